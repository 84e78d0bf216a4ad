"""What a store holds, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kamera_store import evict_plan as eviction
from kamera_store import ledger
from kamera_store.lmdb.transaction import Transaction


@dataclass(frozen=True)
class Share:
    """Sum over some records.

    Attributes
    ----------
    count : int
        How many.
    raw_bytes, stored_bytes : int
        Size of their tensors in memory, and of their pages in the data file.
    """

    count: int
    raw_bytes: int
    stored_bytes: int


@dataclass(frozen=True)
class Stats:
    """Numbers of a store; all sizes in bytes.

    Attributes
    ----------
    count, raw_bytes, stored_bytes : int
        Over all records.
    kinds, tenants : mapping
        The same for each kind and for each tenant.
    units, states, quarantined : int
        Media units, small states, entries set aside as damaged.
    used_bytes : int
        Pages in use, which the quota limits.
    file_bytes, free_inside_bytes : int
        Length of the data file, and how much of it is free for new records.
    map_bytes, quota_bytes : int
        Address space in use, and the limit.
    """

    count: int
    raw_bytes: int
    stored_bytes: int
    kinds: Mapping[str, Share]
    tenants: Mapping[str, Share]
    units: int
    states: int
    quarantined: int
    used_bytes: int
    file_bytes: int
    free_inside_bytes: int
    map_bytes: int
    quota_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Plain nested dictionary, ready for JSON."""
        return asdict(self)


def _shares(usages: list[ledger.Usage], by: str) -> dict[str, Share]:
    groups: dict[str, list[ledger.Usage]] = {}
    for usage in usages:
        groups.setdefault(getattr(usage, by), []).append(usage)
    return {name: _share(members) for name, members in sorted(groups.items())}


def _share(usages: list[ledger.Usage]) -> Share:
    return Share(len(usages), sum(u.raw_bytes for u in usages), sum(u.stored_bytes for u in usages))


def gather(txn: Transaction, file_bytes: int, map_bytes: int, quota_bytes: int) -> Stats:
    """Numbers of a store as one transaction sees it."""
    usages = list(ledger.usages(txn))
    total, used = _share(usages), txn.used_bytes()
    return Stats(
        total.count, total.raw_bytes, total.stored_bytes, _shares(usages, "kind"), _shares(usages, "tenant"),
        len(eviction.group_units(usages)), txn.count("state"), txn.count("quarantine"), used, file_bytes,
        max(0, file_bytes - used), map_bytes, quota_bytes,
    )  # fmt: skip
