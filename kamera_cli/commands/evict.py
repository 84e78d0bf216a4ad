"""``kamera evict``: take chunks out of a window, or drop what the store can spare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kamera_cli.commands.compact import compact_line
from kamera_cli.commands.evict_store import evict_from_store, plan_payload, plan_view
from kamera_cli.commands.recall import named, order_line
from kamera_cli.commands.session import (
    ChunksArgument,
    DryRunOption,
    Session,
    WindowOption,
    YesOption,
    command,
    store_line,
)
from kamera_cli.errors import UsageError
from kamera_cli.options import DEFAULT_WINDOW, EvictOptions
from kamera_cli.results import EvictResult
from kamera_cli.words import count, display, format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType


@command
def evict(
    session: Session,
    chunks: ChunksArgument = None,
    window: WindowOption = DEFAULT_WINDOW,
    oldest: Annotated[int | None, typer.Option("--oldest", metavar="N", help="The first N chunks")] = None,
    purge: Annotated[bool, typer.Option("--purge", help="Delete them from the store too")] = False,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="BYTES", help="Store-wide: delete until it holds this much, as in 10GB"),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="TIME", help="Store-wide: delete what was not used for 7d, 12h"),
    ] = None,
    compact: Annotated[bool, typer.Option("--compact", help="Afterwards make the file smaller")] = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> None:
    """Take chunks out of a window.

    The store keeps them, for `kamera recall`.

    With --to or --older-than: delete from the store, least used and cheapest to rebuild first, never what a window
    holds. Deleting frees room inside the file; only --compact makes the file smaller.
    """
    in_window = bool(chunks) or oldest is not None
    store_wide = to is not None or older_than is not None
    if store_wide and (in_window or purge):
        raise UsageError(
            "--to and --older-than plan for the whole store; they take no chunks, --oldest or --purge"
        )
    if in_window or purge:
        options = EvictOptions(window=window, chunks=chunks, oldest=oldest, purge=purge, dry_run=dry_run)
        with session.engine() as engine:
            result = engine.evict(options=options)
        report = finish(session, compact=compact and not dry_run)
        session.output.result("evict", result, lambda: window_view(result, report), **report)
        return
    if not (store_wide or compact):
        raise UsageError("say what to evict: chunks, --oldest N, --to BYTES or --older-than TIME")
    plan, names_of, freed_bytes = evict_from_store(
        session, to=to, older_than=older_than, dry_run=dry_run, yes=yes
    )
    report = finish(session, compact=compact and not dry_run)
    session.output.result(
        "evict",
        plan_payload(plan, names_of, freed_bytes, dry_run) | report,
        lambda: (*plan_view(plan, names_of, freed_bytes, dry_run), *file_lines(report)),
    )


def finish(session: Session, *, compact: bool) -> dict[str, Any]:
    """Compact when asked, and say what the file now is: its size and what is free inside it are told apart."""
    report: dict[str, Any] = {}
    with session.store(read_only=not compact) as store:
        if compact:
            with session.output.working():
                report["compact"] = store.compact()
        state = store.stats()
    return report | {"file_bytes": state.file_bytes, "free_inside_bytes": state.free_inside_bytes}


def window_view(result: EvictResult, report: Mapping[str, Any]) -> Iterable[RenderableType]:
    """What people see of it."""
    if result.purged:
        would = "would be purged from" if result.dry_run else "purged from"
    else:
        would = "would leave" if result.dry_run else "left"
    gone = named(result.evicted)
    yield f"{gone} {would} window {display(result.window.name)}, which holds: {order_line(result.window)}"
    if result.purged:
        deleted = "would be deleted" if result.dry_run else "deleted"
        freed = format_bytes(result.freed_bytes)
        patches = f"{count(len(result.purged_patches), 'patch')} of {format_bytes(result.patch_bytes)}"
        gone = f"{count(len(result.purged), 'chunk')} {deleted} from the store"
        gone += (
            f" with {patches} that hold something of them"
            if result.purged_patches
            else "; no patch names them"
        )
        yield f"{gone}: {freed} {'to be ' if result.dry_run else ''}freed inside the file"
    elif not result.dry_run:
        yield "the store keeps them: kamera recall puts them back"
    yield from file_lines(report)


def file_lines(report: Mapping[str, Any]) -> Iterable[RenderableType]:
    """The file's size and what is free inside it."""
    if "compact" in report:
        yield compact_line(report["compact"])
    if "file_bytes" in report:
        yield store_line(report["file_bytes"], report["free_inside_bytes"])
