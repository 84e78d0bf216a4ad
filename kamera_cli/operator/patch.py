"""Conditioning patches: Δ = KV(B|A) − KV(B|∅) as low-rank factors in the pre-RoPE frame (paper, "The operator")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kamera_cli.errors import UsageError
from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator.factorise import (
    AUTO_BITS,
    FACTOR_DTYPES,
    MAX_AUTO_RANK,
    Directions,
    Factors,
    Precision,
    absorbed,
    direction_bytes,
    directions,
    factorise,
    is_rounding,
    least_rank,
    residual,
    rounded,
    side_bytes,
    truncated,
)
from kamera_cli.operator.ranks import Spectrum, Worth, choose
from kamera_cli.operator.stacked import Stack, stacks

__all__ = [
    "AUTO_BITS",
    "FACTOR_DTYPES",
    "MAX_AUTO_RANK",
    "Directions",
    "Factors",
    "LayerPatch",
    "Precision",
    "absorbed",
    "add_into",
    "check_rank",
    "direction_bytes",
    "directions",
    "factorise",
    "form",
    "is_rounding",
    "residual",
    "rounded",
    "side_bytes",
    "truncated",
]

NUM_PROBED = 24
"""Directions of each tensor that ``auto`` looks at first; a tensor that takes them all is looked at whole."""


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
    worths = None if worth is None else worth.shares(canonical[0].rotary.shape[0])
    grouped = stacks(pairs)
    known, ranks = _chosen(grouped, rank, energy, dtype, budget_bytes, worths)
    found: dict[int, tuple[Factors, float]] = {}
    for stack in grouped:
        cut = stack.truncated([known[at] for at in stack.places], [ranks[at] for at in stack.places], dtype)
        found |= zip(stack.places, cut, strict=True)
    return [
        LayerPatch(
            found[n][0], found[n + 1][0], found[n][1], found[n + 1][1],
            *(None if worths is None else worths[at] * known[at].total for at in (n, n + 1)),
        )
        for n in range(0, len(pairs), 2)
    ]  # fmt: skip


def _chosen(
    grouped: Sequence[Stack],
    rank: int | Literal["auto"],
    energy: float,
    dtype: Precision,
    budget_bytes: int | None,
    worths: list[float] | None,
) -> tuple[list[Directions], Sequence[int]]:
    """Directions of every tensor, as many as it takes, and its rank.

    The ranks are those that all directions would give, down to ones that are rounding: where a tensor takes as many as
    are known of it, it is looked at again, whole.
    """
    most = MAX_AUTO_RANK if rank == "auto" else rank
    count = NUM_PROBED if rank == "auto" else rank + 1
    known = _in_order(grouped, [stack.strongest(count) for stack in grouped])
    deltas = _in_order(grouped, [stack.deltas for stack in grouped])
    whole = [len(each.squares) >= min(most, *delta.shape) or not each.total
             for each, delta in zip(known, deltas, strict=True)]  # fmt: skip
    while True:
        if rank != "auto":
            ranks: Sequence[int] = [rank] * len(known)
        elif worths is None and budget_bytes is None:
            ranks = [least_rank(each, energy) for each in known]
        else:
            ranks = _of_all([delta.shape for delta in deltas], known, energy, dtype, budget_bytes, worths)
        short = [at for at, each in enumerate(known) if not whole[at] and ranks[at] >= len(each.squares)]
        if not short:
            return known, ranks
        for at in short:
            known[at], whole[at] = directions(deltas[at], most), True


def _in_order(grouped: Sequence[Stack], of_each: Sequence[Sequence]) -> list:
    """One entry per tensor, by its place among all."""
    found = {
        at: entry
        for stack, entries in zip(grouped, of_each, strict=True)
        for at, entry in zip(stack.places, entries, strict=True)
    }
    return [found[at] for at in range(len(found))]


def _of_all(
    shapes: Sequence[tuple[int, int]],
    known: Sequence[Directions],
    energy: float,
    dtype: Precision,
    budget_bytes: int | None,
    worths: list[float] | None,
) -> tuple[int, ...]:
    """Ranks of all tensors together; without ``worths``, each tensor's whole Δ counts the same."""
    spectra = [
        Spectrum(
            tuple(each.squares[:MAX_AUTO_RANK].tolist()),
            each.total,
            direction_bytes(*shape, dtype),
            worths[index] if worths is not None else 1.0 / (each.total or 1.0),
        )
        for index, (shape, each) in enumerate(zip(shapes, known, strict=True))
    ]
    typical = None if worths is None else 1.0
    return choose(spectra, energy=energy, typical=typical, budget_bytes=budget_bytes)


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
