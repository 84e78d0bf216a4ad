"""Finding records by key, id, kind, tenant and reference; one that cannot be read is skipped with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

from kamera_store import ledger
from kamera_store.base import is_prefix
from kamera_store.errors import (
    UNREADABLE,
    DamagedError,
    DamagedRecordWarning,
    FormatVersionError,
    MissingRecordError,
    NewerRecordWarning,
)
from kamera_store.format.header import decode_header, header_checksum
from kamera_store.format.records import Record
from kamera_store.format.segments import segment_key
from kamera_store.lmdb.binding import Transaction
from kamera_store.lmdb.environment import Environment

_BATCH = 256


def under(txn: Transaction, key: bytes) -> Record | None:
    """The record under a key, or None; raises what `decode_header` raises."""
    header = txn.get("records", key)
    return None if header is None else decode_header(key, header)


def is_newer(txn: Transaction, key: bytes) -> bool:
    """Whether the record under a key is sound as far as can be seen, and of a newer program."""
    try:
        under(txn, key)
    except FormatVersionError:
        return True
    except DamagedError:
        return False
    return False


def current(txn: Transaction, record: Record) -> Record:
    """The record in hand, or its present writing if it was written again meanwhile.

    Raises
    ------
    MissingRecordError
        If the store has no such record any more.
    DamagedError
        If the stored header is damaged or is of another content.
    """
    header = txn.get("records", record.key)
    if header is None:
        raise MissingRecordError(record.key)
    if header_checksum(header) == record.header_checksum:
        return record
    found = decode_header(record.key, header)
    if found.digest != record.digest:
        raise DamagedError(record.key, "identity", record.digest.hex(), found.digest.hex())
    return found


def segment_reader(txn: Transaction, key: bytes) -> Callable[[int], memoryview | None]:
    """What gives the stored value of a record's segment by number, as long as the transaction lasts."""
    return lambda index: txn.get("segments", segment_key(key, index))


def count_segments(txn: Transaction, key: bytes) -> int:
    """How many segments stand under a record's key."""
    return sum(1 for _ in txn.keys("segments", key))


def resolve(txn: Transaction, prefix: str, kind: str | None, tenant: str | None) -> list[Record]:
    """Records whose id begins with a hex prefix; see `Store.resolve`."""
    text = prefix.lower()
    if not is_prefix(text):
        return []
    whole = bytes.fromhex(text[: len(text) // 2 * 2])
    found = []
    for key, header in txn.scan("records", whole):
        if key.hex().startswith(text):
            record = _or_warn(key, header)
            if record is not None and _matches(record, kind, tenant):
                found.append(record)
    return found


def iterate(env: Environment, kind: str | None, tenant: str | None) -> Iterator[Record]:
    """All readable records in id order, `_BATCH` headers to a transaction; see `Store.iterate`."""
    start = b""
    while True:
        batch: list[tuple[bytes, bytes]] = []
        with env.read() as txn:
            for key, value in txn.scan("records", start=start):
                batch.append((key, bytes(value)))
                if len(batch) == _BATCH:
                    break
        for key, header in batch:
            record = _or_warn(key, header)
            if record is not None and _matches(record, kind, tenant):
                yield record
        if len(batch) < _BATCH:
            return
        start = batch[-1][0] + b"\0"


def linked(txn: Transaction, role: bytes, target: bytes, tenant: str | None) -> list[Record]:
    """Patches that name a record as their chunk (`ledger.CHUNK`) or as an antecedent (`ledger.ANTECEDENT`)."""
    found = []
    for key in ledger.linked(txn, role, target):
        header = txn.get("records", key)
        record = None if header is None else _or_warn(key, header)
        if record is not None and _matches(record, "patch", tenant):
            found.append(record)
    return found


def _matches(record: Record, kind: str | None, tenant: str | None) -> bool:
    return (kind is None or record.kind == kind) and (tenant is None or record.tenant == tenant)


def _or_warn(key: bytes, header: bytes | memoryview) -> Record | None:
    try:
        return decode_header(key, header)
    except UNREADABLE as error:
        damaged = isinstance(error, DamagedError)
        category = DamagedRecordWarning if damaged else NewerRecordWarning
        warnings.warn(f"{error}; skipped", category, stacklevel=3)
        return None
