"""What every command is handed: settings, output, engine and store; and the global options that each one takes."""

from __future__ import annotations

import copy
import functools
import inspect
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kamera_cli.errors import KameraError, NotFoundError, UsageError
from kamera_cli.output.printer import Output
from kamera_cli.settings import Attention, Device, Dtype, Settings, checked_name
from kamera_cli.words import format_bytes

if TYPE_CHECKING:
    from kamera_cli.engine import Engine
    from kamera_store import KVStore

StoreOption = Annotated[
    str | None, typer.Option("--store", metavar="PATH", help="Folder of the store  [env: KAMERA_STORE]")
]
TenantOption = Annotated[
    str | None, typer.Option("--tenant", metavar="NAME", help="Whose entries these are  [env: KAMERA_TENANT]")
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="ID_OR_DIR",
        help="Checkpoint, or a GGUF file; the embedded kamera-tiny by default  [env: KAMERA_MODEL]",
    ),
]
DeviceOption = Annotated[Device | None, typer.Option("--device", help="auto takes the GPU when there is one")]
DtypeOption = Annotated[Dtype | None, typer.Option("--dtype", help="auto is bf16 on a GPU and fp32 on a CPU")]
AttentionOption = Annotated[
    Attention | None,
    typer.Option("--attention", help="Attention kernel; auto takes flash-attn where it runs"),
]
QuotaOption = Annotated[
    str | None,
    typer.Option("--quota", metavar="BYTES", help="What the store may hold, as in 10GB  [env: KAMERA_QUOTA]"),
]
RehashOption = Annotated[
    bool, typer.Option("--rehash", help="Hash the weights again, even if the files look unchanged")
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let a checkpoint run Python files of its own")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object as the result")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="Only results and errors")]
VerboseOption = Annotated[bool, typer.Option("-v", "--verbose", help="Tracebacks and more detail")]

WindowOption = Annotated[str, typer.Option("--window", metavar="NAME", help="The window")]
ChunksArgument = Annotated[
    list[str] | None, typer.Argument(metavar="CHUNK", help="Numbers, names or ids", show_default=False)
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, change nothing")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask")]

GLOBAL_OPTIONS: dict[str, object] = {
    "store": StoreOption,
    "tenant": TenantOption,
    "model": ModelOption,
    "device": DeviceOption,
    "dtype": DtypeOption,
    "attention": AttentionOption,
    "quota_bytes": QuotaOption,
    "rehash": RehashOption,
    "trust_remote_code": TrustOption,
    "json_mode": JsonOption,
    "quiet": QuietOption,
    "verbose": VerboseOption,
}
"""Name of the setting or output switch, and its option. They may stand before or after the command's name."""

EPILOG = "Options of `kamera --help`, such as --json, --store or --device, may stand here too."

_SWITCHES = ("json_mode", "quiet", "verbose")


@dataclass
class State:
    """What ``app.py`` keeps of one run: the flags that stood before the command, and where to print."""

    output: Output
    flags: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Session:
    """Settings and output of one command; ``subcommand`` is the one that follows, for a group of commands."""

    settings: Settings
    output: Output
    subcommand: str | None = None

    @contextmanager
    def engine(self, *, creates_store: bool = False) -> Iterator[Engine]:
        """An open engine that reports to this output; the model itself loads when it is first needed.

        Raises
        ------
        NotFoundError
            If there is no store at the path and the command is not one that makes it.
        """
        from kamera_cli.engine import Engine

        if not creates_store:
            self.require_store()
        with (
            self.output.working() as on_progress,
            Engine(self.settings, on_progress=on_progress, on_warning=self.output.warn) as engine,
        ):
            yield engine

    @contextmanager
    def store(self, *, read_only: bool = True) -> Iterator[KVStore]:
        """The store alone, without the engine.

        Raises
        ------
        NotFoundError
            If there is no store at the path: looking must not make one.
        """
        from kamera_store import KVStore

        self.require_store()
        quota = None if read_only else self.settings.quota_bytes
        with KVStore.open(self.settings.store, create=False, read_only=read_only, quota_bytes=quota) as store:
            yield store

    def require_store(self) -> None:
        """Raise `NotFoundError` where no store is."""
        if not self.settings.store.exists():
            raise NotFoundError(
                f"there is no store at {str(self.settings.store)!r} yet; `kamera ingest FILE` makes one"
            )

    def require_consent(self, question: str, *, yes: bool) -> None:
        """Go on only with ``--yes`` or when a person says yes.

        Raises
        ------
        UsageError
            If nobody can be asked.
        KameraError
            If the person does not say yes.
        """
        if yes:
            return
        if not self.output.can_ask():
            raise UsageError("nobody can be asked here: give --yes to delete, or --dry-run to see the plan")
        if not self.output.ask(question):
            raise KameraError("nothing was deleted")


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the global options, hidden from its help, and a ``Session`` in place of them.

    ``function`` takes the session first; its own options win over a global one of the same name (``--dtype`` of
    ``compile-patches`` is the dtype of the factors).
    """
    hints = typing.get_type_hints(function, include_extras=True)
    own = [parameter.replace(annotation=hints[name]) for name, parameter in _signature(function).items()][1:]
    taken = {parameter.name for parameter in own}
    shared = {name: _hidden(option) for name, option in GLOBAL_OPTIONS.items() if name not in taken}

    @functools.wraps(function)
    def run(ctx: typer.Context, **values: object) -> None:
        state: State = ctx.obj
        here: dict[str, Any] = {name: values.pop(name) for name in shared}
        flags = state.flags | {name: value for name, value in here.items() if value not in (None, False)}
        state.flags = flags
        state.output.json_mode, state.output.quiet, state.output.verbose = (
            bool(flags.get(switch)) for switch in _SWITCHES
        )
        if state.output.quiet and state.output.verbose:
            raise UsageError("-q and -v exclude each other")
        settings = Settings.from_environment(
            **{name: value for name, value in flags.items() if name not in _SWITCHES}
        )
        if values.get("window") is not None:
            checked_name("window", str(values["window"]))
        function(Session(settings, state.output, ctx.invoked_subcommand), **values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    signature = inspect.Signature(
        [
            inspect.Parameter("ctx", keyword, annotation=typer.Context),
            *(parameter.replace(kind=keyword) for parameter in own),
            *(
                inspect.Parameter(
                    name, keyword, annotation=option, default=False if _is_flag(option) else None
                )
                for name, option in shared.items()
            ),
        ]
    )
    run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    vars(run)["__signature__"] = signature
    del run.__wrapped__
    return run


def store_line(file_bytes: int, free_bytes: int) -> str:
    """File size and what is free inside it, apart: deleting never makes the file smaller."""
    return f"file {format_bytes(file_bytes)}, of which {format_bytes(free_bytes)} free inside"


def _signature(function: Callable[..., None]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def _hidden(option: object) -> object:
    kind, info = typing.get_args(option)
    twin = copy.copy(info)
    twin.hidden = True
    return Annotated[kind, twin]


def _is_flag(option: object) -> bool:
    return typing.get_args(option)[0] is bool
