"""``kamera bench``: suites that measure the method, and one report over all of them. Importing it loads no torch."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kamera_cli.bench.results import BenchResult, SuiteResult
from kamera_cli.errors import UsageError
from kamera_cli.results import Progress
from kamera_cli.settings import Settings

__all__ = ["SUITES", "BenchOptions", "BenchResult", "run"]

SUITES = {
    "ttft": "time to first token: full re-encode, re-prefill, patched and blind, over context length",
    "fidelity": "accuracy, KL and bytes of re-prefill, blind reuse, patches of several ranks and other methods",
    "memory": "bytes of patches against accuracy and KL, formed and written as compile-patches does",
    "deficit": "what blind reuse loses: in which layers, over how many tokens, in how many directions",
    "orbit": "patches for every order of a set against one per order: accuracy, KL and bytes",
    "compose": "patches composed from pairs against exact ones, by number of antecedents",
    "slide": "what a window still knows of a chunk that has left it, and after it was recalled",
    "store": "write and read throughput and bytes of the store on this disk",
}
"""Name of each suite and what it measures; ``kamera_cli.bench.<name>.measure`` runs it."""


@dataclass(frozen=True)
class BenchOptions:
    """Options of ``kamera bench``.

    Attributes
    ----------
    out : Path
        Folder for JSON, pictures and the HTML report; created when it is not there.
    rivals : tuple of str
        Methods to run beside the patches; empty for the default, ``("none",)`` for none, ``("all",)`` for all.
    ranks : tuple of int
        Ranks to measure; empty for each suite's own.
    geometry : str or None
        Shape of the model in the timing suite; None is ``tiny``, the model of the settings as it is.
    episodes : int or None
        Of each suite that draws them; None for its own number.
    seed : int
        Of episodes, orders and random weights.
    """

    out: Path
    rivals: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    geometry: str | None = None
    episodes: int | None = None
    seed: int = 0


def run(
    suites: Sequence[str],
    settings: Settings,
    options: BenchOptions,
    on_progress: Callable[[Progress], None] | None = None,
) -> BenchResult:
    """Run suites and write JSON, pictures and the report into ``options.out``.

    The store of the settings is not touched: each suite works in a temporary one.

    Parameters
    ----------
    suites : sequence of str
        Names from `SUITES`.
    settings : Settings
        Model, device, dtype and attention.

    Raises
    ------
    UsageError
        Unknown suite, rival or geometry, a rank or seed out of range, or a folder that cannot be written.
    """
    unknown = [name for name in suites if name not in SUITES]
    if unknown:
        raise UsageError(f"no suite {unknown[0]!r} (suites: {', '.join(SUITES)})")
    _check(options)
    from kamera_cli.bench.environment import environment
    from kamera_cli.bench.report import write

    started = time.perf_counter()
    results: list[SuiteResult] = []
    for name in suites:
        suite = importlib.import_module(f"kamera_cli.bench.{name}")
        results.append(suite.measure(settings, options, on_progress or (lambda _step: None)))
    result = BenchResult(
        suites=tuple(results),
        environment=environment(),
        seed=options.seed,
        total_s=time.perf_counter() - started,
    )
    return write(result, options.out)


def _check(options: BenchOptions) -> None:
    from kamera_cli.bench.geometry import GEOMETRIES
    from kamera_cli.bench.rivals import RIVALS

    if options.geometry is not None and options.geometry not in GEOMETRIES:
        raise UsageError(f"--geometry {options.geometry!r}: there are {', '.join(GEOMETRIES)}")
    for name in options.rivals:
        if name not in (*RIVALS, "all", "none"):
            raise UsageError(f"--rivals {name!r}: there are {', '.join(RIVALS)}, all, none")
    if any(rank < 1 for rank in options.ranks):
        raise UsageError(f"--ranks {min(options.ranks)}: must be at least 1")
    if options.seed < 0:
        raise UsageError(f"--seed {options.seed}: must not be negative")
    if options.episodes is not None and options.episodes < 1:
        raise UsageError(f"--episodes {options.episodes}: must be at least 1")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {options.out}: {error.strerror or error}") from error
