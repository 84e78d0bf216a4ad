"""Orbit patches: one patch per chunk and antecedent *set*, good for every order of the set (paper, "Reorder").

Δ(B | A₁…A_k) depends on which chunks stand before B and, in a trained model, hardly on their order: the mean of Δ over
two opposite orders stands for the set. All sets of one chunk share the right factor, Δ_S ≈ U_S Vᵀ with one V per layer
and tensor, which at equal rank costs about half the bytes of a patch per set and, measured, no accuracy. One mean patch
for all sets, as in the paper, does not hold two-hop answers here, whatever its rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from kamera_cli.errors import UsageError
from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator.patch import MAX_AUTO_RANK, Factors, LayerPatch, factorise, residual, rounded

ORBIT_LIMIT = 5
"""Most chunks of an orbit: n chunks have n (2ⁿ⁻¹ − 1) patches, 75 for five."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Coefficients:
    """U_S of one layer, (m, T) for the rotary and for the plain tensor, whose V another patch of the orbit holds."""

    rotary: torch.Tensor
    plain: torch.Tensor
    rotary_energy: float
    plain_energy: float

    def on(self, basis: LayerPatch) -> LayerPatch:
        """The patch that these coefficients are over a basis."""
        rotary, plain = Factors(self.rotary, basis.rotary.v), Factors(self.plain, basis.plain.v)
        return LayerPatch(rotary, plain, self.rotary_energy, self.plain_energy)


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
    """Mean over orders of a chunk's KV, per layer, in float32."""
    return [
        LayerKV(
            torch.stack([kv.rotary.float() for kv in layer]).mean(0),
            torch.stack([kv.plain.float() for kv in layer]).mean(0),
        )
        for layer in zip(*orders, strict=True)
    ]


def form_orbit(
    conditioned: Sequence[list[LayerKV]],
    canonical: list[LayerKV],
    *,
    rank: int | Literal["auto"],
    energy: float,
    dtype: torch.dtype | None = None,
) -> list[list[LayerPatch]]:
    """Factor Δ of one chunk for several antecedent sets over a shared V.

    Parameters
    ----------
    conditioned : sequence of list of LayerKV
        Position-free KV of the chunk's T tokens per set and layer.
    canonical : list of LayerKV
    rank : int or "auto"
        ``auto`` takes, for each tensor apart, the smallest rank that captures ``energy`` of every set's Δ, at most
        `kamera_cli.operator.patch.MAX_AUTO_RANK`.

    Returns
    -------
    list of list of LayerPatch
        Per set and layer; the patches of one layer hold the same V.
    """
    patches: list[list[LayerPatch]] = [[] for _ in conditioned]
    for layer, alone in enumerate(canonical):
        after = [chunk[layer] for chunk in conditioned]
        rotary = _joint([residual(kv.rotary, alone.rotary) for kv in after], rank, energy, dtype)
        plain = _joint([residual(kv.plain, alone.plain) for kv in after], rank, energy, dtype)
        for patch, (keys, keys_energy), (values, values_energy) in zip(patches, rotary, plain, strict=True):
            patch.append(LayerPatch(keys, values, keys_energy, values_energy))
    return patches


def _joint(
    deltas: list[torch.Tensor], rank: int | Literal["auto"], energy: float, dtype: torch.dtype | None
) -> list[tuple[Factors, float]]:
    """U_S, (m, T) each, over the right singular vectors of all Δ_S stacked, and the energy that each captures."""
    most = MAX_AUTO_RANK if rank == "auto" else rank
    stacked = torch.cat(deltas)
    basis, _ = factorise(stacked, min(most, *stacked.shape), 1.0, dtype)
    v = basis.v.float()
    coefficients = [v @ delta.T for delta in deltas]
    totals = [float(delta.square().sum()) for delta in deltas]
    chosen = basis.rank
    if rank == "auto":
        for count in range(basis.rank + 1):
            if all(
                float(u[:count].square().sum()) >= energy * total
                for u, total in zip(coefficients, totals, strict=True)
            ):
                chosen = count
                break
    made = []
    for u, delta, total in zip(coefficients, deltas, totals, strict=True):
        factors = Factors(rounded(u[:chosen], dtype), basis.v[:chosen].contiguous(), basis.bits)
        missing = float((delta - factors.u.T.float() @ factors.v.float()).square().sum())
        made.append((factors, 1.0 if total == 0.0 else max(0.0, 1.0 - missing / total)))
    return made
