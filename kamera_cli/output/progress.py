"""Bars on stderr for long jobs: what, how far, rate, time left."""

from __future__ import annotations

from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from kamera_cli.results import Progress
from kamera_cli.words import display, format_bytes

MAX_BARS = 3
"""Bars at once: a batch of many files must not fill the terminal."""

MAX_LABEL = 44


class Bars:
    """One bar for each ``what``; a context manager that leaves nothing behind on the terminal.

    ``console`` is where a line can be printed above the bars, ``progress`` holds one task for each bar.
    """

    def __init__(self, err: TextIO) -> None:
        self.console = Console(file=err, markup=False, highlight=False, emoji=False)
        self.progress = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=28),
            _Amount(),
            _Rate(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("{task.fields[detail]}", markup=False, style="dim"),
            console=self.console,
            transient=True,
            redirect_stdout=False,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.progress.stop()

    def __call__(self, step: Progress) -> None:
        """Draw a step: a new bar for a new ``what``, of which the latest few stay."""
        detail = display(step.detail)
        task = self._tasks.get(step.what)
        if task is None:
            while len(self._tasks) >= MAX_BARS:
                self.progress.remove_task(self._tasks.pop(next(iter(self._tasks))))
            task = self.progress.add_task(
                shortened(display(step.what)), total=step.total, unit=step.unit, detail=detail
            )
            self._tasks[step.what] = task
        self.progress.update(task, completed=step.done, total=step.total, unit=step.unit, detail=detail)


def shortened(label: str) -> str:
    """``label``, or its end when it is long: the end of a path tells files apart."""
    return label if len(label) <= MAX_LABEL else f"…{label[1 - MAX_LABEL :]}"


class _Amount(ProgressColumn):
    """``3/12 chunks`` or ``1.2 MiB/8.0 MiB``."""

    def render(self, task: Task) -> Text:
        """The column's text."""
        unit = task.fields["unit"]
        done, total = int(task.completed), None if task.total is None else int(task.total)
        if unit == "bytes":
            return Text(format_bytes(done) + ("" if total is None else f"/{format_bytes(total)}"))
        return Text(f"{done}{'' if total is None else f'/{total}'} {unit}")


class _Rate(ProgressColumn):
    """``2.4 chunks/s``, empty until it can be told."""

    def render(self, task: Task) -> Text:
        """The column's text."""
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        unit = task.fields["unit"]
        return Text(
            f"{format_bytes(int(speed))}/s" if unit == "bytes" else f"{speed:.1f} {unit}/s", style="dim"
        )
