"""A rival of orbit patches: all antecedent sets of one chunk over one right factor, Δ_S ≈ U_S Vᵀ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kamera_cli.bench.shared_ranks import SharedTensor, choose_shared
from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator.orbit import tensors_of_sets
from kamera_cli.operator.patch import (
    MAX_AUTO_RANK,
    Factors,
    LayerPatch,
    absorbed,
    directions,
    rounded,
    side_bytes,
    truncated,
)
from kamera_cli.operator.ranks import Worth


def form_shared(
    conditioned: Sequence[list[LayerKV]],
    canonical: list[LayerKV],
    *,
    rank: int | Literal["auto"],
    energy: float,
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
    energy
        As for `kamera_cli.operator.patch.form`, for each set. What rounding loses counts as missing.

    Returns
    -------
    list of list of LayerPatch
        Per set and layer. The patches of one layer hold the first rows of the same V; those of the first set hold all.
    """
    num_tokens = canonical[0].rotary.shape[0]
    shares = None if worth is None else worth.shares(num_tokens)
    tensors = [
        _Tensor.over([absorbed(mean, alone) for mean in means], MAX_AUTO_RANK if rank == "auto" else rank)
        for means, alone in tensors_of_sets(conditioned, canonical)
    ]
    if rank != "auto":
        ranks = [tuple(tensor.rank for tensor in tensors)] * len(conditioned)
    elif shares is None:
        apart = [choose_shared([t.weighted(1.0)], t.allowed(energy)) for t in tensors]
        ranks = [sum(of_set, ()) for of_set in zip(*apart, strict=True)]
    else:
        weighted = [tensor.weighted(share) for tensor, share in zip(tensors, shares, strict=True)]
        ranks = choose_shared(weighted, [1.0 - energy] * len(conditioned))
    return [_patch(tensors, one, of_set) for one, of_set in enumerate(ranks)]


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
    def over(cls, deltas: list[torch.Tensor], most: int) -> _Tensor:
        stacked = torch.cat(deltas)
        basis, _ = truncated(stacked, directions(stacked, most), most)
        v = basis.v.float()
        made = [rounded(v @ delta.T) for delta in deltas]
        missing = torch.stack([_missing(delta, u, v) for delta, u in zip(deltas, made, strict=True)])
        sizes = side_bytes(deltas[0].shape[0]), side_bytes(deltas[0].shape[1])
        return cls(basis.v, made, missing, basis.bits, sizes)

    @property
    def rank(self) -> int:
        return self.v.shape[0]

    @property
    def totals(self) -> list[float]:
        return self.missing[:, 0].tolist()

    def allowed(self, energy: float) -> list[float]:
        return [(1.0 - energy) * total for total in self.totals]

    def weighted(self, weight: float) -> SharedTensor:
        """What is missing, for `choose_shared`."""
        return SharedTensor(tuple(map(tuple, (self.missing * weight).tolist())), *self.direction_bytes)

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


def _patch(tensors: Sequence[_Tensor], one: int, ranks: Sequence[int]) -> list[LayerPatch]:
    made = [tensor.factors(one, rank) for tensor, rank in zip(tensors, ranks, strict=True)]
    return [
        LayerPatch(made[n][0], made[n + 1][0], made[n][1], made[n + 1][1]) for n in range(0, len(made), 2)
    ]
