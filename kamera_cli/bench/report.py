"""The files of a run: one JSON document, a PNG per chart, and one HTML page that needs nothing else.

Charts are drawn with matplotlib, which is an optional dependency (extra ``bench``).
"""

from __future__ import annotations

import base64
import html
import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kamera_cli.bench.figures import BenchResult, Chart, SuiteResult, Table
from kamera_cli.words import strict_json

SCHEMA = "kamera.bench.v1"
MISSING = "no pictures: matplotlib is not installed (pip install 'kamera-kv[bench]')"

_COLOURS = ("#d1495b", "#edae49", "#00798c", "#8d96a3", "#5b5f97", "#3a7d44", "#b56576", "#2e4057")
_MOST_TICKS = 10
"""Up to this many different x, each has a tick of its own."""
_INK, _FAINT = "#22262b", "#d9dde2"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22262b; max-width: 62rem; margin: 2.5rem auto; padding: 0 1.2rem }
h1 { font-size: 1.6rem }
h2 { font-size: 1.25rem; margin-top: 2.6rem; border-top: 1px solid #d9dde2; padding-top: 1.2rem }
h3 { font-size: 1rem; margin: 1.8rem 0 .4rem }
table { border-collapse: collapse; font-size: .88rem } th { text-align: left; font-weight: 600 }
th, td { padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #e8ebee; vertical-align: top } .n { text-align: right }
p.note { color: #59616b; font-size: .85rem; margin: .3rem 0 }
img { max-width: 100%; margin-top: 1rem } .wide { overflow-x: auto }
"""


def write(result: BenchResult, out: Path) -> BenchResult:
    """Write ``bench.json``, the pictures and ``report.html``.

    Parameters
    ----------
    out : Path
        An existing folder; files of the same names are replaced.

    Returns
    -------
    BenchResult
        With ``files``, and a note if there could be no pictures.
    """
    pictures: dict[str, Path] = {}
    if can_draw():
        for suite in result.suites:
            for chart in suite.charts:
                pictures[chart.name] = out / f"{chart.name}.png"
                draw(chart, pictures[chart.name])
    charts = any(suite.charts for suite in result.suites)
    document, page = out / "bench.json", out / "report.html"
    files = tuple(str(path) for path in (document, *pictures.values(), page))
    notes = (*result.notes, *(() if can_draw() or not charts else (MISSING,)))
    finished = replace(result, files=files, notes=notes)
    _replace(page, render(finished, pictures))
    content = strict_json({"schema": SCHEMA, **finished.to_json()})
    _replace(document, json.dumps(content, allow_nan=False, indent=1) + "\n")
    return finished


def _replace(path: Path, text: str) -> None:
    """Write a whole file or nothing."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as staging:
        staging.write(text)
    os.chmod(staging.name, 0o644)
    os.replace(staging.name, path)


def render(result: BenchResult, pictures: Mapping[str, Path]) -> str:
    """The HTML page, pictures inside.

    Parameters
    ----------
    pictures : mapping
        PNG file of each chart by the chart's name; charts without one are left out.
    """
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>kamera bench</title><style>{_STYLE}</style><h1>kamera bench</h1>",
        *(_note(line) for line in _machine(result)),
        *(_note(line) for line in result.notes),
    ]
    for suite in result.suites:
        parts += _suite(suite, pictures)
    return "\n".join(parts) + "\n</html>\n"


def _machine(result: BenchResult) -> list[str]:
    found = result.environment
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    load = ", ".join(f"{value:.1f}" for value in found["load_average"] or ())
    commit = f", commit {found['commit']}" if found["commit"] else ""
    return [
        f"kamera {found['version']}{commit}, {found['date']}.",
        f"{found['gpu'] or found['processor']}, {found['num_threads']} threads on {found['num_cpus']} processors, "
        f"{found['platform']}, Python {found['python']}; load average at the end {load or 'unknown'}.",
        f"{versions}. Seed {result.seed}. Whole run {result.total_s:.0f} s.",
    ]


def _suite(suite: SuiteResult, pictures: Mapping[str, Path]) -> list[str]:
    parts = [f"<h2>{html.escape(suite.name)}</h2><p>{html.escape(suite.headline)}</p>"]
    parts += [_table(table) for table in suite.tables]
    parts += [_picture(chart, pictures[chart.name]) for chart in suite.charts if chart.name in pictures]
    return parts


def _table(table: Table) -> str:
    right = [name.startswith(">") for name in table.columns]
    heads = _cells("th", [name.removeprefix(">") for name in table.columns], right)
    rows = "\n".join(f"<tr>{_cells('td', row, right)}</tr>" for row in table.rows)
    notes = "".join(_note(note) for note in table.notes)
    return f"<h3>{html.escape(table.title)}</h3><div class=wide><table><tr>{heads}</tr>\n{rows}</table></div>{notes}"


def _cells(tag: str, cells: Sequence[str], right: Sequence[bool]) -> str:
    return "".join(
        f"<{tag}{' class=n' if to_the_right else ''}>{html.escape(cell)}</{tag}>"
        for cell, to_the_right in zip(cells, right, strict=True)
    )


def _note(text: str) -> str:
    return f"<p class=note>{html.escape(text)}</p>"


def _picture(chart: Chart, path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f"<img alt='{html.escape(chart.title)}' src='data:image/png;base64,{data}'>{_note(chart.caption)}"


def can_draw() -> bool:
    """Whether matplotlib is installed; nothing is imported."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(chart: Chart, path: Path) -> None:
    """Write one chart.

    Parameters
    ----------
    path : Path
        Of the PNG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {
        "font.size": 10,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
    }
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(9.6 if chart.kind == "line" else 7.2, 4.2), dpi=150)
        try:
            {"line": _lines, "stack": _stack, "bars": _bars}[chart.kind](axes, chart)
            axes.set_title(chart.title, loc="left", fontsize=12, pad=12)
            axes.spines[["top", "right"]].set_visible(False)
            axes.spines[["left", "bottom"]].set_color(_INK)
            axes.set_axisbelow(True)
            figure.tight_layout()
            figure.savefig(path)
        finally:
            pyplot.close(figure)


def _lines(axes: Any, chart: Chart) -> None:
    for index, series in enumerate(chart.series):
        colour = _COLOURS[index % len(_COLOURS)]
        axes.plot(
            series.x, series.y, color=colour, marker="o", markersize=4, linewidth=1.8, label=series.name
        )
        if series.low:
            axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.15, linewidth=0)
    x = sorted({value for series in chart.series for value in series.x})
    for index, (name, level) in enumerate(chart.levels):
        axes.axhline(level, color=_INK, linewidth=1, linestyle=("--", ":", "-.")[index % 3], label=name)
    if chart.x_log:
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
    if all(value == int(value) for value in x) and (chart.x_log or len(x) <= _MOST_TICKS):
        axes.set_xticks(x, [f"{value:,.0f}" for value in x])
    elif chart.x_log:
        from matplotlib.ticker import FuncFormatter

        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:,g}"))
    if chart.y_log:
        from matplotlib.ticker import FuncFormatter, LogLocator

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:,g}"))
        axes.yaxis.set_minor_locator(LogLocator(subs=()))
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(color=_FAINT, linewidth=0.7)
    if len(chart.series) + len(chart.levels) > 1:
        axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _stack(axes: Any, chart: Chart) -> None:
    """Horizontal bars, one per x position, a segment for each series; ``x_label`` names the bars, split at commas."""
    names = [name.strip() for name in chart.x_label.split(",")]
    left = [0.0] * len(names)
    for index, series in enumerate(chart.series):
        axes.barh(
            names, series.y, left=left, color=_COLOURS[index % len(_COLOURS)], label=series.name, height=0.55
        )
        left = [start + width for start, width in zip(left, series.y, strict=True)]
    for place, total in enumerate(left):
        axes.text(total, place, f"  {total:,.0f} {chart.y_label}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(left))
    axes.set_xlabel(chart.y_label)
    axes.grid(axis="x", color=_FAINT, linewidth=0.7)
    axes.legend(frameon=False, fontsize=9, loc="lower right")


def _bars(axes: Any, chart: Chart) -> None:
    """Horizontal bars beside each other, one per x position and series; names as in `_stack`."""
    names = [name.strip() for name in chart.x_label.split(",")]
    height = 0.8 / len(chart.series)
    for index, series in enumerate(chart.series):
        places = [place + (index - (len(chart.series) - 1) / 2) * height for place in series.x]
        axes.barh(
            places, series.y, color=_COLOURS[index % len(_COLOURS)], label=series.name, height=0.9 * height
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(chart.y_label)
    axes.grid(axis="x", color=_FAINT, linewidth=0.7)
    axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.4, -0.13), ncols=2)
