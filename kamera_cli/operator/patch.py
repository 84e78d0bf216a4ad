"""Conditioning patches: Δ = KV(B|A) − KV(B|∅) as low-rank factors in the pre-RoPE frame (paper, "The operator")."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from kamera_cli.errors import NotFiniteError, UsageError
from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator import quantise
from kamera_cli.operator.ranks import Spectrum, Worth, choose

MAX_AUTO_RANK = 64
"""Largest rank that ``rank="auto"`` chooses."""

AUTO_BITS = 8
"""Width of integer factors when no dtype is asked for."""

FACTOR_DTYPES: dict[str, torch.dtype | int | None] = {
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


@dataclass(frozen=True)
class LayerPatch:
    """Factors of the rotary and of the plain tensor of one layer (`LayerKV`).

    Attributes
    ----------
    rotary_energy, plain_energy : float
        Captured share of energy, 1 − ‖Δ − UVᵀ‖² / ‖Δ‖².
    rotary_worth, plain_worth : float or None
        What all of Δ is worth to the output, in units of a typical patch; None where no sensitivity was measured.
    """

    rotary: Factors
    plain: Factors
    rotary_energy: float
    plain_energy: float
    rotary_worth: float | None = None
    plain_worth: float | None = None

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
    dtype: Precision = None,
    budget_bytes: int | None = None,
    worth: Worth | None = None,
) -> list[LayerPatch]:
    """Factor Δ of every layer.

    Parameters
    ----------
    conditioned, canonical : list of LayerKV
        Position-free KV of the same T tokens, prefilled after the antecedents and alone.
    rank : int or "auto"
        ``auto`` takes the fewest directions that capture ``energy``, at most `MAX_AUTO_RANK` of a tensor: of all
        tensors together where their ``worth`` is known, and of each tensor apart otherwise.
    energy : float
        Share in (0, 1] of ‖Δ‖²; with ``worth``, all but 1 − ``energy`` of what a typical patch of T tokens is worth.
        Read by ``auto`` alone.
    dtype : torch.dtype, int or None
        Of the factors, an int for integers of so many bits, None for `AUTO_BITS`; a floating point factor with a value
        beyond its range is kept in fp32.
    budget_bytes : int or None
        With ``auto``: bytes that the factors of all layers may take, whatever energy that captures. Without ``worth``,
        each tensor's whole Δ counts the same.
    """
    pairs = [
        pair
        for after, alone in zip(conditioned, canonical, strict=True)
        for pair in ((after.rotary, alone.rotary), (after.plain, alone.plain))
    ]
    flat = None if worth is None else worth.shares(canonical[0].rotary.shape[0])
    if rank == "auto" and (flat is not None or budget_bytes is not None):
        spanned = [directions(_absorbed(*pair), MAX_AUTO_RANK) for pair in pairs]
        ranks = _ranks_of_all(pairs, spanned, energy, dtype, budget_bytes, flat)
        found = [
            truncated(_absorbed(*pair), known, chosen, dtype)
            for pair, known, chosen in zip(pairs, spanned, ranks, strict=True)
        ]
        totals = [known.total for known in spanned]
    else:
        found, totals = [], []
        for pair in pairs:
            known = directions(_absorbed(*pair), None if rank == "auto" else rank)
            chosen = _least_rank(known, energy) if rank == "auto" else rank
            found.append(truncated(_absorbed(*pair), known, chosen, dtype))
            totals.append(known.total)
    worths = (
        [None] * len(pairs) if flat is None else [w * total for w, total in zip(flat, totals, strict=True)]
    )
    return [
        LayerPatch(found[n][0], found[n + 1][0], found[n][1], found[n + 1][1], worths[n], worths[n + 1])
        for n in range(0, len(found), 2)
    ]


def _ranks_of_all(
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
    spanned: list[Directions],
    energy: float,
    dtype: Precision,
    budget_bytes: int | None,
    weights: list[float] | None,
) -> tuple[int, ...]:
    spectra = []
    for index, ((after, _), known) in enumerate(zip(pairs, spanned, strict=True)):
        size = direction_bytes(after.shape[0], after[0].numel(), dtype)
        weight = weights[index] if weights is not None else 1.0 / (known.total or 1.0)
        spectra.append(Spectrum(tuple(known.squares.tolist()), known.total, size, weight))
    typical = None if weights is None else 1.0
    return choose(spectra, energy=energy, typical=typical, budget_bytes=budget_bytes)


def direction_bytes(num_tokens: int, width: int, dtype: Precision = None, *, num_sharing: int = 1) -> int:
    """Raw bytes of one direction of a (T, W) tensor, rounded up where several patches share V."""
    return side_bytes(num_tokens, dtype) + -(-side_bytes(width, dtype) // num_sharing)


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


def _absorbed(after: torch.Tensor, alone: torch.Tensor) -> torch.Tensor:
    """`residual`, and zero where it is rounding: layer 0 takes nothing in, however its forwards were cut."""
    delta = residual(after, alone)
    return torch.zeros_like(delta) if is_rounding(after, alone) else delta


def is_rounding(after: torch.Tensor, alone: torch.Tensor) -> bool:
    """Whether two (T, H, D) tensors differ by no more than the order of sums and the last place of their dtype."""
    tolerance = 2 * torch.finfo(after.dtype).eps + 16 * torch.finfo(torch.float32).eps
    largest = after.float().flatten(1).abs().amax(1, keepdim=True)
    return bool((residual(after, alone).abs() <= tolerance * largest).all())


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
    squares, vectors = torch.linalg.eigh(gram)
    return Directions(squares.flip(0)[:most].clamp_min(0), vectors.flip(1)[:, :most].clone(), total)


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
    return truncated(delta, known, _least_rank(known, energy) if rank == "auto" else int(rank), dtype)


def _least_rank(known: Directions, energy: float) -> int:
    reached = int((known.squares.cumsum(0) < energy * known.total).sum()) + 1
    return min(reached, MAX_AUTO_RANK)


def rounded(rows: torch.Tensor, dtype: Precision = None) -> torch.Tensor:
    """What ``dtype`` can hold of (m, N) rows: in that dtype, in fp32 where a value leaves its range, and for integers
    (`AUTO_BITS` for None) in fp32."""
    if not isinstance(dtype, torch.dtype):
        return quantise.rounded(rows, dtype or AUTO_BITS)
    fits = not rows.numel() or float(rows.abs().max()) < torch.finfo(dtype).max
    return rows.contiguous().to(dtype if fits else torch.float32)


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
