"""Small stored values: strict JSON in one canonical form, and rows whose checksum covers table, key and content."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from kamera_store.errors import DamagedError
from kamera_store.format.keys import checksum64

_CHECKSUM = struct.Struct("<Q")


def close_row(table: str, key: bytes, payload: bytes) -> bytes:
    """The payload followed by its checksum."""
    return payload + _CHECKSUM.pack(checksum64((table.encode(), b"\0", key, payload)))


def open_row(table: str, key: bytes, value: bytes | memoryview) -> bytes:
    """The payload of a stored row.

    Raises
    ------
    DamagedError
        If the checksum is not that of this content under this key.
    """
    data = bytes(value)
    if len(data) < _CHECKSUM.size:
        raise DamagedError(None, f"{table} row {key.hex()}", f"at least {_CHECKSUM.size} bytes", len(data))
    payload, (expected,) = data[: -_CHECKSUM.size], _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)
    found = checksum64((table.encode(), b"\0", key, payload))
    if found != expected:
        raise DamagedError(None, f"{table} row {key.hex()}", f"{expected:016x}", f"{found:016x}")
    return payload


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
