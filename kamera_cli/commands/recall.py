"""``kamera recall``: put evicted chunks back into a window."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from kamera_cli.commands.session import ChunksArgument, Session, WindowOption, command
from kamera_cli.errors import UsageError
from kamera_cli.options import DEFAULT_WINDOW, RecallOptions
from kamera_cli.results import RecallResult, WindowEntry, WindowView
from kamera_cli.words import count, display, format_ms, short_id, table, to_json

if TYPE_CHECKING:
    from rich.console import RenderableType


@command
def recall(
    session: Session,
    chunks: ChunksArgument = None,
    window: WindowOption = DEFAULT_WINDOW,
    at: Annotated[
        str, typer.Option("--at", metavar="end|N", help="Where: at the end, or as the N-th chunk")
    ] = str(RecallOptions.at),
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
    options = RecallOptions(window=window, chunks=chunks, at=at, repair=repair)
    with session.engine() as engine:
        result = engine.recall(options=options)
    session.output.result("recall", result, lambda: view(result))


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
        held = {entry.chunk for entry in window.evicted if store.get(bytes.fromhex(entry.chunk)) is not None}
    evicted = [to_json(entry) | {"in_store": entry.chunk in held} for entry in window.evicted]
    session.output.result(
        "recall", {"window": window.name, "evicted": evicted}, lambda: evicted_view(window, held)
    )


def view(result: RecallResult) -> Iterable[RenderableType]:
    """What people see."""
    back = named(result.recalled)
    yield f"recalled {back} in {format_ms(result.total_ms)}; the vision tower ran {count(result.vision_calls, 'time')}"
    yield f"window {display(result.window.name)} now: {order_line(result.window)}"
    if result.patched:
        yield f"patched for their new place: {named(e for e in result.recalled if e.conditioned_on)}"
    if result.cascade:
        known = [
            entry
            for entry in (*result.window.entries, *result.window.evicted)
            if entry.chunk in result.cascade
        ]
        others = len(result.cascade) - len(known)
        listed = [named(known)] * bool(known) + [f"{count(others, 'chunk')} of other windows"] * bool(others)
        yield f"cascade, with patches that name a recalled chunk: {' and '.join(listed)}"
        if not result.repaired:
            yield "what they took in stays as it was; --repair conditions those of this window anew"
    if result.repaired:
        entries = {entry.number: entry for entry in result.window.entries}
        yield (
            f"repaired, the cheapest first: {named(entries[number] for number in result.repaired)}; "
            f"{count(len(result.repaired_patches), 'patch')} formed or found"
        )


def named(entries: Iterable[WindowEntry]) -> str:
    """``1 (clip.mp4#1), 3 (note.txt)``."""
    return ", ".join(f"{entry.number} ({display(entry.name)})" for entry in entries)


def order_line(window: WindowView) -> str:
    """The numbers of a window's chunks in order."""
    return " ".join(str(entry.number) for entry in window.entries) or "empty"


def evicted_view(window: WindowView, held: Collection[str]) -> Iterable[RenderableType]:
    """What people see of ``--list``; ``held`` are the ids of the chunks that the store still has."""
    if not window.evicted:
        yield f"nothing was evicted from window {display(window.name)}"
        return
    yield table(
        (">#", "chunk", "id", ">tokens", ""),
        (
            (
                entry.number,
                entry.name,
                short_id(entry.chunk),
                entry.num_tokens,
                "" if entry.chunk in held else "gone from the store: ingest its source again",
            )
            for entry in window.evicted
        ),
    )
