"""Save what can be read of a damaged store into a new one; only child processes touch the damaged file."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kamera_store import ledger, tables
from kamera_store.errors import DamagedError, FormatVersionError, KameraStoreError, NotAStoreError
from kamera_store.format.header import decode_header, open_row
from kamera_store.kvstore import KVStore
from kamera_store.lmdb.binding import Transaction
from kamera_store.lmdb.environment import Environment
from kamera_store.lmdb.files import child_command

_MAX_DEATHS = 1000


@dataclass(frozen=True)
class SalvageReport:
    """Result of a rescue into the store at `path`.

    Attributes
    ----------
    num_records, num_states : int
        How many were saved.
    lost : tuple of str
        Ids of records that were named somewhere and could not be read whole, and names of such states.
    """

    path: str
    num_records: int
    num_states: int
    lost: tuple[str, ...]


def salvage(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> SalvageReport:
    """Copy every sound record and state of a damaged store into a new one. The old one is not changed.

    What a newer program wrote is copied as it stands, byte for byte.

    Parameters
    ----------
    source, target : path-like
        Folder of the damaged store, which no process may have open, and of the new one, where nothing may be.
    on_progress : callable, optional
        Called with (entries done, entries in all).

    Raises
    ------
    NotAStoreError
        If something stands at the target already.
    """
    source, target = os.path.realpath(source), os.path.realpath(target)
    if os.path.lexists(target):
        raise NotAStoreError(target, "something stands there already; a rescue needs a new folder")
    KVStore.open(target).close()
    records = {key[:16] for table in ("records", "ledger", "segments") for key in _list(source, table)}
    work = [f"records {key.hex()}" for key in sorted(records)]
    work += [f"state {key.hex()}" for key in sorted(_list(source, "state"))]
    outcomes = dict(_copy(source, target, work, on_progress))
    saved = [line.split()[0] for line in work if outcomes.get(line)]
    lost = tuple(_name(line) for line in work if not outcomes.get(line))
    return SalvageReport(target, saved.count("records"), saved.count("state"), lost)


def _name(line: str) -> str:
    table, key = line.split()
    return key if table == "records" else bytes.fromhex(key).replace(b"\0", b"/").decode(errors="replace")


def _list(source: str, table: str) -> set[bytes]:
    """Keys of one table, as many as a child could list."""
    command = child_command("rescue", "list_keys", source, table)
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    return {bytes.fromhex(line) for line in done.stdout.splitlines(keepends=True) if line.endswith("\n")}


def _copy(
    source: str, target: str, work: list[str], on_progress: Callable[[int, int], None] | None
) -> Iterator[tuple[str, bool]]:
    """Let children copy entries; one that dies takes only the entry it was at with it."""
    left = list(work)
    for _ in range(_MAX_DEATHS):
        if not left:
            return
        command = child_command("rescue", "copy_entries", source, target)
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        answers, _ = child.communicate("".join(f"{line}\n" for line in left))
        answered = [answer for answer in answers.splitlines() if answer in ("saved", "lost")]
        for line, answer in zip(left, answered, strict=False):
            yield line, answer == "saved"
        left = left[len(answered) :]
        if left and child.returncode:
            yield left.pop(0), False
        if on_progress is not None:
            on_progress(len(work) - len(left), len(work))


def list_keys(source: str, table: str) -> None:
    """Body of a child: write the keys of a table to stdout, one in a line, in hex."""
    env = Environment.unchecked(source)
    with env.read() as txn:
        for key in txn.keys(table):
            sys.stdout.write(key.hex() + "\n")
            sys.stdout.flush()


def copy_entries(source: str, target: str) -> None:
    """Body of a child: copy the entries named on stdin and say for each whether it was saved."""
    damaged = Environment.unchecked(source)
    with KVStore.open(target, create=False) as store:
        for line in sys.stdin:
            table, key = line.split()
            copy = _copy_record if table == "records" else _copy_state
            try:
                copy(damaged, store.environment, bytes.fromhex(key))
                answer = "saved"
            except KameraStoreError:
                answer = "lost"
            sys.stdout.write(answer + "\n")
            sys.stdout.flush()


def _copy_record(source: Environment, target: Environment, key: bytes) -> None:
    with source.read() as txn:
        header = bytes(txn.get("records", key) or b"")
        segments = [bytes(value) for _, value in txn.scan("segments", key)]
        try:
            record = decode_header(key, header)
        except FormatVersionError:
            _copy_as_it_stands(txn, target, key)
            return
        tables.require_sound(txn, record)
        try:
            usage = ledger.decode_usage(key, txn.get("ledger", key))
        except DamagedError:
            usage = ledger.usage_of(record, len(header))
    target.write(lambda txn: tables.put_record(txn, record, header, segments, usage))


def _copy_as_it_stands(source: Transaction, target: Environment, key: bytes) -> None:
    """Copy the rows of a record that only a newer program understands; a ledger row that is damaged stays behind."""
    rows = [("records", key, bytes(source.get("records", key) or b""))]
    rows += [("segments", name, bytes(value)) for name, value in source.scan("segments", key)]
    rows += [("links", link, b"") for link in tables.links_from(source, key)]
    row = source.get("ledger", key)
    with contextlib.suppress(DamagedError):
        if row is not None:
            open_row("ledger", key, row)
            rows.append(("ledger", key, bytes(row)))

    def action(txn: Transaction) -> None:
        for table, name, value in rows:
            txn.put(table, name, value)

    target.write(action)


def _copy_state(source: Environment, target: Environment, key: bytes) -> None:
    with source.read() as txn:
        value = bytes(txn.get("state", key) or b"")
    open_row("state", key, value)
    target.write(lambda txn: txn.put("state", key, value))
