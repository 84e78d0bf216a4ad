"""Deleting records, and the small commit after which their pages can be used again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kamera_store import ledger, states
from kamera_store.evict_plan import EvictionPlan
from kamera_store.format import rows
from kamera_store.lmdb.transaction import Transaction

if TYPE_CHECKING:
    from kamera_store.kvstore import KVStore

_PULSE_KEY = b"pulse"


def remove(store: KVStore, choose: Callable[[Transaction], Iterable[bytes]]) -> int:
    """Delete the records that ``choose`` names inside the transaction; bytes freed, as the ledger counts them."""

    def action(txn: Transaction) -> int:
        before, counted = txn.used_bytes(), 0
        for key in choose(txn):
            counted += ledger.stored_bytes_of(txn, key)
            ledger.remove(txn, key)
        return max(counted, before - txn.used_bytes())

    freed = store._write(action)
    if freed:
        store._pulse()
    return freed


def pulse(txn: Transaction) -> None:
    """A write that says nothing: pages freed by one transaction can be used only after another one."""
    txn.put("format", _PULSE_KEY, rows.close_row("format", _PULSE_KEY, str(txn.id).encode()))


def still_evictable(txn: Transaction, plan: EvictionPlan) -> list[bytes]:
    """Records of a plan's units, without the units that a window took up after the plan was made."""
    pinned = states.pinned(txn)
    units = [dropped.unit for dropped in plan.units if pinned.isdisjoint(dropped.unit.keys)]
    return [key for unit in units for key in unit.keys]
