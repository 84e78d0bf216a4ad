"""One arrangement of chunks in memory: canonical and conditioned KV, and the caches that are made of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from kamera_cli.model.compat import DynamicCache, fill_cache
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.inputs import Segment
from kamera_cli.model.runner import ModelRunner
from kamera_cli.operator.assemble import assemble, joined_positions, place
from kamera_cli.operator.factorise import residual
from kamera_cli.operator.patch import LayerPatch
from kamera_cli.operator.ranks import Worth
from kamera_cli.operator.residual import form
from kamera_cli.patches.request import PatchOptions


@dataclass(frozen=True)
class Arrangement:
    """Chunks in prompt order.

    Attributes
    ----------
    segments : list of Segment
        Embeddings and positions of each chunk.
    canonical : list of list of LayerKV
        KV of each chunk behind the preamble alone, per chunk and layer.
    given : list of list of LayerKV or None
        ``conditioned``, where it is known already.
    """

    runner: ModelRunner
    segments: list[Segment]
    canonical: list[list[LayerKV]]
    given: list[list[LayerKV]] | None = None

    @cached_property
    def conditioned(self) -> list[list[LayerKV]]:
        """KV of each chunk out of one cold prefill of the whole arrangement."""
        if self.given is not None:
            return self.given
        return self.runner.prefill_captured([self.runner.preamble, *self.segments])[1:]

    @cached_property
    def _placed(self) -> tuple[torch.Tensor, int]:
        parts = [self.runner.preamble, *self.segments]
        placed, end = place([(part.positions, part.num_tokens) for part in parts])
        return joined_positions(placed), end

    @property
    def positions(self) -> torch.Tensor:
        """Position ids of preamble and chunks."""
        return self._placed[0]

    @property
    def end(self) -> int:
        """Position of the token that follows the last chunk."""
        return self._placed[1]

    @cached_property
    def embeddings(self) -> torch.Tensor:
        """(P, hidden) of preamble and chunks."""
        return torch.cat([part.embeddings for part in [self.runner.preamble, *self.segments]])

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """Start and end of each chunk among the P tokens."""
        found, start = [], self.runner.preamble.num_tokens
        for segment in self.segments:
            found.append((start, start + segment.num_tokens))
            start += segment.num_tokens
        return found

    def num_selected(self, share: float) -> int:
        """Tokens that a share of all chunk tokens stands for."""
        return round(share * sum(segment.num_tokens for segment in self.segments))

    @cached_property
    def exact(self) -> DynamicCache:
        """What a re-prefill writes."""
        return self._cache(self.conditioned, None)

    @cached_property
    def blind(self) -> DynamicCache:
        """Canonical KV, relocated and nothing else."""
        return self._cache(self.canonical, None)

    def patched(self, patches: list[list[LayerPatch] | None], rank: int | None) -> DynamicCache:
        """Canonical KV with the first ``rank`` directions of each chunk's patch, as the product assembles it."""
        return self._cache(self.canonical, patches, rank)

    def holding(self, chunks: list[list[LayerKV]]) -> DynamicCache:
        """Given position-free KV of each chunk at this arrangement's places."""
        return self._cache(chunks, None)

    def _cache(
        self,
        chunks: list[list[LayerKV]],
        patches: list[list[LayerPatch] | None] | None,
        rank: int | None = None,
    ) -> DynamicCache:
        parts = [self.runner.preamble_layers, *chunks]
        with_patches = [None, *(patches or [None] * len(chunks))]
        layers = (
            [
                (part[layer], None if patch is None else patch[layer])
                for part, patch in zip(parts, with_patches, strict=True)
                if part
            ]
            for layer in range(self.runner.family.num_layers)
        )
        return assemble(self.runner.family, layers, self.positions, rank)

    def patches(
        self, rank: int | Literal["auto"], *, of_first: bool = False, worth: Worth | None = None
    ) -> list[list[LayerPatch] | None]:
        """Exact-order patches of every chunk after the first, factors in the product's own dtype.

        Parameters
        ----------
        rank, worth
            As in `patch`.
        of_first : bool
            Also of the first one, which needs it when the canonical KV was captured without the preamble.
        """
        skipped = 0 if of_first else 1
        return [None] * skipped + [
            self.patch(place, rank, worth=worth) for place in range(skipped, len(self.segments))
        ]

    def patch(
        self, place: int, rank: int | Literal["auto"], *, worth: Worth | None = None
    ) -> list[LayerPatch]:
        """The exact-order patch of the chunk at a place, -1 for the last one.

        Parameters
        ----------
        rank : int or "auto"
            A number above the chunk's tokens counts as these; ``auto`` as ``compile-patches`` chooses it by default.
        worth : Worth or None
            What the layers are worth, for ``auto``.
        """
        after, alone = self.conditioned[place], self.canonical[place]
        capped = rank if rank == "auto" else min(rank, after[0].rotary.shape[0])
        return form(after, alone, rank=capped, energy=PatchOptions().energy, worth=worth)

    def bare(self) -> Arrangement:
        """The same chunks with canonical KV captured at position 0 without a preamble in front."""
        canonical = [self.runner.prefill_captured([segment])[0] for segment in self.segments]
        return Arrangement(self.runner, self.segments, canonical, self.conditioned)

    def with_exact_layers(self, layers: range) -> DynamicCache:
        """Blind KV with the re-prefill's own in some layers."""
        return fill_cache(
            [
                (source.keys, source.values)
                for source in (
                    (self.exact if number in layers else self.blind).layers[number]
                    for number in range(self.runner.family.num_layers)
                )
            ]
        )

    def delta_energy(self) -> torch.Tensor:
        """(P,) squared size of Δ per token over all layers and both tensors; zero for the preamble."""
        total = torch.zeros(self.embeddings.shape[0], device=self.embeddings.device)
        for (start, end), after, alone in zip(self.bounds, self.conditioned, self.canonical, strict=True):
            for new, old in zip(after, alone, strict=True):
                total[start:end] += residual(new.rotary, old.rotary).square().sum(1)
                total[start:end] += residual(new.plain, old.plain).square().sum(1)
        return total

    def patched_after_rotation(self, ranks: tuple[int, ...]) -> dict[int, DynamicCache]:
        """Patches whose key part is factored from Δ of the rotated keys; values as ever.

        Such a patch serves one position only. It is here to show what position mixed into Δ costs in rank.
        """
        most = max(ranks)
        factors = {}
        for number, (new, old) in enumerate(zip(self.exact.layers, self.blind.layers, strict=True)):
            for chunk, (start, end) in enumerate(self.bounds[1:], start=1):
                rows = [
                    [LayerKV(*(_rows(part[:, :, start:end]) for part in (layer.keys, layer.values)))]
                    for layer in (new, old)
                ]
                (patch,) = form(*rows, rank=min(most, end - start), energy=1.0)
                factors[number, chunk, "keys"] = patch.rotary
                factors[number, chunk, "values"] = patch.plain
        made = {}
        for rank in ranks:
            layers = []
            for number, old in enumerate(self.blind.layers):
                pair = {"keys": old.keys.clone(), "values": old.values.clone()}
                for chunk, (start, end) in enumerate(self.bounds[1:], start=1):
                    for name, tensor in pair.items():
                        part = factors[number, chunk, name].at_rank(rank)
                        added = part.product().unflatten(1, (tensor.shape[1], -1))
                        tensor[0, :, start:end] += added.transpose(0, 1).to(tensor.dtype)
                layers.append((pair["keys"], pair["values"]))
            made[rank] = fill_cache(layers)
        return made


def _rows(cached: torch.Tensor) -> torch.Tensor:
    """(1, H, T, D) of a cache as (T, H, D)."""
    return cached[0].transpose(0, 1)
