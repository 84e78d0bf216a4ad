"""Small stored values, each with its checksum at its end: headers of records, rows of the other tables, their JSON."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from kamera_store.errors import DamagedError, FormatVersionError, NewerRecordError, NotAKameraEntryError
from kamera_store.format.keys import checksum64
from kamera_store.format.records import (
    ITEM_BYTES,
    KINDS,
    RAW,
    ZSTD,
    Plane,
    Record,
    TensorInfo,
    references,
)

MAGIC = b"KAMERAKV"
VERSION = 1

_FIXED = struct.Struct("<8sHHI16s32sddQQIIIHH")
_LENGTH = struct.Struct("<H")
_ENTRY = struct.Struct("<HHiBBHQQQQ")
_PLANE = struct.Struct("<BBBBQ")
_CHECKSUM = struct.Struct("<Q")
_MAX_NAME_BYTES = 4096


# Rows and JSON


def close_row(table: str, key: bytes, payload: bytes) -> bytes:
    """The payload followed by its checksum."""
    return payload + _CHECKSUM.pack(checksum64((table.encode(), b"\0", key, payload)))


def open_row(table: str, key: bytes, value: bytes | memoryview) -> bytes:
    """The payload of a stored row; DamagedError if the checksum is not that of this content under this key."""
    data = bytes(value)
    if len(data) < _CHECKSUM.size:
        raise DamagedError(None, f"{table} row {key.hex()}", f"at least {_CHECKSUM.size} bytes", len(data))
    payload, (expected,) = data[: -_CHECKSUM.size], _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)
    found = checksum64((table.encode(), b"\0", key, payload))
    if found != expected:
        raise DamagedError(None, f"{table} row {key.hex()}", f"{expected:016x}", f"{found:016x}")
    return payload


def strict_json(value: Mapping[str, Any]) -> bytes:
    """Canonical JSON: sorted keys, no spaces, UTF-8; ValueError for what strict JSON cannot say, NaN included."""
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
    """Read back what `strict_json` wrote; DamagedError if the bytes are not a strict JSON object."""

    def refuse(token: str) -> None:
        raise ValueError(f"{token} is not JSON")

    try:
        value = json.loads(bytes(data), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise DamagedError(key, what, "strict JSON", str(error)) from error
    if not isinstance(value, dict):
        raise DamagedError(key, what, "a JSON object", type(value).__name__)
    return value


# Headers


def _text(value: str, what: str) -> bytes:
    data = value.encode()
    if len(data) > _MAX_NAME_BYTES:
        raise ValueError(f"{what} is {len(data)} bytes long, at most {_MAX_NAME_BYTES} are allowed")
    return _LENGTH.pack(len(data)) + data


def encode_header(record: Record) -> bytes:
    """Header bytes of a record; ValueError if a name is too long or the meta is not strict JSON."""
    meta = strict_json(record.meta)
    words = list(dict.fromkeys(word for info in record.tensors for word in (info.name, info.dtype)))
    place = {word: index for index, word in enumerate(words)}
    rows: list[bytes] = []
    sizes: list[int] = []
    planes: list[bytes] = []
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
    if len(value) < _CHECKSUM.size:
        return 0
    (checksum,) = _CHECKSUM.unpack_from(value, len(value) - _CHECKSUM.size)
    return int(checksum)


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
    """Check and parse the header that was found under a key.

    Raises
    ------
    NotAKameraEntryError
        If the value does not begin like a header.
    FormatVersionError
        If the checksum is right and a newer program wrote it: it has another version, or, as `NewerRecordError`,
        a record kind, dtype or codec that is unknown here.
    DamagedError
        If any length, the checksum, the key, the tensor table or a reference is wrong.
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
    if kind not in KINDS:
        raise NewerRecordError(key, "record kind", kind, ", ".join(KINDS))
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
    try:
        references(record)
    except ValueError as error:
        raise DamagedError(key, "header (meta)", "keys of records", str(error)) from error
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
        if codec not in (RAW, ZSTD):
            raise NewerRecordError(cursor.key, "codec", codec, f"{RAW} and {ZSTD}")
        if zero:
            raise DamagedError(cursor.key, "plane", 0, zero)
        planes.append(Plane(start, width, codec, stored_bytes))
    tensors, size_at, plane_at = [], 0, 0
    for name, dtype, layer, num_dimensions, own_planes, zero, raw, offset, stored, checksum in rows:
        if zero or name >= len(words) or dtype >= len(words):
            raise DamagedError(cursor.key, "tensor table", f"{len(words)} words", (name, dtype, zero))
        shape, size_at = sizes[size_at : size_at + num_dimensions], size_at + num_dimensions
        layout, plane_at = tuple(planes[plane_at : plane_at + own_planes]), plane_at + own_planes
        if words[dtype] not in ITEM_BYTES:
            raise NewerRecordError(cursor.key, "dtype", words[dtype], ", ".join(ITEM_BYTES))
        tensors.append(
            TensorInfo(words[name], layer, words[dtype], shape, raw, offset, stored, checksum, layout)
        )
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
        size = ITEM_BYTES[info.dtype]
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
