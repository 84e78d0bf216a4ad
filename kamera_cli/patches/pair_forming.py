"""Compile pairs: Δ(B | A) for every two chunks of a window, and what compositions of them are worth, measured."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import TYPE_CHECKING, TypeVar

import torch

from kamera_cli.errors import UsageError
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.generate import next_token_kl
from kamera_cli.model.runner import ModelRunner
from kamera_cli.operator.compose import GainFit, compose
from kamera_cli.operator.factorise import residual
from kamera_cli.operator.patch import LayerPatch
from kamera_cli.patches.chunk import Chunk, ChunkChain, read_chunks
from kamera_cli.patches.form import form_chains
from kamera_cli.patches.measure import Part, front, logits_behind
from kamera_cli.patches.pairs import with_calibration
from kamera_cli.patches.request import PatchOptions
from kamera_cli.patches.tree import conditioned
from kamera_cli.results import CompileResult, ComposedBound, Progress
from kamera_cli.window import Chain
from kamera_cli.writing import restate
from kamera_store.errors import MissingRecordError

if TYPE_CHECKING:
    from kamera_cli.context import Context

PAIR_LIMIT = 8
"""Most chunks whose pairs are compiled at once: n chunks have n (n − 1) pairs, 56 for eight."""

Pairs = Mapping[tuple[Chunk, Chunk], Sequence[LayerPatch]]
"""By antecedent and the chunk that stands after it: the patch of the chunk after that antecedent alone."""

_T = TypeVar("_T")


def compile_pairs(context: Context, links: Chain, window: str, options: PatchOptions) -> CompileResult:
    """Form the patch of every chunk after every other one alone, and measure compositions of three or more chunks.

    Raises
    ------
    UsageError
        Fewer than two chunks or more than `PAIR_LIMIT`.
    NotFoundError
        A chunk is gone from the store.
    """
    if not 2 <= len(links) <= PAIR_LIMIT:
        raise UsageError(
            f"pairs are compiled for 2 to {PAIR_LIMIT} chunks, not {len(links)}: n chunks have n (n - 1) of them; "
            "name the chunks that will stand in arrangements together"
        )
    formed, costs = form_chains(context, list(permutations(links, 2)), options, learn_on=links)
    measuring = time.perf_counter()
    bounds = _calibrated(context, links, options.probe) if len(links) > 2 else ()
    measure_ms = costs.measure_ms + 1e3 * (time.perf_counter() - measuring)
    return costs.result(window, "pair", formed, measure_ms=measure_ms, composed=bounds)


def _calibrated(context: Context, links: Chain, question: str) -> tuple[ComposedBound, ...]:
    """Measure compositions of stored pairs and write the outcome to them."""
    library, runner = context.library, context.runner
    chunks = read_chunks(context, links)
    records, pairs = [], {}
    for one, other in permutations(links, 2):
        record = library.find_patch(other, (one,), "exact")
        if record is None:
            raise MissingRecordError(library.patch_identity(other, (one,), "exact").key)
        records.append(record)
        pairs[chunks[one], chunks[other]] = library.patch_layers(record)
    probe = runner.question_ids(question)
    bounds = calibrate(runner, tuple(chunks.values()), pairs, probe, on_progress=context.progress)
    for record in records:
        restate(library, record, with_calibration(record.meta, [link.id for link in links], bounds))
    return bounds


def sampled_orders(chunks: Sequence[_T], seed: int = 0) -> tuple[tuple[_T, ...], ...]:
    """Real arrangements on which compositions are measured: each chunk stands at each place twice.

    All rotations of a seeded order, and of its reverse; for three chunks these are all six orders.
    """
    order = list(chunks)
    random.Random(seed).shuffle(order)
    turns = [(*way[at:], *way[:at]) for way in (tuple(order), tuple(order[::-1])) for at in range(len(order))]
    return tuple(dict.fromkeys(turns))


def composed_patches(
    order: ChunkChain, pairs: Pairs, gains: Mapping[int, float]
) -> list[Sequence[LayerPatch] | None]:
    """Patches of an order, as a plan takes them: nothing for the first chunk, the pair for the second, compositions
    for the others.

    Parameters
    ----------
    gains : mapping
        By number of antecedents; 1 where there is none.
    """
    made: list[Sequence[LayerPatch] | None] = [None]
    for at, chunk in enumerate(order[1:], start=1):
        parts = [pairs[antecedent, chunk] for antecedent in order[:at]]
        gain = gains.get(at, 1.0)
        made.append(
            parts[0] if at == 1 else [compose(layers, gain=gain) for layers in zip(*parts, strict=True)]
        )
    return made


def calibrate(
    runner: ModelRunner,
    chunks: ChunkChain,
    pairs: Pairs,
    probe: torch.Tensor,
    *,
    on_progress: Callable[[Progress], None] = lambda _step: None,
) -> tuple[ComposedBound, ...]:
    """Measure compositions on `sampled_orders`: fit a gain for each number of antecedents, and keep the gains if they
    lower the KL of the samples as a whole.

    Parameters
    ----------
    chunks : ChunkChain
        At least three.
    pairs : mapping
        Of every two chunks, both ways.
    probe : torch.Tensor
        (n,) token ids behind which KL is measured.

    Returns
    -------
    tuple of ComposedBound
        One for each number of antecedents from two on.
    """

    def logits(order: ChunkChain, parts: Sequence[Part]) -> torch.Tensor:
        """(numbers of antecedents, vocab) behind the third chunk and each later one."""
        return logits_behind(runner, [front(runner), *parts], range(3, len(order) + 1), probe)

    def composed_logits(order: ChunkChain, gains: Mapping[int, float]) -> torch.Tensor:
        return logits(order, list(map(Part.of, order, composed_patches(order, pairs, gains))))

    orders, numbers_before = sampled_orders(chunks), range(2, len(chunks))
    fits: list[dict[int, GainFit]] = []
    exact, blind, plain = [], [], []
    for done, order in enumerate(orders):
        on_progress(Progress("measuring compositions", done, len(orders), "arrangements"))
        after = conditioned(runner, [order[: at + 1] for at in range(len(order))])
        true = [after[order[: at + 1]] for at in range(len(order))]
        exact.append(logits(order, [Part(one.segment, kv) for one, kv in zip(order, true, strict=True)]))
        plain.append(composed_logits(order, {}))
        blind.append(logits(order, list(map(Part.of, order))))
        composed = composed_patches(order, pairs, {})
        fits.append({
            at: _fit(composed[at] or (), true[at], order[at].canonical) for at in numbers_before
        })  # fmt: skip
    gains = {at: round(sum((fit[at] for fit in fits), GainFit()).gain, 4) for at in numbers_before}
    fitted = [composed_logits(order, gains) for order in orders]
    on_progress(Progress("measuring compositions", len(orders), len(orders), "arrangements"))
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
