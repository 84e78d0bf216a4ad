"""One store as this process has it open: its map, its transactions, and how the map grows. `sharing` hands it out."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kamera_store.errors import ReadOnlyError, StoreBusyError, StoreRefusedError
from kamera_store.lmdb import binding, opening
from kamera_store.lmdb import folder_check as guard
from kamera_store.lmdb.map_latch import Turnstile
from kamera_store.lmdb.store_lock import Gate
from kamera_store.lmdb.transaction import Transaction

T = TypeVar("T")

_abandoned: list[object] = []
"""What a forked child inherited: kept, because letting go of it would close the parent's."""


class Environment:
    """One LMDB environment, shared by all stores that this process opens on one path.

    Get one with `sharing.acquire` and give it back with `sharing.release`.

    Attributes
    ----------
    folder : str
        Real path of the store.
    read_only : bool
        Whether no write may begin.
    users : int
        How many in this process have it; with none it is closed for good.
    """

    def __init__(self, folder: str, read_only: bool, map_bytes: int | None) -> None:
        self.folder, self.read_only = folder, read_only
        self.users = 0
        self._map_bytes = map_bytes
        self._turnstile = Turnstile()
        self._opening = threading.Lock()
        self._env: binding.Handle | None = None
        self._tables: dict[str, object] = {}
        self._gate: Gate | None = None
        self._inherited: binding.Handle | None = None

    @classmethod
    def unchecked(cls, folder: str) -> Environment:
        """An environment for reading what is left of a damaged store, without any check before it.

        Made for a process that may die from it. It is not shared; end the process to close it.
        """
        env = cls(folder, True, None)
        env.map()
        return env

    # Opening and closing

    def open(self, create: bool) -> None:
        """Check the folder and its data file, and map it.

        Raises
        ------
        NotAStoreError, StoreRefusedError, StoreDamagedError, FormatVersionError
            As the folder and its data file deserve.
        """
        self._gate = opening.gate_of(self.folder, create=create, read_only=self.read_only)
        try:
            alone = self._gate is not None and self._gate.try_alone()
            if self._gate is not None and not alone:
                self._gate.share()
            data = opening.checked_data_file(self.folder, self._gate if alone else None, self.read_only)
            if alone:
                opening.remove_scratch(self.folder)
                self._gate.unseal()
            self._map(data)
            if alone:
                self._gate.share()
        except BaseException:
            self._drop_handles()
            raise

    def reopen_writable(self, create: bool) -> None:
        """Let writes begin from now on; errors as in `open`."""
        with self._turnstile.alone():
            self.close()
            self.read_only = False
            self.open(create)

    def close_for_good(self) -> None:
        """`close`, once the transactions of all threads ended."""
        with self._turnstile.alone():
            self.close()

    def close(self) -> None:
        """Unmap the data file; the last process to do so seals it."""
        if self._env is None:
            return
        self.unmap()
        if self._gate is not None and self._gate.try_alone():
            opening.seal(self.folder, self._gate)
        self._drop_handles()

    def map(self) -> None:
        """Map the data file as it is now."""
        self._map(guard.read_data_file(self.folder))

    def _map(self, data: guard.DataFile | None) -> None:
        self._map_bytes = opening.map_bytes_for(data, self._map_bytes)
        inherited, self._inherited = self._inherited, None
        self._env = binding.open_handle(
            self.folder, map_bytes=self._map_bytes, read_only=self.read_only, inherited=inherited
        )
        self._tables = binding.open_tables(
            self._env, self.folder, fresh=data is None, read_only=self.read_only
        )

    def unmap(self) -> None:
        """Close the map alone; the gate stays held."""
        self._env.close()
        self._env = None

    def _drop_handles(self) -> None:
        env, gate = self._env, self._gate
        self._env, self._gate, self._tables = None, None, {}
        if env is not None:
            env.close()
        if gate is not None:
            gate.close()

    def _handle(self) -> binding.Handle:
        env = self._env
        if env is None:
            if not self.users:
                raise StoreRefusedError(f"store {self.folder} is closed; open it again")
            with self._opening:
                if self._env is None:
                    self.open(create=False)
                env = self._env
        return env

    # Transactions

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
        self._require_writable()
        while True:
            try:
                with (
                    self._turnstile.shared(),
                    binding.translated(self.folder),
                    self._handle().begin(write=True, buffers=True) as raw,
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
    def alone(self) -> Iterator[binding.Handle]:
        """Nobody else, thread or process, has the store open during the block, which gets the bare handle.

        Raises
        ------
        StoreBusyError
            If another process has it open.
        """
        self._require_writable()
        with self._turnstile.alone():
            handle = self._handle()
            if not self._gate.try_alone():
                self._gate.share()
                raise StoreBusyError(
                    f"store {self.folder} is open in another process; compact needs it alone"
                )
            try:
                yield handle
            finally:
                if self._gate is not None:
                    self._gate.share()

    # Growth

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
        except binding.AnyError as error:
            # LMDB unmapped the old map before it failed to make the new one.
            self.unmap()
            self._map_bytes = old
            self.map()
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

    # Forks

    def pause(self) -> None:
        """Let no transaction begin, and wait for the running ones, until `resume`."""
        self._turnstile.shut()

    def resume(self) -> None:
        """End what `pause` began."""
        self._turnstile.reopen()

    def abandon(self) -> None:
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
            except binding.MapResizedError:
                env._turnstile.leave()
            except BaseException as error:
                env._turnstile.leave()
                with binding.translated(env.folder):
                    raise error
            env._adopt()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._raw.abort()
        self._env._turnstile.leave()
        if isinstance(error, binding.AnyError):
            with binding.translated(self._env.folder):
                raise error
