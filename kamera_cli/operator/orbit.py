"""Orbit patches: one patch per chunk and antecedent *set*, good for every order of it (arXiv 2606.23581, "Reorder").

Δ(B | A₁…A_k) depends on which chunks stand before B and, in a trained model, hardly on their order: the mean of Δ over
two opposite orders stands for the set, and is factored as Δ of one order is. How much of each order's own Δ it holds is
measured (`energy_in_order`). One V for all sets of a chunk costs half the bytes at equal rank, but 20 to 40 % more once
each tensor has the rank that it is worth; one mean patch for all sets, as in the paper, does not hold two-hop answers
here, whatever its rank (``kamera bench orbit`` shows it).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

import torch

from kamera_cli.errors import UsageError
from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator.factorise import absorbed, tensor_pairs
from kamera_cli.operator.patch import LayerPatch
from kamera_cli.operator.ranks import Worth

ORBIT_LIMIT = 5
"""Most chunks of an orbit: n chunks have n (2ⁿ⁻¹ − 1) patches, 75 for five."""

_T = TypeVar("_T")


def check_orbit(num_chunks: int) -> None:
    """Refuse a set that is too small or too large.

    Raises
    ------
    UsageError
    """
    if not 2 <= num_chunks <= ORBIT_LIMIT:
        raise UsageError(
            f"an orbit takes 2 to {ORBIT_LIMIT} chunks, not {num_chunks}; name the chunks whose order is to be free"
        )


def antecedent_sets(chunk: _T, chunks: Sequence[_T]) -> list[tuple[_T, ...]]:
    """Every non-empty set of the other chunks, in the order of ``chunks``; the largest first."""
    others = [other for other in chunks if other != chunk]
    return [chosen for size in range(len(others), 0, -1) for chosen in itertools.combinations(others, size)]


def formed_orders(of: tuple[_T, ...]) -> tuple[tuple[_T, ...], ...]:
    """The orders of a set over which Δ is averaged: ascending and descending."""
    return tuple(dict.fromkeys((of, of[::-1])))


def measured_orders(of: tuple[_T, ...]) -> tuple[tuple[_T, ...], ...]:
    """The orders in which a patch's KL is taken: the formed ones, and from three antecedents on one that was not.

    Every start of such an order is one of these orders of a smaller set, so no prefill is needed for it alone.
    """
    return tuple(dict.fromkeys((*formed_orders(of), (*of[:2][::-1], *of[2:]))))


def mean_kv(orders: Sequence[list[LayerKV]]) -> list[LayerKV]:
    """Mean over orders of a chunk's KV, per layer, taken in float32."""
    return [
        LayerKV(
            torch.stack([kv.rotary.float() for kv in layer]).mean(0).to(layer[0].rotary.dtype),
            torch.stack([kv.plain.float() for kv in layer]).mean(0).to(layer[0].plain.dtype),
        )
        for layer in zip(*orders, strict=True)
    ]


def energy_in_order(
    patch: Sequence[LayerPatch], after: Sequence[LayerKV], canonical: Sequence[LayerKV], worth: Worth | None
) -> float:
    """How much of the Δ of one order the patch of its set holds: what another order adds counts as missing.

    Parameters
    ----------
    after : sequence of LayerKV
        Position-free KV of the chunk's T tokens per layer, in that order.
    worth : Worth or None
        With it all tensors together, in units of a typical patch, as `kamera_cli.operator.ranks.weighted_energy`;
        without it the smallest share of a tensor.

    Returns
    -------
    float
        0 to 1.
    """
    shares = None if worth is None else worth.shares(canonical[0].rotary.shape[0])
    factors = [each for layer in patch for each in (layer.rotary, layer.plain)]
    lost, least = 0.0, 1.0
    for index, pair in enumerate(tensor_pairs(after, canonical)):
        delta = absorbed(*pair)
        missing = float((delta - factors[index].product()).square().sum())
        total = float(delta.square().sum())
        lost += missing * (shares[index] if shares else 0.0)
        least = min(least, 1.0 - missing / total if total else 1.0)
    return max(0.0, least if shares is None else 1.0 - lost)
