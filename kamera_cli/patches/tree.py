"""Conditioned KV of many chains at once: chains that share a prefix share its forward.

Two things save work. The canonical KV of the chunk that stands first *is* its conditioned KV, since the preamble stood
in front of it when it was captured (design §2): no forward runs over it. And chains form a tree by their common
prefixes: each of its nodes is prefilled once, after the cache of the path above it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kamera_cli.library import require_record
from kamera_cli.model.compat import DynamicCache, decoder_of, shorten
from kamera_cli.operator.assemble import assemble, joined_positions, place
from kamera_cli.patches.branches import Branch, branches
from kamera_cli.window import Chain

if TYPE_CHECKING:
    from kamera_cli.context import Context
    from kamera_cli.model.families.family import LayerKV
    from kamera_cli.model.inputs import Segment
    from kamera_cli.model.runner import ModelRunner
    from kamera_store.format.keys import Identity
    from kamera_store.format.records import Record

STEP_TOKENS = 512
"""Most tokens of a forward over several chunks that starts from a cache. Its attention needs a mask and skips none of
what that hides, so that short steps do less of it; below this the calls themselves begin to cost."""
COLD_FROM = 3.0
"""What a square of new tokens counts against stored ones in `starts_cold`; measured on models of two shapes."""


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


def conditioned(
    context: Context, chains: Sequence[Chain], numbers: dict[bytes, int] | None = None
) -> dict[Chain, list[LayerKV]]:
    """Position-free KV of the last chunk of each chain, conditioned on those before it; see `each_conditioned`."""
    return dict(each_conditioned(context, chains, numbers))


def each_conditioned(
    context: Context, chains: Sequence[Chain], numbers: dict[bytes, int] | None = None
) -> Iterator[tuple[Chain, list[LayerKV]]]:
    """The same one chain at a time; see `each_branch`."""
    wanted = frozenset(chains)
    for branch in each_branch(context, chains, numbers):
        for index, layers in enumerate(branch.captured):
            if (chain := branch.chain(index)) in wanted:
                yield chain, layers


@dataclass(frozen=True)
class Prefilled:
    """A branch after its forward.

    Attributes
    ----------
    before : Chain
        What it stands behind.
    records, segments, captured : list
        Of its chunks: what is stored, what was prefilled, and position-free KV as it is conditioned here.
    cache : DynamicCache
        The model's own of the preamble, ``before`` and the branch; good until the walk goes on.
    prefill_ms : float
        Time of the forward.
    is_cold : bool
        Whether that was a plain prefill of everything up to here.
    """

    before: Chain
    links: Chain
    records: list[Record]
    segments: list[Segment]
    captured: list[list[LayerKV]]
    cache: DynamicCache
    prefill_ms: float
    is_cold: bool

    def chain(self, index: int) -> Chain:
        """The chain that ends with a chunk of the branch."""
        return (*self.before, *self.links[: index + 1])


def each_branch(
    context: Context, chains: Sequence[Chain], numbers: dict[bytes, int] | None = None, *, num_more: int = 0
) -> Iterator[Prefilled]:
    """Prefill every branch of some chains, depth first, so that the caches of one path are alive and no other's.

    What is captured equals a plain prefill of [preamble, chain] up to the rounding of the compute dtype.

    Parameters
    ----------
    chains : sequence of Chain
        Not empty ones; a prefix of another chain costs nothing.
    numbers : dict, optional
        What to call a chunk in an error, by key.
    num_more : int
        Positions that are to fit behind a chain.

    Raises
    ------
    NotFoundError
        A chunk is gone from the store.
    UsageError
        A chain is longer than the model's context.
    """
    walk = _Walk(context, numbers or {})
    for chain in chains:
        walk.require_fit(chain, num_more)
    for root in branches(chains):
        yield from walk.root(root)


class _Walk:
    """Depth-first walk over branches; chunks are read once, however often they occur."""

    def __init__(self, context: Context, numbers: dict[bytes, int]) -> None:
        self._context, self._numbers = context, numbers
        self._runner, self._library = context.runner, context.library
        self._records: dict[Identity, Record] = {}
        self._segments: dict[Identity, Segment] = {}

    def require_fit(self, chain: Chain, num_more: int) -> None:
        spans = [self._record(link).meta["span"] for link in chain]
        self._context.require_context(
            self._runner.preamble.positions.span + sum(spans) + num_more, "this arrangement"
        )

    def root(self, root: Branch) -> Iterator[Prefilled]:
        """Start from the stored KV of the chunk that stands first, unless little is gained by it."""
        runner = self._runner
        canonical = self._library.layers(self._record(root.links[0]))
        first, *rest = [self._segment(link) for link in root.links]
        standing = [runner.preamble, first]
        held = sum(segment.num_tokens for segment in standing)
        is_cold = starts_cold(sum(segment.num_tokens for segment in rest), held, *_multiplications(runner))
        with self._clock() as spent:
            if is_cold:
                cache, start = DynamicCache(), 0
                captured = runner.prefill_captured([*standing, *rest], cache)[2:]
            else:
                placed, start = place([(one.positions, one.num_tokens) for one in standing])
                layers = (
                    [(above, None), (own, None)]
                    for above, own in zip(runner.preamble_layers, canonical, strict=True)
                )
                cache = assemble(runner.family, layers, joined_positions(placed))
                captured = self._stepwise(rest, cache, start)
        end = sum(segment.positions.span for segment in [*standing, *rest])
        yield self._prefilled((), root.links, [canonical, *captured], cache, spent[0], is_cold)
        yield from self._behind(root, root.links, cache, end)

    def _behind(self, branch: Branch, before: Chain, cache: DynamicCache, start: int) -> Iterator[Prefilled]:
        """What hangs on a branch, whose chain, cache and end are given."""
        held = cache.get_seq_length()
        for following in branch.after:
            segments = [self._segment(link) for link in following.links]
            with self._clock() as spent:
                captured = self._stepwise(segments, cache, start)
            yield self._prefilled(before, following.links, captured, cache, spent[0], False)
            end = start + sum(segment.positions.span for segment in segments)
            yield from self._behind(following, (*before, *following.links), cache, end)
            shorten(cache, held)

    def _stepwise(self, segments: Sequence[Segment], cache: DynamicCache, start: int) -> list[list[LayerKV]]:
        """Prefill after a cache, some chunks at a time."""
        captured: list[list[LayerKV]] = []
        for some in _steps(segments):
            captured += self._runner.prefill_captured(some, cache, start)
            start += sum(segment.positions.span for segment in some)
        return captured

    def _prefilled(
        self,
        before: Chain,
        links: Chain,
        captured: list[list[LayerKV]],
        cache: DynamicCache,
        prefill_ms: float,
        is_cold: bool,
    ) -> Prefilled:
        records, segments = ([of(link) for link in links] for of in (self._record, self._segment))
        return Prefilled(before, links, records, segments, captured, cache, prefill_ms, is_cold)

    @contextmanager
    def _clock(self) -> Iterator[list[float]]:
        """Time of the block in ms, the only entry of the list when it is over."""
        spent: list[float] = []
        self._runner.synchronize()
        started = time.perf_counter()
        yield spent
        self._runner.synchronize()
        spent.append(1e3 * (time.perf_counter() - started))

    def _record(self, link: Identity) -> Record:
        if link not in self._records:
            label = str(self._numbers.get(link.key, link.short_id))
            self._records[link] = require_record(self._library, link, label)
        return self._records[link]

    def _segment(self, link: Identity) -> Segment:
        if link not in self._segments:
            self._segments[link] = self._library.segment(self._record(link))
        return self._segments[link]


def _multiplications(runner: ModelRunner) -> tuple[int, int]:
    """Of one token with the decoder's weights, and of attention for one pair of tokens, in all layers."""
    decoder = decoder_of(runner.model)
    weights = sum(one.numel() for name, one in decoder.named_parameters() if "embed_tokens" not in name)
    heads = decoder.config.num_attention_heads
    return weights, heads * runner.family.width_per_pair * runner.family.num_layers


def _steps(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Segments in runs of at most `STEP_TOKENS`, or of one segment that is longer."""
    run: list[Segment] = []
    for segment in segments:
        if run and sum(one.num_tokens for one in run) + segment.num_tokens > STEP_TOKENS:
            yield run
            run = []
        run.append(segment)
    if run:
        yield run
