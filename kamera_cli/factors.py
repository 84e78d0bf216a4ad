"""Factors of patches as the store keeps them: rows of one length of many tensors are packed and unpacked together.

A patch has four small tensors in every layer, and an arrangement many patches: one by one, the calls cost several times
what the bytes do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kamera_cli.errors import UnknownFactorsError
from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator.patch import Factors, LayerPatch
from kamera_cli.operator.quantise import BITS, pack, row_bytes, unpack
from kamera_store.errors import DamagedError
from kamera_store.format.records import Record, TensorBytes
from kamera_store.format.tensors import joined, to_bytes, to_torch

FLOATS = ("float16", "bfloat16", "float32")
"""What factors that are no integers are stored in."""

PACKING = {"bits", "num_tokens", "widths"}
"""Fields that `packing_of` gives; a way of packing with other fields is another kind of factors."""


def packing_of(layers: Sequence[LayerPatch]) -> dict[str, Any] | None:
    """What rows of integers are read with; None for factors that are stored in a dtype of their own."""
    first = layers[0].rotary
    if first.bits is None:
        return None
    widths = [[patch.rotary.v.shape[1], patch.plain.v.shape[1]] for patch in layers]
    return {"bits": first.bits, "num_tokens": first.u.shape[1], "widths": widths}


def require_known_factors(patch: Record) -> None:
    """Refuse a patch whose factors this version cannot read, before anything is read of it.

    Raises
    ------
    UnknownFactorsError
    """
    known = f"{', '.join(f'int{bits}' for bits in BITS)}, {', '.join(FLOATS)}"
    packing = patch.meta.get("factors")
    if packing is not None and not (packing.keys() == PACKING and packing["bits"] in BITS):
        kind = packing.get("kind") or f"int{packing.get('bits', '?')}"
        raise UnknownFactorsError(patch.id, str(kind), known)
    dtypes = {tensor.dtype for tensor in patch.tensors} - set(FLOATS if packing is None else ("uint8",))
    if dtypes:
        raise UnknownFactorsError(patch.id, min(dtypes), known)


def tensors_of(names: tuple[str, str], layers: Sequence[LayerPatch]) -> list[TensorBytes]:
    """Tensors of a patch, layer by layer: U and V of the rotary and of the plain tensor.

    Parameters
    ----------
    names : tuple of str
        What the family calls its two tensors.
    """
    wanted = [
        (f"{name}_{side}", layer, getattr(factors, side), factors.bits)
        for layer, patch in enumerate(layers)
        for name, factors in zip(names, (patch.rotary, patch.plain), strict=True)
        for side in "uv"
    ]
    written = [rows for _, _, rows, _ in wanted]
    for key, places in _grouped(
        [None if bits is None else (rows.shape[1], bits) for _, _, rows, bits in wanted]
    ).items():
        packed = pack(torch.cat([written[at] for at in places]), key[1])
        for at, part in zip(places, torch.split(packed, [len(written[at]) for at in places]), strict=True):
            written[at] = part
    # Integers of V are those of orthonormal rows: nothing in them repeats, so trying to compress them is time lost.
    return [
        to_bytes(label, rows, layer=layer, codec="auto" if bits is None or label.endswith("_u") else "raw")
        for (label, layer, _, bits), rows in zip(wanted, written, strict=True)
    ]


@dataclass(frozen=True)
class LayerReader:
    """Turns one stored layer of many records into tensors.

    Attributes
    ----------
    names : tuple of str
        What the family calls its rotary and its plain tensor.
    device : torch.device
        Where tensors go.
    apart : bool
        Give every record memory of its own; for copies that are kept, and freed, one by one.
    """

    names: tuple[str, str]
    device: torch.device
    apart: bool = False

    def chunk(self, tensors: Mapping[str, TensorBytes]) -> LayerKV:
        """Canonical KV, in the memory that it was decoded into."""
        return LayerKV(*(to_torch(tensors[name], copy=False).to(self.device) for name in self.names))

    def layers(
        self, records: Sequence[Record], layer: int, tensors: Sequence[Mapping[str, TensorBytes]]
    ) -> list[LayerKV | LayerPatch]:
        """One layer of chunks and patches, each as fresh tensors; factors as integers or, as written before that, in
        half precision.

        Parameters
        ----------
        tensors : sequence of mapping
            By name, of each record.

        Raises
        ------
        DamagedError
            The rows of integers do not have the length that the record's header says.
        """
        held: list[TensorBytes] = []
        shapes: list[tuple[int, int] | None] = []
        for record, named in zip(records, tensors, strict=True):
            for index, name in enumerate(self.names if record.kind == "patch" else ()):
                for side in "uv":
                    held.append(named[f"{name}_{side}"])
                    shapes.append(_shape(record, layer, index, side, held[-1]))
        rows = iter(self._rows(held, shapes))
        return [
            self.chunk(named) if record.kind == "chunk" else _patch(record, layer, rows)
            for record, named in zip(records, tensors, strict=True)
        ]

    def _rows(
        self, held: Sequence[TensorBytes], shapes: Sequence[tuple[int, int] | None]
    ) -> list[torch.Tensor]:
        """U or V each, (m, T) or (m, W)."""
        rows: list[torch.Tensor] = [torch.empty(0)] * len(held)
        for at, (tensor, shape) in enumerate(zip(held, shapes, strict=True)):
            if shape is None:
                rows[at] = to_torch(tensor, copy=False).to(self.device)
        for (length, bits), places in _grouped(shapes).items():
            packed = joined([held[at] for at in places]).to(self.device)
            parts = torch.split(unpack(packed, length, bits), [held[at].shape[0] for at in places])
            for at, part in zip(places, parts, strict=True):
                rows[at] = part.clone() if self.apart else part
        return rows


def _patch(record: Record, layer: int, rows: Iterator[torch.Tensor]) -> LayerPatch:
    """One layer of a patch from the rows that come next."""
    energy = record.meta["energy"][layer]
    bits = (record.meta.get("factors") or {}).get("bits")
    rotary = Factors(next(rows), next(rows), bits)
    return LayerPatch(rotary, Factors(next(rows), next(rows), bits), energy, energy)


def _shape(record: Record, layer: int, index: int, side: str, tensor: TensorBytes) -> tuple[int, int] | None:
    """Length and bits of rows of integers; None for rows that stand as they are."""
    if tensor.dtype != "uint8":
        return None
    factors = record.meta["factors"]
    length = factors["num_tokens"] if side == "u" else factors["widths"][layer][index]
    bits = factors["bits"]
    if tensor.shape[1] != row_bytes(length, bits):
        raise DamagedError(record.key, f"length of {tensor.name}", row_bytes(length, bits), tensor.shape[1])
    return length, bits


def _grouped(keys: Sequence[tuple[int, int] | None]) -> dict[tuple[int, int], list[int]]:
    """Places of equal keys; none of None."""
    places: dict[tuple[int, int], list[int]] = {}
    for at, key in enumerate(keys):
        if key is not None:
            places.setdefault(key, []).append(at)
    return places
