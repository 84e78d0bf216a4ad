"""Put chunks side by side in a fresh KV cache: patch each in the pre-RoPE frame, then rotate all keys once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kamera_cli.model.compat import DynamicCache
from kamera_cli.model.families.family import AttentionFamily, LayerKV
from kamera_cli.model.positions import RelativePositions
from kamera_cli.operator.patch import LayerPatch, add_into


@dataclass(frozen=True)
class Placed:
    """A chunk at its place: relative positions, number of tokens and the scalar that is added to every axis."""

    positions: RelativePositions
    num_tokens: int
    offset: int


def place(parts: list[tuple[RelativePositions, int]]) -> tuple[list[Placed], int]:
    """Offsets of parts that follow one another from position 0.

    Parameters
    ----------
    parts : list of (RelativePositions, int)
        Positions and number of tokens of the preamble and of each chunk, in order.

    Returns
    -------
    list of Placed
    int
        Position of the token that follows the last part.
    """
    placed, offset = [], 0
    for positions, num_tokens in parts:
        placed.append(Placed(positions, num_tokens, offset))
        offset += positions.span
    return placed, offset


def joined_positions(placed: list[Placed]) -> torch.Tensor:
    """Position ids of all parts in order: (3, T) or (T,)."""
    return torch.cat([part.positions.at(part.offset) for part in placed], dim=-1)


def patched_layer(parts: list[tuple[LayerKV, LayerPatch | None]], rank: int | None = None) -> LayerKV:
    """Both tensors of one layer plus their U Vᵀ over all parts, still position-free, in fresh memory.

    Parameters
    ----------
    parts : list of (LayerKV, LayerPatch or None)
        Canonical KV of each part and its patch.
    rank : int or None
        Read only the first directions of each patch.
    """
    first = parts[0][0]
    total = sum(layer.rotary.shape[0] for layer, _ in parts)
    rotary = first.rotary.new_empty(total, *first.rotary.shape[1:])
    plain = first.plain.new_empty(total, *first.plain.shape[1:])
    start = 0
    for layer, patch in parts:
        end = start + layer.rotary.shape[0]
        rotary_factors = None if patch is None else patch.rotary.at_rank(rank)
        plain_factors = None if patch is None else patch.plain.at_rank(rank)
        add_into(rotary[start:end].flatten(1), layer.rotary.flatten(1), rotary_factors)
        add_into(plain[start:end].flatten(1), layer.plain.flatten(1), plain_factors)
        start = end
    return LayerKV(rotary, plain)


def assemble(
    family: AttentionFamily,
    layers: Iterable[list[tuple[LayerKV, LayerPatch | None]]],
    positions: torch.Tensor,
    rank: int | None = None,
) -> DynamicCache:
    """A fresh cache for the placed parts: K^ = R(p)·(K + U Vᵀ), V^ = V + U Vᵀ (arXiv 2606.23581, "The operator").

    `patched_layer` adds U Vᵀ, `AttentionFamily.cache` rotates what it gives (R(p)) and lays it out as the model does.

    Parameters
    ----------
    layers : iterable of list of (LayerKV, LayerPatch or None)
        One list per layer, parts in order; consumed one layer at a time, so that a reader may work ahead.
    positions : torch.Tensor
        (3, T) or (T,) of all parts.
    """
    return family.cache((patched_layer(parts, rank) for parts in layers), positions)
