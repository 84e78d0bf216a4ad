"""Writing records: encode before the transaction, write in one, and make room under the quota where there is little.

What needs numpy is imported where records are encoded, so that opening and listing a store do not load it.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kamera_store import evict, ledger, tables
from kamera_store.base import is_same
from kamera_store.errors import DamagedError, DamagedRecordWarning, NoRoomError
from kamera_store.format.header import close_row, open_row
from kamera_store.format.keys import Identity
from kamera_store.format.records import references
from kamera_store.format.segments import needed_bytes
from kamera_store.lmdb.binding import Transaction
from kamera_store.lmdb.environment import Environment

if TYPE_CHECKING:
    from kamera_store.format.payload import Prepared

DEFAULT_QUOTA_BYTES = 20 << 30
MIN_QUOTA_BYTES = 1 << 20
_DISK_SHARE = 0.8
_QUOTA_KEY = b"quota"
_ROOM_TRIES = 3


class _ShortageError(Exception):
    """A write found too little room in its own transaction, which is given up."""


def put(env: Environment, item: Mapping[str, Any], *, replace: bool) -> bool:
    """Write one record; whether it was written. ``item`` is what `Store.put` is given; errors as there."""
    with env.read() as txn:
        if _keeps_what_stands(txn, item["identity"], item["tenant"], replace):
            return False
    prepared = _prepared(env, item)
    for _ in range(_ROOM_TRIES):
        try:
            return env.write(lambda txn: _put_in(txn, prepared, replace))
        except _ShortageError:
            # Evicted in a transaction of its own: the next one but one can use the pages again.
            pass
        with env.read() as txn:
            plan = plan_room(txn, prepared)
        evict.evict(env, plan)
    # Others took the room each time: evict and write at once, and let the file grow by one record.
    return env.write(lambda txn: _put_in(txn, prepared, replace, evicting=True))


def put_all(env: Environment, items: Sequence[Mapping[str, Any]], *, replace: bool) -> None:
    """Write records in one transaction, or one by one where the room is short; see `Store.put_all`."""
    listed = [{**item, "tensors": list(item["tensors"])} for item in items]
    prepared = [_prepared(env, item) for item in listed]
    try:
        env.write(lambda txn: [_put_in(txn, one, replace) for one in prepared])
    except _ShortageError:
        for item in listed:
            put(env, item, replace=replace)


def _prepared(env: Environment, item: Mapping[str, Any]) -> Prepared:
    from kamera_store.format.payload import prepare

    named = {**item, "tensors": list(item["tensors"])}
    check_room(env, sum(tensor.raw_bytes for tensor in named["tensors"]))
    return prepare(named.pop("identity"), **named)


def _put_in(txn: Transaction, prepared: Prepared, replace: bool, evicting: bool = False) -> bool:
    record = prepared.record
    if _keeps_what_stands(txn, Identity(record.kind, record.key, record.digest), record.tenant, replace):
        return False
    tables.remove(txn, record.key)
    if evicting:
        for key in plan_room(txn, prepared).keys:
            tables.remove(txn, key)
    used, quota = txn.used_bytes(), quota_of(txn)
    if not evicting and used + prepared.needed_bytes > quota - reserve(quota):
        raise _ShortageError
    usage = ledger.usage_of(record, len(prepared.header), time.time())
    tables.put_record(txn, record, prepared.header, prepared.segments(), usage)
    return True


def _keeps_what_stands(txn: Transaction, identity: Identity, tenant: str, replace: bool) -> bool:
    """Whether a record under the key stays: another content, or this one if it is sound and not to be replaced.

    Raises
    ------
    FormatVersionError
        If a newer program wrote it: nobody here can tell what it is.
    """
    try:
        record = tables.under(txn, identity.key)
        if record is None:
            return False
        if is_same(record, identity, tenant):
            if replace:
                return False
            tables.require_sound(txn, record)
    except DamagedError as error:
        warnings.warn(f"{error}; written again", DamagedRecordWarning, stacklevel=4)
        return False
    return True


# Room


def require_quota(quota_bytes: int) -> None:
    """Refuse a limit under which nothing could be kept, with a ValueError."""
    if quota_bytes < MIN_QUOTA_BYTES:
        raise ValueError(f"quota of {quota_bytes} bytes, at least {MIN_QUOTA_BYTES} are needed")


def settle_quota(env: Environment, wanted: int | None) -> None:
    """Keep the limit that is wanted; for a store without one, 20 GiB or 80 % of the free disk space if that is less."""
    with env.read() as txn:
        stored = _stored_quota(txn)
    if stored is None and wanted is None:
        free = shutil.disk_usage(env.folder).free
        wanted = max(MIN_QUOTA_BYTES, min(DEFAULT_QUOTA_BYTES, int(free * _DISK_SHARE)))
    if wanted is not None and wanted != stored:
        store_quota(env, wanted)


def store_quota(env: Environment, quota_bytes: int) -> None:
    """Keep another limit."""
    row = close_row("format", _QUOTA_KEY, str(int(quota_bytes)).encode())
    env.write(lambda txn: txn.put("format", _QUOTA_KEY, row))


def _stored_quota(txn: Transaction) -> int | None:
    value = txn.get("format", _QUOTA_KEY)
    return None if value is None else int(open_row("format", _QUOTA_KEY, value))


def quota_of(txn: Transaction) -> int:
    """The limit that is in force, in bytes."""
    stored = _stored_quota(txn)
    return DEFAULT_QUOTA_BYTES if stored is None else stored


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


def plan_room(txn: Transaction, prepared: Prepared) -> evict.EvictionPlan:
    """Which units go so that a record fits, with some slack if it can be had.

    Raises
    ------
    NoRoomError
        If all that may go is not enough.
    """
    record, quota, used = prepared.record, quota_of(txn), txn.used_bytes()
    limit = quota - reserve(quota)
    usages = list(ledger.usages(txn))
    chunk, antecedents = references(record)
    named = {chunk, *antecedents}
    protected = {(record.tenant, record.unit)} | {
        (row.tenant, row.unit) for row in usages if row.key in named
    }
    units, aim = ledger.group_units(usages), limit - prepared.needed_bytes
    for slack in (min(limit // 32, max(0, aim)), 0):
        plan = evict.plan_stored(
            txn,
            units,
            used_bytes=used,
            now_s=time.time(),
            to_bytes=aim - slack,
            protected=frozenset(protected),
        )
        if plan.reached:
            return plan
    raise NoRoomError(prepared.needed_bytes, max(0, limit - used + plan.freed_bytes))
