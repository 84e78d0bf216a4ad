"""Patches for free: what a fallback prefill computed anyway, kept so that the next query reuses it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from kamera_cli.generate import next_token_kl
from kamera_cli.jobs.measuring import Part, probe_logits
from kamera_cli.jobs.patches import PatchOptions
from kamera_cli.jobs.sensitivity import layer_worth
from kamera_cli.library import Library, NewPatch
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.inputs import Segment
from kamera_cli.operator.patch import form
from kamera_store.errors import DamagedError, NoRoomError, ReadOnlyError
from kamera_store.keys import Identity
from kamera_store.records import Record

if TYPE_CHECKING:
    from kamera_cli.engine import Engine


def keep_patches(
    engine: Engine,
    library: Library,
    records: Sequence[Record],
    captured: Sequence[list[LayerKV]],
    segments: Sequence[Segment],
    question_ids: torch.Tensor,
    reference: torch.Tensor,
) -> tuple[str, ...]:
    """Factor Δ of every chunk after the first, measure the arrangement on the question just asked, and store.

    The answer stands already, so nothing here may fail it: a store without room, or a damaged chunk, costs a warning.

    Parameters
    ----------
    captured : sequence of list of LayerKV
        Position-free KV of each chunk out of the prefill.
    reference : torch.Tensor
        (vocab,) logits that the prefill gave after the question.

    Returns
    -------
    tuple of str
        Ids of the patches that were kept.
    """
    if len(records) < 2:
        return ()
    options = PatchOptions()
    runner = engine.runner
    started = time.perf_counter()
    try:
        worth = layer_worth(engine, None, {})
        canonical = [library.layers(record) for record in records]
    except DamagedError as error:
        engine.warn(f"no patches kept: {error}")
        return ()
    formed = [None] + [
        form(after, alone, rank=options.rank, energy=options.energy, worth=worth)
        for after, alone in zip(captured[1:], canonical[1:], strict=True)
    ]
    preamble = Part(runner.preamble, runner.preamble_layers)
    patched = [preamble, *(Part(*part) for part in zip(segments, canonical, formed, strict=True))]
    blind = [preamble, *(Part(*part) for part in zip(segments, canonical, strict=True))]
    measured = {
        "kl": next_token_kl(reference, probe_logits(runner, patched, question_ids)),
        "kl_blind": next_token_kl(reference, probe_logits(runner, blind, question_ids)),
        "probe": "the first question",
        "request": options.request,
    }
    cost_ms = 1e3 * (time.perf_counter() - started) / (len(records) - 1)
    identities = [Identity("chunk", record.key, record.digest) for record in records]
    patches = [
        NewPatch(records[index], identities[:index], "exact", formed[index], measured, cost_ms)
        for index in range(1, len(records))
    ]
    return _kept(engine, library, patches)


def _kept(engine: Engine, library: Library, patches: Sequence[NewPatch]) -> tuple[str, ...]:
    """Ids of what was written: all of it in one transaction, or as many as there is room for."""
    with suppress(NoRoomError, ReadOnlyError):
        return tuple(patch.id for patch in library.put_patches(patches))
    kept: list[str] = []
    for patch in patches:
        try:
            kept.append(library.put_patch(patch).id)
        except (NoRoomError, ReadOnlyError) as error:
            engine.warn(f"{len(kept)} of {len(patches)} patches kept: {error}")
            break
    return tuple(kept)
