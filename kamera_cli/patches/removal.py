"""Removal: what survivors took in from chunks that have left their window is taken out of them again.

A survivor keeps its conditioning when an antecedent leaves (design §4), which is what a slide wants; models with
deepstack features may need to lose it (paper, "Slide"). The difference to what a prefill of the slid window would give
is formed against canonical KV and takes the place of the old patch, instead of standing on top of it: one patch is read
where there would be two, and a survivor that now stands first needs none.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kamera_cli.library import require_record
from kamera_cli.model.generate import next_token_kl
from kamera_cli.operator.patch import check_rank
from kamera_cli.patches.form import form_chains
from kamera_cli.patches.measure import Part, probe_logits
from kamera_cli.patches.request import PatchOptions
from kamera_cli.results import CompileResult, WindowView
from kamera_cli.window import conditioning, forgetting, load_window, update_window

if TYPE_CHECKING:
    from kamera_cli.context import Context


def remove(context: Context, window: str, options: PatchOptions) -> CompileResult:
    """Patch every survivor for what still stands before it, and let the window condition it on that.

    The window changes only after every patch is stored.

    Returns
    -------
    CompileResult
        With the survivors' numbers, and the next-token KL to a prefill of the slid window with and without the removal.

    Raises
    ------
    NotFoundError
        No such window, or a chunk is gone from the store.
    UsageError
        A rank out of range for one of the survivors.
    """
    started = time.perf_counter()
    tenant = context.tenant
    view = load_window(context.store, tenant, window)
    context.refuse_other_model(view)
    after = forgetting(view)
    survivors = [new for new, old in zip(after.entries, view.entries, strict=True) if new != old]
    wanted = conditioning(after, survivors, given_order=False)
    for chunk in wanted:
        check_rank(options.rank, chunk.entry.num_tokens)
    numbers = {bytes.fromhex(entry.chunk): entry.number for entry in (*view.entries, *view.evicted)}
    chains = [chunk.chain for chunk in wanted if chunk.antecedents]
    formed, costs = form_chains(context, chains, options, numbers)
    kept, removed = _measure(context, (view, after), options.probe) if survivors else (None, None)
    update_window(context.store, tenant, window, forgetting)
    total_ms = 1e3 * (time.perf_counter() - started)
    return CompileResult(
        window, "removal", tuple(formed), costs.prefill_ms, total_ms,
        survivors=tuple(entry.number for entry in survivors), kl_kept=kept, kl_removed=removed,
        measure_ms=costs.measure_ms, form_ratio=costs.form_ratio, learn_ms=costs.learn_ms,
    )  # fmt: skip


def _measure(context: Context, views: tuple[WindowView, WindowView], probe: str) -> list[float | None]:
    """Next-token KL of each view's conditioning to a prefill of its chunks; None where a patch was never formed."""
    runner, library = context.runner, context.library
    chunks = conditioning(views[0], views[0].entries, given_order=True)
    records = [require_record(library, chunk.chain[-1], str(chunk.entry.number)) for chunk in chunks]
    segments = [library.segment(record) for record in records]
    canonical = [library.layers(record) for record in records]
    prefilled = runner.prefill_captured([runner.preamble, *segments])
    ids = runner.question_ids(probe)
    exact = [Part(runner.preamble, prefilled[0])]
    reference = probe_logits(runner, exact + list(map(Part, segments, prefilled[1:])), ids)
    found: list[float | None] = []
    for view in views:
        parts = list(exact)
        for chunk, segment, layers in zip(
            conditioning(view, view.entries, given_order=False), segments, canonical, strict=True
        ):
            patch = None
            if chunk.antecedents:
                patch = library.find_patch(chunk.chain[-1], chunk.antecedents, "exact")
            if patch is None and chunk.antecedents != ():
                break
            parts.append(Part(segment, layers, None if patch is None else library.patch_layers(patch)))
        whole = len(parts) == len(segments) + 1
        found.append(next_token_kl(reference, probe_logits(runner, parts, ids)) if whole else None)
    return found
