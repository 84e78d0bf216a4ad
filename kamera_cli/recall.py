"""Recall: chunks come back into a window from the store, each with a patch for what now stands before it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kamera_cli.arrangement import conditioning, require_record
from kamera_cli.patches.form import form_chains
from kamera_cli.patches.request import PatchOptions
from kamera_cli.results import RecallResult, WindowEntry
from kamera_cli.window import load_window, pick, recalled, update_window

if TYPE_CHECKING:
    from kamera_cli.context import Context


def recall(context: Context, chunks: Sequence[str], window: str, at: int | None) -> RecallResult:
    """Put evicted chunks back, each with a patch for what now stands before it; see ``Engine.recall``.

    The window changes only after every patch is stored.

    Raises
    ------
    NotFoundError
        No such window, or no such chunk among the evicted ones, or it is gone from the store.
    UsageError
        The window already holds the chunk, or the place lies outside the window.
    """
    started = time.perf_counter()
    tenant = context.tenant
    view = load_window(context.store, tenant, window)
    context.refuse_other_model(view)
    returning = pick((*view.evicted, *view.entries), chunks, f"window {window!r}")
    after = recalled(view, returning, at)
    back = {entry.chunk for entry in returning}
    wanted = conditioning(after, [entry for entry in after.entries if entry.chunk in back], given_order=False)
    for chunk in wanted:
        require_record(context.library, chunk.chain[-1], str(chunk.entry.number))
    calls = context.vision_calls
    numbers = {bytes.fromhex(entry.chunk): entry.number for entry in (*after.entries, *after.evicted)}
    formed, _ = form_chains(
        context,
        [chunk.chain for chunk in wanted if chunk.antecedents],
        PatchOptions(any_usable=True),
        numbers,
    )
    update_window(context.store, tenant, window, lambda current: recalled(current, returning, at))
    entries = {entry.chunk: entry for entry in after.entries}
    return RecallResult(
        window=after,
        recalled=tuple(entries[entry.chunk] for entry in returning),
        patched=tuple(patch.id for patch in formed),
        cascade=cascade_of(context, returning),
        vision_calls=context.vision_calls - calls,
        total_ms=1e3 * (time.perf_counter() - started),
    )


def cascade_of(context: Context, entries: Sequence[WindowEntry]) -> tuple[str, ...]:
    """Chunks (hex) with patches that name one of these as an antecedent."""
    tenant = context.tenant
    named = (context.store.patches_naming(bytes.fromhex(entry.chunk), tenant=tenant) for entry in entries)
    return tuple(sorted({patch.meta["chunk"] for patches in named for patch in patches}))
