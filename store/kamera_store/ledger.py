"""What records take and cost: a row for each, and their sums by media unit, kind and tenant."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kamera_store.errors import UNREADABLE, DamagedError, DamagedRecordWarning
from kamera_store.format.header import close_row, decode_header, open_row
from kamera_store.format.records import Record, references
from kamera_store.format.segments import stored_bytes
from kamera_store.lmdb.binding import Transaction

_NUMBERS = struct.Struct("<dddQQ16sBBHH")

# One row for each record


@dataclass(frozen=True)
class Usage:
    """One record as eviction and statistics see it.

    Attributes
    ----------
    key, kind, tenant, unit
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


def usage_of(record: Record, header_bytes: int, last_used_s: float | None = None) -> Usage:
    """The row that belongs to a record; last used when it was made, by default."""
    stored = stored_bytes(record.payload_bytes, header_bytes)
    return Usage(
        record.key, record.kind, record.tenant, record.unit, references(record)[0], record.raw_bytes, stored,
        record.cost_ms, record.created_s, record.created_s if last_used_s is None else last_used_s,
    )  # fmt: skip


def put(txn: Transaction, usage: Usage) -> None:
    """Write a row."""
    kind, tenant, unit = usage.kind.encode(), usage.tenant.encode(), usage.unit.encode()
    numbers = _NUMBERS.pack(
        usage.last_used_s, usage.created_s, usage.cost_ms, usage.raw_bytes, usage.stored_bytes,
        usage.chunk or bytes(16), usage.chunk is not None, len(kind), len(tenant), len(unit),
    )  # fmt: skip
    txn.put("ledger", usage.key, close_row("ledger", usage.key, numbers + kind + tenant + unit))


def decode_usage(key: bytes, value: bytes | memoryview | None) -> Usage:
    """Check and parse a row.

    Raises
    ------
    DamagedError
        If there is none, or its checksum or lengths are wrong.
    """
    if value is None:
        raise DamagedError(key, "ledger row", "a row", "nothing")
    payload = open_row("ledger", key, value)
    if len(payload) < _NUMBERS.size:
        raise DamagedError(key, "ledger row", f"at least {_NUMBERS.size} bytes", len(payload))
    (last_used_s, created_s, cost_ms, raw, stored, chunk, has_chunk,
     kind, tenant, unit) = _NUMBERS.unpack_from(payload)  # fmt: skip
    ends = (_NUMBERS.size, _NUMBERS.size + kind, _NUMBERS.size + kind + tenant)
    end = ends[-1] + unit
    if len(payload) != end:
        raise DamagedError(key, "ledger row", f"{end} bytes", len(payload))
    kind_name, tenant_name, unit_name = (
        payload[at:to].decode() for at, to in zip(ends, (*ends[1:], end), strict=True)
    )
    return Usage(
        key, kind_name, tenant_name, unit_name, chunk if has_chunk else None,
        raw, stored, cost_ms, created_s, last_used_s,
    )  # fmt: skip


def usages(txn: Transaction) -> Iterator[Usage]:
    """All rows in key order; a damaged or absent one is remade from the record's header, with a warning."""
    rows = txn.scan("ledger")
    row = next(rows, None)
    for key in txn.keys("records"):
        while row is not None and row[0] < key:
            row = next(rows, None)
        usage = _usage_or_remade(txn, key, row[1] if row is not None and row[0] == key else None)
        if usage is not None:
            yield usage


def _usage_or_remade(txn: Transaction, key: bytes, value: memoryview | None) -> Usage | None:
    try:
        return decode_usage(key, value)
    except DamagedError as error:
        warnings.warn(f"{error}; read again from the record", DamagedRecordWarning, stacklevel=2)
    header = txn.get("records", key)
    assert header is not None, "a row is asked for a record that is there"
    try:
        return usage_of(decode_header(key, header), len(header))
    except UNREADABLE as error:
        warnings.warn(f"{error}; skipped", DamagedRecordWarning, stacklevel=2)
        return None


def touch(txn: Transaction, keys: Iterable[bytes], now_s: float) -> None:
    """Stamp those of the records that are there as used."""
    for key in dict.fromkeys(keys):
        if txn.get("records", key) is not None:
            usage = _usage_or_remade(txn, key, txn.get("ledger", key))
            if usage is not None:
                put(txn, replace(usage, last_used_s=now_s))


def stored_bytes_of(txn: Transaction, key: bytes) -> int:
    """What a record takes in the data file; 0 if there is none or its row is damaged."""
    try:
        return decode_usage(key, txn.get("ledger", key)).stored_bytes
    except DamagedError:
        return 0


# Sums


@dataclass(frozen=True)
class UnitUsage:
    """A media unit: its chunks, their patches, and its sources, which stay or go together.

    Attributes
    ----------
    tenant, unit : str
        Whose, and which.
    keys : tuple of bytes
        All its records, ``num_chunks`` chunks and ``num_patches`` patches among them.
    raw_bytes, stored_bytes : int
        Size in memory, and pages in the data file.
    cost_ms : float
        What it would take to make all of it again.
    last_used_s : float
        Latest use of any of its records, Unix time in seconds.
    """

    tenant: str
    unit: str
    keys: tuple[bytes, ...]
    num_chunks: int
    num_patches: int
    raw_bytes: int
    stored_bytes: int
    cost_ms: float
    last_used_s: float


def group_units(usages: Iterable[Usage]) -> list[UnitUsage]:
    """Gather records into media units.

    A patch belongs to the unit of its chunk; one whose chunk is gone belongs to the unit it names.
    """
    rows = list(usages)
    home = {row.key: (row.tenant, row.unit) for row in rows if row.kind == "chunk"}
    groups: dict[tuple[str, str], list[Usage]] = {}
    for row in rows:
        own = (row.tenant, row.unit)
        groups.setdefault(home.get(row.chunk, own) if row.chunk is not None else own, []).append(row)
    return [
        UnitUsage(
            tenant,
            unit,
            tuple(row.key for row in members),
            sum(row.kind == "chunk" for row in members),
            sum(row.kind == "patch" for row in members),
            sum(row.raw_bytes for row in members),
            sum(row.stored_bytes for row in members),
            sum(row.cost_ms for row in members),
            max(row.last_used_s for row in members),
        )
        for (tenant, unit), members in groups.items()
    ]


@dataclass(frozen=True)
class Share:
    """How many records, the size of their tensors in memory, and of their pages in the data file."""

    count: int
    raw_bytes: int
    stored_bytes: int


@dataclass(frozen=True)
class Stats:
    """Numbers of a store; all sizes in bytes.

    Attributes
    ----------
    count, raw_bytes, stored_bytes : int
        Over all records.
    kinds, tenants : mapping
        The same for each kind and for each tenant.
    units, states, quarantined : int
        Media units, small states, entries set aside as damaged.
    used_bytes : int
        Pages in use, which the quota limits.
    file_bytes, free_inside_bytes : int
        Length of the data file, and how much of it is free for new records.
    map_bytes, quota_bytes : int
        Address space in use, and the limit.
    """

    count: int
    raw_bytes: int
    stored_bytes: int
    kinds: Mapping[str, Share]
    tenants: Mapping[str, Share]
    units: int
    states: int
    quarantined: int
    used_bytes: int
    file_bytes: int
    free_inside_bytes: int
    map_bytes: int
    quota_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Plain nested dictionary, ready for JSON."""
        return asdict(self)


def _share(rows: Sequence[Usage]) -> Share:
    return Share(len(rows), sum(row.raw_bytes for row in rows), sum(row.stored_bytes for row in rows))


def _shares(rows: Sequence[Usage], by: str) -> dict[str, Share]:
    groups: dict[str, list[Usage]] = {}
    for row in rows:
        groups.setdefault(getattr(row, by), []).append(row)
    return {name: _share(members) for name, members in sorted(groups.items())}


def gather(txn: Transaction, file_bytes: int, map_bytes: int, quota_bytes: int) -> Stats:
    """Numbers of a store as one transaction sees it."""
    rows = list(usages(txn))
    total, used = _share(rows), txn.used_bytes()
    return Stats(
        total.count, total.raw_bytes, total.stored_bytes, _shares(rows, "kind"), _shares(rows, "tenant"),
        len(group_units(rows)), txn.count("state"), txn.count("quarantine"), used, file_bytes,
        max(0, file_bytes - used), map_bytes, quota_bytes,
    )  # fmt: skip
