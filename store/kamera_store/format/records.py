"""What a record is: tensors as bytes, the rows of its tensor table, and what its header says."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kamera_store.errors import UnsupportedDtypeError

if TYPE_CHECKING:
    import numpy as np

RAW, ZSTD = 0, 1

KINDS = ("chunk", "patch", "source")
"""Kinds of records that the format defines."""

ITEM_BYTES: Mapping[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "uint16": 2,
    "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip

MAX_DIMENSIONS = 16


def item_bytes(dtype: str) -> int:
    """Bytes of one element; UnsupportedDtypeError if the format does not define the dtype."""
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        raise UnsupportedDtypeError(dtype) from None


def _buffer(data: Any) -> memoryview:
    return memoryview(data)


def byte_view(data: Any) -> memoryview:
    """Flat read-only view of the bytes of any C-contiguous buffer, empty ones included."""
    view = _buffer(data)
    if not view.c_contiguous:
        raise ValueError("tensor bytes must be C-contiguous")
    if view.nbytes == 0:
        return memoryview(b"")
    return view.cast("B").toreadonly()


@dataclass(frozen=True, eq=False)
class TensorBytes:
    """One tensor as bytes, little-endian, C order.

    Parameters
    ----------
    name : str
        What it is: ``keys``, ``values``, ``latent``, ``token_ids`` and the like.
    layer : int
        Layer index, -1 when it belongs to none.
    dtype : str
        A name from `ITEM_BYTES`.
    shape : tuple of int
        Any number of dimensions, zeros allowed.
    data : bytes, memoryview or numpy.ndarray
        Exactly ``prod(shape) * item_bytes(dtype)`` bytes.
    codec : {"auto", "raw"}
        How to store it; no part of identity or equality.

    Raises
    ------
    UnsupportedDtypeError
        If the dtype is unknown.
    ValueError
        If the number of bytes is not that of the shape.
    """

    name: str
    layer: int
    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview | np.ndarray = field(repr=False)
    codec: str = "auto"

    def __post_init__(self) -> None:
        shape = tuple(int(size) for size in self.shape)
        object.__setattr__(self, "shape", shape)
        if any(size < 0 for size in shape) or len(shape) > MAX_DIMENSIONS:
            raise ValueError(f"tensor {self.name!r}: shape {shape} is not storable")
        expected = math.prod(shape) * item_bytes(self.dtype)
        found = _buffer(self.data).nbytes
        if expected != found:
            raise ValueError(
                f"tensor {self.name!r}: shape {shape} of {self.dtype} is {expected} bytes, data has {found}"
            )
        if self.codec not in ("auto", "raw"):
            raise ValueError(f"tensor {self.name!r}: codec {self.codec!r} is neither 'auto' nor 'raw'")

    @property
    def raw_bytes(self) -> int:
        """Size of the data in bytes."""
        return _buffer(self.data).nbytes

    def view(self) -> memoryview:
        """Flat read-only view of the data."""
        return byte_view(self.data)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorBytes):
            return NotImplemented
        mine = (self.name, self.layer, self.dtype, self.shape)
        return mine == (other.name, other.layer, other.dtype, other.shape) and self.view() == other.view()

    __hash__ = None  # type: ignore[assignment]


class Plane(NamedTuple):
    """Bytes ``start .. start + width`` of every element, stored together."""

    start: int
    width: int
    codec: int
    stored_bytes: int


class TensorInfo(NamedTuple):
    """A row of a record's tensor table.

    Attributes
    ----------
    name, layer, dtype, shape
        As in `TensorBytes`.
    raw_bytes : int
        Size of the tensor in memory.
    offset, stored_bytes : int
        Where its stored bytes stand in the record's payload.
    checksum : int
        xxh3-64 of the stored bytes.
    planes : tuple of Plane
        How an element's bytes are laid out, in payload order.
    """

    name: str
    layer: int
    dtype: str
    shape: tuple[int, ...]
    raw_bytes: int
    offset: int
    stored_bytes: int
    checksum: int
    planes: tuple[Plane, ...]

    @property
    def codec(self) -> str:
        """``raw``, ``zstd`` or ``planes``."""
        if len(self.planes) > 1:
            return "planes"
        return "zstd" if self.planes and self.planes[0].codec == ZSTD else "raw"


@dataclass(frozen=True)
class Record:
    """One stored object without its payload.

    Attributes
    ----------
    kind : str
        One of `KINDS`.
    key, digest : bytes
        16 bytes xxh3-128 and 32 bytes SHA-256 of the same canonical encoding.
    tenant, unit : str
        Who owns it, and the media unit it belongs to.
    meta : dict
        Strict JSON.
    tensors : tuple of TensorInfo
        The tensor table, ordered by layer.
    created_s, cost_ms : float
        Unix time in seconds, and what it took to make.
    payload_bytes, num_segments : int
        Size of the payload and in how many segments it lies.
    header_checksum : int
        xxh3-64 at the end of the header, tells two writings of one key apart.
    """

    kind: str
    key: bytes
    digest: bytes
    tenant: str
    unit: str
    meta: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    created_s: float
    cost_ms: float
    payload_bytes: int
    num_segments: int
    header_checksum: int = 0

    @property
    def id(self) -> str:
        """Lower-case hex of the key."""
        return self.key.hex()

    @property
    def short_id(self) -> str:
        """First ten characters of `id`."""
        return self.key.hex()[:10]

    @property
    def raw_bytes(self) -> int:
        """Sum of the tensors' sizes in memory."""
        return sum(tensor.raw_bytes for tensor in self.tensors)

    @property
    def stored_bytes(self) -> int:
        """Size of the stored payload, without padding and header."""
        return self.payload_bytes

    @property
    def num_layers(self) -> int:
        """Highest layer index plus one; 0 when no tensor belongs to a layer."""
        return max((tensor.layer for tensor in self.tensors), default=-1) + 1

    def tensor(self, name: str, layer: int = -1) -> TensorInfo:
        """The table row of one tensor; KeyError if the record has no such tensor."""
        for info in self.tensors:
            if info.layer == layer and info.name == name:
                return info
        raise KeyError(f"record {self.short_id} has no tensor {name!r} in layer {layer}")

    def layer_tensors(self, layer: int) -> tuple[TensorInfo, ...]:
        """All table rows of one layer."""
        return tuple(info for info in self.tensors if info.layer == layer)


def sort_tensors(tensors: Iterable[TensorBytes]) -> list[TensorBytes]:
    """Tensors in payload order: by layer, and within a layer as given; ValueError if two share name and layer."""
    ordered = sorted(tensors, key=lambda tensor: tensor.layer)
    seen = {(tensor.name, tensor.layer) for tensor in ordered}
    if len(seen) != len(ordered):
        raise ValueError("two tensors of a record share name and layer")
    return ordered


def _reference(value: object, what: str) -> bytes:
    """A record key from its hex form in a patch's JSON."""
    try:
        key = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        key = b""
    if len(key) != 16:
        raise ValueError(f"{what} is {value!r}, not the 32 hex digits of a record key")
    return key


def references(record: Record) -> tuple[bytes | None, tuple[bytes, ...]]:
    """The chunk and the antecedents that a record names in its meta; ValueError if a name is not a record key."""
    if record.kind != "patch":
        return None, ()
    chunk = record.meta.get("chunk")
    antecedents = record.meta.get("antecedents") or ()
    if not isinstance(antecedents, (list, tuple)):
        raise ValueError(f"a patch's antecedents are {antecedents!r}, not a list of record keys")
    return (
        None if chunk is None else _reference(chunk, "a patch's chunk"),
        tuple(dict.fromkeys(_reference(item, "a patch's antecedent") for item in antecedents)),
    )
