"""Patches as ``compile-patches`` forms them, inside a suite: what the layers are worth is learned on the first windows,
and one chunk's Δ is factored once, however many patches are cut from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kamera_cli.bench.arrangement import Arrangement
from kamera_cli.bench.sizes import Size, of_factors, of_layer
from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator.patch import (
    MAX_AUTO_RANK,
    Factors,
    LayerPatch,
    Precision,
    absorbed,
    direction_bytes,
    directions,
    truncated,
)
from kamera_cli.operator.ranks import Sensitivity, Spectrum, Worth, choose, worth
from kamera_cli.options import parse_budget
from kamera_cli.patches.request import PatchOptions
from kamera_cli.patches.worth import LEAST_FELT, MAX_TOKENS, MAX_TRIES, Measured, Prompt, measure

AS_COMPILED = "as compile-patches forms them"
"""Name of the arm with default options: ranks by worth, factors in 8-bit integers."""


class Learner:
    """What the layers are worth, from the windows it is shown: measured until something was felt, `MAX_TRIES` at most,
    as `kamera_cli.patches.worth.layer_worth` does with the windows that are compiled.

    Attributes
    ----------
    num_windows : int
        Windows that were measured.
    """

    def __init__(self) -> None:
        self.num_windows = 0
        self._sums: Measured = []
        self._num_tokens = 0

    def worth(self, window: Arrangement) -> Worth | None:
        """What a patch that is formed for this window goes by; None where nothing was felt so far."""
        if not self._is_felt and self.num_windows < MAX_TRIES and len(window.segments) > 1:
            self._add(window)
        return worth(self._sums, self._num_tokens) if self._is_felt else None

    @property
    def _is_felt(self) -> bool:
        highest = max((tensor.kl for layer in self._sums for tensor in layer), default=0.0)
        return self.num_windows > 0 and highest >= LEAST_FELT * self.num_windows

    def _add(self, window: Arrangement) -> None:
        count = _num_measured([segment.num_tokens for segment in window.segments])
        runner = window.runner
        segments, canonical, conditioned = (
            [first, *chunks[:count]]
            for first, chunks in (
                (runner.preamble, window.segments),
                (runner.preamble_layers, window.canonical),
                (runner.preamble_layers, window.conditioned),
            )
        )
        found = measure(Prompt(runner, segments, canonical, conditioned))
        self._sums = [
            tuple(map(_sum, *layers)) for layers in zip(self._sums or _nothing(found), found, strict=True)
        ]
        self._num_tokens += sum(segment.num_tokens for segment in window.segments[1:count])
        self.num_windows += 1


def _num_measured(sizes: Sequence[int]) -> int:
    """First chunks of a window that are measured on: two, and more as long as all stay within `MAX_TOKENS`."""
    count = 2
    while count < len(sizes) and sum(sizes[: count + 1]) <= MAX_TOKENS:
        count += 1
    return count


def _sum(one: Sensitivity, other: Sensitivity) -> Sensitivity:
    return Sensitivity(one.kl + other.kl, one.missing + other.missing, one.total + other.total)


def _nothing(found: Measured) -> Measured:
    return [(Sensitivity(0.0, 0.0, 0.0),) * 2 for _ in found]


class Residual:
    """Δ of one chunk in all layers, and the patches that are cut from it.

    Parameters
    ----------
    conditioned, canonical : list of LayerKV
        Position-free KV of the same T tokens, prefilled after the antecedents and alone.

    Attributes
    ----------
    kv : Size
        Of the canonical KV that a patch serves.
    """

    def __init__(self, conditioned: list[LayerKV], canonical: list[LayerKV]) -> None:
        pairs = [
            pair
            for after, alone in zip(conditioned, canonical, strict=True)
            for pair in ((after.rotary, alone.rotary), (after.plain, alone.plain))
        ]
        self._deltas = [absorbed(*pair) for pair in pairs]
        self._known = [directions(delta) for delta in self._deltas]
        self._kv_bytes = sum(alone.nbytes for _, alone in pairs)
        self._cut: dict[tuple[int, int, Precision], tuple[Factors, float, Size]] = {}
        self.kv = sum(map(of_layer, canonical), Size())

    def patch(self, options: PatchOptions) -> tuple[list[LayerPatch], Size]:
        """What `kamera_cli.operator.patch.form` gives for these options, and its bytes.

        Returns
        -------
        list of LayerPatch
            One per layer.
        Size
        """
        ranks = self._ranks(options)
        parts = [self._part(index, rank, options.dtype) for index, rank in enumerate(ranks)]
        layers = [
            LayerPatch(rotary, plain, rotary_energy, plain_energy)
            for (rotary, rotary_energy, _), (plain, plain_energy, _) in zip(
                parts[::2], parts[1::2], strict=True
            )
        ]
        return layers, sum((size for _, _, size in parts), Size())

    def _ranks(self, options: PatchOptions) -> Sequence[int]:
        if options.rank != "auto":
            return [options.rank] * len(self._deltas)
        num_tokens = self._deltas[0].shape[0]
        weights = None if options.worth is None else options.worth.shares(num_tokens)
        spectra = [
            Spectrum(
                tuple(known.squares[:MAX_AUTO_RANK].tolist()),
                known.total,
                direction_bytes(*delta.shape, options.dtype),
                1.0 / (known.total or 1.0) if weights is None else weights[index],
            )
            for index, (delta, known) in enumerate(zip(self._deltas, self._known, strict=True))
        ]
        if weights is None and options.budget is None:
            return [choose([spectrum], energy=options.energy)[0] for spectrum in spectra]
        budget = None if options.budget is None else parse_budget(options.budget).of(self._kv_bytes)
        typical = None if weights is None else 1.0
        return choose(spectra, energy=options.energy, typical=typical, budget_bytes=budget)

    def _part(self, index: int, rank: int, dtype: Precision) -> tuple[Factors, float, Size]:
        key = (index, rank, dtype)
        if key not in self._cut:
            factors, energy = truncated(self._deltas[index], self._known[index], rank, dtype)
            self._cut[key] = factors, energy, of_factors(factors)
        return self._cut[key]
