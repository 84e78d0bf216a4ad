"""Durable, content-keyed storage of tensors for position-free KV caches: LMDB, zstd, checked reads.

From the bottom up: `errors`, `keys`, `records`, `header`, `codec` and `segments` say what the bytes mean; `binding`,
`guard`, `gate`, `opening`, `environment` and `sharing` open a data file and give transactions; `payload`, `ledger`,
`states`, `lookup`, `writing`, `deletion`, `eviction` and `room` work inside one; `kvstore` is what others call;
`integrity`, `compaction` and `salvage` look after a store. ``FORMAT.md`` beside this package describes the bytes.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "kvstore": ("KVStore",),
    "format.keys": (
        "Identity", "bytes_digest", "chunk_identity", "encode", "file_sha256",
        "fingerprint_digest", "identity",
        "patch_identity", "source_identity", "tensor_field", "text_digest",
    ),
    "format.records": ("Record", "TensorBytes", "TensorInfo"),
    "states": ("State",),
    "stats": ("Share", "Stats"),
    "evict_plan": ("Eviction", "EvictionPlan", "UnitUsage"),
    "compact": ("CompactReport",),
    "verify": ("Damage", "VerifyReport"),
    "rescue": ("SalvageReport", "salvage"),
    "errors": (
        "ConflictError", "DamagedError", "DamagedRecordWarning", "FormatVersionError", "IdentityWarning",
        "KameraStoreError", "MissingRecordError", "NoRoomError", "NotAKameraEntryError", "NotAStoreError",
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
