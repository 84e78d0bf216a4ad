"""Writing records: encode before the transaction, write in one, and make room where there is too little."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kamera_store import ledger
from kamera_store.errors import DamagedError, DamagedRecordWarning, UnsupportedDtypeError
from kamera_store.format import payload
from kamera_store.format.header import decode_header
from kamera_store.format.keys import Identity
from kamera_store.lmdb.transaction import Transaction
from kamera_store.lookup import is_same
from kamera_store.room import plan_room, quota_of, reserve

if TYPE_CHECKING:
    from kamera_store.kvstore import KVStore

_ROOM_TRIES = 3


class _ShortageError(Exception):
    """A write found too little room in its own transaction, which is given up."""


def put(store: KVStore, item: Mapping[str, Any], *, replace: bool) -> bool:
    """Write one record; whether it was written. ``item`` is what `KVStore.put` is given; errors as there."""
    store._require_writable()
    with store._env.read() as txn:
        if _stands(txn, item["identity"], item["tenant"], replace):
            return False
    prepared = _prepared(store, item)
    for _ in range(_ROOM_TRIES):
        try:
            return store._write(lambda txn: _put_in(txn, prepared, replace))
        except _ShortageError:
            # Evicted in a transaction of its own: the next one but one can use the pages again.
            pass
        with store._env.read() as txn:
            plan = plan_room(txn, prepared)
        store.evict(plan)
    # Others took the room each time: evict and write at once, and let the file grow by one record.
    return store._write(lambda txn: _put_in(txn, prepared, replace, evicting=True))


def put_all(store: KVStore, items: Sequence[Mapping[str, Any]], *, replace: bool) -> None:
    """Write records in one transaction, or one by one where the room is short; see `KVStore.put_all`."""
    store._require_writable()
    listed = [{**item, "tensors": list(item["tensors"])} for item in items]
    prepared = [_prepared(store, item) for item in listed]
    try:
        store._write(lambda txn: [_put_in(txn, one, replace) for one in prepared])
    except _ShortageError:
        for item in listed:
            put(store, item, replace=replace)


def _prepared(store: KVStore, item: Mapping[str, Any]) -> payload.Prepared:
    named = {"created_s": None, **item, "tensors": list(item["tensors"])}
    store.check_room(sum(tensor.raw_bytes for tensor in named["tensors"]))
    return payload.prepare(named.pop("identity"), **named)


def _put_in(txn: Transaction, prepared: payload.Prepared, replace: bool, evicting: bool = False) -> bool:
    record = prepared.record
    if _stands(txn, Identity(record.kind, record.key, record.digest), record.tenant, replace):
        return False
    ledger.remove(txn, record.key)
    if evicting:
        for key in plan_room(txn, prepared).keys:
            ledger.remove(txn, key)
    used, quota = txn.used_bytes(), quota_of(txn)
    if not evicting and used + prepared.needed_bytes > quota - reserve(quota):
        raise _ShortageError
    payload.write(txn, prepared, time.time())
    return True


def _stands(txn: Transaction, identity: Identity, tenant: str, replace: bool) -> bool:
    """Whether the key is taken for good: by other content, or by this one if it is not to be replaced."""
    header = txn.get("records", identity.key)
    if header is None:
        return False
    try:
        record = decode_header(identity.key, header)
        if is_same(record, identity, tenant):
            if replace:
                return False
            payload.require_sound(txn, record)
    except (DamagedError, UnsupportedDtypeError) as error:
        warnings.warn(f"{error}; written again", DamagedRecordWarning, stacklevel=4)
        return False
    return True
