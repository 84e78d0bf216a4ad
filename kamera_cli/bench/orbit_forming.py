"""For the suite ``orbit``: conditioned KV after every order of a set, and the patches of each arm."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from kamera_cli.bench.episodes import Encoded
from kamera_cli.bench.forming import AS_COMPILED
from kamera_cli.model.compat import DynamicCache, shorten
from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator.orbit import antecedent_sets, formed_orders, mean_kv
from kamera_cli.operator.patch import LayerPatch
from kamera_cli.operator.ranks import Worth
from kamera_cli.operator.residual import form
from kamera_cli.patches.request import PatchOptions

EXACT, ORBIT = "exact, one per order", "orbit, one per set"
RIVALS = ONE_ORDER, ONE_MEAN = "one order", "one mean patch"
Chain = tuple[tuple[int, ...], int]
"""The chunks before one, in order, and that one."""
Patches = dict[Chain, list[LayerPatch]]


@dataclass(frozen=True)
class Ways:
    """How the patches of all arms are formed, and which arms there are."""

    rank: int | Literal["auto"]
    with_rivals: bool
    worth: Worth | None = None

    @property
    def energy(self) -> float:
        return PatchOptions().energy

    @property
    def described(self) -> str:
        return AS_COMPILED if self.rank == "auto" else f"of rank {self.rank}"


def conditioned(encoded: Encoded) -> dict[Chain, list[LayerKV]]:
    """KV of every chunk after every order of some of the others, position-free.

    Orders that start alike share the forwards of their start, and the chunk that stands first needs none: behind the
    preamble its canonical KV is what a cold prefill gives (`kamera_cli.patches.tree`).
    """
    runner, chunks = encoded.runner, range(len(encoded.segments))
    found: dict[Chain, list[LayerKV]] = {}

    def follow(before: tuple[int, ...], cache: DynamicCache, end: int) -> None:
        held = cache.get_seq_length()
        for chunk in chunks:
            if chunk in before:
                continue
            segment = encoded.segments[chunk]
            (found[before, chunk],) = runner.prefill_captured([segment], cache, end)
            follow((*before, chunk), cache, end + segment.positions.span)
            shorten(cache, held)

    for chunk in chunks:
        found[(), chunk] = encoded.canonical[chunk]
        alone = encoded.arranged([chunk])
        follow((chunk,), alone.blind, alone.end)
    return found


def arms_of(
    after: dict[Chain, list[LayerKV]], canonical: list[list[LayerKV]], ways: Ways
) -> dict[str, tuple[Patches, list]]:
    """Per arm, patches by order and chunk, and the factors that have to be kept for them."""
    size = len(canonical)
    own: dict[str, Patches] = {name: {} for name in (EXACT, ORBIT, *(RIVALS if ways.with_rivals else ()))}
    kept: dict[str, list] = {name: [] for name in own}

    def rank_of(layers: list[LayerKV]) -> int | Literal["auto"]:
        return ways.rank if ways.rank == "auto" else min(ways.rank, layers[0].rotary.shape[0])

    def factored(layers: list[LayerKV], chunk: int) -> list[LayerPatch]:
        return form(layers, canonical[chunk], rank=rank_of(layers), energy=ways.energy, worth=ways.worth)

    for (before, chunk), layers in after.items():
        if before:
            own[EXACT][before, chunk] = factored(layers, chunk)
            kept[EXACT] += _factors(own[EXACT][before, chunk])
    for chunk in range(size):
        sets = antecedent_sets(chunk, list(range(size)))
        means = [mean_kv([after[order, chunk] for order in formed_orders(of)]) for of in sets]
        for of, layers in zip(sets, means, strict=True):
            patch = factored(layers, chunk)
            kept[ORBIT] += _factors(patch)
            own[ORBIT] |= {(before, chunk): patch for before in itertools.permutations(of)}
        if not ways.with_rivals:
            continue
        everywhere = mean_kv([layers for (before, one), layers in after.items() if one == chunk and before])
        single = factored(everywhere, chunk)
        kept[ONE_MEAN] += _factors(single)
        for of in sets:
            first = factored(after[of, chunk], chunk)
            kept[ONE_ORDER] += _factors(first)
            for before in itertools.permutations(of):
                own[ONE_ORDER][before, chunk] = first
                own[ONE_MEAN][before, chunk] = single
    return {name: (own[name], kept[name]) for name in own}


def _factors(layers: list[LayerPatch]) -> list:
    return [
        rows for patch in layers for factors in (patch.rotary, patch.plain) for rows in (factors.u, factors.v)
    ]
