"""Bytes of KV and of patches: of the tensors themselves, and as the store writes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator.patch import Factors
from kamera_cli.operator.quantise import as_written
from kamera_store.format import codec
from kamera_store.format.tensors import to_bytes


@dataclass(frozen=True)
class Size:
    """Bytes of some tensors.

    Attributes
    ----------
    raw : int
        Of the tensors; integers packed.
    stored : int
        Of what the store's codec makes of each of them.
    """

    raw: int = 0
    stored: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.raw + other.raw, self.stored + other.stored)


def of_layer(layer: LayerKV) -> Size:
    """Both tensors of one layer of KV."""
    return of_tensors((layer.rotary, layer.plain))


def of_factors(factors: Factors) -> Size:
    """U and V of one tensor, as they are kept."""
    return of_tensors(as_written(rows, factors.bits) for rows in (factors.u, factors.v))


def of_tensors(tensors: Iterable[torch.Tensor]) -> Size:
    """Sum over tensors of any dtype that the store knows."""
    parts = [to_bytes("part", tensor) for tensor in tensors]
    return Size(sum(part.raw_bytes for part in parts), sum(codec.encode(part).stored_bytes for part in parts))
