"""The files of a run: one JSON document, a PNG per chart, and one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import html
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kamera_cli.bench.charts import MISSING, can_draw, draw
from kamera_cli.bench.results import BenchResult, Chart, SuiteResult, Table
from kamera_cli.words import strict_json

SCHEMA = "kamera.bench.v1"

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
    return [
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


def _cells(tag: str, cells, right: list[bool]) -> str:
    return "".join(
        f"<{tag}{' class=n' if to_the_right else ''}>{html.escape(cell)}</{tag}>"
        for cell, to_the_right in zip(cells, right, strict=True)
    )


def _note(text: str) -> str:
    return f"<p class=note>{html.escape(text)}</p>"


def _picture(chart: Chart, path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f"<img alt='{html.escape(chart.title)}' src='data:image/png;base64,{data}'>{_note(chart.caption)}"
