"""How much room there is under the quota, and which units go for a record that needs more."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from . import eviction, ledger, rows, states
from .errors import NoRoomError
from .eviction import EvictionPlan
from .transaction import Transaction

if TYPE_CHECKING:
    from .payload import Prepared

DEFAULT_QUOTA_BYTES = 20 << 30
QUOTA_KEY = b"quota"


def reserve(quota_bytes: int) -> int:
    """Part of the quota that records may not take, so that windows and stamps can always be written."""
    return min(64 << 20, max(128 << 10, quota_bytes // 64))


def plan_room(txn: Transaction, prepared: Prepared) -> EvictionPlan:
    """Which units go so that a record fits, with some slack if it can be had.

    Raises
    ------
    NoRoomError
        If all that may go is not enough.
    """
    record, quota, used = prepared.record, quota_of(txn), txn.used_bytes()
    limit = quota - reserve(quota)
    usages, pinned = list(ledger.usages(txn)), states.pinned(txn)
    chunk, antecedents = ledger.references(record)
    named = {chunk, *antecedents}
    protected = {(record.tenant, record.unit)} | {
        (row.tenant, row.unit) for row in usages if row.key in named
    }
    units, aim = eviction.group_units(usages), limit - prepared.needed_bytes
    for slack in (min(limit // 32, max(0, aim)), 0):
        plan = eviction.plan_eviction(
            units,
            used_bytes=used,
            now_s=time.time(),
            to_bytes=aim - slack,
            pinned=pinned,
            protected=frozenset(protected),
        )
        if plan.reached:
            return plan
    raise NoRoomError(prepared.needed_bytes, max(0, limit - used + plan.freed_bytes))


def stored_quota(txn: Transaction) -> int | None:
    """The limit that the store keeps, in bytes; None in a store that is just being made."""
    value = txn.get("format", QUOTA_KEY)
    return None if value is None else int(rows.open_row("format", QUOTA_KEY, value))


def quota_of(txn: Transaction) -> int:
    """The limit that is in force, in bytes."""
    stored = stored_quota(txn)
    return DEFAULT_QUOTA_BYTES if stored is None else stored
