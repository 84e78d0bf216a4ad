"""Locks of a store: between the threads of a process while the map changes, and between processes."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kamera_store.lmdb.files import STORE_LOCK_FILE


class MapLatch:
    """Many transactions of a process hold it at once; whoever changes the memory map holds it alone."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._changing = False
        self._own = threading.local()

    def acquire_shared(self) -> None:
        """Begin a transaction; waits while somebody changes the map, unless this thread is inside already."""
        depth = getattr(self._own, "depth", 0)
        if depth == 0:
            with self._condition:
                while self._changing:
                    self._condition.wait()
                self._inside += 1
        self._own.depth = depth + 1

    def release_shared(self) -> None:
        """End the transaction."""
        self._own.depth -= 1
        if self._own.depth == 0:
            with self._condition:
                self._inside -= 1
                if self._changing:
                    self._condition.notify_all()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Both, around a block."""
        self.acquire_shared()
        try:
            yield
        finally:
            self.release_shared()

    def acquire_alone(self) -> None:
        """Let nobody in and wait until all are out, except this thread itself."""
        own = 1 if getattr(self._own, "depth", 0) else 0
        with self._condition:
            while self._changing:
                self._condition.wait()
            self._changing = True
            while self._inside > own:
                self._condition.wait()

    def release_alone(self) -> None:
        """End what `acquire_alone` began."""
        with self._condition:
            self._changing = False
            self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else is inside during the block."""
        assert not getattr(self._own, "depth", 0), "the map cannot be changed from inside a transaction"
        self.acquire_alone()
        try:
            yield
        finally:
            self.release_alone()


class StoreLock:
    """A shared advisory lock held while a process has the store open; exclusive for whoever needs that.

    Unlike a marker file it cannot outlive its process.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._fd = os.open(
            os.path.join(folder, STORE_LOCK_FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )

    def try_alone(self) -> bool:
        """Take the exclusive lock if nobody else holds the lock. On failure it is not held at all."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def share(self) -> None:
        """Take, or fall back to, the shared lock; waits while another process is alone in the store."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def close(self) -> None:
        """Let go of the lock."""
        os.close(self._fd)
