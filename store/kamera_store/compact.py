"""Giving freed pages back to the file system: a compact copy beside the data file, swapped in atomically."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from kamera_store.errors import NoRoomError
from kamera_store.lmdb import binding
from kamera_store.lmdb import folder_check as guard
from kamera_store.lmdb.environment import Environment
from kamera_store.lmdb.transaction import Transaction


@dataclass(frozen=True)
class CompactReport:
    """Length of the data file before and after, in bytes."""

    before_bytes: int
    after_bytes: int


def compact(env: Environment) -> CompactReport:
    """Write the store anew without its free pages and swap the copy in.

    A kill leaves the old file or the new one, and at most a scratch folder that the next user removes.

    Raises
    ------
    StoreBusyError
        If another process has the store open.
    NoRoomError
        If the disk has no room for the copy.
    ReadOnlyError
        If the store is open for reading only.
    """
    with env.alone() as handle:
        before = env.file_bytes()
        with handle.begin(buffers=True) as raw:
            needed = Transaction(raw, env._tables).used_bytes() + 64 * guard.BLOCK_BYTES
        free = shutil.disk_usage(env.folder).free
        if free < needed:
            raise NoRoomError(needed, free, "disk, for the compact copy")
        scratch = os.path.join(env.folder, f"{guard.SCRATCH_PREFIX}{os.getpid()}")
        os.mkdir(scratch, 0o700)
        mapped = True
        try:
            with binding.translated(env.folder):
                handle.copy(scratch, compact=True)
            copied = os.path.join(scratch, guard.DATA_FILE)
            os.chmod(copied, 0o600)
            guard.sync(copied)
            after = os.stat(copied).st_size
            env.unmap()
            mapped = False
            os.replace(copied, os.path.join(env.folder, guard.DATA_FILE))
            guard.sync(env.folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            if not mapped:
                env.map()
    return CompactReport(before, after)
