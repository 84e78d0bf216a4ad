"""Patches for free: what a fallback prefill computed anyway, kept so that the next query reuses it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kamera_cli.library import Library, NewPatch
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.generate import next_token_kl
from kamera_cli.model.inputs import Segment
from kamera_cli.operator.patch import LayerPatch, form
from kamera_cli.operator.plan import Offer, refusal
from kamera_cli.operator.ranks import proven_energy
from kamera_cli.patches.measure import Part, probe_logits
from kamera_cli.patches.request import PatchOptions
from kamera_cli.patches.worth import layer_worth
from kamera_cli.query.observed import raise_stated
from kamera_store.errors import DamagedError, MissingRecordError, NoRoomError, ReadOnlyError
from kamera_store.format.keys import Identity
from kamera_store.format.records import Record

if TYPE_CHECKING:
    from kamera_cli.context import Context


FINEST_ENERGY = 0.999999
"""Beyond it integer factors have nothing more to give."""


def keep_patches(
    context: Context,
    library: Library,
    records: Sequence[Record],
    captured: Sequence[list[LayerKV]],
    segments: Sequence[Segment],
    question_ids: torch.Tensor,
    reference: torch.Tensor,
    max_kl: float,
) -> tuple[str, ...]:
    """Factor Δ of every chunk after the first, measure the arrangement on the question just asked, and store.

    An exact patch that ``auto`` would use stays as it is, unless it cannot be read. One whose KL was too large is
    formed anew, with a tenth of what it left out, down to what integers can give. The answer stands already, so nothing
    here may fail it: a store without room, or a chunk that is damaged or was purged meanwhile, costs a warning.

    Parameters
    ----------
    captured : sequence of list of LayerKV
        Position-free KV of each chunk out of the prefill.
    reference : torch.Tensor
        (vocab,) logits that the prefill gave after the question.
    max_kl : float
        Largest measured KL, in nats, of a patch that is used.

    Returns
    -------
    tuple of str
        Ids of the patches that were formed and kept.
    """
    if len(records) < 2:
        return ()
    runner = context.runner
    started = time.perf_counter()
    links = [Identity("chunk", record.key, record.digest) for record in records]
    try:
        worth = layer_worth(context, None, {})
        canonical = [library.layers(record) for record in records]
        choices = [_choose(library, links[: end + 1], max_kl) for end in range(1, len(links))]
    except (DamagedError, MissingRecordError) as error:
        context.warn(f"no patches kept: {error}")
        return ()
    patches = [
        form(after, alone, rank=choice.rank, energy=choice.energy, worth=worth)
        if isinstance(choice, PatchOptions)
        else choice.layers
        for after, alone, choice in zip(captured[1:], canonical[1:], choices, strict=True)
    ]
    preamble = Part(runner.preamble, runner.preamble_layers)
    patched = [preamble, *(Part(*part) for part in zip(segments, canonical, [None, *patches], strict=True))]
    blind = [preamble, *(Part(*part) for part in zip(segments, canonical, strict=True))]
    measured = {
        "kl": next_token_kl(reference, probe_logits(runner, patched, question_ids)),
        "kl_blind": next_token_kl(reference, probe_logits(runner, blind, question_ids)),
        "probe": "the first question",
    }
    wanted = [end for end, choice in enumerate(choices) if isinstance(choice, PatchOptions)]
    cost_ms = 1e3 * (time.perf_counter() - started) / max(1, len(wanted))
    new = [
        NewPatch(
            records[at + 1],
            links[: at + 1],
            "exact",
            patches[at],
            measured | {"request": choices[at].request},
            cost_ms,
        )
        for at in wanted
    ]
    raise_stated(
        context, library, [one.record for one in choices if isinstance(one, _Standing)], measured["kl"]
    )
    return _kept(context, library, new)


@dataclass(frozen=True)
class _Standing:
    """A stored patch that stays."""

    record: Record
    layers: list[LayerPatch]


def _choose(library: Library, chain: Sequence[Identity], max_kl: float) -> _Standing | PatchOptions:
    """The stored exact patch of the last chunk of a chain where it is sound and good enough, or as good as there is;
    or else how to form one."""
    record = library.find_patch(chain[-1], chain[:-1], "exact")
    if record is None:
        return PatchOptions()
    offer = Offer((record.key,), "exact", record.meta["kl"], proven_energy(record.meta))
    why_not = refusal(offer, "auto", max_kl)
    request = record.meta["request"]
    if why_not is None or (why_not == "max_kl" and _is_finest(request)):
        with suppress(DamagedError, MissingRecordError):
            return _Standing(record, library.patch_layers(record))
    if why_not != "max_kl" or request["rank"] != "auto":
        return PatchOptions()
    finer = round(1.0 - (1.0 - request["energy"]) / 10.0, 9)
    return PatchOptions(energy=min(max(PatchOptions().energy, finer), FINEST_ENERGY))


def _is_finest(request: Mapping) -> bool:
    """Whether forming anew gives no better patch, and would only forget the KL that this one states."""
    is_coarse = "budget" in request or request["factor_dtype"] in ("int6", "int4")
    return request["rank"] == "auto" and request["energy"] >= FINEST_ENERGY and not is_coarse


def _kept(context: Context, library: Library, patches: Sequence[NewPatch]) -> tuple[str, ...]:
    """Ids of what was written: all of it in one transaction, or as many as there is room for."""
    with suppress(NoRoomError, ReadOnlyError):
        return tuple(patch.id for patch in library.put_patches(patches))
    kept: list[str] = []
    for patch in patches:
        try:
            kept += [record.id for record in library.put_patches([patch])]
        except (NoRoomError, ReadOnlyError) as error:
            context.warn(f"{len(kept)} of {len(patches)} patches kept: {error}")
            break
    return tuple(kept)
