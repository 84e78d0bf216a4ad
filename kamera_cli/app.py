"""The ``kamera`` program: global options, the commands, and the one place where an error becomes an exit code."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from kamera_cli.commands import session as shared
from kamera_cli.commands.bench import bench
from kamera_cli.commands.compact import compact
from kamera_cli.commands.compile_patches import compile_patches
from kamera_cli.commands.evict import evict
from kamera_cli.commands.ingest import ingest
from kamera_cli.commands.ls import ls
from kamera_cli.commands.models import app as models_app
from kamera_cli.commands.query import query
from kamera_cli.commands.recall import recall
from kamera_cli.commands.show import show
from kamera_cli.commands.stats import stats
from kamera_cli.commands.verify import verify
from kamera_cli.model import deferred
from kamera_cli.output.printer import ClosedPipe, Output
from kamera_cli.words import one_line

FAILED, NO_ROOM, INTERRUPTED, CLOSED_PIPE = 1, 6, 130, 141

EXIT_CODES = {
    0: "done",
    FAILED: "failed",
    2: "usage: the request makes no sense",
    3: "not found, or a miss under `--require-hit`",
    4: "refused: model, tenant, format or architecture does not fit",
    5: "damaged data",
    NO_ROOM: "no room",
    INTERRUPTED: "interrupted",
    CLOSED_PIPE: "the reader of stdout went away",
}
"""What the program ends with."""

app = typer.Typer(
    name="kamera",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="The options above may stand before or after the command's name.",
)


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    store: shared.StoreOption = None,
    tenant: shared.TenantOption = None,
    model: shared.ModelOption = None,
    device: shared.DeviceOption = None,
    dtype: shared.DtypeOption = None,
    attention: shared.AttentionOption = None,
    quota_bytes: shared.QuotaOption = None,
    rehash: shared.RehashOption = False,
    trust_remote_code: shared.TrustOption = False,
    json_mode: shared.JsonOption = False,
    quiet: shared.QuietOption = False,
    verbose: shared.VerboseOption = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit")] = False,
) -> None:
    """Reuse the KV cache of video, image and text chunks at any position, in any order."""
    state: shared.State = ctx.obj
    given = {name: ctx.params[name] for name in shared.GLOBAL_OPTIONS}
    state.flags = {name: value for name, value in given.items() if value not in (None, False)}
    if version:
        from kamera_cli import __version__

        state.output.text(f"kamera {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        state.output.text(ctx.get_help())


for _name, _command in (
    ("ingest", ingest),
    ("compile-patches", compile_patches),
    ("query", query),
    ("evict", evict),
    ("recall", recall),
    ("bench", bench),
    ("ls", ls),
    ("show", show),
    ("stats", stats),
    ("verify", verify),
    ("compact", compact),
):
    app.command(_name, epilog=shared.EPILOG)(_command)
app.add_typer(models_app, name="models", epilog=shared.EPILOG)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program on the process's own streams; the entry point of ``kamera``.

    Library bars and chatter are switched off, and whatever a library writes to file descriptor 1 by itself lands on
    stderr, so that stdout holds the result and nothing else. Large packages that a question seldom runs wait for their
    first use (`kamera_cli.model.deferred`).
    """
    for variable, value in (("TRANSFORMERS_VERBOSITY", "error"), ("TQDM_DISABLE", "1")):
        os.environ.setdefault(variable, value)
    deferred.install()
    if "_KAMERA_COMPLETE" in os.environ:
        typer.main.get_command(app).main(prog_name="kamera")
    if sys.stdout is None or sys.stderr is None:  # closed by the caller (``>&-``)
        with open(os.devnull, "w") as nowhere:
            sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
            return run(sys.argv[1:] if argv is None else argv)
    sys.stdout.flush()
    result_stream = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="backslashreplace")
    os.dup2(2, 1)
    sys.stdout = result_stream
    code = run(sys.argv[1:] if argv is None else argv)
    with contextlib.suppress(OSError):  # what could not be written was said already
        result_stream.close()
    return code


def run(argv: Sequence[str]) -> int:
    """Run the program on ``sys.stdout`` and ``sys.stderr`` and return the exit code.

    Parameters
    ----------
    argv : sequence of str
        Without the program's name.
    """
    output = Output(json_mode="--json" in argv, verbose=bool({"-v", "--verbose"} & set(argv)))
    with warnings.catch_warnings():
        _route_warnings(output)
        try:
            with typer.main.get_command(app).make_context(
                "kamera", list(argv), obj=shared.State(output)
            ) as context:
                context.command.invoke(context)
            return 0
        except typer.Exit as leaving:
            return leaving.exit_code
        except (ClosedPipe, BrokenPipeError):
            return CLOSED_PIPE
        except (KeyboardInterrupt, typer.Abort):
            return _fail(output, INTERRUPTED, "interrupted; finished chunks are kept, run it again to go on")
        except Exception as error:
            output.detail(traceback.format_exc())
            return _fail(output, exit_code(error), message(error), error)


def command_names() -> list[str]:
    """Every command and subcommand, as in ``models check``, in the order of the help text."""
    names: list[str] = []
    program: Any = typer.main.get_command(app)
    for name, command in program.commands.items():
        names += [name, *(f"{name} {inner}" for inner in getattr(command, "commands", ()))]
    return names


def help_text(command: str | None = None, width: int = 100) -> str:
    """The ``--help`` text of a command (None: of the program), as the documentation shows it.

    Raises
    ------
    KeyError
        If there is no such command; a subcommand is written ``models check``.
    """
    target: Any = typer.main.get_command(app)
    context = target.context_class(target, info_name="kamera", terminal_width=width, max_content_width=width)
    for part in (command or "").split():
        target = target.commands[part]
        context = target.context_class(
            target, info_name=part, parent=context, terminal_width=width, max_content_width=width
        )
    return context.get_help()


def exit_code(error: BaseException) -> int:
    """One of `EXIT_CODES`. Our own errors, and those of a command line that cannot be parsed, carry theirs."""
    no_room = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if no_room or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return NO_ROOM
    return int(getattr(error, "exit_code", FAILED))


def message(error: BaseException) -> str:
    """One line: what happened, to which object, what to do."""
    if hasattr(error, "format_message"):  # the command line could not be parsed
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "kamera"
        return f"{one_line(error.format_message()).rstrip('.')}; see `{where} --help`"
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename!r}: " if error.filename is not None else ""
        return f"{where}{error.strerror}"
    text = one_line(str(error))
    if text and hasattr(error, "exit_code"):
        return text
    return f"unexpected {type(error).__name__}: {text or 'no message'}; run again with -v for the traceback"


def _fail(output: Output, code: int, text: str, error: BaseException | None = None) -> int:
    with contextlib.suppress(ClosedPipe, BrokenPipeError):
        output.failure(text, code, "Interrupted" if error is None else type(error).__name__)
    return code


def _route_warnings(output: Output) -> None:
    """Python warnings of our own packages become warning lines; those of libraries show with ``-v`` alone."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, *_: object, **_more: object
    ) -> None:
        ours = category.__module__.startswith(("kamera_cli", "kamera_store")) or "/kamera_" in filename
        if ours or output.verbose:
            output.warn(str(message))

    warnings.showwarning = show
