"""Chains as trees: what is prefilled in one forward, and what follows it (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kamera_cli.window import Chain

if TYPE_CHECKING:
    from kamera_store.format.keys import Identity


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


def count_branches(chains: Sequence[Chain]) -> int:
    """How many forwards `kamera_cli.patches.tree.each_branch` gives to some chains."""
    waiting, number = list(branches(chains)), 0
    while waiting:
        number += 1
        waiting += waiting.pop().after
    return number


def maximal(chains: Sequence[Chain]) -> list[Chain]:
    """Chains that are no prefix of another one: a forward over these conditions every chunk of all of them."""
    distinct = list(dict.fromkeys(chains))
    return [
        chain
        for chain in distinct
        if not any(len(other) > len(chain) and other[: len(chain)] == chain for other in distinct)
    ]
