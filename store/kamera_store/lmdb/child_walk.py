"""Look at a data file from a process that may die of it, so that this one does not."""

from __future__ import annotations

import sys

_TIMEOUT_S = 300
_START = "import sys; sys.path[:] = {path!r}; from kamera_store.{module} import {name}; {name}(*{rest!r})"


def child_command(module: str, name: str, *arguments: object) -> list[str]:
    """Command line of a process that calls one function of this package, with this process's import path."""
    code = _START.format(path=sys.path, module=module, name=name, rest=arguments)
    return [sys.executable, "-I", "-S", "-c", code]


def probe(folder: str, touch_values: bool, writable: bool) -> str | None:
    """Walk all tables of a store in a child process.

    Parameters
    ----------
    folder : str
        The store.
    touch_values : bool
        Also touch the end of every value, which a cut file does not survive.
    writable : bool
        Also visit the list of free pages, which takes the write lock for a moment.

    Returns
    -------
    str or None
        None when the walk came to its end, otherwise what ended it.
    """
    # Only a store without a seal is probed, and other opens should not wait for this import.
    import signal
    import subprocess

    command = child_command("lmdb.binding", "walk", folder, touch_values, writable)
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"no end of the walk within {_TIMEOUT_S} s"
    if done.returncode < 0:
        return f"the walk ended by {signal.Signals(-done.returncode).name}"
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the walk ended with code {done.returncode}"
    return None
