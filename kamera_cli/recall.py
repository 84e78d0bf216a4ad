"""Recall: chunks come back into a window from the store, each with a patch for what now stands before it.

The cascade of a recalled chunk are the chunks with patches that name it as an antecedent. Those that took something in
from it, or from what stood where it stands now, keep that until they are repaired: conditioned on what now stands
before them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kamera_cli.library import require_record
from kamera_cli.options import RecallOptions
from kamera_cli.patches.form import form_chains
from kamera_cli.patches.request import PatchOptions
from kamera_cli.results import RecallResult, WindowEntry, WindowView
from kamera_cli.window import Chain, conditioning, load_window, pick, update_window
from kamera_cli.window_changes import recalled, reconditioned

if TYPE_CHECKING:
    from kamera_cli.context import Context


def recall(context: Context, options: RecallOptions) -> RecallResult:
    """Put evicted chunks back, each with a patch for what now stands before it; see ``Engine.recall``.

    The window changes only after every patch is stored. With ``options.repair``, a recall that is done already is taken
    as it is, so that a repair that was interrupted goes on.

    Raises
    ------
    NotFoundError
        No such window, or no such chunk among the evicted ones, or it is gone from the store.
    UsageError
        The window already holds the chunk, or the place lies outside the window.
    """
    started = time.perf_counter()
    view = load_window(context.store, context.tenant, options.window)
    context.refuse_other_model(view)
    returning = pick((*view.evicted, *view.entries), options.names or (), f"window {options.window!r}")
    calls = context.vision_calls
    patched: tuple[str, ...] = ()
    if not (options.repair and _stand_there(view, returning, options.index)):
        view, patched = _put_back(context, view, returning, options.index)
    back = {entry.chunk for entry in returning}
    result = RecallResult(
        window=view,
        recalled=tuple(entry for entry in view.entries if entry.chunk in back),
        patched=patched,
        cascade=_cascade_of(context, returning),
        vision_calls=context.vision_calls - calls,
        total_ms=0.0,
    )
    if options.repair:
        result = _repaired(context, result)
    return replace(result, total_ms=1e3 * (time.perf_counter() - started))


def _stand_there(view: WindowView, returning: tuple[WindowEntry, ...], at: int | None) -> bool:
    """Whether chunks stand already where they are asked for, in this order."""
    first = len(view.entries) - len(returning) if at is None else at
    return first >= 0 and view.entries[first : first + len(returning)] == returning


def _put_back(
    context: Context, view: WindowView, returning: Sequence[WindowEntry], at: int | None
) -> tuple[WindowView, tuple[str, ...]]:
    """The window with the chunks in it again, and the ids of their patches."""
    after = recalled(view, returning, at)
    back = {entry.chunk for entry in returning}
    wanted = conditioning(after, [entry for entry in after.entries if entry.chunk in back], given_order=False)
    for chunk in wanted:
        require_record(context.library, chunk.chain[-1], str(chunk.entry.number))
    patched = _form(context, after, [chunk.chain for chunk in wanted if chunk.antecedents])
    update_window(context.store, context.tenant, view.name, lambda current: recalled(current, returning, at))
    return after, patched


def _form(context: Context, view: WindowView, chains: Sequence[Chain]) -> tuple[str, ...]:
    """Ids of the patches of chains, which are formed where the store has none that serves."""
    formed, _ = form_chains(context.numbered(view), chains, PatchOptions(any_usable=True))
    return tuple(patch.id for patch in formed)


def _cascade_of(context: Context, entries: Sequence[WindowEntry]) -> tuple[str, ...]:
    """Chunks (hex) with patches that name one of these as an antecedent."""
    named = (
        context.store.patches_naming(bytes.fromhex(entry.chunk), tenant=context.tenant) for entry in entries
    )
    return tuple(sorted({patch.meta["chunk"] for patches in named for patch in patches}))


def _repaired(context: Context, result: RecallResult) -> RecallResult:
    """Form the patches of a recall's cascade for the window as it is now, the cheapest first.

    The window follows chunk by chunk, each after its patch is stored, so that an interrupted repair leaves what it did.

    Returns
    -------
    RecallResult
        With the numbers of the repaired chunks, in the order of repair, and the ids of their patches.
    """
    name = result.window.name
    back = {entry.chunk for entry in result.recalled}
    view = load_window(context.store, context.tenant, name)
    after = reconditioned(view, {entry.chunk for entry in view.entries} & set(result.cascade) - back)
    changed = [new for new, old in zip(after.entries, view.entries, strict=True) if new != old]
    tokens = {entry.chunk: entry.num_tokens for entry in (*view.entries, *view.evicted)}
    changed.sort(key=lambda entry: sum(tokens[key] for key in (*entry.conditioned_on, entry.chunk)))
    patches: list[str] = []
    for entry in changed:
        (wanted,) = conditioning(after, [entry], given_order=False)
        if wanted.antecedents:
            patches += _form(context, view, [wanted.chain])
        view = update_window(
            context.store, context.tenant, name, partial(reconditioned, chunks={entry.chunk})
        )
    return replace(
        result,
        window=view,
        repaired=tuple(entry.number for entry in changed),
        repaired_patches=tuple(patches),
    )
