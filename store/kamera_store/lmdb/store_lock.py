"""Who has a store open, and whether the last one left in order: a lock and a seal beside the data file."""

from __future__ import annotations

import fcntl
import os

from kamera_store.lmdb.folder_check import GATE_FILE, SEAL_FILE, DataFile


class Gate:
    """A shared advisory lock held while a process has the store open; exclusive for whoever needs that.

    Unlike a marker file it cannot outlive its process. The seal beside it says that the last user left in
    order.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._fd = os.open(os.path.join(folder, GATE_FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def try_alone(self) -> bool:
        """Take the exclusive lock if nobody else holds the gate. On failure the gate is not held at all."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def share(self) -> None:
        """Take, or fall back to, the shared lock; waits while another process is alone in the store."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def close(self) -> None:
        """Let go of the gate."""
        os.close(self._fd)

    def sealed(self, data: DataFile) -> bool:
        """Whether the last user left in order and nobody touched the data file since."""
        try:
            with open(os.path.join(self.folder, SEAL_FILE), encoding="ascii", errors="replace") as file:
                return file.read(100) == data.seal
        except OSError:
            return False

    def unseal(self) -> None:
        """Say that the store is in use."""
        try:
            os.unlink(os.path.join(self.folder, SEAL_FILE))
        except OSError:
            return

    def seal(self, data: DataFile) -> None:
        """Say that the last user left in order."""
        try:
            fd = os.open(os.path.join(self.folder, SEAL_FILE), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError:
            return
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(data.seal)
