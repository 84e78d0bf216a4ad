"""Durable, content-keyed storage of tensors for position-free KV caches: LMDB, zstd, checked reads.

`format` says what the bytes mean and `lmdb` keeps them; neither knows the other's work. `tables`, `ledger` and `states`
work inside a transaction, `write`, `evict`, `verify` and `rescue` make theirs. `base.Store` has the verbs of any store;
`kvstore.KVStore` is the one on local disk. ``docs/format.md`` describes the bytes.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "kvstore": ("KVStore",),
    "format.keys": (
        "Identity", "chunk_identity", "encode", "file_sha256", "fingerprint_digest", "identity",
        "patch_identity", "source_identity",
    ),
    "format.records": ("Record", "TensorBytes", "TensorInfo"),
    "base": ("State", "Store"),
    "ledger": ("Share", "Stats", "UnitUsage"),
    "evict": ("Eviction", "EvictionPlan"),
    "lmdb.files": ("CompactReport",),
    "verify": ("Damage", "VerifyReport"),
    "rescue": ("SalvageReport", "salvage"),
    "errors": (
        "ConflictError", "DamagedError", "DamagedRecordWarning", "FormatVersionError", "IdentityWarning",
        "KameraStoreError", "MissingRecordError", "NewerRecordError", "NewerRecordWarning", "NoRoomError",
        "NotAKameraEntryError", "NotAStoreError",
        "ReadOnlyError", "StoreBusyError", "StoreDamagedError", "StoreRefusedError", "UnsupportedDtypeError",
    ),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value
