"""What a record is, and the bytes of its header."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import DamagedError, FormatVersionError, NotAKameraEntryError, UnsupportedDtypeError
from .keys import checksum64

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"KAMERAKV"
VERSION = 1
RAW, ZSTD = 0, 1

ITEM_BYTES: Mapping[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "uint16": 2,
    "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip

_FIXED = struct.Struct("<8sHHI16s32sddQQIII")
_LENGTH = struct.Struct("<H")
_ENTRY = struct.Struct("<iBBBB")
_ENTRY_NUMBERS = struct.Struct("<QQQQ")
_PLANE = struct.Struct("<BBBBQ")
_CHECKSUM = struct.Struct("<Q")
_MAX_NAME_BYTES = 4096
_MAX_DIMENSIONS = 16


def item_bytes(dtype: str) -> int:
    """Bytes of one element.

    Raises
    ------
    UnsupportedDtypeError
        If the format does not define the dtype.
    """
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        raise UnsupportedDtypeError(dtype) from None


def byte_view(data: Any) -> memoryview:
    """Flat read-only view of the bytes of any C-contiguous buffer, empty ones included."""
    view = memoryview(data)
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
        if any(size < 0 for size in shape) or len(shape) > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {self.name!r}: shape {shape} is not storable")
        expected = math.prod(shape) * item_bytes(self.dtype)
        found = memoryview(self.data).nbytes
        if expected != found:
            raise ValueError(
                f"tensor {self.name!r}: shape {shape} of {self.dtype} is {expected} bytes, data has {found}"
            )
        if self.codec not in ("auto", "raw"):
            raise ValueError(f"tensor {self.name!r}: codec {self.codec!r} is neither 'auto' nor 'raw'")

    @property
    def raw_bytes(self) -> int:
        """Size of the data in bytes."""
        return memoryview(self.data).nbytes

    def view(self) -> memoryview:
        """Flat read-only view of the data."""
        return byte_view(self.data)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorBytes):
            return NotImplemented
        mine = (self.name, self.layer, self.dtype, self.shape)
        return mine == (other.name, other.layer, other.dtype, other.shape) and self.view() == other.view()

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Plane:
    """Bytes ``start .. start + width`` of every element, stored together."""

    start: int
    width: int
    codec: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
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
        ``chunk``, ``patch`` or ``source``.
    key, digest : bytes
        16 bytes xxh3-128 and 32 bytes SHA-256 of the same canonical encoding.
    tenant, unit : str
        Who owns it, and the media unit it belongs to.
    meta : dict
        Strict JSON.
    tensors : tuple of TensorInfo
        The tensor table, ordered by layer.
    created_s : float
        Unix time in seconds.
    cost_ms : float
        What it took to make, for eviction.
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
        """The table row of one tensor.

        Raises
        ------
        KeyError
            If the record has no such tensor.
        """
        for info in self.tensors:
            if info.layer == layer and info.name == name:
                return info
        raise KeyError(f"record {self.short_id} has no tensor {name!r} in layer {layer}")

    def layer_tensors(self, layer: int) -> tuple[TensorInfo, ...]:
        """All table rows of one layer."""
        return tuple(info for info in self.tensors if info.layer == layer)


def strict_json(value: Mapping[str, Any]) -> bytes:
    """Canonical JSON: sorted keys, no spaces, UTF-8, no NaN or infinity.

    Raises
    ------
    ValueError
        If the value holds anything that strict JSON cannot say.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"a JSON object is needed, not {type(value).__name__}")
    _require_json(value)
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def _require_json(value: Any) -> None:
    if value is None or isinstance(value, (str, bool, int, float)):
        return
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise ValueError(f"JSON object names are strings, not {type(name).__name__}")
            _require_json(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _require_json(item)
    else:
        raise ValueError(f"{type(value).__name__} is not strict JSON")


def parse_json(data: bytes | memoryview, key: bytes | None, what: str) -> dict[str, Any]:
    """Read back what `strict_json` wrote.

    Raises
    ------
    DamagedError
        If the bytes are not a strict JSON object.
    """

    def refuse(token: str) -> None:
        raise ValueError(f"{token} is not JSON")

    try:
        value = json.loads(bytes(data), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise DamagedError(key, what, "strict JSON", str(error)) from error
    if not isinstance(value, dict):
        raise DamagedError(key, what, "a JSON object", type(value).__name__)
    return value


def _text(value: str, what: str) -> bytes:
    data = value.encode()
    if len(data) > _MAX_NAME_BYTES:
        raise ValueError(f"{what} is {len(data)} bytes long, at most {_MAX_NAME_BYTES} are allowed")
    return _LENGTH.pack(len(data)) + data


def encode_header(record: Record) -> bytes:
    """Header bytes of a record, its checksum included."""
    meta = strict_json(record.meta)
    body = [_text(record.kind, "kind"), _text(record.tenant, "tenant"), _text(record.unit, "unit"), meta]
    for info in record.tensors:
        body.append(_text(info.name, "tensor name"))
        body.append(_text(info.dtype, "dtype"))
        body.append(_ENTRY.pack(info.layer, len(info.shape), len(info.planes), 0, 0))
        body.append(struct.pack(f"<{len(info.shape)}Q", *info.shape))
        body.append(_ENTRY_NUMBERS.pack(info.raw_bytes, info.offset, info.stored_bytes, info.checksum))
        body.extend(
            _PLANE.pack(plane.start, plane.width, plane.codec, 0, plane.stored_bytes) for plane in info.planes
        )
    tail = b"".join(body)
    num_bytes = _FIXED.size + len(tail) + _CHECKSUM.size
    fixed = _FIXED.pack(
        MAGIC, VERSION, 0, num_bytes, record.key, record.digest, record.created_s, record.cost_ms,
        record.raw_bytes, record.payload_bytes, record.num_segments, len(record.tensors), len(meta),
    )  # fmt: skip
    return fixed + tail + _CHECKSUM.pack(checksum64((fixed, tail)))


def header_checksum(value: bytes | memoryview) -> int:
    """The checksum that a header carries in its last 8 bytes; 0 for a value too short to be one."""
    return _CHECKSUM.unpack_from(value, len(value) - _CHECKSUM.size)[0] if len(value) >= _CHECKSUM.size else 0


class _Cursor:
    """Reads forward through the variable part of a header and never past its end."""

    def __init__(self, data: bytes, start: int, end: int, key: bytes) -> None:
        self.data, self.at, self.end, self.key = data, start, end, key

    def take(self, num_bytes: int, what: str) -> int:
        at, self.at = self.at, self.at + num_bytes
        if self.at > self.end:
            raise DamagedError(self.key, f"header ({what})", f"at most {self.end} bytes", self.at)
        return at

    def unpack(self, layout: struct.Struct, what: str) -> tuple[Any, ...]:
        return layout.unpack_from(self.data, self.take(layout.size, what))

    def text(self, what: str) -> str:
        (length,) = self.unpack(_LENGTH, what)
        at = self.take(length, what)
        try:
            return self.data[at : at + length].decode()
        except UnicodeDecodeError as error:
            raise DamagedError(self.key, f"header ({what})", "UTF-8", str(error)) from error


def decode_header(key: bytes, value: bytes | memoryview) -> Record:
    """Check and parse a header.

    Parameters
    ----------
    key : bytes
        Key under which the value was found, 16 bytes.
    value : bytes or memoryview
        The stored value.

    Returns
    -------
    Record

    Raises
    ------
    NotAKameraEntryError
        If the value does not begin like a header.
    FormatVersionError
        If a newer program wrote it.
    DamagedError
        If any length, the checksum, the key or the tensor table is wrong.
    """
    data = bytes(value)
    if data[:8] != MAGIC:
        raise NotAKameraEntryError(key, "first bytes", MAGIC.hex(), data[:8].hex())
    if len(data) < _FIXED.size + _CHECKSUM.size:
        raise DamagedError(key, "header length", f"at least {_FIXED.size + _CHECKSUM.size}", len(data))
    (_, version, reserved, num_bytes, own_key, digest, created_s, cost_ms, raw_bytes, payload_bytes,
     num_segments, num_tensors, meta_bytes) = _FIXED.unpack_from(data)  # fmt: skip
    end = len(data) - _CHECKSUM.size
    stored_checksum = header_checksum(data)
    checksum = checksum64((memoryview(data)[:end],))
    if checksum != stored_checksum:
        raise DamagedError(key, "header checksum", f"{stored_checksum:016x}", f"{checksum:016x}")
    if version != VERSION:
        raise FormatVersionError(version, VERSION, f"record {key.hex()[:10]}")
    if num_bytes != len(data) or reserved:
        raise DamagedError(key, "header length", num_bytes, len(data))
    if own_key != bytes(key):
        raise DamagedError(key, "key in header", bytes(key).hex(), own_key.hex())
    cursor = _Cursor(data, _FIXED.size, end, bytes(key))
    kind, tenant, unit = cursor.text("kind"), cursor.text("tenant"), cursor.text("unit")
    at = cursor.take(meta_bytes, "meta")
    meta = parse_json(data[at : at + meta_bytes], key, "header (meta)")
    tensors = tuple(_decode_entry(cursor) for _ in range(num_tensors))
    if cursor.at != end:
        raise DamagedError(key, "header length", f"{cursor.at} bytes used", end)
    record = Record(
        kind, own_key, digest, tenant, unit, meta, tensors, created_s, cost_ms, payload_bytes, num_segments,
        stored_checksum,
    )  # fmt: skip
    _require_table(record, raw_bytes)
    return record


def _decode_entry(cursor: _Cursor) -> TensorInfo:
    name, dtype = cursor.text("tensor name"), cursor.text("dtype")
    layer, num_dimensions, num_planes, zero, zero_too = cursor.unpack(_ENTRY, "tensor")
    if zero or zero_too or num_dimensions > _MAX_DIMENSIONS:
        raise DamagedError(cursor.key, "tensor table", "known flags", (zero, zero_too, num_dimensions))
    at = cursor.take(8 * num_dimensions, "shape")
    shape = struct.unpack_from(f"<{num_dimensions}Q", cursor.data, at)
    raw_bytes, offset, stored_bytes, checksum = cursor.unpack(_ENTRY_NUMBERS, "tensor")
    planes = []
    for _ in range(num_planes):
        start, width, codec, zero, plane_bytes = cursor.unpack(_PLANE, "plane")
        if zero or codec not in (RAW, ZSTD):
            raise DamagedError(cursor.key, "tensor table", "codec 0 or 1", codec)
        planes.append(Plane(start, width, codec, plane_bytes))
    return TensorInfo(name, layer, dtype, shape, raw_bytes, offset, stored_bytes, checksum, tuple(planes))


def _require_table(record: Record, raw_bytes: int) -> None:
    """Refuse a table whose numbers do not fit each other, before anything is allocated from it."""
    offset = 0
    for info in record.tensors:
        size = ITEM_BYTES.get(info.dtype)
        if size is None:
            raise UnsupportedDtypeError(info.dtype)
        what = f"tensor table ({info.name}, layer {info.layer})"
        if math.prod(info.shape) * size != info.raw_bytes:
            raise DamagedError(record.key, what, f"{math.prod(info.shape) * size} bytes", info.raw_bytes)
        if info.offset != offset:
            raise DamagedError(record.key, what, f"offset {offset}", info.offset)
        covered = sorted((plane.start, plane.start + plane.width) for plane in info.planes)
        edges = [0] + [end for _, end in covered]
        if info.raw_bytes and (
            edges[-1] != size or any(start != edges[i] for i, (start, _) in enumerate(covered))
        ):
            raise DamagedError(record.key, what, f"planes that cover {size} bytes", covered)
        if sum(plane.stored_bytes for plane in info.planes) != info.stored_bytes:
            raise DamagedError(record.key, what, f"{info.stored_bytes} bytes", "planes of another sum")
        offset += info.stored_bytes
    if offset != record.payload_bytes:
        raise DamagedError(record.key, "payload length", record.payload_bytes, offset)
    if record.raw_bytes != raw_bytes:
        raise DamagedError(record.key, "raw length", raw_bytes, record.raw_bytes)


def sort_tensors(tensors: Iterable[TensorBytes]) -> list[TensorBytes]:
    """Tensors in payload order: by layer, and within a layer as given.

    Raises
    ------
    ValueError
        If two tensors share name and layer.
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.layer)
    seen = {(tensor.name, tensor.layer) for tensor in ordered}
    if len(seen) != len(ordered):
        raise ValueError("two tensors of a record share name and layer")
    return ordered
