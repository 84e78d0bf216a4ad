"""Removal: what survivors took in from chunks that have left their window is taken out of them again.

A survivor keeps its conditioning when an antecedent leaves, which is what a slide wants; models with deepstack features
may need to lose it (arXiv 2606.23581, "Slide"). The difference to what a prefill of the slid window would give is
formed against canonical KV and takes the place of the old patch, instead of standing on top of it: one patch is read
where there would be two, and a survivor that now stands first needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kamera_cli.model.generate import next_token_kl
from kamera_cli.operator.patch import check_rank
from kamera_cli.patches.chunk import read_chunks
from kamera_cli.patches.form import form_chains
from kamera_cli.patches.measure import Part, probe_logits
from kamera_cli.patches.request import PatchOptions
from kamera_cli.results import CompileResult, WindowView
from kamera_cli.window import conditioning, identity_of, update_window
from kamera_cli.window_changes import forgetting

if TYPE_CHECKING:
    from kamera_cli.context import Context


def remove(context: Context, view: WindowView, options: PatchOptions) -> CompileResult:
    """Patch every survivor for what still stands before it, and let the window condition it on that.

    The window changes only after every patch is stored.

    Returns
    -------
    CompileResult
        With the survivors' numbers, and the next-token KL to a prefill of the slid window with and without the removal.

    Raises
    ------
    NotFoundError
        A chunk is gone from the store.
    UsageError
        A rank out of range for one of the survivors.
    """
    after = forgetting(view)
    survivors = [new for new, old in zip(after.entries, view.entries, strict=True) if new != old]
    for entry in survivors:
        check_rank(options.rank, entry.num_tokens)
    wanted = conditioning(after, survivors, given_order=False)
    formed, costs = form_chains(context, [chunk.chain for chunk in wanted if chunk.antecedents], options)
    kept, removed = _measure(context, (view, after), options.probe) if survivors else (None, None)
    update_window(context.store, context.tenant, view.name, forgetting)
    return costs.result(
        view.name,
        "removal",
        formed,
        survivors=tuple(entry.number for entry in survivors),
        kl_kept=kept,
        kl_removed=removed,
    )


def _measure(context: Context, views: tuple[WindowView, WindowView], question: str) -> list[float | None]:
    """Next-token KL of each view's conditioning to a prefill of its chunks; None where a patch was never formed."""
    runner, library = context.runner, context.library
    held = read_chunks(context, map(identity_of, views[0].entries))
    segments = [chunk.segment for chunk in held.values()]
    prefilled = runner.prefill_captured([runner.preamble, *segments])
    first = Part(runner.preamble, prefilled[0])
    probe = runner.question_ids(question)
    reference = probe_logits(runner, [first, *map(Part, segments, prefilled[1:])], probe)
    found: list[float | None] = []
    for view in views:
        parts = [first]
        for chunk in conditioning(view, view.entries, given_order=False):
            link, patch = identity_of(chunk.entry), None
            if chunk.antecedents:
                patch = library.find_patch(link, chunk.antecedents, "exact")
            if patch is None and chunk.antecedents != ():
                break
            parts.append(Part.of(held[link], None if patch is None else library.patch_layers(patch)))
        whole = len(parts) == len(segments) + 1
        found.append(next_token_kl(reference, probe_logits(runner, parts, probe)) if whole else None)
    return found
