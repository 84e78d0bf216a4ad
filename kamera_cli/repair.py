"""Repair after a recall: the window's chunks of its cascade are conditioned on what now stands before them.

The cascade of a recalled chunk are the chunks with patches that name it as an antecedent. Those that took something in
from it, or from what stood where it stands now, keep that until they are repaired.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kamera_cli.arrangement import conditioning
from kamera_cli.patches.form import form_chains
from kamera_cli.patches.request import PatchOptions
from kamera_cli.recall import cascade_of
from kamera_cli.results import RecallResult
from kamera_cli.window import load_window, pick, reconditioned, update_window

if TYPE_CHECKING:
    from kamera_cli.context import Context


def standing(context: Context, chunks: Sequence[str], window: str, at: int | None) -> RecallResult | None:
    """The result of a recall that is done already, so that an interrupted repair can go on; None where it is not.

    It is done when the chunks stand where they are asked for, in this order.
    """
    started = time.perf_counter()
    view = load_window(context.store, context.tenant, window)
    context.refuse_other_model(view)
    returning = pick((*view.evicted, *view.entries), chunks, f"window {window!r}")
    first = len(view.entries) - len(returning) if at is None else at
    if first < 0 or view.entries[first : first + len(returning)] != returning:
        return None
    return RecallResult(
        window=view,
        recalled=returning,
        patched=(),
        cascade=cascade_of(context, returning),
        vision_calls=0,
        total_ms=1e3 * (time.perf_counter() - started),
    )


def repair(context: Context, recalled: RecallResult) -> RecallResult:
    """Form the patches of a recall's cascade for the window as it is now, the cheapest first.

    The window follows chunk by chunk, each after its patch is stored, so that an interrupted repair leaves what it did.

    Returns
    -------
    RecallResult
        With the numbers of the repaired chunks, in the order of repair, and the ids of their patches.
    """
    started = time.perf_counter()
    tenant, name = context.tenant, recalled.window.name
    back = {entry.chunk for entry in recalled.recalled}
    view = load_window(context.store, tenant, name)
    named = {entry.chunk for entry in view.entries} & set(recalled.cascade) - back
    after = reconditioned(view, named)
    changed = [new for new, old in zip(after.entries, view.entries, strict=True) if new != old]
    tokens = {entry.chunk: entry.num_tokens for entry in (*view.entries, *view.evicted)}
    changed.sort(key=lambda entry: sum(tokens[key] for key in (*entry.conditioned_on, entry.chunk)))
    numbers = {bytes.fromhex(entry.chunk): entry.number for entry in (*view.entries, *view.evicted)}
    patches = []
    for entry in changed:
        (wanted,) = conditioning(after, [entry], given_order=False)
        if wanted.antecedents:
            formed, _ = form_chains(context, [wanted.chain], PatchOptions(any_usable=True), numbers)
            patches += [patch.id for patch in formed]
        view = update_window(
            context.store, tenant, name, lambda current, chunk=entry.chunk: reconditioned(current, {chunk})
        )
    return replace(
        recalled,
        window=view,
        repaired=tuple(entry.number for entry in changed),
        repaired_patches=tuple(patches),
        total_ms=recalled.total_ms + 1e3 * (time.perf_counter() - started),
    )
