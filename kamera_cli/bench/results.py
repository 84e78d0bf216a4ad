"""What a bench hands back: plain tables, series to draw, and data for JSON. Imports no torch and draws nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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


@dataclass(frozen=True)
class Series:
    """One line of a chart. ``low`` and ``high`` bound each point; empty where no spread is drawn."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


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
    data: dict
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
    environment: dict
    seed: int
    total_s: float
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def tables(self) -> tuple[Table, ...]:
        """Tables of all suites in order."""
        return tuple(table for suite in self.suites for table in suite.tables)

    def to_json(self) -> dict:
        """The document of schema ``kamera.bench.v1`` without the schema name, which the printer adds."""
        return {
            "environment": self.environment,
            "seed": self.seed,
            "total_s": round(self.total_s, 3),
            "suites": {suite.name: {"headline": suite.headline, **suite.data} for suite in self.suites},
            "files": list(self.files),
            "notes": list(self.notes),
        }
