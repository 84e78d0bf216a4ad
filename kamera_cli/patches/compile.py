"""Which job forms patches of which kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kamera_cli.options import CompileOptions
from kamera_cli.patches import exact, orbit, pair_forming, removal
from kamera_cli.patches.report import refused_lines
from kamera_cli.patches.request import PatchOptions
from kamera_cli.results import CompileResult

if TYPE_CHECKING:
    from kamera_cli.context import Context


def compile_patches(context: Context, asked: CompileOptions) -> CompileResult:
    """Form patches of one kind, and say which of them ``--reuse auto`` will not use; see ``Engine.compile_patches``."""
    kind, chunks, window = asked.kind, asked.names, asked.window
    options = PatchOptions(**vars(asked), learn=True)
    if kind == "removal":
        result = removal.remove(context, window, options)
    elif kind == "pair":
        result = pair_forming.compile_pairs(context, chunks, window, options)
    elif kind == "orbit":
        result = orbit.compile_orbit(context, chunks, window, options)
    else:
        result = exact.compile_window(context, chunks, window, options)
    for line in refused_lines(result):
        context.warn(line)
    return result
