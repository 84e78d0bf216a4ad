"""Evict: chunks leave a window, and with ``purge`` the store. Needs neither model nor torch."""

from __future__ import annotations

from collections.abc import Sequence

from kamera_cli.errors import UsageError
from kamera_cli.results import EvictResult, WindowEntry, WindowView
from kamera_cli.window import load_window, pick, purged, update_window, without
from kamera_store.kvstore import KVStore


def position(at: str | int) -> int | None:
    """Index before which recalled chunks are placed: None for ``end``, N - 1 for a 1-based N.

    Raises
    ------
    UsageError
        Neither ``end`` nor a positive number.
    """
    if at == "end":
        return None
    if not str(at).isdecimal() or int(at) < 1:
        raise UsageError(f"--at {at}: must be 'end' or a place from 1")
    return int(at) - 1


def evict(
    store: KVStore,
    tenant: str,
    name: str,
    chunks: Sequence[str] | None,
    *,
    oldest: int | None,
    purge: bool,
    dry_run: bool,
) -> EvictResult:
    """Take named chunks, or the ``oldest`` first ones, out of a window.

    Raises
    ------
    UsageError
        Neither or both of ``chunks`` and ``oldest`` were given, or the window holds fewer chunks.
    NotFoundError
        No such window or chunk.
    """
    if bool(chunks) == (oldest is not None):
        raise UsageError("name chunks to evict, or give --oldest N (one of the two)")
    window = load_window(store, tenant, name)
    leaving = _leaving(window, chunks, oldest, purge)
    if dry_run:
        return EvictResult(without(window, leaving), leaving, dry_run=True)
    change = purged if purge else without
    window = update_window(store, tenant, name, lambda current: change(current, leaving))
    freed, gone = 0, []
    for entry in leaving if purge else ():
        key = bytes.fromhex(entry.chunk)
        keys = [key, *(patch.key for patch in store.patches_of(key, tenant=tenant))]
        keys += [patch.key for patch in store.patches_naming(key, tenant=tenant)]
        freed += store.delete(dict.fromkeys(keys))
        gone.append(entry.chunk)
    return EvictResult(window, leaving, tuple(gone), freed)


def _leaving(
    window: WindowView, chunks: Sequence[str] | None, oldest: int | None, purge: bool
) -> tuple[WindowEntry, ...]:
    if chunks:
        entries = (*window.entries, *window.evicted) if purge else window.entries
        return pick(entries, chunks, f"window {window.name}")
    if oldest < 1 or oldest > len(window.entries):
        raise UsageError(f"--oldest {oldest}: window {window.name} has {len(window.entries)} chunks")
    return window.entries[:oldest]
