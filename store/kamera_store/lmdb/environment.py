"""One store as this process has it open: its map, its transactions, growth, and what a fork does to it."""

from __future__ import annotations

import atexit
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kamera_store.errors import NoRoomError, ReadOnlyError, StoreBusyError, StoreRefusedError
from kamera_store.lmdb import binding, files
from kamera_store.lmdb.binding import Transaction
from kamera_store.lmdb.files import DATA_FILE, CompactReport, DataFile
from kamera_store.lmdb.locks import MapLatch, StoreLock

T = TypeVar("T")

_abandoned: list[object] = []
"""What a forked child inherited: kept, because letting go of it would close the parent's."""


class Environment:
    """One LMDB environment, shared by all stores that this process opens on one path.

    Get one with `acquire` and give it back with `release`.

    Attributes
    ----------
    folder : str
        Real path of the store.
    read_only : bool
        Whether no write may begin.
    users : int
        How many stores of this process have it.
    """

    def __init__(self, folder: str, read_only: bool, map_bytes: int | None) -> None:
        self.folder, self.read_only = folder, read_only
        self.users = 0
        self._map_bytes = map_bytes
        self._latch = MapLatch()
        self._opening = threading.Lock()
        self._mapped: binding.Handle | None = None
        self._tables: binding.Tables = {}
        self._lock: StoreLock | None = None
        self._inherited: binding.Handle | None = None

    @classmethod
    def unchecked(cls, folder: str) -> Environment:
        """An environment for reading what is left of a damaged store, without any check before it.

        Made for a process that may die from it. It is not shared; end the process to close it.
        """
        env = cls(folder, True, None)
        env._map(files.read_data_file(folder))
        return env

    # Opening and closing

    def open(self, create: bool) -> None:
        """Check the folder and its data file, and map it; errors as in `acquire`."""
        files.prepare_folder(self.folder, create and not self.read_only)
        files.require_local(self.folder)
        lock = self._lock = self._new_lock()
        try:
            alone = lock is not None and lock.try_alone()
            if lock is not None and not alone:
                lock.share()
            data = files.check_data_file(self.folder, alone=alone, read_only=self.read_only)
            if alone:
                files.remove_scratch(self.folder)
                files.unseal(self.folder)
            self._map(data)
            if lock is not None and alone:
                lock.share()
        except BaseException:
            self._drop_handles()
            raise

    def _new_lock(self) -> StoreLock | None:
        """The lock of the folder, not yet held; None where only reading is possible and asked for."""
        try:
            return StoreLock(self.folder)
        except OSError:
            if not self.read_only:
                raise StoreRefusedError(
                    f"store {self.folder} cannot be written to; open it for reading only"
                ) from None
            return None

    def reopen_writable(self, create: bool) -> None:
        """Let writes begin from now on; errors as in `open`."""
        with self._latch.alone():
            self.close()
            self.read_only = False
            self.open(create)

    def close_for_good(self) -> None:
        """`close`, once the transactions of all threads ended."""
        with self._latch.alone():
            self.close()

    def close(self) -> None:
        """Unmap the data file; the last process to do so seals it."""
        if self._mapped is None:
            return
        self._unmap()
        if self._lock is not None and self._lock.try_alone():
            files.seal(self.folder)
        self._drop_handles()

    def _map(self, data: DataFile | None) -> None:
        self._map_bytes = binding.map_bytes_for(data, self._map_bytes)
        inherited, self._inherited = self._inherited, None
        self._mapped = binding.open_handle(
            self.folder, map_bytes=self._map_bytes, read_only=self.read_only, inherited=inherited
        )
        self._tables = binding.open_tables(
            self._mapped, self.folder, fresh=data is None, read_only=self.read_only
        )

    def _unmap(self) -> None:
        """Close the map alone; the lock stays held."""
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None

    def _drop_handles(self) -> None:
        lock, self._lock = self._lock, None
        self._unmap()
        self._tables = {}
        if lock is not None:
            lock.close()

    def handle(self) -> binding.Handle:
        """The open LMDB environment, opened anew after a fork; StoreRefusedError if the store is closed."""
        if self._mapped is None:
            if not self.users:
                raise StoreRefusedError(f"store {self.folder} is closed; open it again")
            with self._opening:
                if self._mapped is None:
                    self.open(create=False)
        assert self._mapped is not None, "an environment that was opened is mapped"
        return self._mapped

    # Transactions

    def read(self) -> _Reading:
        """A short read transaction, as a context manager; StoreDamagedError if LMDB finds its pages damaged."""
        return _Reading(self)

    def write(self, action: Callable[[Transaction], T]) -> T:
        """What an action returns that runs in one write transaction: all of it is committed or nothing.

        It runs again from its start after the map had to grow.

        Raises
        ------
        ReadOnlyError, NoRoomError
            If the environment is open for reading, or the disk is full.
        """
        self._require_writable()
        while True:
            try:
                with (
                    self._latch.shared(),
                    binding.translated(self.folder),
                    self.handle().begin(write=True, buffers=True) as raw,
                ):
                    return action(Transaction(raw, self._tables))
            except binding.MapFullError:
                self._grow()
            except binding.MapResizedError:
                self._adopt()

    def _require_writable(self) -> None:
        if self.read_only:
            raise ReadOnlyError(f"store {self.folder} is open for reading only")

    @contextmanager
    def _alone(self) -> Iterator[binding.Handle]:
        """Nobody else, thread or process, has the store open during the block, which gets the handle."""
        with self._latch.alone():
            handle, lock = self.handle(), self._lock
            assert lock is not None, "a store open for writing holds its lock"
            if not lock.try_alone():
                lock.share()
                raise StoreBusyError(
                    f"store {self.folder} is open in another process; compact needs it alone"
                )
            try:
                yield handle
            finally:
                if self._lock is not None:
                    lock.share()

    # Growing and shrinking

    def compact(self) -> CompactReport:
        """Write the data file anew without its free pages and swap the copy in.

        A kill leaves the old file or the new one, and at most a scratch folder that the next user removes.

        Raises
        ------
        StoreBusyError, NoRoomError, ReadOnlyError
            If another process has the store open, the disk has no room for the copy, or nothing may be written.
        """
        self._require_writable()
        with self.read() as txn:
            needed = txn.used_bytes() + 64 * files.BLOCK_BYTES
        with self._alone() as handle:
            try:
                with files.scratch_folder(self.folder) as scratch:
                    before, free = self.file_bytes(), shutil.disk_usage(self.folder).free
                    if free < needed:
                        raise NoRoomError(needed, free, "disk, for the compact copy")
                    with binding.translated(self.folder):
                        handle.copy(scratch, compact=True)
                    copied = os.path.join(scratch, DATA_FILE)
                    os.chmod(copied, 0o600)
                    files.sync(copied)
                    after = os.stat(copied).st_size
                    self._unmap()
                    os.replace(copied, os.path.join(self.folder, DATA_FILE))
                    files.sync(self.folder)
            finally:
                if self._mapped is None:
                    self._map(files.read_data_file(self.folder))
        return CompactReport(before, after)

    def _grow(self) -> None:
        with self._latch.alone():
            old = self.handle().info()["map_size"]
            self._resize(2 * old, old)

    def _adopt(self) -> None:
        """Take over the map size that another process set."""
        with self._latch.alone():
            old = self.handle().info()["map_size"]
            self._resize(0, old)

    def _resize(self, size: int, old: int) -> None:
        try:
            self.handle().set_mapsize(size)
        except binding.AnyError as error:
            # LMDB unmapped the old map before it failed to make the new one.
            self._unmap()
            self._map_bytes = old
            self._map(files.read_data_file(self.folder))
            raise StoreRefusedError(
                f"store {self.folder} cannot map {size or 'more'} bytes of address space ({error}); "
                "raise the limit (ulimit -v)"
            ) from error
        self._map_bytes = self.handle().info()["map_size"]

    def map_bytes(self) -> int:
        """Size of the memory map."""
        with self._latch.shared():
            return int(self.handle().info()["map_size"])

    def file_bytes(self) -> int:
        """Length of the data file."""
        return os.stat(os.path.join(self.folder, DATA_FILE)).st_size

    def abandon(self) -> None:
        """After a fork: the parent's environment must be neither used nor closed here."""
        self._inherited = self._mapped
        _abandoned.append(self._mapped)
        if self._lock is not None:
            self._lock.close()
        self._mapped, self._lock, self._tables = None, None, {}
        self._latch, self._opening = MapLatch(), threading.Lock()


class _Reading:
    """One read transaction; a class and not a generator because reads of small layers feel the difference."""

    __slots__ = ("_env", "_raw")

    def __init__(self, env: Environment) -> None:
        self._env = env

    def __enter__(self) -> Transaction:
        env = self._env
        while True:
            env._latch.acquire_shared()
            try:
                self._raw = env.handle().begin(buffers=True)
                return Transaction(self._raw, env._tables)
            except binding.MapResizedError:
                env._latch.release_shared()
            except BaseException as error:
                env._latch.release_shared()
                with binding.translated(env.folder):
                    raise error
            env._adopt()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._raw.abort()
        self._env._latch.release_shared()
        if isinstance(error, binding.AnyError):
            with binding.translated(self._env.folder):
                raise error


# One environment for each path and process

_open: dict[str, Environment] = {}
_lock = threading.Lock()


def acquire(
    path: str | os.PathLike[str], *, create: bool, read_only: bool, map_bytes: int | None
) -> Environment:
    """The process's environment for a path, opened if it is not yet.

    Raises
    ------
    NotAStoreError, StoreRefusedError, StoreDamagedError, FormatVersionError
        As the folder and its data file deserve.
    """
    folder = os.path.realpath(os.path.expanduser(os.fspath(path)))
    with _lock:
        env = _open.get(folder)
        if env is None:
            env = Environment(folder, read_only, map_bytes)
            env.open(create)
            _open[folder] = env
        elif env.read_only and not read_only:
            env.reopen_writable(create)
        env.users += 1
        return env


def release(env: Environment) -> None:
    """Give an environment back; the last user closes it."""
    with _lock:
        env.users -= 1
        if env.users == 0:
            _open.pop(env.folder, None)
            env.close_for_good()


def _before_fork() -> None:
    """Let the transactions of all threads end first: what the child inherits is then at rest."""
    _lock.acquire()
    for env in _open.values():
        env._latch.acquire_alone()


def _after_fork_in_parent() -> None:
    for env in _open.values():
        env._latch.release_alone()
    _lock.release()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for env in _open.values():
        env.abandon()


def _close_all() -> None:
    for env in list(_open.values()):
        _open.pop(env.folder, None)
        env.close()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
atexit.register(_close_all)
