"""The only place that prints: results on stdout, everything else on stderr. Rich is imported when first needed."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import PurePath
from typing import TYPE_CHECKING, TextIO

from kamera_cli.results import Progress

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from kamera_cli.progress import Bars

PIPED_WIDTH = 160
"""Columns of a table that goes to a file or a pipe, where no terminal says how wide it is."""

_SURROGATE = re.compile("[\ud800-\udfff]")


class ClosedPipe(Exception):
    """The reader of stdout went away (``| head``): end quietly."""


class Output:
    """Where a command's words go.

    Parameters
    ----------
    json_mode : bool
        Print one strict JSON object as the result, nothing for people.
    quiet : bool
        No progress, notes or warnings; results keep only what matters most. Errors are always printed.
    verbose : bool
        Tracebacks, and progress as plain lines where stderr is not a terminal.
    out, err : text streams, optional
        Stdout and stderr of the process when not given.
    """

    def __init__(
        self,
        *,
        json_mode: bool = False,
        quiet: bool = False,
        verbose: bool = False,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        self.json_mode, self.quiet, self.verbose = json_mode, quiet, verbose
        self.out = out if out is not None else sys.stdout
        self.err = err if err is not None else sys.stderr
        self.emitted = False
        self._bars: Bars | None = None

    # -- results -------------------------------------------------------------------------------------------------

    def result(
        self, command: str, payload: Mapping[str, object], view: Callable[[], Iterable[RenderableType]]
    ) -> None:
        """Print the result of ``command``: the JSON object, or the renderables that ``view`` makes for people."""
        self.emitted = True
        if self.json_mode:
            document = strict_json({"schema": f"kamera.{command}.v1", **payload})
            indent = 2 if _is_terminal(self.out) else None
            self._write(json.dumps(document, allow_nan=False, indent=indent) + "\n")
            return
        console = self._console()
        with console.capture() as capture:
            for part in view():
                console.print(part, soft_wrap=not hasattr(part, "columns"))
        self._write(capture.get())

    def text(self, text: str) -> None:
        """Print plain text on stdout (help, version)."""
        self._write(text if text.endswith("\n") else text + "\n")

    def _write(self, text: str) -> None:
        try:
            self.out.write(text)
            self.out.flush()
        except BrokenPipeError as error:
            raise ClosedPipe from error
        except UnicodeEncodeError:
            encoding = getattr(self.out, "encoding", None) or "ascii"
            self.out.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self.out.flush()

    def _console(self) -> Console:
        from rich.console import Console

        fixed = None if _is_terminal(self.out) or os.environ.get("COLUMNS") else PIPED_WIDTH
        return Console(file=self.out, width=fixed, markup=False, highlight=False, emoji=False)

    # -- stderr --------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """One line that helps but is neither result nor trouble."""
        if not self.quiet:
            self._to_stderr(f"kamera: {one_line(text)}")

    def warn(self, text: str) -> None:
        """One line of warning."""
        if not self.quiet:
            self._to_stderr(f"kamera: warning: {one_line(text)}")

    def error(self, text: str) -> None:
        """One line of error, never silenced."""
        self._to_stderr(f"kamera: error: {one_line(text)}")

    def failure(self, text: str, code: int, kind: str) -> None:
        """The line of an error, and with ``--json`` an object for it, unless a result was printed already."""
        self.error(text)
        if self.json_mode and not self.emitted:
            fields = {"kind": kind, "message": one_line(text), "exit_code": code}
            self.result("error", {"error": fields}, lambda: ())

    def detail(self, text: str) -> None:
        """Lines for ``-v`` alone, such as a traceback."""
        if self.verbose:
            self._to_stderr(text.rstrip("\n"))

    def _to_stderr(self, line: str) -> None:
        if self._bars is not None:
            self._bars.console.print(line, soft_wrap=True)
            return
        try:
            self.err.write(line + "\n")
            self.err.flush()
        except BrokenPipeError as error:
            raise ClosedPipe from error
        except UnicodeEncodeError:
            self.err.write(line.encode("ascii", "backslashreplace").decode("ascii") + "\n")

    # -- progress and questions ----------------------------------------------------------------------------------

    @contextmanager
    def working(self) -> Iterator[Callable[[Progress], None]]:
        """Yield a progress callback; while open, stray prints of libraries go to stderr instead of the result.

        Bars are drawn only where stderr is a terminal. With ``-v`` and no terminal, each step is a plain line.
        """
        with redirect_stdout(self.err):
            if self.quiet or not _is_terminal(self.err):
                yield self._progress_line
                return
            from kamera_cli.progress import Bars

            with Bars(self.err) as bars:
                self._bars = bars
                try:
                    yield bars
                finally:
                    self._bars = None

    def _progress_line(self, step: Progress) -> None:
        of = "" if step.total is None else f"/{step.total}"
        self.detail(f"kamera: {step.what}: {step.done}{of} {step.unit} {display(step.detail)}".rstrip())

    def can_ask(self) -> bool:
        """Whether a person can be asked: stdin and stderr are a terminal and no JSON is wanted."""
        return not self.json_mode and _is_terminal(sys.stdin) and _is_terminal(self.err)

    def ask(self, question: str) -> bool:
        """Ask a yes-or-no question on stderr; anything but yes is no."""
        self.err.write(f"{one_line(question)} [y/N] ")
        self.err.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")


# -- words and numbers -----------------------------------------------------------------------------------------------


def strict_json(value: object) -> object:
    """``value`` with only what strict JSON has: NaN and infinities become null, bad UTF-8 becomes ``\\xff``."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (str, PurePath)):
        return _valid_text(str(value))
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).hex()
    if isinstance(value, Mapping):
        return {_valid_text(str(key)): strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [
            strict_json(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)
        ]
    return value


def display(text: object) -> str:
    """``text`` safe for a terminal: control characters and bytes that are no UTF-8 are written as escapes."""
    return "".join(
        char if char.isprintable() or unicodedata.category(char) == "Zs" else _escape(char)
        for char in _valid_text(str(text))
    )


def one_line(text: str) -> str:
    """``text`` on one line, safe for a terminal."""
    return display(
        " ".join(part.strip() for part in text.splitlines() if part.strip()) if "\n" in text else text
    )


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def _valid_text(text: str) -> str:
    return _SURROGATE.sub(_escape_surrogate, text)


def _escape_surrogate(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


def format_bytes(count: int | None) -> str:
    """``1.2 MiB``; ``–`` for None."""
    if count is None:
        return "–"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_ms(duration_ms: float | None) -> str:
    """``12.4 ms``, ``3.1 s`` or ``2 min 5 s``; ``–`` for None and for what is not finite."""
    if duration_ms is None or not math.isfinite(duration_ms):
        return "–"
    if duration_ms < 100:
        return f"{duration_ms:.1f} ms"
    if duration_ms < 1000:
        return f"{duration_ms:.0f} ms"
    if duration_ms < 60_000:
        return f"{duration_ms / 1000:.1f} s"
    minutes, seconds = divmod(round(duration_ms / 1000), 60)
    return f"{minutes} min {seconds} s"


def format_number(value: float | None, digits: int = 2) -> str:
    """``1.2e-05`` in short; ``–`` for None and for what is not finite."""
    if value is None or not math.isfinite(value):
        return "–"
    text = f"{value:.{digits}g}"
    return text.replace("e-0", "e-").replace("e+0", "e+")


def short_id(identity: str) -> str:
    """The first ten characters of an id, as tables show it."""
    return identity[:10]


def count(number: int, noun: str) -> str:
    """``1 chunk``, ``3 chunks``, ``2 patches``."""
    plural = noun + ("es" if noun.endswith(("ch", "s")) else "s")
    return f"{number} {noun if number == 1 else plural}"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> Table:
    """A plain table: a leading ``>`` in a column's name aligns it to the right; cells are made safe to print."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", title=title, title_justify="left"
    )
    for name in columns:
        grid.add_column(
            name.removeprefix(">"), justify="right" if name.startswith(">") else "left", overflow="fold"
        )
    for row in rows:
        grid.add_row(*(cell if isinstance(cell, Text) else Text(display(cell)) for cell in row))
    return grid


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()
