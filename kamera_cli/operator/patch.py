"""Conditioning patches: Δ = KV(B|A) − KV(B|∅) as low-rank factors in the pre-RoPE frame (paper, "The operator")."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from kamera_cli.errors import NotFiniteError, UsageError
from kamera_cli.model.families.family import LayerKV

MAX_AUTO_RANK = 64
"""Largest rank that ``rank="auto"`` chooses."""


@dataclass(frozen=True)
class Factors:
    """Δ ≈ U Vᵀ of one tensor of one layer.

    Attributes
    ----------
    u : torch.Tensor
        (m, T): row i is the i-th column of U, so a lower rank is the first rows. Carries the singular values.
    v : torch.Tensor
        (m, W): W is the width H · D of the tensor; rows are orthonormal before rounding.
    """

    u: torch.Tensor
    v: torch.Tensor

    @property
    def rank(self) -> int:
        return self.u.shape[0]

    def at_rank(self, rank: int | None) -> Factors:
        """The first ``rank`` directions; all of them for None or a larger number."""
        return self if rank is None or rank >= self.rank else Factors(self.u[:rank], self.v[:rank])


@dataclass(frozen=True)
class LayerPatch:
    """Factors of the rotary and of the plain tensor of one layer (`LayerKV`), and the share of energy ‖UVᵀ‖²/‖Δ‖² that
    each captures."""

    rotary: Factors
    plain: Factors
    rotary_energy: float
    plain_energy: float

    @property
    def rank(self) -> int:
        return max(self.rotary.rank, self.plain.rank)


def check_rank(rank: int | Literal["auto"], num_tokens: int) -> None:
    """Refuse a rank that means nothing.

    Raises
    ------
    UsageError
        Rank below 1, or above the number of tokens of the chunk.
    """
    if rank != "auto" and not 1 <= rank <= num_tokens:
        raise UsageError(
            f"rank {rank} is out of range: a chunk of {num_tokens} tokens takes ranks 1 to {num_tokens}"
        )


def form(
    conditioned: list[LayerKV],
    canonical: list[LayerKV],
    *,
    rank: int | Literal["auto"],
    energy: float,
    dtype: torch.dtype | None = None,
) -> list[LayerPatch]:
    """Factor Δ of every layer.

    Parameters
    ----------
    conditioned, canonical : list of LayerKV
        Position-free KV of the same T tokens, prefilled after the antecedents and alone.
    rank : int or "auto"
        ``auto`` takes, for each tensor apart, the smallest rank that captures ``energy``, at most `MAX_AUTO_RANK`.
    energy : float
        Share of ‖Δ‖² in (0, 1]; read by ``auto`` alone.
    dtype : torch.dtype or None
        Of the factors, None for fp16; a factor with a value beyond its range is kept in fp32.
    """
    return [
        _layer(after, alone, rank, energy, dtype) for after, alone in zip(conditioned, canonical, strict=True)
    ]


def _layer(
    after: LayerKV, alone: LayerKV, rank: int | str, energy: float, dtype: torch.dtype | None
) -> LayerPatch:
    rotary, rotary_energy = factorise(residual(after.rotary, alone.rotary), rank, energy, dtype)
    plain, plain_energy = factorise(residual(after.plain, alone.plain), rank, energy, dtype)
    return LayerPatch(rotary, plain, rotary_energy, plain_energy)


def residual(after: torch.Tensor, alone: torch.Tensor) -> torch.Tensor:
    """Δ as a float32 matrix (T, H · D)."""
    return (after.float() - alone.float()).flatten(1)


def factorise(
    delta: torch.Tensor, rank: int | str, energy: float, dtype: torch.dtype | None = None
) -> tuple[Factors, float]:
    """Best rank-m factors of a matrix from the eigenvectors of its smaller Gram matrix.

    A projection on orthonormal eigenvectors leaves no error at full rank, even though a Gram matrix resolves small
    singular values badly; a full SVD of Δ is never taken.

    Parameters
    ----------
    delta : torch.Tensor
        (T, W) float32.

    Returns
    -------
    Factors
    float
        Captured energy; 1.0 for Δ = 0, which has rank 0.

    Raises
    ------
    NotFiniteError
        Δ holds NaN or infinity.
    """
    num_tokens, width = delta.shape
    total = float(delta.square().sum())
    if not math.isfinite(total):
        raise NotFiniteError("the difference between a chunk's KV with and without its antecedents")
    if total == 0.0:
        return Factors(delta.new_zeros(0, num_tokens), delta.new_zeros(0, width)), 1.0
    tall = num_tokens >= width
    gram = delta.T @ delta if tall else delta @ delta.T
    squares, vectors = torch.linalg.eigh(gram)
    squares, vectors = squares.flip(0).clamp_min(0), vectors.flip(1)
    chosen = min(_chosen_rank(squares, total, rank, energy), vectors.shape[1])
    basis = vectors[:, :chosen]
    if tall:
        u, v = (delta @ basis).T, basis.T
    else:
        # Δ = E (Eᵀ Δ): move the singular values to U so that both shapes of Δ give factors of the same kind. They are
        # taken from EᵀΔ itself: beyond the rank of Δ the Gram matrix has eigenvalues that are rounding, or negative.
        right = basis.T @ delta
        scale = right.norm(dim=1, keepdim=True)
        u, v = basis.T * scale, right / scale.clamp_min(torch.finfo(delta.dtype).tiny)
    factors = Factors(_rounded(u, dtype), _rounded(v, dtype))
    missing = float((delta - factors.u.T.float() @ factors.v.float()).square().sum())
    return factors, max(0.0, 1.0 - missing / total)


def _chosen_rank(squares: torch.Tensor, total: float, rank: int | str, energy: float) -> int:
    if rank != "auto":
        return int(rank)
    reached = int((squares.cumsum(0) < energy * total).sum()) + 1
    return min(reached, MAX_AUTO_RANK)


def _rounded(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """In ``dtype`` (fp16 for None), or in fp32 where a value leaves its range."""
    wanted = dtype or torch.float16
    fits = float(tensor.abs().max()) < torch.finfo(wanted).max
    return tensor.contiguous().to(wanted if fits else torch.float32)


def add_into(target: torch.Tensor, canonical: torch.Tensor, factors: Factors | None) -> None:
    """Write canonical + U Vᵀ into ``target``.

    Parameters
    ----------
    target : torch.Tensor
        (T, W) view of the assembled tensor, in the compute dtype.
    canonical : torch.Tensor
        (T, W); only read.
    factors : Factors or None
        None for a chunk that needs no patch.
    """
    if factors is None or factors.rank == 0:
        target.copy_(canonical)
    elif target.dtype == torch.float32:
        torch.addmm(canonical, factors.u.T.float(), factors.v.float(), out=target)
    else:
        target.copy_(torch.addmm(canonical.float(), factors.u.T.float(), factors.v.float()))
