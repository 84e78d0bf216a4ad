"""Chunks in one order, as suites ask about them: what a cold prefill gives of them, and the caches of all arms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kamera_cli.bench.figures import Size
from kamera_cli.model.compat import DynamicCache
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.runner import ModelRunner
from kamera_cli.operator.assemble import joined_positions, place
from kamera_cli.operator.factorise import residual
from kamera_cli.operator.patch import LayerPatch
from kamera_cli.operator.quantise import as_written
from kamera_cli.operator.ranks import Worth
from kamera_cli.operator.residual import Residual
from kamera_cli.options import CompileOptions
from kamera_cli.patches.chunk import Chunk, ChunkChain
from kamera_cli.patches.measure import Part, assembled, front
from kamera_cli.patches.request import cut
from kamera_store.format import codec
from kamera_store.format.tensors import to_bytes

AS_COMPILED = "as compile-patches forms them"
"""Name of the arm with default options: ranks by worth, factors in 8-bit integers."""

Patches = Sequence[list[LayerPatch] | None]
"""One per chunk, by layer."""


@dataclass(frozen=True)
class Prompt:
    """Chunks in prompt order, the preamble in front of them.

    Attributes
    ----------
    given : list of list of LayerKV or None
        ``conditioned``, where it is known already.
    """

    runner: ModelRunner
    chunks: ChunkChain
    given: Sequence[list[LayerKV]] | None = None

    @cached_property
    def conditioned(self) -> Sequence[list[LayerKV]]:
        """Position-free KV of each chunk, by layer, out of one cold prefill of the whole prompt."""
        if self.given is not None:
            return self.given
        segments = [chunk.segment for chunk in self.chunks]
        return self.runner.prefill_captured([self.runner.preamble, *segments])[1:]

    @cached_property
    def _residuals(self) -> dict[int, Residual]:
        return {}

    def residual(self, place: int) -> Residual:
        """Δ of the chunk at a place, whose directions are found once."""
        if place not in self._residuals:
            self._residuals[place] = Residual(self.conditioned[place], self.chunks[place].canonical)
        return self._residuals[place]

    @cached_property
    def exact(self) -> DynamicCache:
        """What a re-prefill writes."""
        return self.holding(self.conditioned)

    @cached_property
    def blind(self) -> DynamicCache:
        """Canonical KV, relocated and nothing else."""
        return self.patched([None] * len(self.chunks))

    def holding(self, kv: Sequence[list[LayerKV]]) -> DynamicCache:
        """Given position-free KV of each chunk at this prompt's places."""
        parts = [Part(chunk.segment, layers) for chunk, layers in zip(self.chunks, kv, strict=True)]
        return assembled(self.runner, [front(self.runner), *parts])

    def patched(self, patches: Patches, rank: int | None = None) -> DynamicCache:
        """Canonical KV with the first ``rank`` directions of each chunk's patch."""
        parts = [Part.of(chunk, patch) for chunk, patch in zip(self.chunks, patches, strict=True)]
        return assembled(self.runner, [front(self.runner), *parts], rank)

    def patch(self, place: int, options: CompileOptions, worth: Worth | None = None) -> list[LayerPatch]:
        """The exact-order patch of the chunk at a place, as the product cuts it from Δ.

        Parameters
        ----------
        worth : Worth or None
            What the layers are worth, for ranks that go by it.
        """
        return cut(self.residual(place), options, worth)

    def patches(self, options: CompileOptions, worth: Worth | None = None) -> list[list[LayerPatch] | None]:
        """Patches of every chunk after the first; see `patch`."""
        return [None, *(self.patch(place, options, worth) for place in range(1, len(self.chunks)))]

    def bare(self) -> Prompt:
        """The same chunks with canonical KV captured at position 0 without a preamble in front."""
        captured = (self.runner.prefill_captured([chunk.segment])[0] for chunk in self.chunks)
        chunks = tuple(Chunk(chunk.segment, kv) for chunk, kv in zip(self.chunks, captured, strict=True))
        return Prompt(self.runner, chunks, self.conditioned)

    @cached_property
    def _placed(self) -> tuple[torch.Tensor, int]:
        parts = [self.runner.preamble, *(chunk.segment for chunk in self.chunks)]
        placed, end = place([(part.positions, part.num_tokens) for part in parts])
        return joined_positions(placed), end

    @property
    def positions(self) -> torch.Tensor:
        """Position ids of the P tokens of preamble and chunks, (3, P) or (P,)."""
        return self._placed[0]

    @property
    def end(self) -> int:
        """Position of the token that follows the last chunk."""
        return self._placed[1]

    @property
    def embeddings(self) -> torch.Tensor:
        """(P, hidden) of preamble and chunks."""
        parts = [self.runner.preamble, *(chunk.segment for chunk in self.chunks)]
        return torch.cat([part.embeddings for part in parts])

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """Start and end of each chunk among the P tokens."""
        found, start = [], self.runner.preamble.num_tokens
        for chunk in self.chunks:
            found.append((start, start + chunk.segment.num_tokens))
            start += chunk.segment.num_tokens
        return found

    def num_selected(self, share: float) -> int:
        """Tokens that a share of all chunk tokens stands for."""
        return round(share * sum(chunk.segment.num_tokens for chunk in self.chunks))

    def delta_energy(self) -> torch.Tensor:
        """(P,) squared size of Δ per token over all layers and both tensors; zero for the preamble."""
        total = torch.zeros(self.bounds[-1][1], device=self.conditioned[0][0].rotary.device)
        for (start, end), after, chunk in zip(self.bounds, self.conditioned, self.chunks, strict=True):
            for new, old in zip(after, chunk.canonical, strict=True):
                total[start:end] += residual(new.rotary, old.rotary).square().sum(1)
                total[start:end] += residual(new.plain, old.plain).square().sum(1)
        return total


def tensors_of(cache: DynamicCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer of a cache, (1, H, P, D)."""
    layers: list[Any] = list(cache.layers)
    return [(layer.keys, layer.values) for layer in layers]


def kv_size(chunks: Iterable[Chunk]) -> Size:
    """Bytes of the canonical KV of chunks."""
    return sum((_size(kv.rotary, kv.plain) for chunk in chunks for kv in chunk.canonical), Size())


def patch_size(patches: Patches, rank: int | None = None) -> Size:
    """Bytes of the first ``rank`` directions of patches, integers packed as they are written."""
    factors = (
        part.at_rank(rank)
        for patch in patches
        for layer in patch or ()
        for part in (layer.rotary, layer.plain)
    )
    return sum((_size(*(as_written(rows, one.bits) for rows in (one.u, one.v))) for one in factors), Size())


def _size(*tensors: torch.Tensor) -> Size:
    parts = [to_bytes("part", tensor) for tensor in tensors]
    return Size(sum(part.raw_bytes for part in parts), sum(codec.encode(part).stored_bytes for part in parts))
