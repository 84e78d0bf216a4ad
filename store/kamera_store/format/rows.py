"""Small stored values with a checksum over table, key and content: none changes or moves unseen (pure)."""

from __future__ import annotations

import struct

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
