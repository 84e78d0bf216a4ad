"""What a record is, and the bytes of its header."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

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

_FIXED = struct.Struct("<8sHHI16s32sddQQIIIHH")
_LENGTH = struct.Struct("<H")
_ENTRY = struct.Struct("<HHiBBHQQQQ")
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
    """Header bytes of a record, its checksum included.

    Raises
    ------
    ValueError
        If a name is too long or the meta is not strict JSON.
    """
    meta = strict_json(record.meta)
    words = list(dict.fromkeys(word for info in record.tensors for word in (info.name, info.dtype)))
    place = {word: index for index, word in enumerate(words)}
    rows, sizes, planes = [], [], []
    for info in record.tensors:
        numbers = (info.raw_bytes, info.offset, info.stored_bytes, info.checksum)
        words_at = (place[info.name], place[info.dtype])
        rows.append(_ENTRY.pack(*words_at, info.layer, len(info.shape), len(info.planes), 0, *numbers))
        sizes.extend(info.shape)
        planes.extend(_PLANE.pack(*plane[:3], 0, plane.stored_bytes) for plane in info.planes)
    body = [_text(record.kind, "kind"), _text(record.tenant, "tenant"), _text(record.unit, "unit")]
    body.extend(_text(word, "tensor name") for word in words)
    body.extend((meta, *rows, struct.pack(f"<{len(sizes)}Q", *sizes), *planes))
    tail = b"".join(body)
    num_bytes = _FIXED.size + len(tail) + _CHECKSUM.size
    fixed = _FIXED.pack(
        MAGIC, VERSION, 0, num_bytes, record.key, record.digest, record.created_s, record.cost_ms,
        record.raw_bytes,
        record.payload_bytes, record.num_segments, len(record.tensors), len(meta), len(words), 0,
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

    def text(self, what: str) -> str:
        (length,) = _LENGTH.unpack_from(self.data, self.take(_LENGTH.size, what))
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
     num_segments, num_tensors, meta_bytes, num_words, reserved_too) = _FIXED.unpack_from(data)  # fmt: skip
    end = len(data) - _CHECKSUM.size
    stored_checksum = header_checksum(data)
    checksum = checksum64((memoryview(data)[:end],))
    if checksum != stored_checksum:
        raise DamagedError(key, "header checksum", f"{stored_checksum:016x}", f"{checksum:016x}")
    if version != VERSION:
        raise FormatVersionError(version, VERSION, f"record {key.hex()[:10]}")
    if num_bytes != len(data) or reserved or reserved_too:
        raise DamagedError(key, "header length", num_bytes, len(data))
    if own_key != bytes(key):
        raise DamagedError(key, "key in header", bytes(key).hex(), own_key.hex())
    cursor = _Cursor(data, _FIXED.size, end, bytes(key))
    kind, tenant, unit = cursor.text("kind"), cursor.text("tenant"), cursor.text("unit")
    words = [cursor.text("tensor name") for _ in range(num_words)]
    at = cursor.take(meta_bytes, "meta")
    meta = parse_json(data[at : at + meta_bytes], key, "header (meta)")
    tensors = _decode_table(cursor, num_tensors, words)
    if cursor.at != end:
        raise DamagedError(key, "header length", f"{cursor.at} bytes used", end)
    record = Record(
        kind, own_key, digest, tenant, unit, meta, tensors, created_s, cost_ms, payload_bytes, num_segments,
        stored_checksum,
    )  # fmt: skip
    _require_table(record, raw_bytes)
    return record


def _decode_table(cursor: _Cursor, num_tensors: int, words: list[str]) -> tuple[TensorInfo, ...]:
    at = cursor.take(num_tensors * _ENTRY.size, "tensor table")
    rows = list(_ENTRY.iter_unpack(memoryview(cursor.data)[at : cursor.at]))
    num_sizes, num_planes = sum(row[3] for row in rows), sum(row[4] for row in rows)
    sizes = struct.unpack_from(f"<{num_sizes}Q", cursor.data, cursor.take(8 * num_sizes, "shapes"))
    at = cursor.take(num_planes * _PLANE.size, "planes")
    planes = []
    for start, width, codec, zero, stored_bytes in _PLANE.iter_unpack(
        memoryview(cursor.data)[at : cursor.at]
    ):
        if zero or codec not in (RAW, ZSTD):
            raise DamagedError(cursor.key, "plane", "codec 0 or 1", codec)
        planes.append(Plane(start, width, codec, stored_bytes))
    tensors, size_at, plane_at = [], 0, 0
    for name, dtype, layer, num_dimensions, own_planes, zero, *numbers in rows:
        if zero or name >= len(words) or dtype >= len(words):
            raise DamagedError(cursor.key, "tensor table", f"{len(words)} words", (name, dtype, zero))
        shape, size_at = sizes[size_at : size_at + num_dimensions], size_at + num_dimensions
        layout, plane_at = tuple(planes[plane_at : plane_at + own_planes]), plane_at + own_planes
        tensors.append(TensorInfo(words[name], layer, words[dtype], shape, *numbers, layout))
    return tuple(tensors)


@lru_cache(maxsize=256)
def _covers(spans: tuple[tuple[int, int], ...], size: int) -> bool:
    """Whether spans of (start, width) cover an element of so many bytes without gap or overlap."""
    at = 0
    for start, width in sorted(spans):
        if start != at or not width:
            return False
        at += width
    return at == size


def _require_table(record: Record, raw_bytes: int) -> None:
    """Refuse a table whose numbers do not fit each other, before anything is allocated from it."""
    offset = 0
    for info in record.tensors:
        size = ITEM_BYTES.get(info.dtype)
        if size is None:
            raise UnsupportedDtypeError(info.dtype)
        expected, planes = math.prod(info.shape) * size, info.planes
        if expected != info.raw_bytes:
            raise _table_error(record, info, f"{expected} bytes", info.raw_bytes)
        if info.offset != offset:
            raise _table_error(record, info, f"offset {offset}", info.offset)
        if expected and not _covers(tuple((plane.start, plane.width) for plane in planes), size):
            raise _table_error(record, info, f"planes that cover {size} bytes", planes)
        if sum(plane.stored_bytes for plane in planes) != info.stored_bytes:
            raise _table_error(record, info, f"{info.stored_bytes} bytes", "planes of another sum")
        offset += info.stored_bytes
    if offset != record.payload_bytes:
        raise DamagedError(record.key, "payload length", record.payload_bytes, offset)
    if record.raw_bytes != raw_bytes:
        raise DamagedError(record.key, "raw length", raw_bytes, record.raw_bytes)


def _table_error(record: Record, info: TensorInfo, expected: object, found: object) -> DamagedError:
    return DamagedError(record.key, f"tensor table ({info.name}, layer {info.layer})", expected, found)


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
