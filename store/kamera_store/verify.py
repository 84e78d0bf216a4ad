"""Looking after a store: check every byte, set damaged entries aside, mend what follows from the records."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from kamera_store import ledger, states, tables
from kamera_store.errors import (
    UNREADABLE,
    DamagedError,
    FormatVersionError,
    MissingRecordError,
    StoreDamagedError,
)
from kamera_store.format.header import close_row, decode_header, open_row
from kamera_store.format.records import Record
from kamera_store.lmdb.binding import Transaction
from kamera_store.lmdb.environment import Environment
from kamera_store.lmdb.files import walk_in_child

_KEPT_HEADER_BYTES = 64 << 10


@dataclass(frozen=True)
class Damage:
    """One damaged entry: its table, its key there, the failed check, and whether it was moved aside or mended."""

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
    num_newer : int
        How many of the records a newer program wrote: they are no damage, are not checked further, and stay.
    """

    num_records: int
    num_bytes: int
    damaged: tuple[Damage, ...]
    num_newer: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.damaged


def verify(
    env: Environment, *, on_progress: Callable[[int, int], None] | None = None, quarantine: bool = True
) -> VerifyReport:
    """Check every header, payload, ledger row, link and state.

    Parameters
    ----------
    env : Environment
    on_progress : callable, optional
        Called with (records done, records in all).
    quarantine : bool
        Move damaged records aside: their header and the reason are kept, their payload is deleted. Damaged
        ledger rows and links are made again from the records; damaged states are only reported.

    Raises
    ------
    StoreDamagedError
        If a walk through the data file, made in a child process first, does not come to its end; `salvage`
        saves what can be read.
    """
    failure = walk_in_child(env.folder, touch_values=True, writable=not env.read_only)
    if failure is not None:
        raise StoreDamagedError(env.folder, "data file", "a readable tree", failure)
    with env.read() as txn:
        keys = list(txn.keys("records"))
        owners = set(keys)
        orphans = sorted({key[:16] for key in txn.keys("segments")} - owners)
    damaged: list[Damage] = []
    newer: set[bytes] = set()
    num_bytes = 0
    for done, key in enumerate(keys):
        if on_progress is not None:
            on_progress(done, len(keys))
        try:
            num_bytes += _check_record(env, key)
        except FormatVersionError:
            newer.add(key)
        except MissingRecordError:
            continue
        except DamagedError as error:
            damaged.append(_set_aside(env, "records", error, key, quarantine))
    for key in orphans:
        orphaned = DamagedError(key, "segments", "a record that owns them", "none")
        damaged.append(_set_aside(env, "segments", orphaned, key, quarantine))
    if on_progress is not None:
        on_progress(len(keys), len(keys))
    damaged.extend(_check_rows(env, newer, quarantine))
    return VerifyReport(len(keys), num_bytes, tuple(damaged), len(newer))


def _check_record(env: Environment, key: bytes) -> int:
    """Payload bytes of a sound record; raises what is wrong with it."""
    with env.read() as txn:
        record = tables.under(txn, key)
        if record is None:
            raise MissingRecordError(key)
        tables.require_sound(txn, record)
    for info in record.tensors:
        _check_tensor(env, record, info.name, info.layer)
    return record.payload_bytes


def _check_tensor(env: Environment, record: Record, name: str, layer: int) -> None:
    with env.read() as txn:
        fetched = tables.fetch(txn, record, lambda now: [now.tensor(name, layer)])
    fetched.tensors()


def _set_aside(env: Environment, table: str, error: DamagedError, key: bytes, moving: bool) -> Damage:
    if moving:
        env.write(lambda txn: _move(txn, key, error))
    return _damage(table, key, error, moving)


def _damage(table: str, key: bytes, error: DamagedError, moved: bool) -> Damage:
    return Damage(table, key, error.what, str(error.expected), str(error.found), moved)


def _move(txn: Transaction, key: bytes, error: DamagedError) -> None:
    header = txn.get("records", key)
    note = {
        "what": error.what, "expected": str(error.expected), "found": str(error.found), "time_s": time.time(),
        "header": None if header is None else bytes(header[:_KEPT_HEADER_BYTES]).hex(),
    }  # fmt: skip
    tables.remove(txn, key)
    txn.put("quarantine", key, close_row("quarantine", key, json.dumps(note, sort_keys=True).encode()))


def _check_rows(env: Environment, newer: set[bytes], moving: bool) -> list[Damage]:
    """Ledger rows, links, states and the format table.

    Rows and links of a newer program's records cannot be made again here: they stay as they are.
    """
    found: list[Damage] = []
    with env.read() as txn:
        records = set(txn.keys("records"))
        ledger_rows: dict[bytes, bytes | None] = dict.fromkeys(records)
        ledger_rows.update((key, bytes(value)) for key, value in txn.scan("ledger"))
        wanted: set[bytes] = set()
        for key in records - newer:
            with contextlib.suppress(*UNREADABLE):
                record = tables.under(txn, key)
                wanted.update(() if record is None else tables.links_of(record))
        links = {link for link in txn.keys("links") if link[17:] not in newer}
        for table in ("state", "format", "quarantine"):
            for key, value in txn.scan(table):
                try:
                    if table == "state":
                        states.parse(key, value)
                    else:
                        open_row(table, key, value)
                except DamagedError as error:
                    found.append(_damage(table, key, error, False))
    for key, row in ledger_rows.items():
        wrong = _ledger_error(key, row, key in records)
        if wrong is not None:
            found.append(_damage("ledger", key, wrong, moving and key not in newer))
    for link in sorted(links ^ wanted):
        sides = ("no link", "a link") if link in links else ("a link", "no link")
        found.append(Damage("links", link, "link", *sides, moving))
    if moving and found:
        env.write(lambda txn: _mend(txn, [damage for damage in found if damage.quarantined]))
    return found


def _ledger_error(key: bytes, value: bytes | None, owned: bool) -> DamagedError | None:
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
        with contextlib.suppress(*UNREADABLE):
            record = decode_header(key, header)
            tables.put_row(txn, ledger.usage_of(record, len(header)), record)
