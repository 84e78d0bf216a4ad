"""What patches cost before they save anything: forming in units of one prefill, and uses after which it has paid.

Every cost is counted: reading, conditioned forwards, factors, measuring KL and writing when patches are formed, reading
and patching at each use. Patches are deleted before each run, so that each one forms them all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kamera_cli.bench.figures import Table
from kamera_cli.bench.timing import Samples, take_turns, timed
from kamera_cli.engine import Engine
from kamera_cli.results import CompileResult
from kamera_cli.words import format_ms

NUM_FORMING_RUNS = 5
"""Counted runs of each arm."""


@dataclass(frozen=True)
class Payback:
    """Times of one prompt.

    Attributes
    ----------
    samples : dict of str to Samples
        ``compile``: forming all patches ahead, the whole call. ``plain``: one cold prefill of the same chunks from
        their embeddings. ``first``: a first query that prefills and keeps its patches, the whole call. ``full``,
        ``reprefill`` and ``patched``: TTFT of one use.
    measure_ms, prefill_ms : tuple of float
        Of each counted ``compile``, what went into KL and into conditioned forwards.
    """

    num_chunks: int
    num_tokens: int
    samples: dict[str, Samples]
    measure_ms: tuple[float, ...]
    prefill_ms: tuple[float, ...]

    def _times(self, arm: str, by_cpu: bool) -> tuple[float, ...]:
        return self.samples[arm].cpu_ms if by_cpu else self.samples[arm].times_ms

    def form_ratios(self) -> list[float]:
        """Forming without measuring over one plain prefill, run by run."""
        runs = zip(self._times("compile", False), self.measure_ms, self._times("plain", False), strict=True)
        return [(whole - measure) / plain for whole, measure, plain in runs]

    def uses(self, slower: str, *, by_cpu: bool = False) -> list[float | None]:
        """After how many uses compiling has paid, run by run: compile + n · patched ≤ n · slower. None: never."""
        arms = (self._times(arm, by_cpu) for arm in ("compile", slower, "patched"))
        return [cost / (old - new) if old > new else None for cost, old, new in zip(*arms, strict=True)]

    def uses_of_kept(self, *, by_cpu: bool = False) -> list[float | None]:
        """The same for patches of a first query, which prefills anyway: first + (n − 1) · patched ≤ n · reprefill."""
        arms = (self._times(arm, by_cpu) for arm in ("first", "reprefill", "patched"))
        return [
            (first - new) / (old - new) if old > new else None for first, old, new in zip(*arms, strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        by_cpu = {arm: self.uses(arm, by_cpu=True) for arm in ("reprefill", "full")}
        return {
            "num_chunks": self.num_chunks,
            "num_tokens": self.num_tokens,
            "times": {name: samples.to_json() for name, samples in self.samples.items()},
            "compile_measure_ms": list(self.measure_ms),
            "compile_prefill_ms": list(self.prefill_ms),
            "form_ratio": self.form_ratios(),
            "break_even_reuses": {arm: self.uses(arm) for arm in ("reprefill", "full")},
            "break_even_reuses_by_cpu": by_cpu,
            "break_even_reuses_of_kept": self.uses_of_kept(),
            "break_even_reuses_of_kept_by_cpu": self.uses_of_kept(by_cpu=True),
        }


def measure_payback(
    engine: Engine,
    window: str,
    order: Sequence[str],
    question: str,
    use: dict[str, Callable[[], float]],
    rank: int | Literal["auto"],
) -> Payback:
    """Form the patches of an order again and again, in turn with uses of them.

    Parameters
    ----------
    use : dict of str to callable
        ``full``, ``reprefill``, ``patched``: one use, its TTFT in ms.
    """
    runner, library, store = engine.context.runner, engine.context.library, engine.context.store
    entries = {str(entry.number): entry for entry in engine.window(window).entries}
    found = [library.find_chunk(entries[number]) for number in order]
    records = [record for record in found if record is not None]
    segments = [library.segment(record) for record in records]
    compiled: list[CompileResult] = []

    def forget() -> None:
        store.delete({patch.key for record in records for patch in store.patches_of(record.key)})

    def compile_all() -> float:
        forget()
        started = time.perf_counter()
        compiled.append(engine.compile_patches(order, window=window, rank=rank))
        return 1e3 * (time.perf_counter() - started)

    def first_query() -> float:
        forget()
        started = time.perf_counter()
        engine.query(question, window=window, chunks=order, reuse="auto", max_new_tokens=1)
        return 1e3 * (time.perf_counter() - started)

    def plain() -> float:
        return timed(lambda: runner.prefill_captured([runner.preamble, *segments]), runner.synchronize)

    compile_all()
    compiled.clear()
    arms = {**use, "first": first_query, "compile": compile_all, "plain": plain}
    samples = take_turns(arms, num_runs=NUM_FORMING_RUNS)
    # A use that is timed next finds the patches of a compilation, not those that a query kept.
    compile_all()
    counted = compiled[1:-1]
    return Payback(
        num_chunks=len(order),
        num_tokens=sum(record.meta["num_tokens"] for record in records),
        samples=samples,
        measure_ms=tuple(result.measure_ms for result in counted),
        prefill_ms=tuple(result.prefill_ms for result in counted),
    )


def payback_table(paybacks: Sequence[Payback], *, on_cpu: bool) -> Table:
    """Costs and break-even by number of chunks."""
    rows = [
        (
            str(point.num_chunks),
            f"{point.num_tokens:,}",
            format_ms(point.samples["plain"].median_ms),
            format_ms(point.samples["compile"].median_ms),
            format_ms(statistics.median(point.prefill_ms)),
            format_ms(statistics.median(point.measure_ms)),
            spread(point.form_ratios()),
            spread(point.uses("reprefill")),
            spread(point.uses("reprefill", by_cpu=True)) if on_cpu else "–",
            spread(point.uses_of_kept()),
            spread(point.uses("full")),
        )
        for point in paybacks
    ]
    notes = (
        "Medians, in brackets the least and the most of the runs. Compile: the whole call (reading, forwards, factors, "
        "KL, writing), with the model in memory. Forming: without the KL, over one plain prefill.",
        "Uses: the least n with compile + n · patched ≤ n · the other; for patches that a first query keeps, with "
        "first + (n - 1) · patched ≤ n · re-prefill. By CPU time, which other work on the machine hardly stretches and "
        "which leaves out waiting for the disk, beside it.",
    )
    columns = (
        ">chunks", ">tokens", ">one prefill", ">compile", ">forwards", ">KL", ">forming : prefill",
        ">uses, against re-prefill", ">by CPU time", ">patches of a first query", ">against full re-encode",
    )  # fmt: skip
    return Table("What patches cost and when they have paid", columns, tuple(rows), notes)


def spread(values: Sequence[float | None]) -> str:
    """``1.4 [1.3 – 1.6]``; ``never`` where half of the runs saved nothing."""
    known = sorted(value for value in values if value is not None)
    if 2 * len(known) <= len(values):
        return "never"
    text = f"{statistics.median(known):.2f} [{known[0]:.2f} – {known[-1]:.2f}]"
    return text if len(known) == len(values) else f"{text}, {len(values) - len(known)} never"
