"""Readable references for `kamera_cli.operator`: one matrix at a time, all of its directions."""

from __future__ import annotations

import torch

from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator import quantise
from kamera_cli.operator.factorise import Directions
from kamera_cli.operator.patch import AUTO_BITS, Factors, Precision
from kamera_cli.operator.residual import form


def factorise(
    delta: torch.Tensor, rank: int | str, energy: float, dtype: Precision = None
) -> tuple[Factors, float]:
    """What the product makes of one matrix Δ, (T, W)."""
    after, alone = (LayerKV(part[:, None], part[:, None]) for part in (delta, torch.zeros_like(delta)))
    (made,) = form([after], [alone], rank=rank, energy=energy, dtype=dtype)
    return made.rotary, made.rotary_energy


def truncated(
    delta: torch.Tensor, known: Directions, rank: int, dtype: Precision = None
) -> tuple[Factors, float]:
    """The plain way to best factors of rank m out of known directions, and the energy they capture."""
    basis = known.vectors[:, :rank]
    bits = None if isinstance(dtype, torch.dtype) else dtype or AUTO_BITS
    if not basis.shape[1]:
        nothing = Factors(*(delta.new_zeros(0, length) for length in delta.shape), bits)
        return nothing, 1.0 if known.total == 0.0 else 0.0
    if delta.shape[0] >= delta.shape[1]:
        u, v = (delta @ basis).T, basis.T
    else:
        right = basis.T @ delta
        scale = right.norm(dim=1, keepdim=True)
        u, v = basis.T * scale, right / scale.clamp_min(torch.finfo(delta.dtype).tiny)
    factors = Factors(rounded(u, dtype), rounded(v, dtype), bits)
    missing = float((delta - factors.product()).square().sum())
    return factors, max(0.0, 1.0 - missing / known.total)


def rounded(rows: torch.Tensor, dtype: Precision = None) -> torch.Tensor:
    """What ``dtype`` can hold of (m, N) rows: in that dtype, in fp32 where a value leaves its range or for integers."""
    if not isinstance(dtype, torch.dtype):
        return quantise.rounded(rows, dtype or AUTO_BITS)
    fits = not rows.numel() or float(rows.abs().max()) < torch.finfo(dtype).max
    return rows.contiguous().to(dtype if fits else torch.float32)
