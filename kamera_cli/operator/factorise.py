"""Δ of one tensor as low-rank factors U Vᵀ, by the smaller Gram matrix: the plain way, one matrix at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kamera_cli.errors import NotFiniteError
from kamera_cli.operator import quantise
from kamera_cli.options import FactorDtype

MAX_AUTO_RANK = 64
"""Largest rank that ``rank="auto"`` chooses."""

AUTO_BITS = 8
"""Width of integer factors when no dtype is asked for."""

RIDGE = 1e-10
"""Share of ‖Δ‖² that is added to the diagonal of a Gram matrix while its eigenvectors are sought."""

FACTOR_DTYPES: dict[FactorDtype, torch.dtype | int | None] = {
    "auto": None,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": 8,
    "int6": 6,
    "int4": 4,
}
"""What factors may be kept in: a dtype, or a number of bits."""

Precision = torch.dtype | int | None


@dataclass(frozen=True)
class Factors:
    """Δ ≈ U Vᵀ of one tensor of one layer.

    Attributes
    ----------
    u : torch.Tensor
        (m, T): row i is the i-th column of U, so a lower rank is the first rows. Carries the singular values.
    v : torch.Tensor
        (m, W): W is the width H · D of the tensor; rows are orthonormal before rounding.
    bits : int or None
        The rows are integers of so many bits times one scale per row, and are stored as such; None: stored as they are.
    """

    u: torch.Tensor
    v: torch.Tensor
    bits: int | None = None

    @property
    def rank(self) -> int:
        return self.u.shape[0]

    def at_rank(self, rank: int | None) -> Factors:
        """The first ``rank`` directions; all of them for None or a larger number."""
        return self if rank is None or rank >= self.rank else Factors(self.u[:rank], self.v[:rank], self.bits)


def direction_bytes(num_tokens: int, width: int, dtype: Precision = None) -> int:
    """Raw bytes of one direction of a (T, W) tensor, rounded up where several patches share V."""
    return side_bytes(num_tokens, dtype) + side_bytes(width, dtype)


def side_bytes(length: int, dtype: Precision = None) -> int:
    """Raw bytes of a row of U or V."""
    return (
        dtype.itemsize * length
        if isinstance(dtype, torch.dtype)
        else quantise.row_bytes(length, dtype or AUTO_BITS)
    )


def residual(after: torch.Tensor, alone: torch.Tensor) -> torch.Tensor:
    """Δ as a float32 matrix (T, H · D)."""
    return (after.float() - alone.float()).flatten(1)


def is_rounding(after: torch.Tensor, alone: torch.Tensor) -> bool:
    """Whether two (T, H, D) tensors differ by no more than the order of sums and the last place of their dtype."""
    tolerance = 2 * torch.finfo(after.dtype).eps + 16 * torch.finfo(torch.float32).eps
    largest = after.float().flatten(1).abs().amax(1, keepdim=True)
    return bool((residual(after, alone).abs() <= tolerance * largest).all())


def absorbed(after: torch.Tensor, alone: torch.Tensor) -> torch.Tensor:
    """Δ, (T, W) float32, as `residual`; zero where it is rounding."""
    delta = residual(after, alone)
    return torch.zeros_like(delta) if is_rounding(after, alone) else delta


@dataclass(frozen=True)
class Directions:
    """What Δ, a (T, W) matrix, spans, strongest first.

    Attributes
    ----------
    squares : torch.Tensor
        (k,) squared singular values, descending; empty for Δ = 0.
    vectors : torch.Tensor
        (min(T, W), k) orthonormal eigenvectors of the smaller Gram matrix of Δ.
    total : float
        ‖Δ‖².
    """

    squares: torch.Tensor
    vectors: torch.Tensor
    total: float


def directions(delta: torch.Tensor, most: int | None = None) -> Directions:
    """The ``most`` strongest directions of Δ (all of them for None), by its smaller Gram matrix.

    Raises
    ------
    NotFiniteError
        Δ holds NaN or infinity.
    """
    total = float(delta.square().sum())
    if not math.isfinite(total):
        raise NotFiniteError("the difference between a chunk's KV with and without its antecedents")
    if total == 0.0:
        return Directions(delta.new_zeros(0), delta.new_zeros(min(delta.shape), 0), 0.0)
    gram = delta.T @ delta if delta.shape[0] >= delta.shape[1] else delta @ delta.T
    squares, vectors = eigh(gram)
    return Directions(squares.flip(0)[:most].clamp_min(0), vectors.flip(1)[:, :most].clone(), total)


def eigh(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues, ascending, and eigenvectors of Gram matrices (..., n, n).

    LAPACK gives up on some that fall off by more than float32 resolves. What is added to their diagonal keeps it going;
    it is a thousandth of that resolution, and taken off the eigenvalues again.
    """
    ridge = RIDGE * gram.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    one = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    squares, vectors = torch.linalg.eigh(gram + ridge[..., None] * one)
    return squares - ridge, vectors


def truncated(
    delta: torch.Tensor, known: Directions, rank: int, dtype: Precision = None
) -> tuple[Factors, float]:
    """Best rank-m factors of a matrix whose directions are known.

    A projection on orthonormal eigenvectors leaves no error at full rank, even though a Gram matrix resolves small
    singular values badly; a full SVD of Δ is never taken.

    Parameters
    ----------
    delta : torch.Tensor
        (T, W) float32.
    rank : int
        0 and up; no more directions are taken than there are.

    Returns
    -------
    Factors
    float
        Captured energy, rounding of the factors included; 1.0 for Δ = 0, which has rank 0.
    """
    num_tokens, width = delta.shape
    basis = known.vectors[:, :rank]
    bits = None if isinstance(dtype, torch.dtype) else dtype or AUTO_BITS
    if not basis.shape[1]:
        nothing = Factors(delta.new_zeros(0, num_tokens), delta.new_zeros(0, width), bits)
        return nothing, 1.0 if known.total == 0.0 else 0.0
    if num_tokens >= width:
        u, v = (delta @ basis).T, basis.T
    else:
        # Δ = E (Eᵀ Δ): move the singular values to U so that both shapes of Δ give factors of the same kind. They are
        # taken from EᵀΔ itself: beyond the rank of Δ the Gram matrix has eigenvalues that are rounding, or negative.
        right = basis.T @ delta
        scale = right.norm(dim=1, keepdim=True)
        u, v = basis.T * scale, right / scale.clamp_min(torch.finfo(delta.dtype).tiny)
    factors = Factors(rounded(u, dtype), rounded(v, dtype), bits)
    missing = float((delta - factors.u.T.float() @ factors.v.float()).square().sum())
    return factors, max(0.0, 1.0 - missing / known.total)


def factorise(
    delta: torch.Tensor, rank: int | str, energy: float, dtype: Precision = None
) -> tuple[Factors, float]:
    """`truncated` at a rank, or for ``auto`` at the smallest one that captures ``energy``, at most `MAX_AUTO_RANK`."""
    known = directions(delta)
    return truncated(delta, known, least_rank(known, energy) if rank == "auto" else int(rank), dtype)


def least_rank(known: Directions, energy: float) -> int:
    """The smallest rank that captures ``energy``, at most `MAX_AUTO_RANK`."""
    reached = int((known.squares.cumsum(0) < energy * known.total).sum()) + 1
    return min(reached, MAX_AUTO_RANK)


def rounded(rows: torch.Tensor, dtype: Precision = None) -> torch.Tensor:
    """What ``dtype`` can hold of (m, N) rows: in that dtype, in fp32 where a value leaves its range, and for integers
    (`AUTO_BITS` for None) in fp32."""
    if not isinstance(dtype, torch.dtype):
        return quantise.rounded(rows, dtype or AUTO_BITS)
    fits = not rows.numel() or float(rows.abs().max()) < torch.finfo(dtype).max
    return rows.contiguous().to(dtype if fits else torch.float32)
