"""Which media units go when room is needed (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kamera_store.ledger import Usage


@dataclass(frozen=True)
class UnitUsage:
    """A media unit: its chunks, their patches, and its sources, which stay or go together.

    Attributes
    ----------
    tenant, unit : str
        Whose, and which.
    keys : tuple of bytes
        All its records.
    num_chunks, num_patches : int
        How many of them are which.
    raw_bytes, stored_bytes : int
        Size in memory, and pages in the data file.
    cost_ms : float
        What it would take to make all of it again.
    last_used_s : float
        Latest use of any of its records, Unix time in seconds.
    """

    tenant: str
    unit: str
    keys: tuple[bytes, ...]
    num_chunks: int
    num_patches: int
    raw_bytes: int
    stored_bytes: int
    cost_ms: float
    last_used_s: float


@dataclass(frozen=True)
class Eviction:
    """One unit of a plan and why it goes or stays."""

    unit: UnitUsage
    reason: str


@dataclass(frozen=True)
class EvictionPlan:
    """What would be evicted; nothing has happened yet.

    Attributes
    ----------
    units : tuple of Eviction
        Units to drop, first to go first.
    kept : tuple of Eviction
        Units that were due but stay, and why.
    freed_bytes, used_bytes : int
        What the plan frees, and what was in use.
    to_bytes : int or None
        Aim of the plan.
    reached : bool
        Whether the plan reaches its aim.
    """

    units: tuple[Eviction, ...]
    kept: tuple[Eviction, ...]
    freed_bytes: int
    used_bytes: int
    to_bytes: int | None
    reached: bool

    @property
    def keys(self) -> tuple[bytes, ...]:
        """All records to delete."""
        return tuple(key for eviction in self.units for key in eviction.unit.keys)


def group_units(usages: Iterable[Usage]) -> list[UnitUsage]:
    """Gather records into media units.

    A patch belongs to the unit of its chunk; one whose chunk is gone belongs to the unit it names.
    """
    rows = list(usages)
    home = {row.key: (row.tenant, row.unit) for row in rows if row.kind == "chunk"}
    groups: dict[tuple[str, str], list[Usage]] = {}
    for row in rows:
        own = (row.tenant, row.unit)
        groups.setdefault(home.get(row.chunk, own) if row.chunk is not None else own, []).append(row)
    return [
        UnitUsage(
            tenant,
            unit,
            tuple(row.key for row in members),
            sum(row.kind == "chunk" for row in members),
            sum(row.kind == "patch" for row in members),
            sum(row.raw_bytes for row in members),
            sum(row.stored_bytes for row in members),
            sum(row.cost_ms for row in members),
            max(row.last_used_s for row in members),
        )
        for (tenant, unit), members in groups.items()
    ]


def urgency(unit: UnitUsage, now_s: float) -> float:
    """How much a unit deserves to go: idle time times bytes, over the cost to make it again."""
    idle_s = max(now_s - unit.last_used_s, 0.0) + 1.0
    return idle_s * unit.stored_bytes / max(unit.cost_ms, 1.0)


def plan_eviction(
    units: Sequence[UnitUsage],
    *,
    used_bytes: int,
    now_s: float,
    to_bytes: int | None = None,
    older_than_s: float | None = None,
    tenant: str | None = None,
    pinned: frozenset[bytes] = frozenset(),
    protected: frozenset[tuple[str, str]] = frozenset(),
) -> EvictionPlan:
    """Choose units to drop.

    Parameters
    ----------
    units : sequence of UnitUsage
        All units of the store.
    used_bytes : int
        Bytes in use, which `to_bytes` is compared with.
    now_s : float
        Unix time in seconds.
    to_bytes : int, optional
        Drop until no more than this is in use.
    older_than_s : float, optional
        Only units not used for this long; all of them if `to_bytes` is not given.
    tenant : str, optional
        Only units of this tenant; `used_bytes` is then the tenant's own sum.
    pinned : frozenset of bytes
        Record keys in windows; a unit with one of them stays.
    protected : frozenset of (tenant, unit)
        Units that stay because they are being written.

    Returns
    -------
    EvictionPlan
    """
    mine = [unit for unit in units if tenant is None or unit.tenant == tenant]
    if tenant is not None:
        used_bytes = sum(unit.stored_bytes for unit in mine)
    if to_bytes is None and older_than_s is None:
        return EvictionPlan((), (), 0, used_bytes, None, True)
    due = [unit for unit in mine if older_than_s is None or now_s - unit.last_used_s > older_than_s]
    due.sort(key=lambda unit: (-urgency(unit, now_s), unit.last_used_s, unit.tenant, unit.unit))
    dropped, kept, freed = [], [], 0
    for unit in due:
        if to_bytes is not None and used_bytes - freed <= to_bytes:
            break
        if not pinned.isdisjoint(unit.keys):
            kept.append(Eviction(unit, "in a window"))
        elif (unit.tenant, unit.unit) in protected:
            kept.append(Eviction(unit, "being written"))
        else:
            idle_s = max(now_s - unit.last_used_s, 0.0)
            dropped.append(Eviction(unit, f"not used for {idle_s:.0f} s"))
            freed += unit.stored_bytes
    reached = to_bytes is None or used_bytes - freed <= to_bytes
    return EvictionPlan(tuple(dropped), tuple(kept), freed, used_bytes, to_bytes, reached)
