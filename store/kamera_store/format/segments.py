"""Cutting a payload into segments of few fixed sizes, so that freed space fits the next writer (pure)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from kamera_store.errors import DamagedError

MAGIC = b"KSEG"
HEADER = struct.Struct("<4sII16s4s")
PAGE_BYTES = 4096
PAGE_HEADER_BYTES = 16
CLASS_PAGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
VALUE_BYTES = CLASS_PAGES[-1] * PAGE_BYTES - PAGE_HEADER_BYTES
DATA_BYTES = VALUE_BYTES - HEADER.size
INLINE_BYTES = 1024
INDEX = struct.Struct(">I")


def num_segments(payload_bytes: int) -> int:
    """How many segments a payload takes."""
    return -(-payload_bytes // DATA_BYTES)


def value_bytes(data_bytes: int) -> int:
    """Size of the stored value for a segment with so many data bytes, padding included.

    An LMDB value above about 2 kB takes whole pages less 16 bytes. Only twelve page counts are used.
    """
    size = HEADER.size + data_bytes
    if size <= INLINE_BYTES:
        return size
    pages = -(-(size + PAGE_HEADER_BYTES) // PAGE_BYTES)
    return next(count for count in CLASS_PAGES if count >= pages) * PAGE_BYTES - PAGE_HEADER_BYTES


def _database_bytes(size: int) -> int:
    """What a value takes in the data file: its size inside a leaf page, or whole pages of its own."""
    if size <= INLINE_BYTES:
        return size
    return -(-(size + PAGE_HEADER_BYTES) // PAGE_BYTES) * PAGE_BYTES


def stored_bytes(payload_bytes: int, header_bytes: int) -> int:
    """What a record takes in the data file, padding included, tree pages not."""
    full, rest = divmod(payload_bytes, DATA_BYTES)
    tail = _database_bytes(value_bytes(rest)) if rest else 0
    return full * CLASS_PAGES[-1] * PAGE_BYTES + tail + _database_bytes(header_bytes)


def needed_bytes(payload_bytes: int, header_bytes: int) -> int:
    """Upper bound for what writing a record adds to the pages in use, tree pages included."""
    tree_pages = 4 + num_segments(payload_bytes) // 32
    return stored_bytes(payload_bytes, header_bytes) + tree_pages * PAGE_BYTES


def segment_key(key: bytes, index: int) -> bytes:
    """Database key of one segment: record key, then the index big-endian."""
    return key + INDEX.pack(index)


def cut(
    key: bytes, digest: bytes, pieces: Iterable[bytes | memoryview], payload_bytes: int
) -> Iterator[bytearray]:
    """The stored values of a payload in order, each valid until the next is taken: the buffer is used again.

    Parameters
    ----------
    key, digest : bytes
        Of the record that owns the payload; each segment names them.
    pieces : iterable of bytes or memoryview
        The payload in parts of any size, ``payload_bytes`` in all.
    """
    source = iter(pieces)
    piece = memoryview(b"")
    full = bytearray(VALUE_BYTES)
    for index in range(num_segments(payload_bytes)):
        used = min(DATA_BYTES, payload_bytes - index * DATA_BYTES)
        value = full if used == DATA_BYTES else bytearray(value_bytes(used))
        HEADER.pack_into(value, 0, MAGIC, index, used, key, digest[:4])
        target, at, end = memoryview(value), HEADER.size, HEADER.size + used
        while at < end:
            while not len(piece):
                piece = memoryview(next(source)).cast("B")
            step = min(len(piece), end - at)
            target[at : at + step] = piece[:step]
            piece = piece[step:]
            at += step
        yield value


def open_segment(
    key: bytes, digest: bytes, index: int, payload_bytes: int, value: memoryview | None
) -> memoryview:
    """The data of one segment, after checking that it is the one asked for and that its padding is zero.

    Raises
    ------
    DamagedError
        If the segment is absent, of another record, of another place or of another length.
    """
    used = min(DATA_BYTES, payload_bytes - index * DATA_BYTES)
    what = f"segment {index}"
    if value is None:
        raise DamagedError(key, what, f"{value_bytes(used)} bytes", "nothing")
    if len(value) != value_bytes(used):
        raise DamagedError(key, what, f"{value_bytes(used)} bytes", len(value))
    expected = HEADER.pack(MAGIC, index, used, key, digest[:4])
    if value[: HEADER.size] != expected:
        raise DamagedError(key, f"{what} (header)", expected.hex(), bytes(value[: HEADER.size]).hex())
    end = HEADER.size + used
    if len(value) > end and bytes(value[end:]).count(0) != len(value) - end:
        raise DamagedError(key, f"{what} (padding)", "zeros", "other bytes")
    return value[HEADER.size : end]
