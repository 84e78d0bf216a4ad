"""The one interface of all attention families: what is captured, what is rotated, how it goes back into the cache.

Every family keeps two position-free tensors per layer: one that RoPE turns and one that is carried as it is. Everything
above this module (patches, assembly, store) treats the two alike and never asks for the family; see
`docs/architecture.md`, "The operator".
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kamera_cli.model.compat import DynamicCache, Module, fill_cache, gives_whole_tables, rotary_table


@dataclass
class LayerKV:
    """Position-free KV of one layer, in the compute dtype.

    Attributes
    ----------
    rotary : torch.Tensor
        (T, H, D): what RoPE turns, before it is turned. Keys of GQA; the shared ``k_rope`` of MLA, H = 1.
    plain : torch.Tensor
        (T, H, D_v): what has no position. Values of GQA; the latent of MLA after its norm, H = 1.
    """

    rotary: torch.Tensor
    plain: torch.Tensor


@dataclass
class Capture:
    """What the hooks saw during one forward: pre-RoPE tensors per layer, batch of one."""

    rotary: dict[int, torch.Tensor] = field(default_factory=dict)
    plain: dict[int, torch.Tensor] = field(default_factory=dict)

    def layers(self, start: int, end: int) -> list[LayerKV]:
        """Tokens ``[start, end)`` of every layer, copied so that the full forward can be freed."""
        return [
            LayerKV(self.rotary[layer][start:end].clone(), self.plain[layer][start:end].clone())
            for layer in sorted(self.rotary)
        ]


Rotation = tuple[torch.Tensor, ...]
"""The model's rotary table at some positions, as its own rotation function takes it after queries and keys."""


class AttentionFamily(ABC):
    """Capture, rotation and cache layout of one decoder.

    Attributes
    ----------
    names : tuple of str
        Field's names of the rotary and of the plain tensor; records in the store carry them.
    layer_shapes : tuple
        Per layer the (H, D) of the rotary and of the plain tensor.
    width_per_pair : int
        Multiplications of one query head with one cached token: width of its key and of its value.
    gapless : bool
        Whether the model itself can place a token only where every position before it is filled.
    """

    names: ClassVar[tuple[str, str]]
    layer_shapes: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    width_per_pair: int

    def __init__(self, decoder: Module) -> None:
        self.attentions = [layer.self_attn for layer in decoder.layers]
        self.num_layers = len(self.attentions)
        self._rotary = getattr(decoder, "rotary_emb", None) or self.attentions[0].rotary_emb
        self.gapless = gives_whole_tables(self._rotary)

    @abstractmethod
    def hooked(self, attention: Module) -> tuple[tuple[Module, Select], ...]:
        """The modules whose outputs hold the rotary and the plain tensor, each with the part of it that is kept."""

    @abstractmethod
    def rotate(self, rotary: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """R(p) · K: pre-RoPE (T, H, D) to rotated (1, H, T, D), by the model's own function.

        So a relocated key is bit-identical to the one that a cold prefill computes from equal pre-RoPE keys.
        """

    @abstractmethod
    def cached(
        self, layer: int, rotated: torch.Tensor, plain: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The pair that the model's cache holds of a layer, from rotated (1, H, T, D) and plain (1, H, T, D_v)."""

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        """Record what this family keeps, of this thread's forwards inside the block."""
        seen, handles = Capture(), []
        for layer, attention in enumerate(self.attentions):
            shapes = self.layer_shapes[layer]
            targets = (seen.rotary, seen.plain)
            for (module, select), shape, into in zip(self.hooked(attention), shapes, targets, strict=True):
                handles.append(module.register_forward_hook(_recorder(into, layer, select, shape)))
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    def rotation(self, positions: torch.Tensor, like: torch.Tensor) -> Rotation:
        """The model's own rotary table at ``positions`` ((3, T) or (T,)), in the dtype of ``like``."""
        batched = positions[:, None] if positions.ndim == 2 else positions[None]
        return rotary_table(self._rotary, like, batched.to(like.device))

    def cache(self, layers: Iterable[LayerKV], positions: torch.Tensor, first: int = 0) -> DynamicCache:
        """A fresh cache of position-free layers, from layer ``first`` on, placed at ``positions`` ((3, T) or (T,)).

        The inputs stay untouched.
        """
        pairs, rotation = [], None
        for index, layer in enumerate(layers, start=first):
            rotation = rotation or self.rotation(positions, layer.rotary)
            rotated = self.rotate(layer.rotary, rotation)
            pairs.append(self.cached(index, rotated, layer.plain.transpose(0, 1)[None]))
        return fill_cache(pairs)

    def token_values(self) -> int:
        """Numbers that one token keeps over all layers."""
        return sum(heads * width for shapes in self.layer_shapes for heads, width in shapes)


Select = Callable[[torch.Tensor], torch.Tensor]
"""From a module's output to the part that is kept."""


def whole(output: torch.Tensor) -> torch.Tensor:
    """Everything that the module gives."""
    return output


def _recorder(into: dict[int, torch.Tensor], layer: int, select: Select, shape: tuple[int, int]) -> Callable:
    owner = threading.get_ident()

    def hook(_module: Module, _inputs: tuple, output: torch.Tensor) -> None:
        # Hooks fire for every thread that runs the model; another one's tokens are not ours.
        if threading.get_ident() == owner:
            into[layer] = select(output.detach()).reshape(-1, *shape)

    return hook
