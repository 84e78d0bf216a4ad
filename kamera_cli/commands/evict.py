"""``kamera evict``: take chunks out of a window, or drop what the store can spare."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from kamera_cli.commands.compact import compact_line, compact_payload
from kamera_cli.commands.recall import entry_payload, named, order_line
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
from kamera_cli.results import EvictResult
from kamera_cli.settings import parse_bytes, parse_duration_s
from kamera_cli.text import count, display, format_bytes, format_ms, short_id, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kamera_store import KVStore
    from kamera_store.eviction import Eviction, EvictionPlan

Names = Mapping[str, str | None]
"""Name of a media unit by its id."""


@command
def evict(
    session: Session,
    chunks: ChunksArgument = None,
    window: WindowOption = "default",
    oldest: Annotated[
        int | None, typer.Option("--oldest", metavar="N", min=1, help="The first N chunks")
    ] = None,
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
    names = list(chunks or ())
    in_window = bool(names) or oldest is not None
    store_wide = to is not None or older_than is not None
    check_request(names, oldest, store_wide=store_wide, purge=purge, compact=compact)
    if in_window:
        result = evict_from_window(session, names, window=window, oldest=oldest, purge=purge, dry_run=dry_run)
        report = finish(session, compact=compact and not dry_run)
        session.output.result("evict", window_payload(result) | report, lambda: window_view(result, report))
        return
    plan, names_of, freed_bytes = evict_from_store(
        session, to=to, older_than=older_than, dry_run=dry_run, yes=yes
    )
    report = finish(session, compact=compact and not dry_run)
    session.output.result(
        "evict",
        plan_payload(plan, names_of, freed_bytes, dry_run) | report,
        lambda: plan_view(plan, names_of, freed_bytes, dry_run, report),
    )


def check_request(
    names: list[str], oldest: int | None, *, store_wide: bool, purge: bool, compact: bool
) -> None:
    """Refuse requests that contradict themselves or ask for nothing.

    Raises
    ------
    UsageError
        Naming the options that do not go together.
    """
    if names and oldest is not None:
        raise UsageError("name chunks or give --oldest, not both")
    if store_wide and (names or oldest is not None or purge):
        raise UsageError(
            "--to and --older-than plan for the whole store; they take no chunks, --oldest or --purge"
        )
    if not (names or oldest is not None or store_wide or compact):
        raise UsageError("say what to evict: chunks, --oldest N, --to BYTES or --older-than TIME")
    if purge and not (names or oldest is not None):
        raise UsageError("--purge needs chunks or --oldest N")


def evict_from_window(
    session: Session, names: list[str], *, window: str, oldest: int | None, purge: bool, dry_run: bool
) -> EvictResult:
    """Let the engine take chunks out of a window."""
    with session.engine() as engine:
        return engine.evict(names or None, window=window, oldest=oldest, purge=purge, dry_run=dry_run)


def evict_from_store(
    session: Session, *, to: str | None, older_than: str | None, dry_run: bool, yes: bool
) -> tuple[EvictionPlan | None, Names, int]:
    """Plan, ask, then carry out.

    Returns
    -------
    EvictionPlan or None
        None when only ``--compact`` was asked.
    Names
        What the media of the plan's units are called.
    int
        Bytes freed.

    Raises
    ------
    KameraError
        If nobody can be asked and ``--yes`` was not given, or if the answer is no.
    """
    if to is None and older_than is None:
        return None, {}, 0
    to_bytes = None if to is None else parse_bytes(to)
    older_than_s = None if older_than is None else parse_duration_s(older_than)
    with session.store(read_only=dry_run) as store:
        plan = store.plan_eviction(to_bytes=to_bytes, older_than_s=older_than_s)
        names_of = {eviction.unit.unit: unit_name(store, eviction) for eviction in (*plan.units, *plan.kept)}
        if dry_run or not plan.units:
            return plan, names_of, 0
        question = f"delete {count(len(plan.units), 'source')}, {format_bytes(plan.freed_bytes)}?"
        session.require_consent(question, yes=yes)
        return plan, names_of, store.evict(plan)


def unit_name(store: KVStore, eviction: Eviction) -> str | None:
    """What the first chunk of a media unit is called, without the number of the chunk; None where none is left."""
    records = (store.get(key) for key in eviction.unit.keys)
    chunks = [record for record in records if record is not None and record.kind == "chunk"]
    first = min(chunks, key=lambda record: str(record.meta.get("name", "")), default=None)
    return None if first is None else re.sub(r"#\d+$", "", str(first.meta.get("name", "")))


def finish(session: Session, *, compact: bool) -> dict[str, object]:
    """Compact when asked, and say what the file now is: its size and what is free inside it are told apart."""
    report: dict[str, object] = {}
    with session.store(read_only=not compact) as store:
        if compact:
            with session.output.working():
                report["compact"] = compact_payload(store.compact())
        state = store.stats()
    return report | {"file_bytes": state.file_bytes, "free_inside_bytes": state.free_inside_bytes}


def window_payload(result: EvictResult) -> dict[str, object]:
    """The fields of ``kamera.evict.v1`` for chunks of a window."""
    return {
        "window": result.window.name,
        "dry_run": result.dry_run,
        "evicted": [entry_payload(entry) for entry in result.evicted],
        "chunks": [entry_payload(entry) for entry in result.window.entries],
        "purged": result.purged,
        "purged_patches": result.purged_patches,
        "patch_bytes": result.patch_bytes,
        "freed_bytes": result.freed_bytes,
    }


def window_view(result: EvictResult, report: Mapping[str, object]) -> Iterable[RenderableType]:
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


def plan_payload(
    plan: EvictionPlan | None, names_of: Names, freed_bytes: int, dry_run: bool
) -> dict[str, object]:
    """The fields of ``kamera.evict.v1`` for a store-wide plan."""
    if plan is None:
        return {"dry_run": dry_run, "units": [], "freed_bytes": 0}
    return {
        "dry_run": dry_run,
        "units": [_unit_payload(eviction, names_of) for eviction in plan.units],
        "kept": [_unit_payload(eviction, names_of) for eviction in plan.kept],
        "used_bytes": plan.used_bytes,
        "to_bytes": plan.to_bytes,
        "planned_bytes": plan.freed_bytes,
        "freed_bytes": freed_bytes,
        "reached": plan.reached,
    }


def plan_view(
    plan: EvictionPlan | None,
    names_of: Names,
    freed_bytes: int,
    dry_run: bool,
    report: Mapping[str, object],
) -> Iterable[RenderableType]:
    """What people see of it."""
    if plan is not None:
        if plan.units or plan.kept:
            yield table(
                ("", "source", "tenant", ">chunks", ">patches", ">size", ">to rebuild", "why"),
                [_unit_row("would go" if dry_run else "gone", eviction, names_of) for eviction in plan.units]
                + [_unit_row("stays", eviction, names_of) for eviction in plan.kept],
            )
        does = (
            f"would free {format_bytes(plan.freed_bytes)}"
            if dry_run
            else f"freed {format_bytes(freed_bytes)}"
        )
        yield (
            f"{count(len(plan.units), 'source')}: {does} inside the file"
            if plan.units
            else "nothing to delete"
        )
        if not plan.reached:
            yield "that is not enough: what stays is held by windows; take it out with kamera evict CHUNK"
    yield from file_lines(report)


def _unit_payload(eviction: Eviction, names_of: Names) -> dict[str, object]:
    unit = eviction.unit
    return {
        "unit": unit.unit,
        "name": names_of.get(unit.unit),
        "tenant": unit.tenant,
        "reason": eviction.reason,
        "ids": [key.hex() for key in unit.keys],
        "num_chunks": unit.num_chunks,
        "num_patches": unit.num_patches,
        "raw_bytes": unit.raw_bytes,
        "stored_bytes": unit.stored_bytes,
        "cost_ms": unit.cost_ms,
        "last_used_ms": round(unit.last_used_s * 1000),
    }


def _unit_row(fate: str, eviction: Eviction, names_of: Names) -> tuple[object, ...]:
    unit = eviction.unit
    return (
        fate,
        names_of.get(unit.unit) or short_id(unit.unit),
        unit.tenant,
        unit.num_chunks,
        unit.num_patches,
        format_bytes(unit.stored_bytes),
        format_ms(unit.cost_ms),
        eviction.reason,
    )


def file_lines(report: Mapping[str, object]) -> Iterable[RenderableType]:
    """The file's size and what is free inside it."""
    if "compact" in report:
        yield compact_line(report["compact"])
    if "file_bytes" in report:
        yield store_line(report["file_bytes"], report["free_inside_bytes"])
