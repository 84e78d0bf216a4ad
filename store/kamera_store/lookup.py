"""Finding records by identity, id, kind, tenant and reference; one that cannot be read is skipped with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from kamera_store import ledger
from kamera_store.errors import (
    DamagedError,
    DamagedRecordWarning,
    FormatVersionError,
    IdentityWarning,
    UnsupportedDtypeError,
)
from kamera_store.format.header import decode_header
from kamera_store.format.keys import Identity
from kamera_store.format.records import Record
from kamera_store.lmdb.environment import Environment
from kamera_store.lmdb.transaction import Transaction

_BATCH = 256
_UNREADABLE = (DamagedError, FormatVersionError, UnsupportedDtypeError)


def under(txn: Transaction, key: bytes) -> Record | None:
    """The record under a key, or None; raises what `decode_header` raises."""
    header = txn.get("records", key)
    return None if header is None else decode_header(key, header)


def is_same(record: Record, identity: Identity, tenant: str) -> bool:
    """Whether a record found under an identity's key is that identity, for that tenant; warns of other content."""
    if record.digest != identity.digest or record.kind != identity.kind:
        warnings.warn(
            f"entry {record.short_id} holds another content (SHA-256 {record.digest.hex()[:16]}, "
            f"asked for {identity.digest.hex()[:16]}); counted as a miss",
            IdentityWarning,
            stacklevel=4,
        )
        return False
    return record.tenant == tenant


def resolve(txn: Transaction, prefix: str, kind: str | None, tenant: str | None) -> list[Record]:
    """Records whose id begins with a hex prefix; see `KVStore.resolve`."""
    text = prefix.lower()
    if len(text) > 32 or any(character not in "0123456789abcdef" for character in text):
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
    """All sound records in id order, `_BATCH` headers to a transaction; see `KVStore.iterate`."""
    start = b""
    while True:
        batch = []
        with env.read() as txn:
            for key, header in txn.scan("records", start=start):
                batch.append((key, bytes(header)))
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
    except _UNREADABLE as error:
        warnings.warn(f"{error}; skipped", DamagedRecordWarning, stacklevel=3)
        return None
