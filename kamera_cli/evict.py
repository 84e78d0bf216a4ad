"""Evict: chunks leave a window, and with ``purge`` the store. Needs neither model nor torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kamera_cli.errors import RefusedError, UsageError
from kamera_cli.options import EvictOptions
from kamera_cli.results import EvictResult, WindowEntry, WindowView
from kamera_cli.window import list_windows, load_window, pick, refuse_what_left, update_window
from kamera_cli.window_changes import purged, without
from kamera_store.format.records import Record
from kamera_store.kvstore import KVStore

if TYPE_CHECKING:
    from kamera_cli.context import Context


def evict(context: Context, options: EvictOptions) -> EvictResult:
    """Take named chunks, or the ``oldest`` first ones, out of a window.

    Raises
    ------
    UsageError
        The window holds fewer chunks.
    NotFoundError
        No such window or chunk.
    """
    store, tenant, name, purge = context.store, context.tenant, options.window, options.purge
    window = load_window(store, tenant, name)
    leaving = _leaving(window, options)
    change = purged if purge else without
    if purge:
        _refuse_held_elsewhere(store, tenant, name, leaving)
    doomed = _records(store, tenant, leaving) if purge else {}
    patches = [record for record in doomed.values() if record.kind == "patch"]
    if options.dry_run:
        window, freed = change(window, leaving), sum(record.stored_bytes for record in doomed.values())
    else:
        window = update_window(store, tenant, name, lambda current: change(current, leaving))
        freed = store.delete(doomed) if doomed else 0
        context.drop_deleted()
    return EvictResult(
        window=window,
        evicted=leaving,
        purged=tuple(entry.chunk for entry in leaving if purge),
        freed_bytes=freed,
        dry_run=options.dry_run,
        purged_patches=tuple(record.id for record in patches),
        patch_bytes=sum(record.stored_bytes for record in patches),
    )


def _records(store: KVStore, tenant: str, leaving: Sequence[WindowEntry]) -> dict[bytes, Record]:
    """Chunks, their patches, and the patches that carry something of them."""
    found: dict[bytes, Record] = {}
    for entry in leaving:
        key = bytes.fromhex(entry.chunk)
        chunk = store.get(key)
        linked = (*store.patches_of(key, tenant=tenant), *store.patches_naming(key, tenant=tenant))
        found |= {record.key: record for record in (chunk, *linked) if record is not None}
    return found


def _refuse_held_elsewhere(store: KVStore, tenant: str, name: str, leaving: Sequence[WindowEntry]) -> None:
    """A purge must not take a chunk from under another window."""
    gone = {entry.chunk for entry in leaving}
    for other in list_windows(store, tenant):
        held = [entry for entry in other.entries if entry.chunk in gone]
        if held and other.name != name:
            raise RefusedError(f"chunk {held[0].name} is also in window {other.name!r}; evict it there first")


def _leaving(window: WindowView, options: EvictOptions) -> tuple[WindowEntry, ...]:
    names, oldest = options.names, options.oldest
    if names:
        entries = (*window.entries, *window.evicted) if options.purge else window.entries
        if not options.purge:
            refuse_what_left(window, names, "it can be recalled, or deleted with --purge")
        return pick(entries, names, f"window {window.name}")
    assert oldest is not None, "EvictOptions asks for chunks or for the oldest"
    if oldest > len(window.entries):
        raise UsageError(f"--oldest {oldest}: window {window.name} has {len(window.entries)} chunks")
    return window.entries[:oldest]
