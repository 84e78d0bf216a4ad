"""What an answer leaves in the store: patches that its prefill gave for free, and the largest KL found with a patch.

A KL is measured when a patch is formed, on one question. Where a later question gives more, the patches of that answer
state the larger figure from then on, so that no later plan goes by the smaller one. The answer stands already, so
nothing here may fail it: a store without room, or a chunk that is damaged or was purged meanwhile, costs a warning.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kamera_cli.library import Library
from kamera_cli.model.generate import next_token_kl
from kamera_cli.operator.patch import MAX_AUTO_RANK, LayerPatch
from kamera_cli.operator.residual import form
from kamera_cli.patches.measure import Part, probe_logits
from kamera_cli.patches.request import PatchOptions
from kamera_cli.patches.worth import known_worth
from kamera_cli.query.arrange import Arranged, Found
from kamera_cli.query.read import Ready
from kamera_cli.trust import AUTO_MAX_KL, refusal, stored_offer
from kamera_cli.window import Chain, identity_of
from kamera_cli.words import format_number
from kamera_cli.writing import NewPatch, put_patches, restate
from kamera_store.errors import DamagedError, MissingRecordError, NoRoomError, ReadOnlyError
from kamera_store.format.keys import Identity
from kamera_store.format.records import Record

if TYPE_CHECKING:
    from kamera_cli.context import Context

FINEST_ENERGY = 0.999999
"""Beyond it integer factors have nothing more to give."""

PROBE = "a later question"


def keep_patches(
    context: Context, records: Sequence[Record], ready: Ready, question_ids: torch.Tensor, max_kl: float
) -> tuple[str, ...]:
    """Factor Δ of every chunk after the first, measure the arrangement on the question just asked, and store.

    An exact patch that ``auto`` would use stays as it is, unless it cannot be read. So does one that captures too
    little where forming it anew would capture no more. One whose KL was too large is formed anew, with a tenth of what
    it left out, down to what integers can give.

    Parameters
    ----------
    ready : Ready
        The whole prefill.
    max_kl : float
        Largest measured KL, in nats, of a patch that is used.

    Returns
    -------
    tuple of str
        Ids of the patches that were formed and kept.
    """
    if len(records) < 2:
        return ()
    runner, library = context.runner, context.library
    started = time.perf_counter()
    chain = tuple(Identity("chunk", record.key, record.digest) for record in records)
    try:
        worth = known_worth(context)
        canonical = [library.layers(record) for record in records]
        choices = [
            _choose(library, chain[:end], max_kl, is_weighed=worth is not None)
            for end in range(2, len(chain) + 1)
        ]
    except (DamagedError, MissingRecordError) as error:
        context.warn(f"no patches kept: {error}")
        return ()
    patches = [
        choice.layers
        if isinstance(choice, _Stored)
        else form(after, alone, rank=choice.rank, energy=choice.energy, worth=worth)
        for after, alone, choice in zip(ready.captured[1:], canonical[1:], choices, strict=True)
    ]
    blind = [Part(segment, layers) for segment, layers in zip(ready.segments, canonical, strict=True)]
    patched = [
        Part(part.segment, part.layers, patch) for part, patch in zip(blind, [None, *patches], strict=True)
    ]
    preamble = Part(runner.preamble, runner.preamble_layers)
    kl, kl_blind = (
        next_token_kl(ready.logits, probe_logits(runner, [preamble, *parts], question_ids))
        for parts in (patched, blind)
    )
    measured = {"kl": kl, "kl_blind": kl_blind, "probe": "the first question"}
    stored = [choice.record for choice in choices if isinstance(choice, _Stored)]
    cost_ms = 1e3 * (time.perf_counter() - started) / max(1, len(choices) - len(stored))
    new = [
        NewPatch(records[at], chain[:at], "exact", patch, measured | {"request": choice.request}, cost_ms)
        for at, (patch, choice) in enumerate(zip(patches, choices, strict=True), start=1)
        if isinstance(choice, PatchOptions)
    ]
    _raise_stated(context, library, stored, kl)
    return _write(context, library, new)


@dataclass(frozen=True)
class _Stored:
    """A stored patch that stays."""

    record: Record
    layers: list[LayerPatch]


def _choose(library: Library, chain: Chain, max_kl: float, *, is_weighed: bool) -> _Stored | PatchOptions:
    """The stored exact patch of the last chunk of a chain where it is sound and good enough, or as good as there is;
    or else how to form one.

    Parameters
    ----------
    is_weighed : bool
        Whether it is known by now what each layer is worth.
    """
    record = library.find_patch(chain[-1], chain[:-1], "exact")
    if record is None:
        return PatchOptions()
    why_not = refusal(stored_offer(record.key, record.meta), "auto", max_kl)
    request = record.meta["request"]
    stays = {
        None: True,
        "max_kl": _is_finest(request),
        "low_energy": _is_as_fine(record.meta, is_weighed=is_weighed),
    }
    if stays.get(why_not, False):
        with suppress(DamagedError, MissingRecordError):
            return _Stored(record, library.patch_layers(record))
    if why_not != "max_kl" or request["rank"] != "auto":
        return PatchOptions()
    finer = round(1.0 - (1.0 - request["energy"]) / 10.0, 9)
    return PatchOptions(energy=min(max(PatchOptions().energy, finer), FINEST_ENERGY))


def _is_finest(request: Mapping[str, Any]) -> bool:
    """Whether forming anew gives no better patch, and would only forget the KL that this one states."""
    is_coarse = "budget" in request or request["factor_dtype"] in ("int6", "int4")
    return request["rank"] == "auto" and request["energy"] >= FINEST_ENERGY and not is_coarse


def _is_as_fine(meta: Mapping[str, Any], *, is_weighed: bool) -> bool:
    """Whether forming anew by the defaults gives no more directions: the same work, or a coarser patch for a finer."""
    request, default = meta["request"], PatchOptions()
    is_newly_weighed = is_weighed and meta.get("energy_weighted") is None
    if is_newly_weighed or "budget" in request or request["factor_dtype"] in ("int6", "int4"):
        return False
    if request["rank"] == "auto":
        return bool(request["energy"] >= default.energy)
    return bool(request["rank"] >= MAX_AUTO_RANK)


def _write(context: Context, library: Library, patches: Sequence[NewPatch]) -> tuple[str, ...]:
    """Ids of what was written: all of it in one transaction, or as many as there is room for."""
    with suppress(NoRoomError, ReadOnlyError):
        return tuple(record.id for record in put_patches(library, patches))
    kept: list[str] = []
    for patch in patches:
        try:
            kept += [record.id for record in put_patches(library, [patch])]
        except (NoRoomError, ReadOnlyError) as error:
            context.warn(f"{len(kept)} of {len(patches)} patches kept: {error}")
            break
    return tuple(kept)


def keep_worst(context: Context, arranged: Arranged, kl: float) -> None:
    """Raise the stated KL of the exact and orbit patches that an answer used to what was measured on its question.

    Nothing is done where the comparison says nothing of the patches: chunks that keep what they took in elsewhere are
    meant to differ from a prefill of this order, and of composed or blind chunks no one patch is to blame.

    Parameters
    ----------
    kl : float
        Next-token KL in nats to a prefill of the same chunks in the same order.
    """
    used = {action.used for action in arranged.plan.actions}
    if not _in_order(arranged.found) or used & {"blind", "composed", "prefilled"}:
        return
    patches = [records[-1] for records in arranged.patches if records]
    if _raise_stated(context, context.library, patches, kl) and kl > AUTO_MAX_KL:
        context.warn(
            f"on this question the KL is {format_number(kl)}, above {AUTO_MAX_KL:g}: its patches state that from now "
            "on, and --reuse auto forms finer ones"
        )


def _raise_stated(context: Context, library: Library, patches: Sequence[Record], kl: float) -> bool:
    """Let stored patches that state a smaller KL, or none, state this one; whether any did."""
    num_raised = 0
    for record in patches:
        try:
            num_raised += _raised(library, record, kl)
        except (DamagedError, MissingRecordError, NoRoomError, ReadOnlyError) as error:
            context.warn(f"the KL that was measured on this question was not kept: {error}")
    return num_raised > 0


def _raised(library: Library, record: Record, kl: float) -> bool:
    """Whether a patch states this KL now and did not before.

    Raises
    ------
    MissingRecordError
        It was removed meanwhile, or formed anew.
    """
    stored = library.store.get(record.key)
    if stored is None or stored.digest != record.digest or stored.tensors != record.tensors:
        raise MissingRecordError(record.key)
    # Another process may have raised it since it was read.
    if stored.meta["kl"] is not None and stored.meta["kl"] >= kl:
        return False
    restate(library, stored, {"kl": kl, "probe": PROBE})
    return True


def _in_order(found: Sequence[Found]) -> bool:
    """Whether every chunk is conditioned on exactly what stands before it."""
    links = tuple(identity_of(chunk.wanted.entry) for chunk in found)
    return all(chunk.wanted.antecedents == links[:at] for at, chunk in enumerate(found))
