"""Compile an orbit: patches for every chunk of a small set after every set of the others."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kamera_cli.library import NewPatch, require_record
from kamera_cli.model.generate import next_token_kl
from kamera_cli.operator.orbit import (
    antecedent_sets,
    check_orbit,
    energy_in_order,
    formed_orders,
    mean_kv,
    measured_orders,
)
from kamera_cli.operator.patch import LayerPatch, check_rank, form
from kamera_cli.patches.measure import Part, probe_logits
from kamera_cli.patches.report import describe
from kamera_cli.patches.request import PatchOptions, serves
from kamera_cli.patches.tree import conditioned
from kamera_cli.patches.worth import layer_worth
from kamera_cli.results import CompileResult, FormedPatch, Progress
from kamera_cli.window import Chain, identity_of, load_window, ordered
from kamera_store.format.keys import Identity

if TYPE_CHECKING:
    from kamera_cli.context import Context
    from kamera_cli.library import Library
    from kamera_cli.model.families.family import LayerKV
    from kamera_store.format.records import Record

Member = tuple[Identity, Chain]
"""A chunk and a set of antecedents, ascending by key."""


def compile_orbit(
    context: Context, chunks: Sequence[str] | None, window: str, options: PatchOptions
) -> CompileResult:
    """Form orbit patches for chunks of a window; see ``Engine.compile_patches``.

    A patch's KL is the largest over `kamera_cli.operator.orbit.measured_orders`. A budget holds for the patch of each
    set.

    Raises
    ------
    UsageError
        Too few or too many chunks for an orbit, a rank out of range, or a budget without room for any direction.
    NotFoundError
        No such window or chunk.
    """
    started = time.perf_counter()
    view = load_window(context.store, context.tenant, window)
    context.refuse_other_model(view)
    entries = ordered(view, chunks)
    check_orbit(len(entries))
    for entry in entries:
        check_rank(options.rank, entry.num_tokens)
    numbers = {bytes.fromhex(entry.chunk): entry.number for entry in (*view.entries, *view.evicted)}
    orbit = sorted(map(identity_of, entries), key=lambda chunk: chunk.key)
    records = {chunk: require_record(context.library, chunk, str(numbers[chunk.key])) for chunk in orbit}
    members = [(chunk, of) for chunk in map(identity_of, entries) for of in antecedent_sets(chunk, orbit)]
    formed = _found(context, members, records, options, numbers)
    costs = _Costs()
    if len(formed) < len(members):
        for entry in entries:
            options.check_budget(records[identity_of(entry)], f"chunk {entry.number}")
        learning = time.perf_counter()
        learns = options.learn and options.rank == "auto"
        chain = tuple(map(identity_of, entries)) if learns else None
        options = replace(options, worth=layer_worth(context, chain, numbers))
        costs.learn_ms = 1e3 * (time.perf_counter() - learning)
        formed = _form(context, members, records, options, numbers, costs)
    patches = tuple(formed[member] for member in members)
    total_ms = 1e3 * (time.perf_counter() - started)
    return CompileResult(
        window,
        "orbit",
        patches,
        costs.prefill_ms,
        total_ms,
        measure_ms=costs.measure_ms,
        learn_ms=costs.learn_ms,
    )


@dataclass
class _Costs:
    """Clocks, in ms: conditioned forwards, measuring KL, and what each layer is worth."""

    prefill_ms: float = 0.0
    measure_ms: float = 0.0
    learn_ms: float = 0.0


def _found(
    context: Context,
    members: Sequence[Member],
    records: Mapping[Identity, Record],
    options: PatchOptions,
    numbers: dict[bytes, int],
) -> dict[Member, FormedPatch]:
    """What is there already and serves the request."""
    found = {}
    for chunk, of in members:
        stored = context.library.find_patch(chunk, of, "orbit")
        if stored is not None and serves(stored, options):
            found[chunk, of] = describe(stored, records[chunk], numbers, "found", 0.0)
    return found


def _form(
    context: Context,
    members: Sequence[Member],
    records: Mapping[Identity, Record],
    options: PatchOptions,
    numbers: dict[bytes, int],
    costs: _Costs,
) -> dict[Member, FormedPatch]:
    """Patches of every member; those of one chunk are written together."""
    library, runner = context.library, context.runner
    context.progress(Progress("forming orbit patches", 0, len(records), "chunks"))
    started = time.perf_counter()
    chains = [(*order, chunk) for chunk, of in members for order in measured_orders(of)]
    after = conditioned(context, list(dict.fromkeys(chains)), numbers)
    runner.synchronize()
    costs.prefill_ms = 1e3 * (time.perf_counter() - started)
    canonical = {chunk: library.layers(record) for chunk, record in records.items()}
    patches: dict[Member, list[LayerPatch]] = {}
    spent: dict[Identity, float] = {}
    for done, (chunk, record) in enumerate(records.items(), start=1):
        forming = time.perf_counter()
        sets = [of for one, of in members if one == chunk]
        for of in sets:
            mean = mean_kv([after[*order, chunk] for order in formed_orders(of)])
            patches[chunk, of] = form(
                mean, canonical[chunk], rank=options.rank, energy=options.energy, dtype=options.dtype,
                budget_bytes=options.budget_bytes(record), worth=options.worth,
            )  # fmt: skip
        spent[chunk] = 1e3 * (time.perf_counter() - forming) / len(sets)
        context.progress(Progress("forming orbit patches", done, len(records), "chunks"))
    orbit = _Orbit(context, records, canonical, after, patches)
    formed: dict[Member, FormedPatch] = {}
    for chunk, record in records.items():
        of_chunk = [member for member in members if member[0] == chunk]
        measuring = time.perf_counter()
        measured = [orbit.measured(chunk, of, options) for _, of in of_chunk]
        costs.measure_ms += 1e3 * (time.perf_counter() - measuring)
        cost_ms = spent[chunk] + costs.prefill_ms / len(members)
        older = [library.find_patch(chunk, of, "orbit") for _, of in of_chunk]
        stored = _written(
            library, record, [(of, patches[chunk, of]) for _, of in of_chunk], measured, options, cost_ms
        )
        for member, patch, old in zip(of_chunk, stored, older, strict=True):
            formed[member] = describe(patch, record, numbers, "formed", spent[chunk], old)
    return formed


def _written(
    library: Library,
    chunk: Record,
    patches: Sequence[tuple[Chain, list[LayerPatch]]],
    measured: Sequence[dict[str, float]],
    options: PatchOptions,
    cost_ms: float,
) -> list[Record]:
    """Write the patches of one chunk in one transaction."""
    return library.put_patches([
        NewPatch(
            chunk, of, "orbit", patch,
            meta=found | {"probe": options.probe, "request": options.request}, cost_ms=cost_ms,
        )
        for (of, patch), found in zip(patches, measured, strict=True)
    ])  # fmt: skip


@dataclass(frozen=True)
class _Orbit:
    """What was formed, in memory: canonical KV per chunk, KV after each chain that was prefilled, patches per set."""

    context: Context
    records: Mapping[Identity, Record]
    canonical: Mapping[Identity, list[LayerKV]]
    after: Mapping[Chain, list[LayerKV]]
    patches: Mapping[Member, list[LayerPatch]]

    def measured(self, chunk: Identity, of: Chain, options: PatchOptions) -> dict[str, float]:
        """The worst over the measured orders of a set: next-token KL with orbit patches and, in that order, without,
        and how much of that order's own Δ the patch of the set holds."""
        chains = [(*order, chunk) for order in measured_orders(of)]
        kl, kl_blind = max(self._kl(chain, options.probe) for chain in chains)
        held = (
            energy_in_order(self.patches[chunk, of], self.after[chain], self.canonical[chunk], options.worth)
            for chain in chains
        )
        return {"kl": kl, "kl_blind": kl_blind, "energy_in_orders": min(held)}

    def _kl(self, order: Chain, question: str) -> tuple[float, float]:
        """After the last chunk of an order, to its prefill: KL with orbit patches throughout, and with none."""
        runner, library = self.context.runner, self.context.library
        arms: dict[str, list[Part]] = {"exact": [], "patched": [], "blind": []}
        for index, link in enumerate(order):
            segment, alone = library.segment(self.records[link]), self.canonical[link]
            before = tuple(sorted(order[:index], key=lambda one: one.key))
            arms["exact"].append(Part(segment, self.after[order[: index + 1]] if index else alone))
            arms["patched"].append(Part(segment, alone, self.patches[link, before] if index else None))
            arms["blind"].append(Part(segment, alone))
        probe = runner.question_ids(question)
        front = Part(runner.preamble, runner.preamble_layers)
        logits = {name: probe_logits(runner, [front, *parts], probe) for name, parts in arms.items()}
        return tuple(next_token_kl(logits["exact"], logits[name]) for name in ("patched", "blind"))
