"""Looking after a store: check every byte, set damaged entries aside, mend what follows from the records."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kamera_store import ledger, states
from kamera_store.errors import (
    DamagedError,
    FormatVersionError,
    MissingRecordError,
    StoreDamagedError,
    UnsupportedDtypeError,
)
from kamera_store.format import payload, rows
from kamera_store.format.header import decode_header
from kamera_store.lmdb import child_walk as probe
from kamera_store.lmdb.transaction import Transaction

if TYPE_CHECKING:
    from kamera_store.kvstore import KVStore

_KEPT_HEADER_BYTES = 64 << 10


@dataclass(frozen=True)
class Damage:
    """One damaged entry.

    Attributes
    ----------
    table : str
        Where it stands.
    key : bytes
        Its key there.
    what, expected, found : str
        The failed check.
    quarantined : bool
        Whether it was moved aside.
    """

    table: str
    key: bytes
    what: str
    expected: str
    found: str
    quarantined: bool


@dataclass(frozen=True)
class VerifyReport:
    """Result of a check of the whole store.

    Attributes
    ----------
    num_records, num_bytes : int
        How many records and payload bytes were checked.
    damaged : tuple of Damage
        What failed.
    """

    num_records: int
    num_bytes: int
    damaged: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.damaged


def verify(
    store: KVStore, *, on_progress: Callable[[int, int], None] | None = None, quarantine: bool = True
) -> VerifyReport:
    """Check every header, payload, ledger row, link and state.

    Parameters
    ----------
    store : KVStore
        The store; one opened for reading only is checked without moving anything.
    on_progress : callable, optional
        Called with (records done, records in all).
    quarantine : bool
        Move damaged records aside: their header and the reason are kept, their payload is deleted. Damaged
        ledger rows and links are made again from the records; damaged states are only reported.

    Returns
    -------
    VerifyReport

    Raises
    ------
    StoreDamagedError
        If a walk through the data file, made in a child process first, does not come to its end; `salvage`
        saves what can be read.
    """
    failure = probe.probe(store.path, touch_values=True, writable=not store.read_only)
    if failure is not None:
        raise StoreDamagedError(store.path, "data file", "a readable tree", failure)
    moving = quarantine and not store.read_only
    with store._env.read() as txn:
        keys = list(txn.keys("records"))
        owners = set(keys)
        orphans = sorted({key[:16] for key in txn.keys("segments")} - owners)
    damaged, num_bytes = [], 0
    for done, key in enumerate(keys):
        if on_progress is not None:
            on_progress(done, len(keys))
        checked, damage = _check_record(store, key)
        num_bytes += checked
        if damage is not None:
            damaged.append(_set_aside(store, "records", damage, key, moving))
    for key in orphans:
        damage = DamagedError(key, "segments", "a record that owns them", "none")
        damaged.append(_set_aside(store, "segments", damage, key, moving))
    if on_progress is not None:
        on_progress(len(keys), len(keys))
    damaged.extend(_check_rows(store, moving))
    return VerifyReport(len(keys), num_bytes, tuple(damaged))


def _check_record(store: KVStore, key: bytes) -> tuple[int, DamagedError | None]:
    try:
        with store._env.read() as txn:
            header = txn.get("records", key)
            if header is None:
                return 0, None
            record = decode_header(key, header)
            payload.require_sound(txn, record)
        for info in record.tensors:
            store.read(record, ((info.name, info.layer),))
        return record.payload_bytes, None
    except MissingRecordError:
        return 0, None
    except DamagedError as error:
        return 0, error
    except UnsupportedDtypeError as error:
        return 0, DamagedError(key, "dtype", "a dtype of the format", error.name)
    except FormatVersionError:
        return 0, None


def _set_aside(store: KVStore, table: str, error: DamagedError, key: bytes, moving: bool) -> Damage:
    if moving:
        store._write(lambda txn: _move(txn, key, error))
    return Damage(table, key, error.what, str(error.expected), str(error.found), moving)


def _move(txn: Transaction, key: bytes, error: DamagedError) -> None:
    header = txn.get("records", key)
    note = {
        "what": error.what, "expected": str(error.expected), "found": str(error.found), "time_s": time.time(),
        "header": None if header is None else bytes(header[:_KEPT_HEADER_BYTES]).hex(),
    }  # fmt: skip
    ledger.remove(txn, key)
    txn.put("quarantine", key, rows.close_row("quarantine", key, json.dumps(note, sort_keys=True).encode()))


def _check_rows(store: KVStore, moving: bool) -> list[Damage]:
    """Ledger rows, links, states and the format table."""
    found: list[Damage] = []
    with store._env.read() as txn:
        records = set(txn.keys("records"))
        ledger_rows = dict.fromkeys(records)
        for key, value in txn.scan("ledger"):
            ledger_rows[key] = bytes(value)
        wanted = set()
        for key in records:
            try:
                wanted.update(ledger._links(decode_header(key, txn.get("records", key))))
            except (DamagedError, FormatVersionError, UnsupportedDtypeError, ValueError):
                continue
        links = set(txn.keys("links"))
        for key, value in txn.scan("state"):
            try:
                states._parse(key, value)
            except DamagedError as error:
                found.append(Damage("state", key, error.what, str(error.expected), str(error.found), False))
        for table in ("format", "quarantine"):
            for key, value in txn.scan(table):
                try:
                    rows.open_row(table, key, value)
                except DamagedError as error:
                    found.append(Damage(table, key, error.what, str(error.expected), str(error.found), False))
    for key, value in ledger_rows.items():
        error = _ledger_error(key, value, key in records)
        if error is not None:
            found.append(Damage("ledger", key, error.what, str(error.expected), str(error.found), moving))
    for link in sorted(links ^ wanted):
        sides = ("no link", "a link") if link in links else ("a link", "no link")
        found.append(Damage("links", link, "link", *sides, moving))
    if moving and found:
        store._write(lambda txn: _mend(txn, [damage for damage in found if damage.quarantined]))
    return found


def _ledger_error(key: bytes, value: bytes | None, owned: bool) -> DamagedError | None:
    if value is None:
        return DamagedError(key, "ledger row", "a row", "nothing")
    if not owned:
        return DamagedError(key, "ledger row", "a record", "none")
    try:
        ledger.decode_usage(key, value)
    except DamagedError as error:
        return error
    return None


def _mend(txn: Transaction, damages: list[Damage]) -> None:
    """Bring ledger and links in line with the records as they are in this transaction."""
    for damage in damages:
        key = damage.key if damage.table == "ledger" else damage.key[17:]
        header = txn.get("records", key)
        if damage.table == "links":
            txn.delete("links", damage.key)
        else:
            txn.delete("ledger", key)
        if header is None:
            continue
        try:
            record = decode_header(key, header)
        except (DamagedError, FormatVersionError, UnsupportedDtypeError):
            continue
        ledger.add(txn, ledger.usage_of(record, len(header), record.created_s), record)
