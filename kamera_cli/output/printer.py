"""The only place that prints: results on stdout, everything else on stderr. Rich is imported when first needed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, TextIO

from kamera_cli.results import Progress
from kamera_cli.words import display, one_line, strict_json, to_json

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from kamera_cli.output.progress import Bars

PIPED_WIDTH = 160
"""Columns of a table that goes to a file or a pipe, where no terminal says how wide it is."""


class ClosedPipe(Exception):
    """The reader of stdout went away (``| head``): end quietly."""


class Output:
    """Where a command's words go.

    Parameters
    ----------
    json_mode : bool
        Print one strict JSON object as the result, nothing for people.
    quiet : bool
        No progress, notes or warnings: results and errors alone.
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
        self,
        command: str,
        payload: object,
        view: Callable[[], Iterable[RenderableType]],
        **more: object,
    ) -> None:
        """Print the result of ``command``: the JSON object, or the renderables that ``view`` makes for people.

        Parameters
        ----------
        payload : mapping or dataclass instance
            What JSON has (`kamera_cli.words.to_json`).
        **more
            Further keys of it.
        """
        self.emitted = True
        if self.json_mode:
            found = payload if isinstance(payload, Mapping) else to_json(payload)
            document = strict_json({"schema": f"kamera.{command}.v1", **found, **more})
            indent = 2 if _is_terminal(self.out) else None
            self._write(json.dumps(document, allow_nan=False, indent=indent) + "\n")
            return
        console = self._console()
        with console.capture() as capture:
            for part in view():
                console.print(part, soft_wrap=not hasattr(part, "columns"))
        text = capture.get()
        if not _is_terminal(self.out):
            text = "".join(f"{line.rstrip()}\n" for line in text.split("\n")[:-1])
        self._write(text)

    def text(self, text: str) -> None:
        """Print plain text on stdout (help, version)."""
        self._write(text if text.endswith("\n") else text + "\n")

    def _write(self, text: str) -> None:
        try:
            self.out.write(text)
            self.out.flush()
        except BrokenPipeError as error:
            raise ClosedPipe from error
        except OSError as error:
            raise OSError(error.errno, error.strerror, "stdout") from error
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
            from kamera_cli.output.progress import Bars

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


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()
