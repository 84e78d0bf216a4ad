"""What a folder and its data file must pass before they are mapped, and how large the map begins."""

from __future__ import annotations

import os
import shutil

from kamera_store.errors import KameraStoreError, NotAStoreError, StoreDamagedError, StoreRefusedError
from kamera_store.lmdb import child_walk as probe
from kamera_store.lmdb import folder_check as guard
from kamera_store.lmdb.binding import DEFAULT_MAP_BYTES, MIN_MAP_BYTES, rounded
from kamera_store.lmdb.store_lock import Gate


def gate_of(folder: str, *, create: bool, read_only: bool) -> Gate | None:
    """The gate of a folder that is fit for a store, not yet held; None where only reading is possible and asked for.

    Raises
    ------
    NotAStoreError, StoreRefusedError
        If the folder or its file system is not fit, or cannot be written to though writing is asked for.
    """
    guard.prepare_folder(folder, create and not read_only)
    guard.require_local(folder)
    try:
        return Gate(folder)
    except OSError:
        if not read_only:
            raise StoreRefusedError(
                f"store {folder} cannot be written to; open it for reading only"
            ) from None
        return None


def checked_data_file(folder: str, gate: Gate | None, read_only: bool) -> guard.DataFile | None:
    """What the data file says of itself, after a walk through it where that is called for; None for an empty one.

    Parameters
    ----------
    folder : str
        The store.
    gate : Gate or None
        The gate, if this process is alone in the store: without a seal on it the file is walked through.
    read_only : bool
        Whether an empty file is an error.

    Raises
    ------
    NotAStoreError
        If the file is empty or absent and nothing may be made.
    StoreDamagedError
        If the walk does not come to its end.
    """
    data = guard.read_data_file(folder)
    if data is None:
        if read_only:
            raise NotAStoreError(folder, "an empty data file")
        return None
    short = data.file_bytes < data.needed_bytes
    if short or (gate is not None and not gate.sealed(data)):
        # Tail pages that no table uses may never have been written, so a short file alone proves nothing.
        failure = probe.probe(folder, touch_values=short, writable=not read_only)
        if failure is not None:
            expected, found = "a readable tree", failure
            if short:
                expected, found = f"{data.needed_bytes} bytes", f"{data.file_bytes} bytes"
            raise StoreDamagedError(folder, "data file", expected, found)
    return data


def map_bytes_for(data: guard.DataFile | None, wanted: int | None) -> int:
    """Address space for a data file: what is wanted, 1 GiB by default, or the file and a quarter more."""
    file_bytes = 0 if data is None else max(data.file_bytes, data.needed_bytes)
    headroom = max(file_bytes + file_bytes // 4, file_bytes + MIN_MAP_BYTES) if file_bytes else 0
    return rounded(max(MIN_MAP_BYTES, wanted or DEFAULT_MAP_BYTES, headroom))


def remove_scratch(folder: str) -> None:
    """Remove what a compaction left that was killed."""
    for name in os.listdir(folder):
        if name.startswith(guard.SCRATCH_PREFIX):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def seal(folder: str, gate: Gate) -> None:
    """Say on the gate that the data file was closed in order, so that the next open need not walk through it."""
    try:
        data = guard.read_data_file(folder)
    except KameraStoreError:
        return
    if data is not None:
        gate.seal(data)
