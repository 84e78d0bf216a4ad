"""Compile an orbit: patches for every chunk of a small set after every set of the others."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kamera_cli.library import require_record
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.generate import next_token_kl
from kamera_cli.model.runner import ModelRunner
from kamera_cli.operator.orbit import (
    antecedent_sets,
    check_orbit,
    energy_in_order,
    formed_orders,
    mean_kv,
    measured_orders,
)
from kamera_cli.operator.patch import LayerPatch
from kamera_cli.operator.ranks import Worth
from kamera_cli.patches.chunk import Chunk, ChunkChain, read_chunks
from kamera_cli.patches.form import Factor, require_fit
from kamera_cli.patches.measure import Part, front, probe_logits
from kamera_cli.patches.report import describe
from kamera_cli.patches.request import PatchOptions, factor, serves
from kamera_cli.patches.tree import conditioned
from kamera_cli.patches.worth import known_worth, learned_worth
from kamera_cli.results import CompileResult, FormedPatch, Progress
from kamera_cli.window import Chain
from kamera_cli.writing import NewPatch, put_patches
from kamera_store.format.keys import Identity
from kamera_store.format.records import Record

if TYPE_CHECKING:
    from kamera_cli.context import Context


@dataclass(frozen=True)
class Orbit:
    """Patches of the chunks of a set in memory, each after every set of the others.

    Attributes
    ----------
    chunks : ChunkChain
        Antecedents of a set stand in this order.
    after : mapping
        Position-free KV of the last chunk of each of `orbit_chains`.
    patches : mapping
        By chunk and set of antecedents; see `set_patches`.
    """

    runner: ModelRunner
    chunks: ChunkChain
    after: Mapping[ChunkChain, list[LayerKV]]
    patches: Mapping[tuple[Chunk, ChunkChain], list[LayerPatch]]

    def patch_after(self, chunk: Chunk, before: ChunkChain) -> list[LayerPatch] | None:
        """The patch of a chunk behind others in any order; None where none stands before it."""
        return self.patches[chunk, tuple(one for one in self.chunks if one in before)] if before else None

    def measured(
        self, chunk: Chunk, of: ChunkChain, probe: torch.Tensor, worth: Worth | None
    ) -> dict[str, float]:
        """The worst over the measured orders of a set: next-token KL with orbit patches and, in that order, without,
        and how much of that order's own Δ the patch of the set holds."""
        chains = [(*order, chunk) for order in measured_orders(of)]
        kl, kl_blind = max(self._kl(chain, probe) for chain in chains)
        held = (
            energy_in_order(self.patches[chunk, of], self.after[chain], chunk.canonical, worth)
            for chain in chains
        )
        return {"kl": kl, "kl_blind": kl_blind, "energy_in_orders": min(held)}

    def _kl(self, order: ChunkChain, probe: torch.Tensor) -> tuple[float, float]:
        """After the last chunk of an order, to its prefill: KL with orbit patches throughout, and with none."""
        prefilled = [self.after.get(order[: at + 1], chunk.canonical) for at, chunk in enumerate(order)]
        patches = [self.patch_after(chunk, order[:at]) for at, chunk in enumerate(order)]
        segments = [chunk.segment for chunk in order]
        exact, patched, blind = (
            probe_logits(self.runner, [front(self.runner), *parts], probe)
            for parts in (
                list(map(Part, segments, prefilled)),
                list(map(Part.of, order, patches)),
                list(map(Part.of, order)),
            )
        )
        return next_token_kl(exact, patched), next_token_kl(exact, blind)


def set_patches(
    chunks: ChunkChain, after: Mapping[ChunkChain, list[LayerKV]], factored: Factor
) -> dict[tuple[Chunk, ChunkChain], list[LayerPatch]]:
    """The patch of each chunk after every set of the others: Δ is the mean over two opposite orders of the set.

    Parameters
    ----------
    after : mapping
        Position-free KV of the last chunk of each of `orbit_chains`.
    factored : callable
        Such as `kamera_cli.patches.request.factor` with options.
    """
    return {
        (chunk, of): factored(mean_kv([after[*order, chunk] for order in formed_orders(of)]), chunk)
        for chunk in chunks
        for of in antecedent_sets(chunk, chunks)
    }


def orbit_chains(chunks: ChunkChain) -> list[ChunkChain]:
    """What has to be prefilled for the patches of an orbit and for measuring them."""
    chains = [
        (*order, chunk)
        for chunk in chunks
        for of in antecedent_sets(chunk, chunks)
        for order in measured_orders(of)
    ]
    return list(dict.fromkeys(chains))


Member = tuple[Identity, Chain]
"""A stored chunk and a set of antecedents, ascending by key."""


def compile_orbit(context: Context, links: Chain, window: str, options: PatchOptions) -> CompileResult:
    """Form orbit patches for stored chunks; see ``Engine.compile_patches``.

    A patch's KL is the largest over `kamera_cli.operator.orbit.measured_orders`. A budget holds for the patch of each
    set.

    Raises
    ------
    UsageError
        Too few or too many chunks for an orbit, or a budget without room for any direction.
    NotFoundError
        A chunk is gone from the store.
    """
    check_orbit(len(links))
    orbit = tuple(sorted(links, key=lambda link: link.key))
    records = {link: require_record(context.library, link, context.label(link)) for link in orbit}
    members = [(link, of) for link in links for of in antecedent_sets(link, orbit)]
    formed, costs = _found(context, members, records, options), _Costs()
    if len(formed) < len(members):
        for link in links:
            options.check_budget(records[link], f"chunk {context.label(link)}")
        formed = _formed(context, links, orbit, options, costs)
    return CompileResult(
        window, "orbit", tuple(formed[member] for member in members), costs.prefill_ms, 0.0,
        measure_ms=costs.measure_ms, learn_ms=costs.learn_ms,
    )  # fmt: skip


@dataclass
class _Costs:
    """Clocks, in ms: conditioned forwards, measuring KL, and what each layer is worth."""

    prefill_ms: float = 0.0
    measure_ms: float = 0.0
    learn_ms: float = 0.0


def _found(
    context: Context, members: Sequence[Member], records: Mapping[Identity, Record], options: PatchOptions
) -> dict[Member, FormedPatch]:
    """What is there already and serves the request."""
    found = {}
    for link, of in members:
        stored = context.library.find_patch(link, of, "orbit")
        if stored is not None and serves(stored, options):
            found[link, of] = describe(context, stored, records[link], "found", 0.0)
    return found


def _formed(
    context: Context, links: Chain, orbit: Chain, options: PatchOptions, costs: _Costs
) -> dict[Member, FormedPatch]:
    """Patches of every member; those of one chunk are written together."""
    runner = context.runner
    probe = runner.question_ids(options.probe)
    chunks = read_chunks(context, orbit)
    held = tuple(chunks.values())
    chains = orbit_chains(held)
    require_fit(context, chains, probe.numel())
    learning = time.perf_counter()
    window = [chunks[link] for link in links]
    worth = learned_worth(context, window) if options.learns else known_worth(context)
    costs.learn_ms = 1e3 * (time.perf_counter() - learning)
    context.progress(Progress("forming orbit patches", 0, len(orbit), "chunks"))
    started = time.perf_counter()
    after = conditioned(runner, chains)
    runner.synchronize()
    costs.prefill_ms = 1e3 * (time.perf_counter() - started)
    started = time.perf_counter()
    patches = set_patches(held, after, lambda kv, chunk: factor(kv, chunk.canonical, options, worth))
    form_ms = 1e3 * (time.perf_counter() - started) / len(patches)
    made = Orbit(runner, held, after, patches)
    names = {chunk: link for link, chunk in chunks.items()}
    formed: dict[Member, FormedPatch] = {}
    for done, chunk in enumerate(held, start=1):
        sets = antecedent_sets(chunk, held)
        measuring = time.perf_counter()
        measured = [made.measured(chunk, of, probe, worth) for of in sets]
        costs.measure_ms += 1e3 * (time.perf_counter() - measuring)
        cost_ms = form_ms + costs.prefill_ms / len(patches)
        members = [(names[chunk], tuple(names[one] for one in of)) for of in sets]
        older = [context.library.find_patch(*member, "orbit") for member in members]
        stored = put_patches(context.library, [
            NewPatch(
                chunk.stored, antecedents, "orbit", patches[chunk, of], {**found, **options.stated}, cost_ms
            )
            for of, (_, antecedents), found in zip(sets, members, measured, strict=True)
        ])  # fmt: skip
        for member, patch, before in zip(members, stored, older, strict=True):
            formed[member] = describe(context, patch, chunk.stored, "formed", form_ms, before)
        context.progress(Progress("forming orbit patches", done, len(orbit), "chunks"))
    return formed
