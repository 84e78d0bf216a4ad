"""A report with NaN in it, that needs the network, or that fails for want of matplotlib."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kamera_cli.bench import report
from kamera_cli.bench.figures import BenchResult, Chart, Series, SuiteResult, Table
from kamera_cli.bench.runner import environment

LINES = Chart("lines", "A <title>", "x", "y", (Series("s", (1.0, 2.0), (1.0, 4.0), (0.5, 3.0), (2.0, 5.0)),),
              x_log=True, y_log=True, levels=(("level", 2.0),))  # fmt: skip
STACK = Chart("stack", "B", "one, two", "ms", (Series("a", (0.0, 1.0), (1.0, 2.0)),), kind="stack")


def result(*drawn: Chart) -> BenchResult:
    table = Table("T & co", ("arm", ">ms"), (("<b>", "1"),), ("note",))
    suite = SuiteResult(
        "demo", "headline", {"value": float("nan"), "deep": [{"x": float("inf")}]}, (table,), drawn
    )
    return BenchResult((suite,), environment(), 0, 1.5)


def test_the_json_is_strict_and_names_its_schema(tmp_path: Path) -> None:
    report.write(result(), tmp_path)

    def refuse(token: str) -> None:
        raise AssertionError(token)

    document = json.loads((tmp_path / "bench.json").read_text("utf-8"), parse_constant=refuse)
    assert document["schema"] == "kamera.bench.v1"
    assert document["suites"]["demo"]["value"] is None
    assert document["suites"]["demo"]["headline"] == "headline"


def test_the_page_needs_nothing_else_and_escapes_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    finished = report.write(result(LINES, STACK), tmp_path)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert page.count("src='data:image/png;base64,") == 2
    assert "http" not in page.split("<h2>")[1].split("src=")[0]
    assert "<script" not in page and "<link" not in page
    assert "&lt;b&gt;" in page and "T &amp; co" in page and "A &lt;title&gt;" in page
    assert [Path(file).name for file in finished.files] == [
        "bench.json",
        "lines.png",
        "stack.png",
        "report.html",
    ]
    assert all(Path(file).stat().st_size for file in finished.files)


def test_without_matplotlib_there_is_one_line_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    finished = report.write(result(LINES), tmp_path)
    assert finished.notes == (report.MISSING,)
    assert [Path(file).name for file in finished.files] == ["bench.json", "report.html"]
