"""What ``kamera evict`` does store-wide: plan, ask, delete; and the plan as people and programs read it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kamera_cli.commands.session import Session
from kamera_cli.settings import parse_bytes, parse_duration_s
from kamera_cli.words import count, format_bytes, format_ms, short_id, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kamera_store import KVStore
    from kamera_store.evict import Eviction, EvictionPlan

Names = Mapping[str, str | None]
"""Name of a media unit by its id."""


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
