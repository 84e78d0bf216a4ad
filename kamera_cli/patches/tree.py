"""Conditioned KV of many chains at once: chains that share a prefix share its forward.

Two things save work. The canonical KV of the chunk that stands first *is* its conditioned KV, since the preamble stood
in front of it when it was captured: no forward runs over it. And chains form a tree by their common prefixes: each of
its nodes is prefilled once, after the cache of the path above it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kamera_cli.model.compat import DynamicCache, decoder_of, shorten
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.inputs import Segment
from kamera_cli.model.runner import ModelRunner
from kamera_cli.patches.chunk import Chunk, ChunkChain
from kamera_cli.patches.measure import Part, assembled, front

STEP_TOKENS = 512
"""Most tokens of a forward over several chunks that starts from a cache. Its attention needs a mask and skips none of
what that hides, so that short steps do less of it; below this the calls themselves begin to cost."""
COLD_FROM = 3.0
"""What a square of new tokens counts against stored ones in `starts_cold`; measured on models of two shapes."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Branch(Generic[_T]):
    """Chunks that are prefilled in one forward, and the branches that start where they end."""

    links: tuple[_T, ...]
    after: tuple[Branch[_T], ...]


def branches(chains: Sequence[tuple[_T, ...]], start: int = 0) -> tuple[Branch[_T], ...]:
    """Chains as trees, cut only where they part (pure); in the order in which they are given.

    Parameters
    ----------
    chains : sequence of tuple
        Equal up to ``start``.
    """
    groups: dict[_T, list[tuple[_T, ...]]] = {}
    for chain in chains:
        if len(chain) > start:
            groups.setdefault(chain[start], []).append(chain)
    made = []
    for group in groups.values():
        end = start + 1
        while len({chain[end] for chain in group if len(chain) > end}) == 1:
            end += 1
        longest = max(group, key=len)
        made.append(Branch(longest[start:end], branches(group, end)))
    return tuple(made)


def count_branches(chains: Sequence[tuple[_T, ...]]) -> int:
    """How many forwards `each_branch` gives to some chains."""
    waiting, number = list(branches(chains)), 0
    while waiting:
        number += 1
        waiting += waiting.pop().after
    return number


def maximal(chains: Sequence[tuple[_T, ...]]) -> list[tuple[_T, ...]]:
    """Chains that are no prefix of another one: a forward over these conditions every chunk of all of them."""
    distinct = list(dict.fromkeys(chains))
    return [
        chain
        for chain in distinct
        if not any(len(other) > len(chain) and other[: len(chain)] == chain for other in distinct)
    ]


def starts_cold(num_new: int, num_held: int, num_weights: int, per_pair: int) -> bool:
    """Whether prefilling everything is faster than starting from the store (pure).

    The store saves the matrix products over its tokens. It costs attention, which then needs a mask and computes what
    that hides: work that grows with the square of the new tokens.

    Parameters
    ----------
    num_new, num_held : int
        Tokens after those that are stored, and stored ones.
    num_weights : int
        Multiplications of one token with the decoder's weights.
    per_pair : int
        Multiplications of attention for a token and one before it.
    """
    return num_new**2 * per_pair >= COLD_FROM * num_held * num_weights


def conditioned(runner: ModelRunner, chains: Sequence[ChunkChain]) -> dict[ChunkChain, list[LayerKV]]:
    """Position-free KV of the last chunk of each chain, conditioned on those before it; see `each_branch`."""
    return dict(each_conditioned(runner, chains))


def each_conditioned(
    runner: ModelRunner, chains: Sequence[ChunkChain]
) -> Iterator[tuple[ChunkChain, list[LayerKV]]]:
    """The same one chain at a time."""
    wanted = frozenset(chains)
    for branch in each_branch(runner, chains):
        for index, layers in enumerate(branch.captured):
            if (chain := branch.chain(index)) in wanted:
                yield chain, layers


@dataclass(frozen=True)
class Prefilled:
    """A branch after its forward.

    Attributes
    ----------
    before : ChunkChain
        What it stands behind.
    chunks : ChunkChain
        What was prefilled.
    captured : list of list of LayerKV
        Position-free KV of each of its chunks as it is conditioned here.
    cache : DynamicCache
        The model's own of the preamble, ``before`` and the branch; good until the walk goes on.
    prefill_ms : float
        Time of the forward.
    is_cold : bool
        Whether that was a plain prefill of everything up to here.
    """

    before: ChunkChain
    chunks: ChunkChain
    captured: list[list[LayerKV]]
    cache: DynamicCache
    prefill_ms: float
    is_cold: bool

    def chain(self, index: int) -> ChunkChain:
        """The chain that ends with a chunk of the branch."""
        return (*self.before, *self.chunks[: index + 1])


def each_branch(runner: ModelRunner, chains: Sequence[ChunkChain]) -> Iterator[Prefilled]:
    """Prefill every branch of some chains, depth first, so that the caches of one path are alive and no other's.

    What is captured equals a plain prefill of [preamble, chain] up to the rounding of the compute dtype.

    Parameters
    ----------
    chains : sequence of ChunkChain
        Not empty ones, within the model's context; a prefix of another chain costs nothing.
    """
    for root in branches(chains):
        yield from _root(runner, root)


def _root(runner: ModelRunner, root: Branch[Chunk]) -> Iterator[Prefilled]:
    """Start from the canonical KV of the chunk that stands first, unless little is gained by it."""
    first, *others = root.links
    standing, rest = [runner.preamble, first.segment], [chunk.segment for chunk in others]
    held = sum(segment.num_tokens for segment in standing)
    is_cold = starts_cold(sum(segment.num_tokens for segment in rest), held, *multiplications(runner))
    with _clock(runner) as spent:
        if is_cold:
            cache = DynamicCache()
            captured = runner.prefill_captured([*standing, *rest], cache)[2:]
        else:
            cache = assembled(runner, [front(runner), Part.of(first)])
            captured = _stepwise(runner, rest, cache, sum(segment.positions.span for segment in standing))
    end = sum(segment.positions.span for segment in [*standing, *rest])
    yield Prefilled((), root.links, [first.canonical, *captured], cache, spent[0], is_cold)
    yield from _behind(runner, root, root.links, cache, end)


def _behind(
    runner: ModelRunner, branch: Branch[Chunk], before: ChunkChain, cache: DynamicCache, start: int
) -> Iterator[Prefilled]:
    """What hangs on a branch, whose chain, cache and end are given."""
    held = cache.get_seq_length()
    for following in branch.after:
        segments = [chunk.segment for chunk in following.links]
        with _clock(runner) as spent:
            captured = _stepwise(runner, segments, cache, start)
        yield Prefilled(before, following.links, captured, cache, spent[0], False)
        end = start + sum(segment.positions.span for segment in segments)
        yield from _behind(runner, following, (*before, *following.links), cache, end)
        shorten(cache, held)


def _stepwise(
    runner: ModelRunner, segments: Sequence[Segment], cache: DynamicCache, start: int
) -> list[list[LayerKV]]:
    """Prefill after a cache, in runs of at most `STEP_TOKENS`, or of one segment that is longer."""
    captured: list[list[LayerKV]] = []
    run: list[Segment] = []
    for at, segment in enumerate(segments):
        run.append(segment)
        is_last = at + 1 == len(segments)
        if is_last or sum(one.num_tokens for one in (*run, segments[at + 1])) > STEP_TOKENS:
            captured += runner.prefill_captured(run, cache, start)
            start += sum(one.positions.span for one in run)
            run = []
    return captured


@contextmanager
def _clock(runner: ModelRunner) -> Iterator[list[float]]:
    """Time of the block in ms, the only entry of the list when it is over."""
    spent: list[float] = []
    runner.synchronize()
    started = time.perf_counter()
    yield spent
    runner.synchronize()
    spent.append(1e3 * (time.perf_counter() - started))


def multiplications(runner: ModelRunner) -> tuple[int, int]:
    """Of one token with the decoder's weights, and of attention for one pair of tokens, in all layers."""
    decoder = decoder_of(runner.model)
    weights = sum(one.numel() for name, one in decoder.named_parameters() if "embed_tokens" not in name)
    config: Any = decoder.config
    heads: int = config.num_attention_heads
    return weights, heads * runner.family.width_per_pair * runner.family.num_layers
