"""Rows of floating point numbers as integers of few bits with one scale per row, and their packed bytes."""

from __future__ import annotations

import torch

BITS = (4, 6, 8)
"""Widths that pack into words of 24 bits."""

_WORD_BITS = 24
_BYTES = torch.tensor([0, 8, 16], dtype=torch.int32)


def rounded(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest rows that ``bits`` can hold, in float32; rounding them again changes nothing but a last place.

    Parameters
    ----------
    rows : torch.Tensor
        (..., N) float; each row is scaled so that its largest value is the largest integer, 2^(bits-1) - 1.
    """
    numbers, scale = _integers(rows, bits)
    return numbers.mul_(scale[..., None])


def pack(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows as bytes.

    Returns
    -------
    torch.Tensor
        (m, `row_bytes`) uint8 on the CPU. Each row is its scale (float32, little-endian) and then words of 24 bits,
        little-endian, each with 24 / bits integers plus 2^(bits-1), the first one lowest. Rows stand alone, so a lower
        rank is the first rows.
    """
    numbers, scale = (part.cpu() for part in _integers(rows, bits))
    each = _WORD_BITS // bits
    num_words = -(-rows.shape[1] // each)
    held = torch.zeros(rows.shape[0], num_words * each, dtype=torch.int32)
    held[:, : rows.shape[1]] = numbers.to(torch.int32) + (1 << (bits - 1))
    words = (held.view(-1, num_words, each) << _shifts(bits)).sum(-1, dtype=torch.int32)
    split = ((words[..., None] >> _BYTES) & 0xFF).to(torch.uint8).flatten(1)
    return torch.cat([scale[:, None].view(torch.uint8), split], dim=1)


def as_written(rows: torch.Tensor, bits: int | None) -> torch.Tensor:
    """What the store keeps of rows: packed integers, or the rows themselves for None."""
    return rows if bits is None else pack(rows, bits)


def unpack(packed: torch.Tensor, length: int, bits: int) -> torch.Tensor:
    """(m, ``length``) float32 out of what `pack` made, on the same device."""
    scale = packed[:, :4].flatten().clone().view(torch.float32)[:, None]
    if bits == 8:  # bytes of a word are its integers in order
        return (packed[:, 4 : 4 + length].to(torch.float32) - 128) * scale
    parts = packed[:, 4:].reshape(len(packed), (packed.shape[1] - 4) // 3, 3).to(torch.int32)
    words = (parts << _BYTES.to(packed.device)).sum(-1, dtype=torch.int32)
    held = (words[..., None] >> _shifts(bits).to(packed.device)) & ((1 << bits) - 1)
    return (held.flatten(1)[:, :length] - (1 << (bits - 1))) * scale


def row_bytes(length: int, bits: int) -> int:
    """Bytes of one packed row of ``length`` numbers."""
    return 4 + 3 * -(-length // (_WORD_BITS // bits))


def _integers(rows: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    if bits not in BITS:
        raise ValueError(f"{bits} bits; integers of {', '.join(map(str, BITS))} bits are known")
    rows = rows.float()
    largest = (1 << (bits - 1)) - 1
    scale = rows.abs().amax(-1) / largest if rows.numel() else rows.new_zeros(rows.shape[:-1])
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (rows / divisor[..., None]).round_().clamp_(-largest, largest), scale


def _shifts(bits: int) -> torch.Tensor:
    return torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
