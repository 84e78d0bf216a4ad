"""Which media units go when room is needed, and their removal; a plan is a pure decision that changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kamera_store import ledger, states, tables
from kamera_store.format.header import close_row
from kamera_store.ledger import UnitUsage
from kamera_store.lmdb.binding import Transaction
from kamera_store.lmdb.environment import Environment

_EXTRA_COMMIT_KEY = b"pulse"


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
    units, kept : tuple of Eviction
        Units to drop, first to go first; units that were due but stay.
    freed_bytes, used_bytes : int
        What the plan frees, and what was in use.
    to_bytes : int or None
        Aim of the plan, and whether it is `reached`.
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
    newer: frozenset[bytes] = frozenset(),
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
    pinned, newer : frozenset of bytes
        Keys of records in windows, and of those that a newer program wrote; a unit with one of them stays.
    protected : frozenset of (tenant, unit)
        Units that stay because they are being written.
    """
    mine = [unit for unit in units if tenant is None or unit.tenant == tenant]
    if tenant is not None:
        used_bytes = sum(unit.stored_bytes for unit in mine)
    if to_bytes is None and older_than_s is None:
        return EvictionPlan((), (), 0, used_bytes, None, True)
    due = [unit for unit in mine if older_than_s is None or now_s - unit.last_used_s > older_than_s]
    due.sort(key=lambda unit: (-urgency(unit, now_s), unit.last_used_s, unit.tenant, unit.unit))
    dropped: list[Eviction] = []
    kept: list[Eviction] = []
    freed = 0
    for unit in due:
        if to_bytes is not None and used_bytes - freed <= to_bytes:
            break
        if not pinned.isdisjoint(unit.keys):
            kept.append(Eviction(unit, "in a window"))
        elif not newer.isdisjoint(unit.keys):
            kept.append(Eviction(unit, "written by a newer kamera"))
        elif (unit.tenant, unit.unit) in protected:
            kept.append(Eviction(unit, "being written"))
        else:
            idle_s = max(now_s - unit.last_used_s, 0.0)
            dropped.append(Eviction(unit, f"not used for {idle_s:.0f} s"))
            freed += unit.stored_bytes
    reached = to_bytes is None or used_bytes - freed <= to_bytes
    return EvictionPlan(tuple(dropped), tuple(kept), freed, used_bytes, to_bytes, reached)


def plan_stored(
    txn: Transaction,
    units: Sequence[UnitUsage],
    *,
    used_bytes: int,
    now_s: float,
    to_bytes: int | None = None,
    older_than_s: float | None = None,
    tenant: str | None = None,
    protected: frozenset[tuple[str, str]] = frozenset(),
) -> EvictionPlan:
    """`plan_eviction` for the units of a store: chunks in windows and records of a newer program stay.

    Headers are read of the units that are due alone: who wrote a record does not stand in the ledger.
    """
    pinned, newer = states.pinned(txn), frozenset[bytes]()
    while True:
        plan = plan_eviction(
            units, used_bytes=used_bytes, now_s=now_s, to_bytes=to_bytes, older_than_s=older_than_s,
            tenant=tenant, pinned=pinned, newer=newer, protected=protected,
        )  # fmt: skip
        found = newer.union(key for key in plan.keys if tables.is_newer(txn, key))
        if found == newer:
            return plan
        newer = found


def evict(env: Environment, plan: EvictionPlan) -> int:
    """Carry out a plan; bytes freed inside the data file.

    Units stay that a window took up after the plan was made, or in which a newer program wrote.
    """

    def still_due(txn: Transaction) -> list[bytes]:
        pinned = states.pinned(txn)
        units = [due.unit.keys for due in plan.units if pinned.isdisjoint(due.unit.keys)]
        return [key for keys in units if not any(tables.is_newer(txn, key) for key in keys) for key in keys]

    return remove(env, still_due) if plan.units else 0


def remove(env: Environment, choose: Callable[[Transaction], Iterable[bytes]]) -> int:
    """Delete the records that ``choose`` names inside the transaction; bytes freed, as the ledger counts them."""

    def action(txn: Transaction) -> int:
        before, counted = txn.used_bytes(), 0
        for key in choose(txn):
            counted += ledger.stored_bytes_of(txn, key)
            tables.remove(txn, key)
        return max(counted, before - txn.used_bytes())

    freed = env.write(action)
    if freed:
        release_freed_pages(env)
    return freed


def release_freed_pages(env: Environment) -> None:
    """Commit once more: LMDB hands out the pages that one transaction freed only after another one."""

    def action(txn: Transaction) -> None:
        row = close_row("format", _EXTRA_COMMIT_KEY, str(txn.id).encode())
        txn.put("format", _EXTRA_COMMIT_KEY, row)

    env.write(action)
