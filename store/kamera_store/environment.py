"""The only file that knows LMDB: one environment for each path and process, its transactions and errors."""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import lmdb

from . import guard, probe, rows
from .errors import (
    FormatVersionError,
    KameraStoreError,
    NoRoomError,
    NotAStoreError,
    ReadOnlyError,
    StoreBusyError,
    StoreDamagedError,
    StoreRefusedError,
)
from .gate import Gate
from .transaction import TABLES, Transaction
from .turnstile import Turnstile

T = TypeVar("T")

FORMAT_VERSION = 1
DEFAULT_MAP_BYTES = 1 << 30
_MIN_MAP_BYTES = 1 << 20
_MAX_READERS = 1024
_FREE_LIST_BYTES = 16 << 20
_VERSION_KEY = b"version"

_registry: dict[str, Environment] = {}
_registry_lock = threading.Lock()
_abandoned: list[object] = []


@contextmanager
def _translated(folder: str) -> Iterator[None]:
    """Turn LMDB's errors into ours; the two that the caller repairs pass unchanged."""
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
            raise NoRoomError(guard.BLOCK_BYTES, room, f"disk: {text}") from error
        if os.strerror(errno.EIO) in text:
            if "commit" in text:
                # LMDB's name for a write that the file system took only in part.
                raise NoRoomError(guard.BLOCK_BYTES, room, f"disk full or failing: {text}") from error
            raise StoreDamagedError(folder, "reading", "no input/output error", text) from error
        raise StoreRefusedError(
            f"store {folder} cannot be opened ({text}); the file system must give locks and shared "
            "memory maps: set KAMERA_STORE or --store to a folder on a local disk"
        ) from error


class Environment:
    """One LMDB environment, shared by all stores that this process opens on one path.

    Get one with `acquire` and give it back with `release`.
    """

    def __init__(self, folder: str, read_only: bool, map_bytes: int | None) -> None:
        self.folder, self.read_only = folder, read_only
        self._map_bytes = map_bytes
        self._users = 0
        self._turnstile = Turnstile()
        self._opening = threading.Lock()
        self._env: lmdb.Environment | None = None
        self._tables: dict[str, object] = {}
        self._gate: Gate | None = None
        self._inherited: lmdb.Environment | None = None

    @classmethod
    def acquire(
        cls, path: str | os.PathLike[str], *, create: bool, read_only: bool, map_bytes: int | None
    ) -> Environment:
        """The process's environment for a path, opened if it is not yet.

        Raises
        ------
        NotAStoreError, StoreRefusedError, StoreDamagedError, FormatVersionError
            As the folder and its data file deserve.
        """
        folder = os.path.realpath(os.path.expanduser(os.fspath(path)))
        with _registry_lock:
            env = _registry.get(folder)
            if env is None:
                env = cls(folder, read_only, map_bytes)
                env._open(create)
                _registry[folder] = env
            elif env.read_only and not read_only:
                env._reopen_writable(create)
            env._users += 1
            return env

    @classmethod
    def unchecked(cls, folder: str) -> Environment:
        """An environment for reading what is left of a damaged store, without any check before it.

        Made for a process that may die from it. It is in no registry; end the process to close it.
        """
        env = cls(folder, True, None)
        env._map(guard.read_data_file(folder))
        with _translated(folder):
            env._open_tables(False)
        return env

    def release(self) -> None:
        """Give the environment back; the last user closes it."""
        with _registry_lock:
            self._users -= 1
            if self._users == 0:
                _registry.pop(self.folder, None)
                with self._turnstile.alone():
                    self._close()

    def _open(self, create: bool) -> None:
        guard.prepare_folder(self.folder, create and not self.read_only)
        guard.require_local(self.folder)
        try:
            self._gate = Gate(self.folder)
        except OSError:
            if not self.read_only:
                raise StoreRefusedError(
                    f"store {self.folder} cannot be written to; open it for reading only"
                ) from None
        try:
            alone = self._gate is not None and self._gate.try_alone()
            if self._gate is not None and not alone:
                self._gate.share()
            data = self._checked_data_file(alone)
            if alone:
                _remove_scratch(self.folder)
                self._gate.unseal()
            self._map(data)
            with _translated(self.folder):
                self._open_tables(data is None)
            if alone:
                self._gate.share()
        except BaseException:
            self._drop_handles()
            raise

    def _checked_data_file(self, alone: bool) -> guard.DataFile | None:
        data = guard.read_data_file(self.folder)
        if data is None:
            if self.read_only:
                raise NotAStoreError(self.folder, "an empty data file")
            return None
        short = data.file_bytes < data.needed_bytes
        if short or (alone and not self._gate.sealed(data)):
            # Tail pages that no table uses may never have been written, so a short file alone proves nothing.
            failure = probe.probe(self.folder, touch_values=short, writable=not self.read_only)
            if failure is not None:
                expected, found = "a readable tree", failure
                if short:
                    expected, found = f"{data.needed_bytes} bytes", f"{data.file_bytes} bytes"
                raise StoreDamagedError(self.folder, "data file", expected, found)
        return data

    def _map(self, data: guard.DataFile | None) -> None:
        file_bytes = 0 if data is None else max(data.file_bytes, data.needed_bytes)
        wanted = max(_MIN_MAP_BYTES, self._map_bytes or DEFAULT_MAP_BYTES)
        headroom = max(file_bytes + file_bytes // 4, file_bytes + _MIN_MAP_BYTES) if file_bytes else 0
        self._map_bytes = _rounded(max(wanted, headroom))
        with _translated(self.folder):
            self._env = self._lmdb()
            self._env.reader_check()

    def _lmdb(self) -> lmdb.Environment:
        options = {
            "map_size": self._map_bytes,
            "max_dbs": len(TABLES) + 1,
            "max_readers": _MAX_READERS,
            "max_spare_txns": 0,
            "mode": 0o600,
            "readonly": self.read_only,
            "create": not self.read_only,
            "lock": True,
            "writemap": False,
        }
        inherited, self._inherited = self._inherited, None
        try:
            return lmdb.open(self.folder, **options)
        except lmdb.Error as error:
            if inherited is None or "already open" not in str(error):
                raise
        # After a fork the binding still counts the parent's environment. It is at rest and without readers:
        # closing it here leaves the parent's alone.
        inherited.close()
        return lmdb.open(self.folder, **options)

    def _open_tables(self, fresh: bool) -> None:
        env = self._env
        with env.begin() as raw:
            empty = fresh or raw.stat()["entries"] == 0
        if not empty:
            # Handles opened in a caller's read transaction do not outlive it, so each is opened by itself.
            try:
                self._tables = {name: env.open_db(name.encode(), create=False) for name in TABLES}
            except lmdb.NotFoundError as error:
                raise NotAStoreError(self.folder, "a database of something else") from error
            with env.begin() as raw:
                _require_version(self.folder, Transaction(raw, self._tables))
            return
        if self.read_only:
            raise NotAStoreError(self.folder, "an empty database")
        with env.begin(write=True) as raw:
            self._tables = {name: env.open_db(name.encode(), raw) for name in TABLES}
            if raw.get(_VERSION_KEY, db=self._tables["format"]) is None:
                row = rows.close_row("format", _VERSION_KEY, str(FORMAT_VERSION).encode())
                raw.put(_VERSION_KEY, row, db=self._tables["format"])
        with env.begin() as raw:
            _require_version(self.folder, Transaction(raw, self._tables))

    def _reopen_writable(self, create: bool) -> None:
        with self._turnstile.alone():
            self._close()
            self.read_only = False
            self._open(create)

    def _drop_handles(self) -> None:
        env, gate = self._env, self._gate
        self._env, self._gate, self._tables = None, None, {}
        if env is not None:
            env.close()
        if gate is not None:
            gate.close()

    def _close(self) -> None:
        if self._env is None:
            return
        self._env.close()
        self._env = None
        if self._gate is not None and self._gate.try_alone():
            try:
                data = guard.read_data_file(self.folder)
            except KameraStoreError:
                data = None
            if data is not None:
                self._gate.seal(data)
        self._drop_handles()

    def _handle(self) -> lmdb.Environment:
        env = self._env
        if env is None:
            if not self._users:
                raise StoreRefusedError(f"store {self.folder} is closed; open it again")
            with self._opening:
                if self._env is None:
                    self._open(create=False)
                env = self._env
        return env

    def read(self) -> _Reading:
        """A short read transaction, as a context manager that gives a `Transaction`.

        Raises
        ------
        StoreDamagedError
            If LMDB finds its pages damaged.
        """
        return _Reading(self)

    def write(self, action: Callable[[Transaction], T]) -> T:
        """Run an action in one write transaction: all of it is committed or nothing.

        Parameters
        ----------
        action : callable
            Called with the transaction; called again from the start after the map had to grow.

        Returns
        -------
        object
            What the action returned.

        Raises
        ------
        ReadOnlyError
            If the environment is open for reading.
        NoRoomError
            If the disk is full.
        """
        if self.read_only:
            raise ReadOnlyError(f"store {self.folder} is open for reading only")
        while True:
            try:
                with (
                    self._turnstile.shared(),
                    _translated(self.folder),
                    self._handle().begin(write=True, buffers=True) as raw,
                ):
                    return action(Transaction(raw, self._tables))
            except lmdb.MapFullError:
                self._grow()
            except lmdb.MapResizedError:
                self._adopt()

    def _grow(self) -> None:
        with self._turnstile.alone():
            old = self._handle().info()["map_size"]
            self._resize(2 * old, old)

    def _adopt(self) -> None:
        """Take over the map size that another process set."""
        with self._turnstile.alone():
            old = self._handle().info()["map_size"]
            self._resize(0, old)

    def _resize(self, size: int, old: int) -> None:
        try:
            self._env.set_mapsize(size)
        except lmdb.Error as error:
            # LMDB unmapped the old map before it failed to make the new one.
            self._env.close()
            self._env, self._map_bytes = None, old
            self._map(guard.read_data_file(self.folder))
            with _translated(self.folder):
                self._open_tables(False)
            raise StoreRefusedError(
                f"store {self.folder} cannot map {size or 'more'} bytes of address space ({error}); "
                "raise the limit (ulimit -v)"
            ) from error
        self._map_bytes = self._env.info()["map_size"]

    def map_bytes(self) -> int:
        """Size of the memory map."""
        with self._turnstile.shared():
            return self._handle().info()["map_size"]

    def file_bytes(self) -> int:
        """Length of the data file."""
        return os.stat(os.path.join(self.folder, guard.DATA_FILE)).st_size

    def replace_by_compact_copy(self) -> tuple[int, int]:
        """Write a compact copy beside the data file and swap it in.

        A kill leaves the old file or the new one, and at most a scratch folder that the next user removes.

        Returns
        -------
        (int, int)
            Length of the data file before and after.

        Raises
        ------
        StoreBusyError
            If another process has the store open.
        NoRoomError
            If the disk has no room for the copy.
        """
        if self.read_only:
            raise ReadOnlyError(f"store {self.folder} is open for reading only")
        with self._turnstile.alone():
            self._handle()
            if not self._gate.try_alone():
                self._gate.share()
                raise StoreBusyError(
                    f"store {self.folder} is open in another process; compact needs it alone"
                )
            try:
                return self._swap()
            finally:
                if self._gate is not None:
                    self._gate.share()

    def _swap(self) -> tuple[int, int]:
        before = self.file_bytes()
        with self._env.begin(buffers=True) as raw:
            needed = Transaction(raw, self._tables).used_bytes() + 64 * guard.BLOCK_BYTES
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise NoRoomError(needed, free, "disk, for the compact copy")
        scratch = os.path.join(self.folder, f"{guard.SCRATCH_PREFIX}{os.getpid()}")
        os.mkdir(scratch, 0o700)
        try:
            with _translated(self.folder):
                self._env.copy(scratch, compact=True)
            copied = os.path.join(scratch, guard.DATA_FILE)
            os.chmod(copied, 0o600)
            guard.sync(copied)
            after = os.stat(copied).st_size
            self._env.close()
            self._env = None
            os.replace(copied, os.path.join(self.folder, guard.DATA_FILE))
            guard.sync(self.folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            if self._env is None:
                self._map(guard.read_data_file(self.folder))
                with _translated(self.folder):
                    self._open_tables(False)
        return before, after

    def _abandon(self) -> None:
        """After a fork: the parent's environment must be neither used nor closed here."""
        self._inherited = self._env
        _abandoned.append(self._env)
        if self._gate is not None:
            self._gate.close()
        self._env, self._gate, self._tables = None, None, {}
        self._turnstile, self._opening = Turnstile(), threading.Lock()


class _Reading:
    """One read transaction; a class and not a generator because reads of small layers feel the difference."""

    __slots__ = ("_env", "_raw")

    def __init__(self, env: Environment) -> None:
        self._env = env

    def __enter__(self) -> Transaction:
        env = self._env
        while True:
            env._turnstile.enter()
            try:
                self._raw = env._handle().begin(buffers=True)
                return Transaction(self._raw, env._tables)
            except lmdb.MapResizedError:
                env._turnstile.leave()
            except BaseException as error:
                env._turnstile.leave()
                with _translated(env.folder):
                    raise error
            env._adopt()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._raw.abort()
        self._env._turnstile.leave()
        if isinstance(error, lmdb.Error):
            with _translated(self._env.folder):
                raise error


def _rounded(size: int) -> int:
    return -(-size // _MIN_MAP_BYTES) * _MIN_MAP_BYTES


def _require_version(folder: str, txn: Transaction) -> None:
    value = txn.get("format", _VERSION_KEY)
    if value is None:
        raise NotAStoreError(folder, "a database without a format version")
    version = rows.open_row("format", _VERSION_KEY, value).decode("ascii", "replace")
    if version != str(FORMAT_VERSION):
        raise FormatVersionError(version, FORMAT_VERSION, f"store {folder}")


def _remove_scratch(folder: str) -> None:
    for name in os.listdir(folder):
        if name.startswith(guard.SCRATCH_PREFIX):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def walk(folder: str, touch_values: bool, writable: bool) -> None:
    """Visit every key of every table and the list of free pages.

    Made for a process that may die from it: nothing protects against damaged pages here.

    Parameters
    ----------
    folder : str
        The store.
    touch_values : bool
        Visit the last byte of every value too.
    writable : bool
        Whether the list of free pages can be visited: LMDB reads it only for a write, which is given up.

    Raises
    ------
    StoreDamagedError
        If a table has more or fewer keys than it says, or keys out of order.
    """
    file_bytes = os.stat(os.path.join(folder, guard.DATA_FILE)).st_size
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
            with env.begin(buffers=True) as raw:
                for key, value in raw.cursor(db=table):
                    key = bytes(key)
                    if touch_values:
                        bytes(value[-1:])
                    if key <= before:
                        raise StoreDamagedError(folder, f"order of table {name!r}", before.hex(), key.hex())
                    num_keys, before = num_keys + 1, key
                expected = raw.stat(table)["entries"]
            if num_keys != expected:
                raise StoreDamagedError(folder, f"keys of table {name!r}", expected, num_keys)
        if writable and tables:
            raw = env.begin(write=True)
            raw.put(b"\xff" * 32, bytes(_FREE_LIST_BYTES), db=tables[0])
            raw.abort()


def _before_fork() -> None:
    """Let the transactions of all threads end first: what the child inherits is then at rest."""
    _registry_lock.acquire()
    for env in _registry.values():
        env._turnstile.shut()


def _after_fork_in_parent() -> None:
    for env in _registry.values():
        env._turnstile.reopen()
    _registry_lock.release()


def _after_fork_in_child() -> None:
    global _registry_lock
    _registry_lock = threading.Lock()
    for env in _registry.values():
        env._abandon()


def _close_all() -> None:
    for env in list(_registry.values()):
        _registry.pop(env.folder, None)
        env._close()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
atexit.register(_close_all)
