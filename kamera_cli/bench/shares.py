"""Wilson intervals, percentiles and means over episodes (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_Z = 1.959963984540054
"""97.5 % point of the standard normal distribution."""


@dataclass(frozen=True)
class Share:
    """``num_right`` of ``count`` with the Wilson 95 % interval; all None when there is nothing to count."""

    num_right: int
    count: int

    @property
    def value(self) -> float | None:
        return self.num_right / self.count if self.count else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Low and high end, inside [0, 1]."""
        if not self.count:
            return None
        n, p = self.count, self.num_right / self.count
        scale = 1 + _Z * _Z / n
        centre = (p + _Z * _Z / (2 * n)) / scale
        half = _Z * math.sqrt(p * (1 - p) / n + _Z * _Z / (4 * n * n)) / scale
        return (centre - half if self.num_right else 0.0), (centre + half if self.num_right < n else 1.0)

    def to_json(self) -> dict:
        low, high = self.interval or (None, None)
        return {"accuracy": self.value, "low": low, "high": high, "count": self.count}


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean; None for nothing."""
    return math.fsum(values) / len(values) if values else None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear interpolation between the two nearest ranks; None for nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = percent / 100 * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
