"""Compile patches for chunks of a window: what every kind needs first, and the job that forms each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kamera_cli.errors import NotFoundError
from kamera_cli.operator.patch import check_rank
from kamera_cli.options import CompileOptions
from kamera_cli.patches.form import form_chains
from kamera_cli.patches.orbit import compile_orbit
from kamera_cli.patches.pair_forming import compile_pairs
from kamera_cli.patches.removal import remove
from kamera_cli.patches.report import refused_lines
from kamera_cli.patches.request import PatchOptions
from kamera_cli.results import CompileResult, WindowEntry, WindowView
from kamera_cli.window import conditioning, identity_of, load_window, ordered

if TYPE_CHECKING:
    from kamera_cli.context import Context


def compile_patches(context: Context, asked: CompileOptions) -> CompileResult:
    """Form patches of one kind, and say which of them ``--reuse auto`` will not use; see ``Engine.compile_patches``.

    Raises
    ------
    NotFoundError
        No such window or chunk, or an antecedent was purged.
    UsageError
        Empty window, a rank out of range for one of the chunks, or a number of chunks that the kind does not take.
    """
    started = time.perf_counter()
    options, kind, window = PatchOptions(**vars(asked), learn=True), asked.kind, asked.window
    view = load_window(context.store, context.tenant, window)
    context.refuse_other_model(view)
    context = context.numbered(view)
    if kind == "removal":
        result = remove(context, view, options)
    else:
        entries = ordered(view, asked.names)
        for entry in entries:
            check_rank(options.rank, entry.num_tokens)
        links = tuple(map(identity_of, entries))
        if kind == "orbit":
            result = compile_orbit(context, links, window, options)
        elif kind == "pair":
            result = compile_pairs(context, links, window, options)
        else:
            result = _compile_exact(context, view, entries, options)
    result = replace(result, total_ms=1e3 * (time.perf_counter() - started))
    for line in refused_lines(result):
        context.warn(line)
    return result


def _compile_exact(
    context: Context, view: WindowView, entries: Sequence[WindowEntry], options: PatchOptions
) -> CompileResult:
    """Form what is missing for a window's own conditioning, or for a given order."""
    wanted = conditioning(view, entries, given_order=options.chunks is not None)
    for chunk in wanted:
        if chunk.antecedents is None:
            raise NotFoundError(
                f"chunk {chunk.entry.number} is conditioned on a purged chunk; give an order of chunks"
            )
    formed, costs = form_chains(context, [chunk.chain for chunk in wanted if chunk.antecedents], options)
    return costs.result(view.name, "exact", formed)
