"""``kamera bench``: suites that measure the method, and one report over all of them.

Here stands what may be asked; importing it loads no torch. `kamera_cli.bench.runner.run` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kamera_cli.bench.geometry import GEOMETRIES
from kamera_cli.errors import UsageError

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


RIVALS = ("oracle", "cacheblend", "epic")
"""Names for ``--rivals``, see `kamera_cli.bench.rivals`."""


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

    Raises
    ------
    UsageError
        Unknown rival or geometry, or a rank, seed or number of episodes out of range.
    """

    out: Path
    rivals: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    geometry: str | None = None
    episodes: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.geometry is not None and self.geometry not in GEOMETRIES:
            raise UsageError(f"--geometry {self.geometry!r}: there are {', '.join(GEOMETRIES)}")
        for name in self.rivals:
            if name not in (*RIVALS, "all", "none"):
                raise UsageError(f"--rivals {name!r}: there are {', '.join(RIVALS)}, all, none")
        if any(rank < 1 for rank in self.ranks):
            raise UsageError(f"--ranks {min(self.ranks)}: must be at least 1")
        if self.seed < 0:
            raise UsageError(f"--seed {self.seed}: must not be negative")
        if self.episodes is not None and self.episodes < 1:
            raise UsageError(f"--episodes {self.episodes}: must be at least 1")

    def ranks_or(self, default: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks to measure, ascending."""
        return tuple(sorted(set(self.ranks))) or default
