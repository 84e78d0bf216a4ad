"""MLA: the latent c_KV after its norm and the shared k_rope per layer; only k_rope is rotated.

The latent holds what all heads' keys without position and values are made of, and moves byte for byte.
"""

from __future__ import annotations

from typing import Literal

import torch

from kamera_cli.errors import RefusedError
from kamera_cli.model.compat import Module, own_function
from kamera_cli.model.families.family import AttentionFamily, Rotation, Select, whole

Layout = Literal["latent", "expanded"]


class MLA(AttentionFamily):
    """A decoder whose layers have ``kv_a_proj_with_mqa``, ``kv_a_layernorm`` and ``kv_b_proj``.

    Parameters
    ----------
    cache_shapes : tuple of tuple of int
        (H, D) of the two tensors that the model's own cache holds of layer 0. It tells the layout: latents and k_rope,
        one head each, or every head's keys and values.

    Raises
    ------
    RefusedError
        The cache holds neither.
    """

    names = ("k_rope", "latent")

    def __init__(self, decoder: Module, cache_shapes: tuple[tuple[int, int], ...]) -> None:
        super().__init__(decoder)
        self.layer_shapes = tuple(
            ((1, attention.qk_rope_head_dim), (1, attention.kv_lora_rank)) for attention in self.attentions
        )
        first = self.attentions[0]
        self.width_per_pair = first.qk_nope_head_dim + first.qk_rope_head_dim + first.v_head_dim
        self.layout = _layout(first, cache_shapes)
        self._apply_rotary = _rotation_function(first)

    def hooked(self, attention: Module) -> tuple[tuple[Module, Select], ...]:
        """The last columns of the down projection are k_rope; its first ones pass the norm and become the latent."""
        width = attention.qk_rope_head_dim
        return (attention.kv_a_proj_with_mqa, lambda output: output[..., -width:]), (
            attention.kv_a_layernorm,
            whole,
        )

    def rotate(self, rotary: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """See `AttentionFamily.rotate`: pair order and YaRN scaling are those of the model's own function and table."""
        # The layer rotates a slice of a wider row, and complex products round otherwise on rows without gaps.
        row = rotary.new_zeros(1, 1, rotary.shape[0], self.layer_shapes[0][1][1] + rotary.shape[-1])
        k_rope = row[..., -rotary.shape[-1] :]
        k_rope.copy_(rotary.transpose(0, 1)[None])
        return self._apply_rotary(k_rope, k_rope, *rotation)[1]

    def cached(
        self, layer: int, rotated: torch.Tensor, plain: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latent (1, 1, T, r) and k_rope (1, 1, T, d_r), or keys (1, H, T, d_n + d_r) and values (1, H, T, d_v)."""
        if self.layout == "latent":
            return plain, rotated
        attention = self.attentions[layer]
        nope, value = attention.qk_nope_head_dim, attention.v_head_dim
        heads = attention.kv_b_proj(plain[:, 0]).unflatten(-1, (-1, nope + value)).transpose(1, 2)
        keys, values = heads.split([nope, value], dim=-1)
        return torch.cat([keys, rotated.expand(-1, keys.shape[1], -1, -1)], dim=-1), values


def _layout(attention: Module, shapes: tuple[tuple[int, int], ...]) -> Layout:
    rope, nope, value = attention.qk_rope_head_dim, attention.qk_nope_head_dim, attention.v_head_dim
    heads = attention.kv_b_proj.out_features // (nope + value)
    known: dict[tuple, Layout] = {
        ((1, attention.kv_lora_rank), (1, rope)): "latent",
        ((heads, nope + rope), (heads, value)): "expanded",
    }
    if shapes not in known:
        expected = " or ".join(map(str, known))
        raise RefusedError(f"this model's MLA cache holds tensors of (heads, width) {shapes}, not {expected}")
    return known[shapes]


def _rotation_function(attention: Module):
    """The function that the layer itself calls: on complex pairs, on interleaved pairs, or on halves."""
    for name, used in (
        ("apply_rotary_emb", True),
        ("apply_rotary_pos_emb_interleave", getattr(attention.config, "rope_interleave", False)),
        ("apply_rotary_pos_emb", True),
    ):
        if used and (function := own_function(attention, name)) is not None:
            return function
    raise RefusedError(f"{type(attention).__name__} names no rotation function that kamera knows")
