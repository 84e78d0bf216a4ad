"""Records in the tables: found, read, written and removed, each with its segments, its ledger row and its links."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

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
from kamera_store.format.records import Record, TensorInfo, references
from kamera_store.format.segments import segment_key
from kamera_store.ledger import Usage
from kamera_store.lmdb.binding import Transaction
from kamera_store.lmdb.environment import Environment

if TYPE_CHECKING:
    from kamera_store.format.payload import Fetched

CHUNK, ANTECEDENT = b"c", b"a"
"""Roles in the links: a patch names its chunk and its antecedents. A link is role, target, own key."""
_BATCH = 256

# Finding


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


def resolve(txn: Transaction, prefix: str, kind: str | None, tenant: str | None) -> list[Record]:
    """Records whose id begins with a hex prefix; see `Store.resolve`."""
    text = prefix.lower()
    if not is_prefix(text):
        return []
    whole = bytes.fromhex(text[: len(text) // 2 * 2])
    headers = ((key, header) for key, header in txn.scan("records", whole) if key.hex().startswith(text))
    return list(_readable(headers, kind, tenant))


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
        yield from _readable(batch, kind, tenant)
        if len(batch) < _BATCH:
            return
        start = batch[-1][0] + b"\0"


def linked(txn: Transaction, role: bytes, target: bytes, tenant: str | None) -> list[Record]:
    """Patches that name a record as their chunk (`CHUNK`) or as an antecedent (`ANTECEDENT`)."""
    keys = [link[17:] for link in txn.keys("links", role + target)]
    headers = ((key, header) for key in keys if (header := txn.get("records", key)) is not None)
    return list(_readable(headers, "patch", tenant))


def _readable(
    headers: Iterable[tuple[bytes, bytes | memoryview]], kind: str | None, tenant: str | None
) -> Iterator[Record]:
    """The records of a kind and tenant; one that cannot be read is skipped with a warning."""
    for key, header in headers:
        try:
            record = decode_header(key, header)
        except UNREADABLE as error:
            damaged = isinstance(error, DamagedError)
            category = DamagedRecordWarning if damaged else NewerRecordWarning
            warnings.warn(f"{error}; skipped", category, stacklevel=3)
            continue
        if kind in (None, record.kind) and tenant in (None, record.tenant):
            yield record


# Reading. What needs numpy is imported here, so that a listing does not load it.


def fetch(txn: Transaction, record: Record, choose: Callable[[Record], Iterable[TensorInfo]]) -> Fetched:
    """Copy the stored bytes of tensors that ``choose`` names in the record's present writing.

    Raises
    ------
    MissingRecordError, DamagedError
        As `current`, or if a segment is absent or not the one asked for.
    """
    from kamera_store.format.payload import Fetched, fetch

    now = current(txn, record)
    return Fetched(now, fetch(now, choose(now), _segment_reader(txn, now.key)))


def require_sound(txn: Transaction, record: Record) -> None:
    """Check every stored byte of a record's payload; raises DamagedError (`payload.require_sound`)."""
    from kamera_store.format import payload

    num_found = sum(1 for _ in txn.keys("segments", record.key))
    payload.require_sound(record, _segment_reader(txn, record.key), num_found)


def _segment_reader(txn: Transaction, key: bytes) -> Callable[[int], memoryview | None]:
    return lambda index: txn.get("segments", segment_key(key, index))


# Writing and removal


def put_record(
    txn: Transaction, record: Record, header: bytes, segments: Iterable[bytes | bytearray], usage: Usage
) -> None:
    """Write header, segments, row and links of a record that is not there."""
    txn.put("records", record.key, header)
    for index, value in enumerate(segments):
        txn.put("segments", segment_key(record.key, index), value)
    put_row(txn, usage, record)


def put_row(txn: Transaction, usage: Usage, record: Record) -> None:
    """Write the row and the links of a record."""
    ledger.put(txn, usage)
    for link in links_of(record):
        txn.put("links", link, b"")


def remove(txn: Transaction, key: bytes) -> bool:
    """Delete a record, readable or not, with all that belongs to it; whether anything was there."""
    links = None
    with contextlib.suppress(*UNREADABLE):
        record = under(txn, key)
        links = None if record is None else list(links_of(record))
    if links is None:
        links = list(links_from(txn, key))
    segments = list(txn.keys("segments", key))
    for segment in segments:
        txn.delete("segments", segment)
    for link in links:
        txn.delete("links", link)
    row = txn.delete("ledger", key)
    return txn.delete("records", key) or row or bool(segments)


def links_of(record: Record) -> Iterator[bytes]:
    """Keys of the links that belong to a record."""
    chunk, antecedents = references(record)
    if chunk is not None:
        yield CHUNK + chunk + record.key
    for antecedent in antecedents:
        yield ANTECEDENT + antecedent + record.key


def links_from(txn: Transaction, key: bytes) -> Iterator[bytes]:
    """Keys of the links that name a record as their patch; looks through all links."""
    return (link for link in txn.keys("links") if link[17:] == key)
