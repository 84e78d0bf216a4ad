"""The strongest directions of Δ of many tensors at once, and low-rank factors U Vᵀ out of them.

Directions are eigenvectors of the smaller Gram matrix; a full SVD of Δ is never taken. A patch needs few of the
directions that a Δ has, so all of them are found only where the few do not do. A block of random directions, turned
into those of the largest eigenvalues by a few products with the Gram matrix, gives the strongest ones at a tenth of the
cost. Each comes with a proof: a direction counts as found only if the Gram matrix maps it to a multiple of itself, up
to `WITHIN` of all energy, and so do all stronger ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kamera_cli.errors import NotFiniteError
from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator import quantise
from kamera_cli.operator.patch import AUTO_BITS, Factors, Precision

RIDGE = 1e-10
"""Share of ‖Δ‖² that is added to the diagonal of a Gram matrix while its eigenvectors are sought."""
OVERSAMPLING = 8
"""Directions of a block beyond those that are wanted: the weakest of a block come last."""
NUM_TURNS = 3
"""Products with the Gram matrix. One more costs a twentieth of all eigenvectors."""
WITHIN = 1e-5
"""What a found direction may miss being an eigenvector by, as a share of ‖Δ‖²."""
MIN_SHARE = 3
"""A block is used where the Gram matrix is at least so many times as wide."""


def tensor_pairs(
    after: Sequence[LayerKV], alone: Sequence[LayerKV]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Rotary and plain tensor of each layer, (T, H, D): conditioned and canonical."""
    for new, old in zip(after, alone, strict=True):
        yield new.rotary, old.rotary
        yield new.plain, old.plain


def residual(after: torch.Tensor, alone: torch.Tensor) -> torch.Tensor:
    """Δ as a float32 matrix (T, H · D)."""
    return (after.float() - alone.float()).flatten(1)


def is_rounding(after: torch.Tensor, alone: torch.Tensor) -> bool:
    """Whether two (T, H, D) tensors differ by no more than the order of sums and the last place of their dtype; what is
    not finite never does."""
    tolerance = 2 * torch.finfo(after.dtype).eps + 16 * torch.finfo(torch.float32).eps
    largest = after.float().flatten(1).abs().amax(1, keepdim=True)
    difference = residual(after, alone).abs()
    return bool((difference <= tolerance * largest).all() and difference.isfinite().all())


def absorbed(after: torch.Tensor, alone: torch.Tensor) -> torch.Tensor:
    """Δ, (T, W) float32, as `residual`; zero where it is rounding: layer 0 takes nothing in, however its forwards were
    cut."""
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
    """The ``most`` strongest directions of Δ, a finite (T, W) matrix (all of them for None), by its smaller Gram
    matrix."""
    total = float(delta.square().sum())
    if total == 0.0:
        return Directions(delta.new_zeros(0), delta.new_zeros(min(delta.shape), 0), 0.0)
    squares, vectors = eigh(_smaller_gram(delta))
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


@dataclass(frozen=True)
class Stack:
    """Δ of tensors of one shape.

    Attributes
    ----------
    places : list of int
        Where the tensors stand among all.
    deltas : torch.Tensor
        (B, T, W) float32; zero where a difference is rounding.
    totals : list of float
        ‖Δ‖² of each.
    """

    places: list[int]
    deltas: torch.Tensor
    totals: list[float]

    def strongest(self, count: int) -> list[Directions]:
        """The ``count`` strongest directions of each Δ, fewer where they were not found well enough, all of them where
        that is no more work."""
        narrow = min(self.deltas.shape[1:])
        if narrow < MIN_SHARE * (count + OVERSAMPLING):
            return [directions(delta) for delta in self.deltas]
        live = [at for at, total in enumerate(self.totals) if total > 0]
        found = [
            Directions(self.deltas.new_zeros(0), self.deltas.new_zeros(narrow, 0), total)
            for total in self.totals
        ]
        if not live:
            return found
        deltas = self.deltas if len(live) == len(found) else self.deltas[live]
        totals = [self.totals[at] for at in live]
        squares, vectors, numbers = _block(deltas, totals, count)
        for at, total, each, basis, number in zip(live, totals, squares, vectors, numbers, strict=True):
            found[at] = Directions(each[:number], basis[:, :number], total)
        return found

    def truncated(
        self, known: Sequence[Directions], ranks: Sequence[int], dtype: Precision
    ) -> list[tuple[Factors, float]]:
        """Best factors of each Δ at its own rank, out of known directions.

        A projection on orthonormal eigenvectors leaves no error at full rank, even though a Gram matrix resolves small
        singular values badly.

        Parameters
        ----------
        known : sequence of Directions
            Of each Δ.
        ranks : sequence of int
            0 and up; no more directions are taken than are known.

        Returns
        -------
        list of (Factors, float)
            With the captured energy, rounding of the factors included; 1.0 for Δ = 0, which has rank 0.
        """
        num, num_tokens, width = self.deltas.shape
        ranks = [min(rank, each.vectors.shape[1]) for rank, each in zip(ranks, known, strict=True)]
        basis = self.deltas.new_zeros(num, min(num_tokens, width), max(ranks))
        for at, (rank, each) in enumerate(zip(ranks, known, strict=True)):
            basis[at, :, :rank] = each.vectors[:, :rank]
        if num_tokens >= width:
            u, v = (self.deltas @ basis).mT, basis.mT
        else:
            # Δ = E (Eᵀ Δ): move the singular values to U so that both shapes of Δ give factors of the same kind. They
            # are taken from EᵀΔ itself: beyond the rank of Δ the Gram matrix has eigenvalues that are rounding.
            right = basis.mT @ self.deltas
            scale = right.norm(dim=2, keepdim=True)
            u, v = basis.mT * scale, right / scale.clamp_min(torch.finfo(right.dtype).tiny)
        (u, of_u), (v, of_v) = _rounded(u, dtype), _rounded(v, dtype)
        missing = torch.baddbmm(self.deltas, u.mT, v, alpha=-1).square().sum((1, 2)).tolist()
        bits = None if isinstance(dtype, torch.dtype) else dtype or AUTO_BITS
        made = []
        for at, rank in enumerate(ranks):
            kinds = (of_u[at], of_v[at]) if rank else (torch.float32, torch.float32)
            factors = Factors(u[at, :rank].to(kinds[0]), v[at, :rank].to(kinds[1]), bits)
            total = self.totals[at]
            made.append((factors, max(0.0, 1.0 - missing[at] / total) if total else 1.0))
        return made


def stacks(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Stack]:
    """`absorbed` of pairs of tensors (T, H, D), by their shape.

    Raises
    ------
    NotFiniteError
        A difference holds NaN or infinity.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for at, (after, _) in enumerate(pairs):
        places.setdefault((after.shape[0], after[0].numel()), []).append(at)
    made = []
    for group in places.values():
        deltas = torch.stack([absorbed(*pairs[at]) for at in group])
        totals = deltas.square().sum((1, 2)).tolist()
        if not all(map(math.isfinite, totals)):
            raise NotFiniteError("the difference between a chunk's KV with and without its antecedents")
        made.append(Stack(group, deltas, totals))
    return made


def _smaller_gram(deltas: torch.Tensor) -> torch.Tensor:
    """(..., n, n) for (..., T, W) with n = min(T, W)."""
    return deltas.mT @ deltas if deltas.shape[-2] >= deltas.shape[-1] else deltas @ deltas.mT


def _block(
    deltas: torch.Tensor, totals: Sequence[float], count: int
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Eigenvalues (B, count) and eigenvectors (B, n, count) of the smaller Gram matrices, largest first, and how many
    of each were found well enough."""
    gram = _smaller_gram(deltas)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(gram.shape[1], count + OVERSAMPLING, generator=generator)
    basis = start.to(gram.device)
    for _ in range(NUM_TURNS):
        basis = torch.linalg.qr(gram @ basis).Q
    image = gram @ basis
    squares, turn = eigh(basis.mT @ image)
    squares, turn = squares.flip(1)[:, :count], turn.flip(2)[:, :, :count]
    vectors = basis @ turn
    off = (image @ turn - vectors * squares[:, None]).norm(dim=1)
    allowed = WITHIN * torch.tensor(totals, device=off.device)[:, None]
    numbers: list[int] = (off <= allowed).cumprod(1).sum(1).tolist()
    return squares.clamp_min(0), vectors, numbers


def _rounded(rows: torch.Tensor, dtype: Precision) -> tuple[torch.Tensor, list[torch.dtype]]:
    """What ``dtype`` can hold of (B, m, N) rows, in float32, and the dtype in which each matrix is kept: fp32 where a
    value leaves its range, and for integers."""
    if not isinstance(dtype, torch.dtype):
        return quantise.rounded(rows, dtype or AUTO_BITS), [torch.float32] * len(rows)
    limit = torch.finfo(dtype).max
    fits = (
        rows.abs().flatten(1).amax(1) < limit if rows.numel() else rows.new_ones(len(rows), dtype=torch.bool)
    )
    kept = torch.where(fits[:, None, None], rows.to(dtype).float(), rows)
    return kept, [dtype if fit else torch.float32 for fit in fits.tolist()]
