"""Compile pairs: Δ(B | A) for every two chunks of a window, and what compositions of them are worth, measured."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

import torch

from kamera_cli.errors import UsageError
from kamera_cli.library import require_record
from kamera_cli.model.generate import next_token_kl
from kamera_cli.operator.compose import GainFit, compose
from kamera_cli.operator.patch import LayerPatch, check_rank, residual
from kamera_cli.patches.form import form_chains
from kamera_cli.patches.measure import Part, logits_behind
from kamera_cli.patches.pairs import with_calibration
from kamera_cli.patches.request import PatchOptions
from kamera_cli.patches.tree import conditioned
from kamera_cli.results import CompileResult, ComposedBound, Progress
from kamera_cli.window import Chain, identity_of, load_window, ordered
from kamera_store.format.keys import Identity

if TYPE_CHECKING:
    from kamera_cli.context import Context
    from kamera_cli.model.families.family import LayerKV
    from kamera_cli.model.inputs import Segment

PAIR_LIMIT = 8
"""Most chunks whose pairs are compiled at once: n chunks have n (n − 1) pairs, 56 for eight."""

Pair = tuple[Identity, Identity]
"""An antecedent and the chunk that stands after it."""


def compile_pairs(
    context: Context, chunks: Sequence[str] | None, window: str, options: PatchOptions
) -> CompileResult:
    """Form the patch of every chunk after every other one alone, and measure compositions of three or more chunks.

    Raises
    ------
    UsageError
        Fewer than two chunks or more than `PAIR_LIMIT`, or a rank out of range.
    NotFoundError
        No such window or chunk.
    """
    started = time.perf_counter()
    view = load_window(context.store, context.tenant, window)
    context.refuse_other_model(view)
    entries = ordered(view, chunks)
    if not 2 <= len(entries) <= PAIR_LIMIT:
        raise UsageError(
            f"pairs are compiled for 2 to {PAIR_LIMIT} chunks, not {len(entries)}: n chunks have n (n - 1) of them; "
            "name the chunks that will stand in arrangements together"
        )
    for entry in entries:
        check_rank(options.rank, entry.num_tokens)
    numbers = {bytes.fromhex(entry.chunk): entry.number for entry in (*view.entries, *view.evicted)}
    links = tuple(map(identity_of, entries))
    formed, costs = form_chains(context, list(permutations(links, 2)), options, numbers, learn_on=links)
    measuring = time.perf_counter()
    bounds = _calibrate(context, links, numbers, options.probe) if len(links) > 2 else ()
    measure_ms = costs.measure_ms + 1e3 * (time.perf_counter() - measuring)
    return CompileResult(
        window, "pair", tuple(formed), costs.prefill_ms, 1e3 * (time.perf_counter() - started),
        measure_ms=measure_ms, form_ratio=costs.form_ratio, learn_ms=costs.learn_ms,
        composed=bounds,
    )  # fmt: skip


def sampled_orders(links: Chain, seed: int = 0) -> tuple[Chain, ...]:
    """Real arrangements on which compositions are measured: each chunk stands at each place twice.

    All rotations of a seeded order, and of its reverse; for three chunks these are all six orders.
    """
    order = list(links)
    random.Random(seed).shuffle(order)
    turns = [(*way[at:], *way[:at]) for way in (tuple(order), tuple(order[::-1])) for at in range(len(order))]
    return tuple(dict.fromkeys(turns))


@dataclass(frozen=True)
class _Held:
    """What is needed of the chunks of a set in memory, and their pairs."""

    segments: Mapping[Identity, Segment]
    canonical: Mapping[Identity, list[LayerKV]]
    pairs: Mapping[Pair, list[LayerPatch]]

    def patches(self, order: Chain, gains: Mapping[int, float]) -> list[list[LayerPatch] | None]:
        """As a plan takes them: nothing for the first chunk, the pair for the second, compositions for the others.

        Parameters
        ----------
        gains : mapping
            By number of antecedents; 1 where there is none.
        """
        made: list[list[LayerPatch] | None] = [None]
        for at, chunk in enumerate(order[1:], start=1):
            parts = [self.pairs[antecedent, chunk] for antecedent in order[:at]]
            gain = gains.get(at, 1.0)
            made.append(
                parts[0] if at == 1 else [compose(layers, gain=gain) for layers in zip(*parts, strict=True)]
            )
        return made

    def logits(
        self,
        context: Context,
        order: Chain,
        probe: torch.Tensor,
        *,
        layers: Sequence[list[LayerKV]] | None = None,
        patches: Sequence[list[LayerPatch] | None] | None = None,
    ) -> torch.Tensor:
        """(numbers of antecedents, vocab): next-token logits after ``probe`` behind the third chunk and each later one.

        Parameters
        ----------
        layers : sequence of list of LayerKV, optional
            KV of each chunk; canonical by default.
        """
        runner = context.runner
        parts = [Part(runner.preamble, runner.preamble_layers)]
        for at, chunk in enumerate(order):
            kv = self.canonical[chunk] if layers is None else layers[at]
            parts.append(Part(self.segments[chunk], kv, None if patches is None else patches[at]))
        return logits_behind(runner, parts, range(3, len(parts)), probe)


def _calibrate(
    context: Context, links: Chain, numbers: dict[bytes, int], question: str
) -> tuple[ComposedBound, ...]:
    """Measure compositions on real arrangements and write the outcome to the pairs."""
    library = context.library
    chunks = {link: require_record(library, link, str(numbers[link.key])) for link in links}
    stored = {
        (one, other): library.find_patch(other, (one,), "exact") for one, other in permutations(links, 2)
    }
    held = _Held(
        {link: library.segment(record) for link, record in chunks.items()},
        {link: library.layers(record) for link, record in chunks.items()},
        {pair: library.patch_layers(record) for pair, record in stored.items()},
    )
    bounds = _measure(context, held, sampled_orders(links), numbers, context.runner.question_ids(question))
    for record in stored.values():
        library.restate(record, with_calibration(record.meta, [link.id for link in links], bounds))
    return bounds


def _measure(
    context: Context, held: _Held, orders: Sequence[Chain], numbers: dict[bytes, int], probe: torch.Tensor
) -> tuple[ComposedBound, ...]:
    """Fit a gain for each number of antecedents, and keep the gains if they lower the KL of the samples as a whole."""
    size = len(orders[0])
    numbers_before = range(2, size)
    fits: list[dict[int, GainFit]] = []
    exact, blind, plain = [], [], []
    for done, order in enumerate(orders):
        context.progress(Progress("measuring compositions", done, len(orders), "arrangements"))
        after = conditioned(context, [order[:end] for end in range(1, size + 1)], numbers)
        true = [after[order[:end]] for end in range(1, size + 1)]
        composed = held.patches(order, {})
        exact.append(held.logits(context, order, probe, layers=true))
        plain.append(held.logits(context, order, probe, patches=composed))
        blind.append(held.logits(context, order, probe))
        fits.append({at: _fit(composed[at], true[at], held.canonical[order[at]]) for at in numbers_before})
    gains = {at: round(sum((fit[at] for fit in fits), GainFit()).gain, 4) for at in numbers_before}
    fitted = [held.logits(context, order, probe, patches=held.patches(order, gains)) for order in orders]
    context.progress(Progress("measuring compositions", len(orders), len(orders), "arrangements"))
    with_gains, without, unpatched = (_kls(exact, arm) for arm in (fitted, plain, blind))
    if float(with_gains.mean()) < float(without.mean()):
        kept = with_gains
    else:
        kept, gains = without, dict.fromkeys(gains, 1.0)
    return tuple(
        ComposedBound(
            num_antecedents=at,
            kl=float(kept[:, column].max()),
            kl_blind=float(unpatched[:, column].max()),
            energy=min(fit[at].energy(gains[at]) for fit in fits),
            gain=gains[at],
            num_samples=len(orders),
        )
        for column, at in enumerate(numbers_before)
    )


def _fit(composed: Sequence[LayerPatch], after: Sequence[LayerKV], alone: Sequence[LayerKV]) -> GainFit:
    fit = GainFit()
    for patch, conditioned_kv, canonical in zip(composed, after, alone, strict=True):
        fit.add(patch.rotary, residual(conditioned_kv.rotary, canonical.rotary))
        fit.add(patch.plain, residual(conditioned_kv.plain, canonical.plain))
    return fit


def _kls(exact: Sequence[torch.Tensor], arm: Sequence[torch.Tensor]) -> torch.Tensor:
    """(arrangements, numbers of antecedents) next-token KL of logits (numbers, vocab) of each arrangement."""
    return torch.tensor([
        [next_token_kl(*rows) for rows in zip(true, made, strict=True)]
        for true, made in zip(exact, arm, strict=True)
    ])  # fmt: skip
