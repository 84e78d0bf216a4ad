"""What ``compile-patches`` may be asked for, and which job forms it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

from kamera_cli.errors import UsageError
from kamera_cli.operator.patch import FACTOR_DTYPES
from kamera_cli.operator.ranks import parse_budget
from kamera_cli.patches import exact, orbit, pair_forming, removal
from kamera_cli.patches.report import refused_lines
from kamera_cli.patches.request import PatchOptions
from kamera_cli.results import CompileResult

if TYPE_CHECKING:
    from kamera_cli.context import Context

Kind = Literal["exact", "orbit", "pair", "removal"]


def compile_patches(
    context: Context, chunks: Sequence[str] | None, window: str, kind: Kind, options: PatchOptions
) -> CompileResult:
    """Form patches of one kind, and say which of them ``--reuse auto`` will not use; see ``Engine.compile_patches``."""
    check_request(chunks, kind, options)
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


def check_request(chunks: Sequence[str] | None, kind: str, options: PatchOptions) -> None:
    """Refuse what cannot be formed, before any model is loaded.

    Raises
    ------
    UsageError
        A kind, energy, rank or dtype that there is not, or two options that exclude each other.
    """
    rank, energy, factor_dtype, budget = options.rank, options.energy, options.factor_dtype, options.budget
    kinds = get_args(Kind)
    if kind not in kinds:
        raise UsageError(f"--kind {kind} is not supported (supported: {', '.join(kinds)})")
    if not 0 < energy <= 1:
        raise UsageError(f"--energy {energy}: must be above 0 and at most 1")
    if rank != "auto" and (not isinstance(rank, int) or isinstance(rank, bool)):
        raise UsageError(f"--rank {rank} is neither 'auto' nor a whole number from 1 up")
    if factor_dtype not in FACTOR_DTYPES:
        raise UsageError(f"--dtype {factor_dtype} is not supported (supported: {', '.join(FACTOR_DTYPES)})")
    if budget is not None:
        _check_budget(budget, rank)
    if kind == "removal" and chunks is not None:
        raise UsageError("--kind removal goes by the window's own order; name no chunks")


def _check_budget(budget: str, rank: int | str) -> None:
    parse_budget(budget)
    if rank != "auto":
        raise UsageError(
            f"--budget {budget} and --rank {rank} exclude each other; a budget goes with --rank auto"
        )
