"""Orbit patches: one patch per chunk and antecedent *set*, good for every order of the set (paper, "Reorder").

Δ(B | A₁…A_k) depends on which chunks stand before B and, in a trained model, hardly on their order: the mean of Δ over
two opposite orders stands for the set. All sets of one chunk share the right factor, Δ_S ≈ U_S Vᵀ with one V per layer
and tensor, which at equal rank costs about half the bytes of a patch per set and, measured, no accuracy. Its ranks
follow the measured sensitivity as those of exact patches do, so that every set holds the energy that was asked for; a
set that needs fewer directions keeps coefficients for fewer (`kamera_cli.operator.shared_ranks`). One mean patch for
all sets, as in the paper, does not hold two-hop answers here, whatever its rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from kamera_cli.errors import UsageError
from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator.patch import (
    MAX_AUTO_RANK,
    Factors,
    LayerPatch,
    Precision,
    directions,
    is_rounding,
    residual,
    rounded,
    side_bytes,
    truncated,
)
from kamera_cli.operator.ranks import Worth
from kamera_cli.operator.shared_ranks import SharedTensor, choose_shared

ORBIT_LIMIT = 5
"""Most chunks of an orbit: n chunks have n (2ⁿ⁻¹ − 1) patches, 75 for five."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Coefficients:
    """U_S of one layer, (m, T) for the rotary and for the plain tensor, over the first m rows of a V that another patch
    of the orbit holds."""

    rotary: torch.Tensor
    plain: torch.Tensor
    rotary_energy: float
    plain_energy: float

    def on(self, basis: LayerPatch) -> LayerPatch:
        """The patch that these coefficients are over a basis."""
        rotary, plain = (
            Factors(u, factors.v[: u.shape[0]])
            for u, factors in ((self.rotary, basis.rotary), (self.plain, basis.plain))
        )
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
    dtype: Precision = None,
    budget_bytes: int | None = None,
    worth: Worth | None = None,
) -> list[list[LayerPatch]]:
    """Factor Δ of one chunk for several antecedent sets over a shared V.

    Parameters
    ----------
    conditioned : sequence of list of LayerKV
        Position-free KV of the chunk's T tokens per set and layer.
    canonical : list of LayerKV
    rank : int or "auto"
        ``auto`` takes the fewest bytes with which every set captures ``energy``, at most
        `kamera_cli.operator.patch.MAX_AUTO_RANK` directions of a tensor: of all tensors together where their ``worth``
        is known, and of each tensor apart otherwise.
    energy, dtype
        As for `kamera_cli.operator.patch.form`, for each set. What rounding loses counts as missing, so that integers
        of few bits may hold less than was asked at any rank.
    budget_bytes : int or None
        With ``auto``: bytes that the patch of each set may take, its U and its share of V
        (`kamera_cli.operator.shared_ranks.SharedTensor.share_bytes`), whatever energy that captures. Without
        ``worth``, each tensor's whole Δ counts the same.

    Returns
    -------
    list of list of LayerPatch
        Per set and layer. The patches of one layer hold the first rows of the same V; those of the first set hold all.
    """
    num_tokens = canonical[0].rotary.shape[0]
    shares = None if worth is None else worth.shares(num_tokens)
    tensors = [
        _Tensor.over(
            [_absorbed(mean, alone) for mean in means], MAX_AUTO_RANK if rank == "auto" else rank, dtype
        )
        for means, alone in _tensors(conditioned, canonical)
    ]
    if rank != "auto":
        ranks = [tuple(tensor.rank for tensor in tensors)] * len(conditioned)
    elif shares is None and budget_bytes is None:
        apart = [choose_shared([t.weighted([1.0] * len(t.totals))], t.allowed(energy)) for t in tensors]
        ranks = [sum(of_set, ()) for of_set in zip(*apart, strict=True)]
    else:
        weights = [
            [1.0 / total if total else 0.0 for total in tensor.totals]
            if shares is None
            else [shares[index]] * len(tensor.totals)
            for index, tensor in enumerate(tensors)
        ]
        weighted = [tensor.weighted(each) for tensor, each in zip(tensors, weights, strict=True)]
        wholes = [sum(tensor.missing[one][0] for tensor in weighted) for one in range(len(conditioned))]
        allowed = [(1.0 - energy) * (whole if shares is None else 1.0) for whole in wholes]
        ranks = choose_shared(weighted, allowed, budget_bytes=budget_bytes)
    return [_patch(tensors, one, of_set, shares) for one, of_set in enumerate(ranks)]


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
    for index, ((new,), alone) in enumerate(_tensors([list(after)], list(canonical))):
        delta = _absorbed(new, alone)
        missing = float((delta - factors[index].u.T.float() @ factors[index].v.float()).square().sum())
        total = float(delta.square().sum())
        lost += missing * (shares[index] if shares else 0.0)
        least = min(least, 1.0 - missing / total if total else 1.0)
    return max(0.0, least if shares is None else 1.0 - lost)


def _tensors(
    conditioned: Sequence[list[LayerKV]], canonical: list[LayerKV]
) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Rotary and plain of each layer: (T, H, D) of every set, and alone."""
    for layer, alone in enumerate(canonical):
        yield [chunk[layer].rotary for chunk in conditioned], alone.rotary
        yield [chunk[layer].plain for chunk in conditioned], alone.plain


def _absorbed(mean: torch.Tensor, alone: torch.Tensor) -> torch.Tensor:
    """Δ, (T, W) float32; zero where it is the rounding of the dtype in which the model computed."""
    delta = residual(mean, alone)
    return torch.zeros_like(delta) if is_rounding(mean.to(alone.dtype), alone) else delta


@dataclass(frozen=True)
class _Tensor:
    """One tensor of one layer over all sets.

    Attributes
    ----------
    v : torch.Tensor
        (m, W), right singular vectors of all Δ_S stacked, rounded.
    coefficients : list of torch.Tensor
        U_S, (m, T) each, rounded.
    missing : torch.Tensor
        (sets, m + 1) float64: ‖Δ_S − U_S Vᵀ‖² at ranks 0 to m.
    """

    v: torch.Tensor
    coefficients: list[torch.Tensor]
    missing: torch.Tensor
    bits: int | None
    direction_bytes: tuple[int, int]

    @classmethod
    def over(cls, deltas: list[torch.Tensor], most: int, dtype: Precision) -> _Tensor:
        stacked = torch.cat(deltas)
        basis, _ = truncated(stacked, directions(stacked, most), most, dtype)
        v = basis.v.float()
        made = [rounded(v @ delta.T, dtype) for delta in deltas]
        missing = torch.stack([_missing(delta, u, v) for delta, u in zip(deltas, made, strict=True)])
        sizes = side_bytes(deltas[0].shape[0], dtype), side_bytes(deltas[0].shape[1], dtype)
        return cls(basis.v, made, missing, basis.bits, sizes)

    @property
    def rank(self) -> int:
        return self.v.shape[0]

    @property
    def totals(self) -> list[float]:
        return self.missing[:, 0].tolist()

    def allowed(self, energy: float) -> list[float]:
        return [(1.0 - energy) * total for total in self.totals]

    def weighted(self, weights: Sequence[float]) -> SharedTensor:
        """What is missing, for `choose_shared`; nothing to choose where no set loses anything by it."""
        curves = self.missing * self.missing.new_tensor(weights)[:, None]
        return SharedTensor(tuple(map(tuple, curves.tolist())), *self.direction_bytes)

    def factors(self, one: int, rank: int) -> tuple[Factors, float]:
        """U of a set and the first rows of V, and the energy that they capture."""
        total, missing = self.missing[one, 0].item(), self.missing[one, rank].item()
        kept = Factors(self.coefficients[one][:rank].contiguous(), self.v[:rank].contiguous(), self.bits)
        return kept, 1.0 if total == 0.0 else max(0.0, 1.0 - missing / total)


def _missing(delta: torch.Tensor, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """(m + 1,) float64: ‖Δ − UVᵀ‖² with the first 0 to m directions of U (m, T) and V (m, W)."""
    delta, u, v = delta.double(), u.double(), v.double()
    inner = (u @ u.T) * (v @ v.T)
    added = inner.diagonal() + 2 * inner.tril(-1).sum(1) - 2 * ((u @ delta) * v).sum(1)
    total = delta.square().sum()[None]
    return torch.cat([total, total + added.cumsum(0)]).clamp_min(0)


def _patch(
    tensors: Sequence[_Tensor], one: int, ranks: Sequence[int], shares: Sequence[float] | None
) -> list[LayerPatch]:
    made = [tensor.factors(one, rank) for tensor, rank in zip(tensors, ranks, strict=True)]
    worths = (
        [None] * len(tensors)
        if shares is None
        else [share * tensor.totals[one] for share, tensor in zip(shares, tensors, strict=True)]
    )
    return [
        LayerPatch(made[n][0], made[n + 1][0], made[n][1], made[n + 1][1], worths[n], worths[n + 1])
        for n in range(0, len(made), 2)
    ]
