"""One environment for each path and process: who has it, and what a fork and the end of the process do to it."""

from __future__ import annotations

import atexit
import os
import threading

from kamera_store.lmdb.environment import Environment

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
        env.pause()


def _after_fork_in_parent() -> None:
    for env in _open.values():
        env.resume()
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
