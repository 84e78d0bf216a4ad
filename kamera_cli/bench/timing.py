"""Clocks that count finished work, and repetitions that take turns (each arm sees the same machine)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Samples:
    """Times of one arm in ms.

    Attributes
    ----------
    times_ms : tuple of float
        Counted runs, by the clock on the wall.
    warm_up_ms : float
        The first run, which is not among them.
    cpu_ms : tuple of float
        Processor time of the whole call, all threads, for each counted run. A busy machine stretches the wall clock and
        hardly this.
    """

    times_ms: tuple[float, ...]
    warm_up_ms: float
    cpu_ms: tuple[float, ...] = ()

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)

    @property
    def min_ms(self) -> float:
        return min(self.times_ms)

    @property
    def max_ms(self) -> float:
        return max(self.times_ms)

    @property
    def median_cpu_ms(self) -> float | None:
        return statistics.median(self.cpu_ms) if self.cpu_ms else None

    def to_json(self) -> dict:
        """Median, extremes, count, the warm-up run apart, and every time."""
        return {
            "median_ms": self.median_ms,
            "min_ms": self.min_ms,
            "max_ms": self.max_ms,
            "num_runs": len(self.times_ms),
            "warm_up_ms": self.warm_up_ms,
            "median_cpu_ms": self.median_cpu_ms,
            "times_ms": list(self.times_ms),
        }


def timed(run: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """Time of ``run`` in ms, with the device idle before the start and its work finished before the stop."""
    synchronize()
    started = time.perf_counter()
    run()
    synchronize()
    return 1e3 * (time.perf_counter() - started)


def take_turns(arms: Mapping[str, Callable[[], float]], *, num_runs: int) -> dict[str, Samples]:
    """Measure arms one after the other, again and again, each round starting with another arm.

    Parameters
    ----------
    arms : mapping of str to callable
        Each call does the work once and returns its time in ms.
    num_runs : int
        Counted runs per arm; one more run before them is the warm-up.

    Returns
    -------
    dict of str to Samples
    """
    names = list(arms)
    times: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(num_runs + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            started = time.process_time()
            times[name].append(arms[name]())
            cpu[name].append(1e3 * (time.process_time() - started))
    return {
        name: Samples(tuple(measured[1:]), measured[0], tuple(cpu[name][1:]))
        for name, measured in times.items()
    }
