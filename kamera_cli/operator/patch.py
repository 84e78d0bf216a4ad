"""Conditioning patches as data: Δ = KV(B|A) − KV(B|∅) as low-rank factors in the pre-RoPE frame, and adding them.

How they are found stands in `kamera_cli.operator.residual`. Source: arXiv 2606.23581, "The operator".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kamera_cli.errors import UsageError
from kamera_cli.operator import quantise
from kamera_cli.options import FactorDtype

MAX_AUTO_RANK = 64
"""Largest rank that ``rank="auto"`` chooses."""

AUTO_BITS = 8
"""Width of integer factors when no dtype is asked for."""

Precision = torch.dtype | int | None
"""What factors are kept in: a dtype, a number of bits, or None for `AUTO_BITS`."""

FACTOR_DTYPES: dict[FactorDtype, Precision] = {
    "auto": None,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": 8,
    "int6": 6,
    "int4": 4,
}
"""Names of what factors may be kept in."""


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
        """Number of directions, m."""
        return self.u.shape[0]

    def at_rank(self, rank: int | None) -> Factors:
        """The first ``rank`` directions; all of them for None or a larger number."""
        return self if rank is None or rank >= self.rank else Factors(self.u[:rank], self.v[:rank], self.bits)

    def product(self) -> torch.Tensor:
        """U Vᵀ, (T, W) float32."""
        return self.u.T.float() @ self.v.float()


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
        """The larger rank of the two."""
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


def direction_bytes(num_tokens: int, width: int, dtype: Precision = None) -> int:
    """Raw bytes of one direction of a (T, W) tensor: a row of U and one of V."""
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize * (num_tokens + width)
    return sum(quantise.row_bytes(length, dtype or AUTO_BITS) for length in (num_tokens, width))


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
