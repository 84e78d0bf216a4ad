"""The only file that imports LMDB: its errors in our words, opening, tables in a transaction, a walk through all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lmdb

from kamera_store.errors import (
    FormatVersionError,
    NoRoomError,
    NotAStoreError,
    ReadOnlyError,
    StoreDamagedError,
    StoreRefusedError,
)
from kamera_store.format.header import close_row, open_row
from kamera_store.lmdb.files import BLOCK_BYTES, DATA_FILE, DataFile

FORMAT_VERSION = 1
DEFAULT_MAP_BYTES = 1 << 30
MIN_MAP_BYTES = 1 << 20
_MAX_READERS = 1024
_FREE_LIST_BYTES = 16 << 20
_VERSION_KEY = b"version"

TABLES = ("format", "records", "segments", "ledger", "links", "state", "quarantine")

Handle = lmdb.Environment
RawTransaction = Any
"""An ``lmdb.Transaction`` whose buffers are memory views."""
Tables = dict[str, Any]
"""Handles of the tables by name."""
AnyError, MapFullError, MapResizedError = lmdb.Error, lmdb.MapFullError, lmdb.MapResizedError


@contextmanager
def translated(folder: str) -> Iterator[None]:
    """Turn LMDB's errors into ours; `MapFullError` and `MapResizedError`, which the caller repairs, pass unchanged."""
    try:
        yield
    except (lmdb.MapFullError, lmdb.MapResizedError):
        raise
    except lmdb.VersionMismatchError as error:
        raise FormatVersionError("unknown", "LMDB 0.9", f"data file in {folder}") from error
    except lmdb.ReadonlyError as error:
        raise ReadOnlyError(f"store {folder} is open for reading only") from error
    except (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError,
            lmdb.PageFullError, lmdb.CursorFullError, lmdb.IncompatibleError) as error:  # fmt: skip
        raise StoreDamagedError(folder, "database pages", "a readable tree", str(error)) from error
    except lmdb.PanicError as error:
        raise StoreRefusedError(
            f"store {folder} stopped: its last write broke off; close it, check the disk, open it again"
        ) from error
    except lmdb.MemoryError as error:
        raise StoreRefusedError(
            f"store {folder} cannot be mapped into memory ({error}); raise the address space limit "
            "(ulimit -v) or open it with a smaller map"
        ) from error
    except lmdb.ReadersFullError as error:
        raise StoreRefusedError(
            f"store {folder} has {_MAX_READERS} readers already; close some of them"
        ) from error
    except lmdb.Error as error:
        text, room = str(error), shutil.disk_usage(folder).free
        if isinstance(error, lmdb.DiskError) or any(
            os.strerror(code) in text for code in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        ):
            raise NoRoomError(BLOCK_BYTES, room, f"disk: {text}") from error
        if os.strerror(errno.EIO) in text:
            if "commit" in text:
                # LMDB's name for a write that the file system took only in part.
                raise NoRoomError(BLOCK_BYTES, room, f"disk full or failing: {text}") from error
            raise StoreDamagedError(folder, "reading", "no input/output error", text) from error
        raise StoreRefusedError(
            f"store {folder} cannot be opened ({text}); the file system must give locks and shared "
            "memory maps: set KAMERA_STORE or --store to a folder on a local disk"
        ) from error


class Transaction:
    """A view of the tables at one moment; memory views from it end with it."""

    __slots__ = ("_raw", "_tables", "id")

    def __init__(self, raw: RawTransaction, tables: Tables) -> None:
        self._raw, self._tables = raw, tables
        self.id: int = raw.id()

    def get(self, table: str, key: bytes) -> memoryview | None:
        """The value under a key, or None."""
        value: memoryview | None = self._raw.get(key, db=self._tables[table])
        return value

    def put(self, table: str, key: bytes, value: bytes | bytearray | memoryview) -> None:
        """Write a value, replacing any."""
        self._raw.put(key, value, db=self._tables[table])

    def delete(self, table: str, key: bytes) -> bool:
        """Delete a value; whether there was one."""
        return bool(self._raw.delete(key, db=self._tables[table]))

    def scan(
        self, table: str, prefix: bytes = b"", start: bytes | None = None
    ) -> Iterator[tuple[bytes, memoryview]]:
        """Keys and values in key order, from `start` or the prefix on, as long as keys have the prefix."""
        first = prefix if start is None else start
        return ((key, cursor.value()) for key, cursor in self._walk(table, prefix, first))

    def keys(self, table: str, prefix: bytes = b"") -> Iterator[bytes]:
        """Keys with a prefix in order, values untouched."""
        return (key for key, _ in self._walk(table, prefix, prefix))

    def _walk(self, table: str, prefix: bytes, first: bytes) -> Iterator[tuple[bytes, Any]]:
        """Keys with a prefix, from the first one on, and the cursor that stands at each."""
        with self._raw.cursor(db=self._tables[table]) as cursor:
            if not (cursor.set_range(first) if first else cursor.first()):
                return
            for view in cursor.iternext(values=False):
                key = bytes(view)
                if not key.startswith(prefix):
                    return
                yield key, cursor

    def count(self, table: str) -> int:
        """Number of keys in a table."""
        return int(self._raw.stat(self._tables[table])["entries"])

    def used_bytes(self) -> int:
        """Pages in use by all tables, in bytes, freed ones not counted."""
        pages, page_bytes = 0, 4096
        for table in self._tables.values():
            found = self._raw.stat(table)
            pages += found["branch_pages"] + found["leaf_pages"] + found["overflow_pages"]
            page_bytes = found["psize"]
        return pages * page_bytes


def open_handle(folder: str, *, map_bytes: int, read_only: bool, inherited: Handle | None) -> Handle:
    """Map a store's data file; slots that dead readers left are cleared.

    Parameters
    ----------
    map_bytes : int
        Address space to take.
    read_only : bool
        Whether no write may begin; nothing is made then.
    inherited : lmdb.Environment or None
        After a fork, the parent's handle on the same folder.

    Raises
    ------
    FormatVersionError, StoreDamagedError, StoreRefusedError
        As `translated` says.
    """
    options: dict[str, Any] = {
        "map_size": map_bytes, "max_dbs": len(TABLES) + 1, "max_readers": _MAX_READERS, "max_spare_txns": 0,
        "mode": 0o600, "readonly": read_only, "create": not read_only, "lock": True, "writemap": False,
    }  # fmt: skip
    with translated(folder):
        try:
            handle = lmdb.open(folder, **options)
        except lmdb.Error as error:
            if inherited is None or "already open" not in str(error):
                raise
            # After a fork the binding still counts the parent's environment. It is at rest and without readers:
            # closing it here leaves the parent's alone.
            inherited.close()
            handle = lmdb.open(folder, **options)
        handle.reader_check()
    return handle


def open_tables(handle: Handle, folder: str, *, fresh: bool, read_only: bool) -> Tables:
    """Handles of the tables by name; they are made where the data file is empty or ``fresh``.

    Raises
    ------
    NotAStoreError
        If the database is of something else, or empty and opened for reading only.
    FormatVersionError
        If another version of the format stands in it.
    """
    with translated(folder):
        with handle.begin() as raw:
            empty = fresh or raw.stat()["entries"] == 0
        if empty and read_only:
            raise NotAStoreError(folder, "an empty database")
        tables = _made_tables(handle) if empty else _found_tables(handle, folder)
        with handle.begin() as raw:
            _require_version(folder, raw.get(_VERSION_KEY, db=tables["format"]))
    return tables


def _found_tables(handle: Handle, folder: str) -> Tables:
    # Handles opened in a caller's read transaction do not outlive it, so each is opened by itself.
    try:
        return {name: handle.open_db(name.encode(), create=False) for name in TABLES}
    except lmdb.NotFoundError as error:
        raise NotAStoreError(folder, "a database of something else") from error


def _made_tables(handle: Handle) -> Tables:
    with handle.begin(write=True) as raw:
        tables = {name: handle.open_db(name.encode(), raw) for name in TABLES}
        if raw.get(_VERSION_KEY, db=tables["format"]) is None:
            row = close_row("format", _VERSION_KEY, str(FORMAT_VERSION).encode())
            raw.put(_VERSION_KEY, row, db=tables["format"])
    return tables


def _require_version(folder: str, value: bytes | None) -> None:
    if value is None:
        raise NotAStoreError(folder, "a database without a format version")
    version = open_row("format", _VERSION_KEY, value).decode("ascii", "replace")
    if version != str(FORMAT_VERSION):
        raise FormatVersionError(version, FORMAT_VERSION, f"store {folder}")


def map_bytes_for(data: DataFile | None, wanted: int | None) -> int:
    """Address space for a data file: what is wanted, 1 GiB by default, or the file and a quarter more."""
    file_bytes = 0 if data is None else max(data.file_bytes, data.needed_bytes)
    headroom = max(file_bytes + file_bytes // 4, file_bytes + MIN_MAP_BYTES) if file_bytes else 0
    return _rounded(max(MIN_MAP_BYTES, wanted or DEFAULT_MAP_BYTES, headroom))


def _rounded(size: int) -> int:
    return -(-size // MIN_MAP_BYTES) * MIN_MAP_BYTES


def walk(folder: str, touch_values: bool, writable: bool) -> None:
    """Visit every key of every table and the list of free pages.

    Made for a process that may die from it: nothing protects against damaged pages here.

    Parameters
    ----------
    touch_values : bool
        Visit the last byte of every value too, which a cut file does not survive.
    writable : bool
        Whether the list of free pages can be visited: LMDB reads it only for a write, which is given up.

    Raises
    ------
    StoreDamagedError
        If a table has more or fewer keys than it says, or keys out of order.
    """
    file_bytes = os.stat(os.path.join(folder, DATA_FILE)).st_size
    size = _rounded(max(DEFAULT_MAP_BYTES, file_bytes + file_bytes // 4 + 4 * _FREE_LIST_BYTES))
    try:
        env = lmdb.open(folder, map_size=size, readonly=not writable, create=False, max_dbs=len(TABLES) + 1)
    except (lmdb.MemoryError, lmdb.LockError, lmdb.ReadersFullError):
        # No fault of the file, and the process that asked will meet it too and name it.
        return
    with env:
        with env.begin() as raw:
            names = list(raw.cursor().iternext(values=False))
        tables = [env.open_db(name, create=False) for name in names]
        for name, table in zip(names, tables, strict=True):
            num_keys, before = 0, b""
            with env.begin(buffers=True) as reading:
                for view, value in reading.cursor(db=table):
                    key = bytes(view)
                    if touch_values:
                        bytes(value[-1:])
                    if key <= before:
                        raise StoreDamagedError(folder, f"order of table {name!r}", before.hex(), key.hex())
                    num_keys, before = num_keys + 1, key
                expected = reading.stat(table)["entries"]
            if num_keys != expected:
                raise StoreDamagedError(folder, f"keys of table {name!r}", expected, num_keys)
        if writable and tables:
            given_up = env.begin(write=True)
            given_up.put(b"\xff" * 32, bytes(_FREE_LIST_BYTES), db=tables[0])
            given_up.abort()
