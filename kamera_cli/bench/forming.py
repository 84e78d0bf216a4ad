"""Patches as ``compile-patches`` forms them, inside a suite: what the layers are worth is learned on the first windows,
and one chunk's Δ is factored once, however many patches are cut from it.
"""

from __future__ import annotations

from kamera_cli.bench.arrangement import Arrangement
from kamera_cli.bench.sizes import Size, of_factors, of_layer
from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator import residual
from kamera_cli.operator.patch import LayerPatch
from kamera_cli.operator.ranks import Worth
from kamera_cli.patches.chunk import Chunk
from kamera_cli.patches.request import PatchOptions, cut
from kamera_cli.patches.worth import Learned, learn

AS_COMPILED = "as compile-patches forms them"
"""Name of the arm with default options: ranks by worth, factors in 8-bit integers."""


class Learner:
    """What the layers are worth, from the windows it is shown: measured until something was felt."""

    def __init__(self) -> None:
        self._known = Learned()

    @property
    def num_windows(self) -> int:
        """Windows that were measured."""
        return self._known.num_windows

    def worth(self, window: Arrangement) -> Worth | None:
        """What a patch that is formed for this window goes by; None where nothing was felt so far."""
        if not self._known.is_settled:
            chunks = list(map(Chunk, window.segments, window.canonical))
            self._known = learn(window.runner, self._known, chunks, window.conditioned)
        return self._known.worth


class Residual(residual.Residual):
    """Δ of one chunk in all layers, and the patches that are cut from it.

    Attributes
    ----------
    kv : Size
        Of the canonical KV that a patch serves.
    """

    def __init__(self, conditioned: list[LayerKV], canonical: list[LayerKV]) -> None:
        super().__init__(conditioned, canonical)
        self.kv = sum(map(of_layer, canonical), Size())

    def cut(self, options: PatchOptions, worth: Worth | None = None) -> tuple[list[LayerPatch], Size]:
        """A patch, one entry per layer, and its bytes."""
        layers = cut(self, options, worth)
        parts = (factors for layer in layers for factors in (layer.rotary, layer.plain))
        return layers, sum(map(of_factors, parts), Size())
