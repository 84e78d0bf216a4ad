"""What a bench hands back and how its figures are taken: answers of arms, intervals, tables and series to draw.

Pure: imports no torch, draws nothing and prints nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kamera_cli.options import CompileOptions
from kamera_cli.words import format_number

REFERENCE, BLIND = "re-prefill", "blind"
"""Names of the arm that all others are compared with, and of canonical KV that was relocated and nothing else."""
GROUPS = ("two_hop", "one_hop", "unknown")
"""Groups in which questions about an episode are counted."""

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

    def to_json(self) -> dict[str, Any]:
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


@dataclass(frozen=True)
class Size:
    """Bytes of some tensors.

    Attributes
    ----------
    raw : int
        Of the tensors; integers packed.
    stored : int
        Of what the store's codec makes of each of them.
    """

    raw: int = 0
    stored: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.raw + other.raw, self.stored + other.stored)


@dataclass(frozen=True)
class Mark:
    """What one arm said to one question.

    Attributes
    ----------
    is_right : bool
        Whether greedy decoding gives the expected answer and ends.
    kl : float
        Nats of the next token to the arm that is the reference.
    num_antecedents : int
        Chunks before the last one of the prompt; 0 where nothing is shown by it.
    """

    group: str
    is_right: bool
    kl: float
    num_antecedents: int = 0


@dataclass
class Arm:
    """One way to answer and what it gave.

    Attributes
    ----------
    kind : str
        Arms of one kind differ in their setting alone and make one line of a chart.
    setting : float or None
        Rank, energy, budget in per cent or share of tokens.
    size : Size or None
        Of all its patches; None for an arm without patches.
    options : CompileOptions or None
        What is asked of the product where arms differ in that.
    by_worth : bool
        Whether ranks go by what the layers are worth, as by default.
    """

    kind: str = ""
    setting: float | None = None
    size: Size | None = None
    options: CompileOptions | None = None
    by_worth: bool = False
    marks: list[Mark] = field(default_factory=list)

    def num_questions(self) -> dict[str, int]:
        """How many questions of each group were answered."""
        return {group: self._share(group).count for group in GROUPS}

    def after(self, numbers: Sequence[int]) -> Arm:
        """The arm over prompts with some numbers of antecedents alone."""
        marks = [mark for mark in self.marks if mark.num_antecedents in numbers]
        return Arm(self.kind, self.setting, marks=marks)

    def kls(self, group: str | None = None) -> list[float]:
        """KL of every question, or of those of one group."""
        return [mark.kl for mark in self.marks if group in (None, mark.group)]

    def figures(self, blind: Arm | None, groups: Sequence[str] = GROUPS) -> dict[str, Any]:
        """Accuracy of each group, and mean, 95th percentile and maximum of KL.

        Parameters
        ----------
        blind : Arm or None
            The arm of which ``eta`` says what share of its mean KL is gone; None to leave ``eta`` open.
        """
        kl, lost = mean(self.kls()), mean(blind.kls()) if blind else None
        return {
            **{group: self._share(group).to_json() for group in groups},
            "kl_mean": kl,
            "kl_p95": percentile(self.kls(), 95),
            "kl_max": max(self.kls(), default=None),
            "eta": 1 - kl / lost if kl is not None and lost else None,
        }

    def _share(self, group: str) -> Share:
        marks = [mark.is_right for mark in self.marks if mark.group == group]
        return Share(sum(marks), len(marks))

    def byte_figures(self, kv: Size) -> dict[str, Any]:
        """Bytes of the patches, also over the canonical KV that they serve."""
        size = self.size
        return {
            "patch_raw_bytes": size and size.raw,
            "patch_stored_bytes": size and size.stored,
            "patch_to_kv_raw_ratio": size and size.raw / kv.raw,
            "patch_to_kv_stored_ratio": size and size.stored / kv.stored,
        }


@dataclass(frozen=True)
class Table:
    """A table of text cells.

    Attributes
    ----------
    columns : tuple of str
        Heads; a leading ``>`` aligns a column to the right.
    notes : tuple of str
        Sentences that belong below the table.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


Cell = Callable[[dict[str, Any]], str]
"""Text of a cell from the figures of its row."""


def arm_table(
    title: str, rows: Mapping[str, dict[str, Any]], columns: Mapping[str, Cell], notes: tuple[str, ...]
) -> Table:
    """A table with one row for each arm, its name first."""
    lines = tuple((name, *(cell(row) for cell in columns.values())) for name, row in rows.items())
    return Table(title, ("arm", *columns), lines, notes)


def percent(share: float | None, digits: int = 1) -> str:
    """``98.4 %``; a dash for None."""
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def interval(share: Mapping[str, Any]) -> str:
    """``98.4 [97.1, 99.2]`` in per cent, of what `Share.to_json` gives; a dash when nothing was counted."""
    if share["accuracy"] is None:
        return "–"
    return f"{100 * share['accuracy']:.1f} [{100 * share['low']:.1f}, {100 * share['high']:.1f}]"


def of_group(group: str) -> Cell:
    """Accuracy of one group of questions with its interval."""
    return lambda row: interval(row[group])


def number(name: str) -> Cell:
    """A figure as a plain number."""
    return lambda row: format_number(row[name])


def eta(row: Mapping[str, Any]) -> str:
    """Share of blind's mean KL that is gone."""
    return "–" if row["eta"] is None else f"{row['eta']:.5f}"


def measured_on(described: Mapping[str, Any]) -> str:
    """Model, device and dtype, for a note below a table."""
    return f"{described['model']}, {described['device']} {described['dtype']}."


def caption(described: Mapping[str, Any]) -> str:
    """The same with the number of episodes, for a chart."""
    return f"{described['model']}, {described['num_episodes']} episodes, {described['device']} {described['dtype']}."


@dataclass(frozen=True)
class Series:
    """One line of a chart. ``low`` and ``high`` bound each point; empty where no spread is drawn."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


def accuracies(
    name: str, x: Sequence[float], rows: Sequence[dict[str, Any]], group: str = "two_hop"
) -> Series:
    """Accuracy in per cent of one group of questions, with its Wilson interval; 0 where nothing was counted."""
    low_to_high = ([100 * (row[group][end] or 0.0) for row in rows] for end in ("accuracy", "low", "high"))
    return Series(name, tuple(x), *map(tuple, low_to_high))


def bars(name: str, shares: Sequence[Mapping[str, Any]]) -> Series:
    """Accuracies in per cent for a chart of bars, one per place; 0 where nothing was counted."""
    return Series(
        name, tuple(range(len(shares))), tuple(100 * (share["accuracy"] or 0.0) for share in shares)
    )


@dataclass(frozen=True)
class Chart:
    """A picture to draw.

    Attributes
    ----------
    name : str
        Of the file, without suffix.
    caption : str
        One or two sentences that say what is seen.
    levels : tuple of (str, float)
        Horizontal reference lines.
    kind : {"line", "stack", "bars"}
        ``stack`` and ``bars`` draw a bar per x position, which ``x_label`` names, separated by commas: the series one
        behind the other, or beside each other.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    caption: str = ""
    x_log: bool = False
    y_log: bool = False
    levels: tuple[tuple[str, float], ...] = ()
    kind: Literal["line", "stack", "bars"] = "line"


@dataclass(frozen=True)
class SuiteResult:
    """One suite: ``data`` goes into the JSON as it is (units in the names), ``headline`` is one sentence for people."""

    name: str
    headline: str
    data: dict[str, Any]
    tables: tuple[Table, ...]
    charts: tuple[Chart, ...] = ()


@dataclass(frozen=True)
class BenchResult:
    """All suites of one run, the machine they ran on, and the files that were written.

    Attributes
    ----------
    notes : tuple of str
        What a person should know about the report itself, such as missing pictures.
    """

    suites: tuple[SuiteResult, ...]
    environment: dict[str, Any]
    seed: int
    total_s: float
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def tables(self) -> tuple[Table, ...]:
        """Tables of all suites in order."""
        return tuple(table for suite in self.suites for table in suite.tables)

    def to_json(self) -> dict[str, Any]:
        """The document of schema ``kamera.bench.v1`` without the schema name, which the printer adds."""
        return {
            "environment": self.environment,
            "seed": self.seed,
            "total_s": round(self.total_s, 3),
            "suites": {suite.name: {"headline": suite.headline, **suite.data} for suite in self.suites},
            "files": list(self.files),
            "notes": list(self.notes),
        }
