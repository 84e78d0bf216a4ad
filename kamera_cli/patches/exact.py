"""Compile a window: the patches that its own conditioning, or a given order, still lacks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kamera_cli.errors import NotFoundError
from kamera_cli.operator.patch import check_rank
from kamera_cli.patches.form import form_chains
from kamera_cli.patches.request import PatchOptions
from kamera_cli.results import CompileResult
from kamera_cli.window import conditioning, load_window, ordered

if TYPE_CHECKING:
    from kamera_cli.context import Context


def compile_window(
    context: Context, chunks: Sequence[str] | None, window: str, options: PatchOptions
) -> CompileResult:
    """Form what is missing for a window's own conditioning, or for a given order; see ``Engine.compile_patches``.

    Raises
    ------
    NotFoundError
        No such window or chunk, or an antecedent was purged.
    UsageError
        Empty window, or a rank out of range for one of the chunks.
    """
    started = time.perf_counter()
    view = load_window(context.store, context.tenant, window)
    context.refuse_other_model(view)
    wanted = conditioning(view, ordered(view, chunks), given_order=chunks is not None)
    for chunk in wanted:
        check_rank(options.rank, chunk.entry.num_tokens)
        if chunk.antecedents is None:
            raise NotFoundError(
                f"chunk {chunk.entry.number} is conditioned on a purged chunk; give an order of chunks"
            )
    chains = [chunk.chain for chunk in wanted if chunk.antecedents]
    numbers = {bytes.fromhex(entry.chunk): entry.number for entry in (*view.entries, *view.evicted)}
    formed, costs = form_chains(context, chains, options, numbers)
    total_ms = 1e3 * (time.perf_counter() - started)
    return CompileResult(
        window, "exact", tuple(formed), costs.prefill_ms, total_ms,
        measure_ms=costs.measure_ms, form_ratio=costs.form_ratio, learn_ms=costs.learn_ms,
    )  # fmt: skip
