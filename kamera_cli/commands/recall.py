"""``kamera recall``: put evicted chunks back into a window."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from kamera_cli.commands.session import ChunksArgument, Session, WindowOption, command
from kamera_cli.errors import UsageError
from kamera_cli.results import RecallResult, WindowEntry, WindowView
from kamera_cli.text import count, display, format_ms, short_id, table

if TYPE_CHECKING:
    from rich.console import RenderableType


@command
def recall(
    session: Session,
    chunks: ChunksArgument = None,
    window: WindowOption = "default",
    at: Annotated[
        str, typer.Option("--at", metavar="end|N", help="Where: at the end, or as the N-th chunk")
    ] = "end",
    repair: Annotated[
        bool, typer.Option("--repair", help="Also form anew the patches of the cascade in this window")
    ] = False,
    listing: Annotated[bool, typer.Option("--list", help="Show what can be recalled")] = False,
) -> None:
    """Put evicted chunks back.

    They are conditioned on what now stands before them; the vision tower never runs.
    """
    if listing:
        if chunks:
            raise UsageError("--list shows all that can be recalled and takes no chunks")
        list_evicted(session, window)
        return
    if not chunks:
        raise UsageError("name the chunks to recall; `kamera recall --list` shows them")
    where = parse_at(at)
    with session.engine() as engine:
        result = engine.recall(chunks, window=window, at=where, repair=repair)
    session.output.result("recall", payload(result), lambda: view(result))


def parse_at(text: str) -> str | int:
    """``end`` or a 1-based place.

    Raises
    ------
    UsageError
        For anything else.
    """
    if text == "end":
        return text
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(f"--at {text!r} is neither 'end' nor a place from 1 up")
    return int(text)


def list_evicted(session: Session, name: str) -> None:
    """Print what can be recalled, without the engine.

    Raises
    ------
    NotFoundError
        If there is no such window.
    """
    from kamera_cli.window import load_window

    with session.store() as store:
        window = load_window(store, session.settings.tenant, name)
    session.output.result(
        "recall",
        {"window": window.name, "evicted": [entry_payload(entry) for entry in window.evicted]},
        lambda: evicted_view(window),
    )


def entry_payload(entry: WindowEntry) -> dict[str, object]:
    """A window entry as every command prints it."""
    return {
        "id": entry.chunk,
        "number": entry.number,
        "name": entry.name,
        "num_tokens": entry.num_tokens,
        "conditioned_on": entry.conditioned_on,
    }


def payload(result: RecallResult) -> dict[str, object]:
    """The fields of ``kamera.recall.v1``."""
    return {
        "window": result.window.name,
        "recalled": [entry_payload(entry) for entry in result.recalled],
        "chunks": [entry_payload(entry) for entry in result.window.entries],
        "patched": result.patched,
        "cascade": result.cascade,
        "repaired": result.repaired,
        "repaired_patches": result.repaired_patches,
        "vision_calls": result.vision_calls,
        "total_ms": result.total_ms,
    }


def view(result: RecallResult) -> Iterable[RenderableType]:
    """What people see."""
    back = ", ".join(f"{entry.number} ({display(entry.name)})" for entry in result.recalled)
    yield f"recalled {back} in {format_ms(result.total_ms)}; the vision tower ran {result.vision_calls} times"
    yield f"window {display(result.window.name)} now: {order_line(result.window)}"
    if result.patched:
        yield f"patched for their new place: {' '.join(short_id(chunk) for chunk in result.patched)}"
    if result.cascade:
        yield (
            f"cascade: {count(len(result.cascade), 'chunk')} with patches that name a recalled one: "
            f"{' '.join(short_id(chunk) for chunk in result.cascade)}"
        )
    if result.repaired:
        yield (
            f"repaired, the cheapest first: {' '.join(map(str, result.repaired))} "
            f"({count(len(result.repaired_patches), 'patch')} formed or found)"
        )


def order_line(window: WindowView) -> str:
    """The numbers of a window's chunks in order."""
    return " ".join(str(entry.number) for entry in window.entries) or "empty"


def evicted_view(window: WindowView) -> Iterable[RenderableType]:
    """What people see of ``--list``."""
    if not window.evicted:
        yield f"nothing was evicted from window {display(window.name)}"
        return
    yield table(
        (">#", "chunk", "id", ">tokens"),
        ((entry.number, entry.name, short_id(entry.chunk), entry.num_tokens) for entry in window.evicted),
    )
