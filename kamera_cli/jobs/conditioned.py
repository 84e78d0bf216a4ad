"""Conditioned KV of many chains at once: chains that share a prefix share its forward.

Two things save work. The canonical KV of the chunk that stands first *is* its conditioned KV, since the preamble stood
in front of it when it was captured (design §2): no forward runs over it. And chains form a tree by their common
prefixes: each of its nodes is prefilled once, after the cache of the path above it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kamera_cli.jobs.common import Chain, require_context, require_record
from kamera_cli.model.compat import shorten
from kamera_cli.operator.assemble import assemble, joined_positions, place

if TYPE_CHECKING:
    from kamera_cli.engine import Engine
    from kamera_cli.model.compat import DynamicCache
    from kamera_cli.model.families.family import LayerKV
    from kamera_cli.model.inputs import Segment
    from kamera_store.keys import Identity
    from kamera_store.records import Record


@dataclass(frozen=True)
class Branch:
    """Chunks that are prefilled in one forward, and the branches that start where they end."""

    links: Chain
    after: tuple[Branch, ...]


def branches(chains: Sequence[Chain], start: int = 0) -> tuple[Branch, ...]:
    """Chains as trees, cut only where they part (pure); in the order in which they are given.

    Parameters
    ----------
    chains : sequence of Chain
        Equal up to ``start``.
    """
    groups: dict[Identity, list[Chain]] = {}
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


def conditioned(
    engine: Engine, chains: Sequence[Chain], numbers: dict[bytes, int] | None = None
) -> dict[Chain, list[LayerKV]]:
    """Position-free KV of the last chunk of each chain, conditioned on those before it; see `each_conditioned`."""
    return dict(each_conditioned(engine, chains, numbers))


def each_conditioned(
    engine: Engine, chains: Sequence[Chain], numbers: dict[bytes, int] | None = None
) -> Iterator[tuple[Chain, list[LayerKV]]]:
    """The same one chain at a time, depth first, so that the caches of one path are alive and no other's.

    Equal to a plain prefill of [preamble, chain] up to the rounding of the compute dtype.

    Parameters
    ----------
    chains : sequence of Chain
        Not empty ones; a prefix of another chain costs nothing.
    numbers : dict, optional
        What to call a chunk in an error, by key.

    Yields
    ------
    Chain
    list of LayerKV
        Per layer, for the tokens of the chain's last chunk.

    Raises
    ------
    NotFoundError
        A chunk is gone from the store.
    UsageError
        A chain is longer than the model's context.
    """
    walk = _Walk(engine, numbers or {}, frozenset(chains))
    for chain in chains:
        walk.require_fit(chain)
    for root in branches(chains):
        yield from walk.root(root)


class _Walk:
    """Depth-first walk over branches; chunks are read once, however often they occur."""

    def __init__(self, engine: Engine, numbers: dict[bytes, int], wanted: frozenset[Chain]) -> None:
        self._engine, self._numbers, self._wanted = engine, numbers, wanted
        self._runner, self._library = engine.runner, engine.library
        self._records: dict[Identity, Record] = {}
        self._segments: dict[Identity, Segment] = {}

    def require_fit(self, chain: Chain) -> None:
        spans = [self._record(link).meta["span"] for link in chain]
        require_context(self._engine, self._runner.preamble.positions.span + sum(spans), "this arrangement")

    def root(self, root: Branch) -> Iterator[tuple[Chain, list[LayerKV]]]:
        """Start from the stored KV of the chunk that stands first."""
        first, *rest = root.links
        canonical = self._library.layers(self._record(first))
        if (first,) in self._wanted:
            yield (first,), canonical
        if not rest and not root.after:
            return
        runner = self._runner
        standing = [runner.preamble.positions, self._library.positions(self._record(first))]
        counts = [runner.preamble.num_tokens, canonical[0].rotary.shape[0]]
        placed, end = place(list(zip(standing, counts, strict=True)))
        layers = (
            [(above, None), (own, None)] for above, own in zip(runner.preamble_layers, canonical, strict=True)
        )
        cache = assemble(runner.family, layers, joined_positions(placed))
        yield from self._below(Branch(tuple(rest), root.after), (first,), cache, end)

    def _below(
        self, branch: Branch, before: Chain, cache: DynamicCache, start: int
    ) -> Iterator[tuple[Chain, list[LayerKV]]]:
        """Prefill a branch after the chain ``before``, whose cache and end are given, then what hangs on it."""
        if branch.links:
            segments = [self._segment(link) for link in branch.links]
            captured = self._runner.prefill_captured(segments, cache=cache, start=start)
            start += sum(segment.positions.span for segment in segments)
            for link, layers in zip(branch.links, captured, strict=True):
                before = (*before, link)
                if before in self._wanted:
                    yield before, layers
        for following in branch.after:
            held = cache.get_seq_length()
            yield from self._below(following, before, cache, start)
            shorten(cache, held)

    def _record(self, link: Identity) -> Record:
        if link not in self._records:
            label = str(self._numbers.get(link.key, link.short_id))
            self._records[link] = require_record(self._library, link, label)
        return self._records[link]

    def _segment(self, link: Identity) -> Segment:
        if link not in self._segments:
            self._segments[link] = self._library.segment(self._record(link))
        return self._segments[link]
