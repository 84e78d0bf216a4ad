"""How many directions of a shared V the patches of an orbit get. Pure; imports no torch.

All sets of one chunk read the same V, and each keeps coefficients for as many of its first directions as it needs. The
directions of V are taken by what they are worth to all sets together, per byte, until every set holds what was asked;
then each set drops what it can do without.

The curves are measured on the factors as they will be written, so their rounding counts as missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SharedTensor:
    """What one tensor of one layer has to offer to n sets.

    Attributes
    ----------
    missing : tuple of tuple of float
        Per set, what is missing at rank 0, 1, … m, weighted.
    u_bytes, v_bytes : int
        Bytes of one direction, for the coefficients of one set and for V.
    """

    missing: tuple[tuple[float, ...], ...]
    u_bytes: int
    v_bytes: int

    def share_bytes(self, num_sets: int) -> int:
        """Bytes of one direction that count for one set: its coefficients and its share of V, rounded up."""
        return self.u_bytes + -(-self.v_bytes // num_sets)


def choose_shared(tensors: Sequence[SharedTensor], allowed: Sequence[float]) -> list[tuple[int, ...]]:
    """Ranks that leave no set without more than it is allowed to miss.

    Parameters
    ----------
    allowed : sequence of float
        Per set, what may be missing over all tensors.

    Returns
    -------
    list of tuple of int
        Per set, a rank for each tensor; those of the first set are the ranks of V, which no other exceeds.
    """
    most = _of_basis(tensors, allowed)
    chosen = [_of_set(tensors, index, limit, most) for index, limit in enumerate(allowed)]
    return [tuple(map(max, zip(*chosen, strict=True))), *chosen[1:]]


def _of_basis(tensors: Sequence[SharedTensor], allowed: Sequence[float]) -> list[int]:
    """Ranks of V at which every set has what it needs."""
    num_sets = len(allowed)
    sizes = [tensor.share_bytes(num_sets) for tensor in tensors]
    sums = [[sum(at) for at in zip(*tensor.missing, strict=True)] for tensor in tensors]
    steps = sorted(
        (-gain / sizes[index], index, start, end)
        for index, curve in enumerate(sums)
        for gain, start, end in _steps(curve, len(curve) - 1)
    )
    ranks = [0] * len(tensors)
    missing = [sum(tensor.missing[one][0] for tensor in tensors) for one in range(num_sets)]
    for _, index, start, end in steps:
        if all(lacks <= limit for lacks, limit in zip(missing, allowed, strict=True)):
            break
        for rank in range(start + 1, end + 1):
            ranks[index] = rank
            for one, curve in enumerate(tensors[index].missing):
                missing[one] += curve[rank] - curve[rank - 1]
    return ranks


def _of_set(tensors: Sequence[SharedTensor], one: int, limit: float, most: Sequence[int]) -> tuple[int, ...]:
    """The cheapest ranks of one set within those of V."""
    curves = [tensor.missing[one] for tensor in tensors]
    steps = sorted(
        (-gain / tensors[index].u_bytes, index, start, end)
        for index, curve in enumerate(curves)
        for gain, start, end in _steps(curve, most[index])
    )
    ranks, missing = [0] * len(tensors), sum(curve[0] for curve in curves)
    for _, index, start, end in steps:
        for rank in range(start + 1, end + 1):
            if missing <= limit:
                return tuple(ranks)
            missing += curves[index][rank] - curves[index][rank - 1]
            ranks[index] = rank
    return tuple(ranks)


def _steps(curve: Sequence[float], most: int) -> Iterator[tuple[float, int, int]]:
    """The lower convex hull of a curve up to a rank, where it falls: gain per direction, and ranks from and to."""
    corners: list[int] = []
    for rank in range(most + 1):
        while len(corners) > 1:
            first, last = corners[-2:]
            before = (curve[last] - curve[first]) * (rank - last)
            if before < (curve[rank] - curve[last]) * (last - first):
                break
            corners.pop()
        corners.append(rank)
    for start, end in itertools.pairwise(corners):
        if curve[end] < curve[start]:
            yield (curve[start] - curve[end]) / (end - start), start, end
