"""Records in the tables: written and removed whole, with a row for what each costs, its last use, and its links."""

from __future__ import annotations

import contextlib
import struct
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kamera_store.errors import UNREADABLE, DamagedError, DamagedRecordWarning
from kamera_store.format.header import decode_header
from kamera_store.format.records import Record, references
from kamera_store.format.rows import close_row, open_row
from kamera_store.format.segments import segment_key, stored_bytes
from kamera_store.lmdb.binding import Transaction

CHUNK, ANTECEDENT = b"c", b"a"
_NUMBERS = struct.Struct("<dddQQ16sBBHH")


@dataclass(frozen=True)
class Usage:
    """One record as eviction and statistics see it.

    Attributes
    ----------
    key : bytes
        The record's key.
    kind, tenant, unit : str
        As in the record.
    chunk : bytes or None
        For a patch, the chunk that it belongs to.
    raw_bytes, stored_bytes : int
        Size of its tensors in memory, and of its pages in the data file.
    cost_ms : float
        What it took to make.
    created_s, last_used_s : float
        Unix times in seconds.
    """

    key: bytes
    kind: str
    tenant: str
    unit: str
    chunk: bytes | None
    raw_bytes: int
    stored_bytes: int
    cost_ms: float
    created_s: float
    last_used_s: float


def links_of(record: Record) -> Iterator[bytes]:
    """Keys of the links that belong to a record: role, target, own key."""
    chunk, antecedents = references(record)
    if chunk is not None:
        yield CHUNK + chunk + record.key
    for antecedent in antecedents:
        yield ANTECEDENT + antecedent + record.key


def usage_of(record: Record, header_bytes: int, last_used_s: float) -> Usage:
    """The row that belongs to a record."""
    stored = stored_bytes(record.payload_bytes, header_bytes)
    return Usage(
        record.key, record.kind, record.tenant, record.unit, references(record)[0],
        record.raw_bytes, stored, record.cost_ms, record.created_s, last_used_s,
    )  # fmt: skip


def encode_usage(usage: Usage) -> bytes:
    """Stored bytes of a row, its checksum included."""
    kind, tenant, unit = usage.kind.encode(), usage.tenant.encode(), usage.unit.encode()
    numbers = _NUMBERS.pack(
        usage.last_used_s, usage.created_s, usage.cost_ms, usage.raw_bytes, usage.stored_bytes,
        usage.chunk or bytes(16), usage.chunk is not None, len(kind), len(tenant), len(unit),
    )  # fmt: skip
    return close_row("ledger", usage.key, numbers + kind + tenant + unit)


def decode_usage(key: bytes, value: bytes | memoryview) -> Usage:
    """Check and parse a row.

    Raises
    ------
    DamagedError
        If its checksum or lengths are wrong.
    """
    payload = open_row("ledger", key, value)
    if len(payload) < _NUMBERS.size:
        raise DamagedError(key, "ledger row", f"at least {_NUMBERS.size} bytes", len(payload))
    last_used_s, created_s, cost_ms, raw, stored, chunk, has_chunk, kind, tenant, unit = _NUMBERS.unpack_from(
        payload
    )
    if len(payload) != _NUMBERS.size + kind + tenant + unit:
        raise DamagedError(key, "ledger row", f"{_NUMBERS.size + kind + tenant + unit} bytes", len(payload))
    ends = (_NUMBERS.size, _NUMBERS.size + kind, _NUMBERS.size + kind + tenant, len(payload))
    kind_name, tenant_name, unit_name = (payload[ends[i] : ends[i + 1]].decode() for i in range(3))
    return Usage(
        key, kind_name, tenant_name, unit_name, chunk if has_chunk else None,
        raw, stored, cost_ms, created_s, last_used_s,
    )  # fmt: skip


def put_row(txn: Transaction, usage: Usage, record: Record) -> None:
    """Write the row and the links of a record."""
    txn.put("ledger", usage.key, encode_usage(usage))
    for link in links_of(record):
        txn.put("links", link, b"")


def put_record(
    txn: Transaction, record: Record, header: bytes, segments: Iterable[bytes | bytearray], usage: Usage
) -> None:
    """Write header, segments, row and links of a record that is not there."""
    txn.put("records", record.key, header)
    for index, value in enumerate(segments):
        txn.put("segments", segment_key(record.key, index), value)
    put_row(txn, usage, record)


def usages(txn: Transaction) -> Iterator[Usage]:
    """All rows in key order; a damaged or absent one is remade from the record's header, with a warning."""
    rows = txn.scan("ledger")
    row = next(rows, None)
    for key in txn.keys("records"):
        while row is not None and row[0] < key:
            row = next(rows, None)
        found = row[1] if row is not None and row[0] == key else None
        usage = _usage_or_rebuilt(txn, key, found)
        if usage is not None:
            yield usage


def _usage_or_rebuilt(txn: Transaction, key: bytes, value: memoryview | None) -> Usage | None:
    try:
        if value is None:
            raise DamagedError(key, "ledger row", "a row", "nothing")
        return decode_usage(key, value)
    except DamagedError as error:
        warnings.warn(f"{error}; read again from the record", DamagedRecordWarning, stacklevel=2)
    header = txn.get("records", key)
    assert header is not None, "a row is asked for a record that is there"
    try:
        record = decode_header(key, header)
        return usage_of(record, len(header), record.created_s)
    except UNREADABLE as error:
        warnings.warn(f"{error}; skipped", DamagedRecordWarning, stacklevel=2)
        return None


def touch(txn: Transaction, keys: Iterable[bytes], now_s: float) -> int:
    """Stamp records as used; how many there were."""
    num_stamped = 0
    for key in dict.fromkeys(keys):
        if txn.get("records", key) is None:
            continue
        usage = _usage_or_rebuilt(txn, key, txn.get("ledger", key))
        if usage is not None:
            txn.put("ledger", key, encode_usage(replace(usage, last_used_s=now_s)))
            num_stamped += 1
    return num_stamped


def stored_bytes_of(txn: Transaction, key: bytes) -> int:
    """What a record takes in the data file; 0 if there is none or its row is damaged."""
    row = txn.get("ledger", key)
    try:
        return 0 if row is None else decode_usage(key, row).stored_bytes
    except DamagedError:
        return 0


def remove(txn: Transaction, key: bytes) -> bool:
    """Delete a record, readable or not, with all that belongs to it; whether anything was there."""
    links = None
    with contextlib.suppress(*UNREADABLE):
        header = txn.get("records", key)
        links = None if header is None else list(links_of(decode_header(key, header)))
    if links is None:
        links = list(links_from(txn, key))
    segments = list(txn.keys("segments", key))
    for segment in segments:
        txn.delete("segments", segment)
    for link in links:
        txn.delete("links", link)
    row = txn.delete("ledger", key)
    return txn.delete("records", key) or row or bool(segments)


def links_from(txn: Transaction, key: bytes) -> Iterator[bytes]:
    """Keys of the links that name a record as their patch; looks through all links."""
    return (link for link in txn.keys("links") if link[17:] == key)


def linked(txn: Transaction, role: bytes, target: bytes) -> list[bytes]:
    """Keys of the patches that name a record as their chunk or as an antecedent."""
    return [link[17:] for link in txn.keys("links", role + target)]
