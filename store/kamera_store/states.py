"""Small mutable values with a version for compare-and-swap: windows, self-test results, weight hashes."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from kamera_store.base import State
from kamera_store.errors import ConflictError, DamagedError
from kamera_store.format.header import close_row, open_row, parse_json, strict_json
from kamera_store.lmdb.binding import Transaction

_VERSION = struct.Struct("<Q")
_MAX_KEY_BYTES = 500
WINDOWS = "window"
_KEY = re.compile("[0-9a-fA-F]{32}")


def state_key(space: str, name: str) -> bytes:
    """Database key of a state; ValueError if a part is empty, too long or has a zero character."""
    if not space or not name or "\0" in space or "\0" in name:
        raise ValueError(f"state {space!r}/{name!r}: neither part may be empty or hold a zero character")
    key = space.encode() + b"\0" + name.encode()
    if len(key) > _MAX_KEY_BYTES:
        raise ValueError(
            f"state {space}/{name[:40]}...: {len(key)} bytes, at most {_MAX_KEY_BYTES} are allowed"
        )
    return key


def parse(key: bytes, value: bytes | memoryview) -> State:
    """Check and parse a stored state; raises DamagedError if its bytes are not what was written."""
    payload = open_row("state", key, value)
    if len(payload) < _VERSION.size:
        raise DamagedError(None, f"state {key!r}", f"at least {_VERSION.size} bytes", len(payload))
    (version,) = _VERSION.unpack_from(payload)
    return State(parse_json(payload[_VERSION.size :], None, f"state {key!r}"), int(version))


def get(txn: Transaction, space: str, name: str) -> State | None:
    """The state under a name, or None; errors as in `parse`."""
    key = state_key(space, name)
    value = txn.get("state", key)
    return None if value is None else parse(key, value)


def put(
    txn: Transaction, space: str, name: str, value: Mapping[str, Any], expect: int | Literal["any"] | None
) -> int:
    """Write a state if its version is the expected one; the new version. See `Store.put_state`."""
    key = state_key(space, name)
    old = txn.get("state", key)
    found: int | None = None
    if old is not None:
        try:
            found = parse(key, old).version
        except DamagedError:
            if expect != "any":
                raise
            found = 0
    if expect != "any" and found != expect:
        raise ConflictError(space, name, expect, found)
    version = max(txn.id, (found or 0) + 1)
    txn.put("state", key, close_row("state", key, _VERSION.pack(version) + strict_json(value)))
    return version


def names(txn: Transaction, space: str) -> list[str]:
    """All names in a space, sorted by their bytes."""
    prefix = space.encode() + b"\0"
    return [key[len(prefix) :].decode() for key in txn.keys("state", prefix)]


def pinned(txn: Transaction) -> frozenset[bytes]:
    """Keys of all chunks that a window sees.

    Raises
    ------
    DamagedError
        If a window cannot be read: without it nobody knows what may go.
    """
    windows = (parse(key, value) for key, value in txn.scan("state", WINDOWS.encode() + b"\0"))
    return frozenset(key for window in windows for key in _chunks(window.value))


def _chunks(window: Mapping[str, Any]) -> Iterator[bytes]:
    entries = window.get("entries")
    for entry in entries if isinstance(entries, list) else ():
        chunk = entry.get("chunk") if isinstance(entry, dict) else None
        if isinstance(chunk, str) and _KEY.fullmatch(chunk):
            yield bytes.fromhex(chunk)
