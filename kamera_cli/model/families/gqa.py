"""GQA, MQA and MHA: whole keys and values per layer; keys are rotated."""

from __future__ import annotations

import torch

from kamera_cli.errors import RefusedError
from kamera_cli.model.compat import Module, own_function
from kamera_cli.model.families.family import AttentionFamily, Rotation, Select, whole


class GQA(AttentionFamily):
    """A decoder whose layers have ``k_proj``, ``v_proj`` and maybe ``k_norm``."""

    names = ("keys", "values")

    def __init__(self, decoder: Module) -> None:
        super().__init__(decoder)
        self.layer_shapes = tuple(
            (
                (attention.k_proj.out_features // attention.head_dim, attention.head_dim),
                (attention.v_proj.out_features // attention.head_dim, attention.head_dim),
            )
            for attention in self.attentions
        )
        self.width_per_pair = 2 * self.attentions[0].head_dim
        apply_rotary = own_function(self.attentions[0], "apply_rotary_pos_emb")
        if apply_rotary is None:
            raise RefusedError(
                f"{type(self.attentions[0]).__name__} names no rotation function that kamera knows"
            )
        self._apply_rotary = apply_rotary

    def hooked(self, attention: Module) -> tuple[tuple[Module, Select], ...]:
        """Keys after the key norm, where there is one, and values; both before RoPE."""
        return (getattr(attention, "k_norm", attention.k_proj), whole), (attention.v_proj, whole)

    def rotate(self, rotary: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """See `AttentionFamily.rotate`; a query without heads keeps the other half of the work free of charge."""
        heads_first = rotary.transpose(0, 1)[None]
        return self._apply_rotary(heads_first[:, :0], heads_first, *rotation)[1]

    def cached(
        self, layer: int, rotated: torch.Tensor, plain: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (1, H_kv, T, D) and values (1, H_kv, T, D_v)."""
        return rotated, plain
