"""GQA, MQA and MHA: whole keys and values per layer, captured before RoPE; keys are rotated (design §2)."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from kamera_cli.model.compat import DynamicCache, apply_rotary, decoder_of, fill_cache


@dataclass
class LayerKV:
    """Position-free keys and values of one layer: (T, H_kv, D) and (T, H_kv, D_v), in the compute dtype."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass
class Capture:
    """What the hooks saw during one forward: pre-RoPE keys and values per layer, batch of one."""

    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    def layers(self, start: int, end: int) -> list[LayerKV]:
        """Tokens ``[start, end)`` of every layer, copied so that the full forward can be freed."""
        return [
            LayerKV(self.keys[layer][start:end].clone(), self.values[layer][start:end].clone())
            for layer in sorted(self.keys)
        ]


class GQA:
    """Capture, rotation and cache layout of a decoder whose layers have ``k_proj``, ``v_proj`` and maybe ``k_norm``."""

    def __init__(self, model: torch.nn.Module) -> None:
        decoder = decoder_of(model)
        self.attentions = [layer.self_attn for layer in decoder.layers]
        self.rotary = decoder.rotary_emb
        self.head_dim: int = self.attentions[0].head_dim
        self.num_kv_heads: int = self.attentions[0].k_proj.out_features // self.head_dim
        self.num_layers = len(self.attentions)
        self._apply_rotary = apply_rotary(self.attentions[0])

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        """Record keys after the key norm and before RoPE, and values, of this thread's forwards inside the block."""
        seen = Capture()
        handles = []
        for layer, attention in enumerate(self.attentions):
            key_module = getattr(attention, "k_norm", attention.k_proj)
            handles.append(key_module.register_forward_hook(self._store(seen.keys, layer)))
            handles.append(attention.v_proj.register_forward_hook(self._store(seen.values, layer)))
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    def _store(self, into: dict[int, torch.Tensor], layer: int):
        owner = threading.get_ident()

        def hook(_module: torch.nn.Module, _inputs: tuple, output: torch.Tensor) -> None:
            # Hooks fire for every thread that runs the model; another one's tokens are not ours.
            if threading.get_ident() == owner:
                into[layer] = output.detach().reshape(-1, self.num_kv_heads, self.head_dim)

        return hook

    def rotation(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's own rotary table at ``positions`` ((3, T) or (T,)): cos and sin in the dtype of ``like``."""
        batched = positions[:, None] if positions.ndim == 2 else positions[None]
        return self.rotary(like, batched.to(like.device))

    def rotate(self, keys: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """R(p) · K: pre-RoPE keys (T, H_kv, D) to the rotated (1, H_kv, T, D) that the cache holds.

        The model's own function does the arithmetic, so a relocated key is bit-identical to the one that a cold prefill
        computes from equal pre-RoPE keys. A query tensor without heads keeps its other half free of charge.
        """
        heads_first = keys.transpose(0, 1)[None]
        _, rotated = self._apply_rotary(heads_first[:, :0], heads_first, *rotation)
        return rotated

    def cache(self, layers: Iterable[LayerKV], positions: torch.Tensor) -> DynamicCache:
        """A fresh cache of position-free layers placed at ``positions``; the inputs stay untouched."""
        rotated, rotation = [], None
        for layer in layers:
            rotation = rotation or self.rotation(positions, layer.keys)
            rotated.append((self.rotate(layer.keys, rotation), layer.values.transpose(0, 1)[None]))
        return fill_cache(rotated)
