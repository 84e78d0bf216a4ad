"""What a window becomes: chunks are appended, leave, are purged, come back, or are conditioned anew. All pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from kamera_cli.errors import UsageError
from kamera_cli.results import WindowEntry, WindowView


def appended(window: WindowView, new: Sequence[WindowEntry]) -> WindowView:
    """Add chunks at the end, each conditioned on what stands before it; a chunk that is there already stays.

    No number is given twice, not even that of a chunk that was purged.
    """
    entries = list(window.entries)
    evicted = list(window.evicted)
    number = window.next_number
    for entry in new:
        if any(entry.chunk == present.chunk for present in entries):
            continue
        known = next((old for old in evicted if old.chunk == entry.chunk), None)
        if known is not None:
            evicted.remove(known)
        before = tuple(present.chunk for present in entries)
        entries.append(replace(entry, number=known.number if known else number, conditioned_on=before))
        number += known is None
    return replace(window, entries=tuple(entries), evicted=tuple(evicted), next_number=number)


def without(window: WindowView, leaving: Sequence[WindowEntry]) -> WindowView:
    """Take chunks out. Survivors keep their conditioning (forward-lossless, not retroactive).

    A chunk that has left meanwhile is passed over.
    """
    gone = {entry.chunk for entry in leaving}
    kept = tuple(entry for entry in window.entries if entry.chunk not in gone)
    left = tuple(entry for entry in window.entries if entry.chunk in gone)
    return replace(window, entries=kept, evicted=(*window.evicted, *left))


def purged(window: WindowView, leaving: Sequence[WindowEntry]) -> WindowView:
    """Forget chunks altogether: they can not be recalled."""
    gone = {entry.chunk for entry in leaving}
    return replace(
        window,
        entries=tuple(entry for entry in window.entries if entry.chunk not in gone),
        evicted=tuple(entry for entry in window.evicted if entry.chunk not in gone),
    )


def recalled(window: WindowView, returning: Sequence[WindowEntry], at: int | None) -> WindowView:
    """Put evicted chunks back in the given order, before index ``at`` (None: at the end).

    Each is conditioned on what now stands before it; what stands after it keeps its conditioning.

    Raises
    ------
    UsageError
        The window already holds the chunk, or ``at`` lies outside the window.
    """
    entries = list(window.entries)
    where = len(entries) if at is None else at
    if not 0 <= where <= len(entries):
        raise UsageError(f"--at {where + 1}: window {window.name} has {len(entries)} chunks")
    for entry in returning:
        if any(entry.chunk == present.chunk for present in entries):
            raise UsageError(f"chunk {entry.number} ({entry.name}) is already in window {window.name}")
        before = tuple(present.chunk for present in entries[:where])
        entries.insert(where, replace(entry, conditioned_on=before))
        where += 1
    back = {entry.chunk for entry in returning}
    left = tuple(entry for entry in window.evicted if entry.chunk not in back)
    return replace(window, entries=tuple(entries), evicted=left)


def reconditioned(window: WindowView, chunks: Collection[str] | None = None) -> WindowView:
    """Some chunks (None: every one) conditioned on what stands before them now, as after a prefill of the window."""
    keys = [entry.chunk for entry in window.entries]
    return replace(
        window,
        entries=tuple(
            replace(entry, conditioned_on=tuple(keys[:index]))
            if chunks is None or entry.chunk in chunks
            else entry
            for index, entry in enumerate(window.entries)
        ),
    )


def forgetting(window: WindowView) -> WindowView:
    """Every chunk conditioned only on those of its antecedents that still stand before it."""
    before: set[str] = set()
    entries = []
    for entry in window.entries:
        kept = tuple(key for key in entry.conditioned_on if key in before)
        entries.append(replace(entry, conditioned_on=kept))
        before.add(entry.chunk)
    return replace(window, entries=tuple(entries))
