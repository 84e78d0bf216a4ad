"""Draw charts as PNG with matplotlib, which is an optional dependency (extra ``bench``)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kamera_cli.bench.results import Chart

MISSING = "no pictures: matplotlib is not installed (pip install 'kamera-kv[bench]')"

_COLOURS = ("#d1495b", "#edae49", "#00798c", "#8d96a3", "#5b5f97", "#3a7d44", "#b56576", "#2e4057")
_MOST_TICKS = 10
"""Up to this many different x, each has a tick of its own."""
_INK, _FAINT = "#22262b", "#d9dde2"


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

    style = {
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


def _lines(axes, chart: Chart) -> None:
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


def _stack(axes, chart: Chart) -> None:
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


def _bars(axes, chart: Chart) -> None:
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
