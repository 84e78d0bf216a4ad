"""How much room there is under the quota and on the disk, and which units go for a record that needs more."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

from kamera_store import evict_plan as eviction
from kamera_store import ledger, states
from kamera_store.errors import NoRoomError
from kamera_store.evict_plan import EvictionPlan
from kamera_store.format import rows
from kamera_store.format.segments import needed_bytes
from kamera_store.lmdb.transaction import Transaction

if TYPE_CHECKING:
    from kamera_store.format.payload import Prepared
    from kamera_store.lmdb.environment import Environment

DEFAULT_QUOTA_BYTES = 20 << 30
MIN_QUOTA_BYTES = 1 << 20
_DISK_SHARE = 0.8
_QUOTA_KEY = b"quota"


def require_quota(quota_bytes: int) -> None:
    """Refuse a limit under which nothing could be kept, with a ValueError."""
    if quota_bytes < MIN_QUOTA_BYTES:
        raise ValueError(f"quota of {quota_bytes} bytes, at least {MIN_QUOTA_BYTES} are needed")


def quota_for_disk(folder: str) -> int:
    """The limit of a new store, in bytes: 20 GiB, or 80 % of the free disk space where that is less."""
    free = shutil.disk_usage(folder).free
    return max(MIN_QUOTA_BYTES, min(DEFAULT_QUOTA_BYTES, int(free * _DISK_SHARE)))


def reserve(quota_bytes: int) -> int:
    """Part of the quota that records may not take, so that windows and stamps can always be written."""
    return min(64 << 20, max(128 << 10, quota_bytes // 64))


def check_room(env: Environment, raw_bytes: int) -> None:
    """Refuse a record that cannot fit even when everything evictable went; see `KVStore.check_room`."""
    needed = needed_bytes(raw_bytes, 4096)
    with env.read() as txn:
        quota, used = quota_of(txn), txn.used_bytes()
    limit = quota - reserve(quota)
    if needed > limit:
        raise NoRoomError(needed, limit)
    inside = max(0, env.file_bytes() - used)
    free = shutil.disk_usage(env.folder).free
    if needed > free + inside and used + needed <= limit:
        raise NoRoomError(needed, free + inside, "disk")


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
    value = txn.get("format", _QUOTA_KEY)
    return None if value is None else int(rows.open_row("format", _QUOTA_KEY, value))


def store_quota(txn: Transaction, quota_bytes: int) -> None:
    """Keep another limit."""
    txn.put("format", _QUOTA_KEY, rows.close_row("format", _QUOTA_KEY, str(int(quota_bytes)).encode()))


def quota_of(txn: Transaction) -> int:
    """The limit that is in force, in bytes."""
    stored = stored_quota(txn)
    return DEFAULT_QUOTA_BYTES if stored is None else stored
