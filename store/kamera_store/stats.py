"""What a store holds, in numbers: by media unit, by kind, by tenant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kamera_store import ledger
from kamera_store.ledger import Usage
from kamera_store.lmdb.binding import Transaction


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


def _shares(usages: list[Usage], by: str) -> dict[str, Share]:
    groups: dict[str, list[Usage]] = {}
    for usage in usages:
        groups.setdefault(getattr(usage, by), []).append(usage)
    return {name: _share(members) for name, members in sorted(groups.items())}


def _share(usages: list[Usage]) -> Share:
    return Share(len(usages), sum(u.raw_bytes for u in usages), sum(u.stored_bytes for u in usages))


def gather(txn: Transaction, file_bytes: int, map_bytes: int, quota_bytes: int) -> Stats:
    """Numbers of a store as one transaction sees it."""
    usages = list(ledger.usages(txn))
    total, used = _share(usages), txn.used_bytes()
    return Stats(
        total.count, total.raw_bytes, total.stored_bytes, _shares(usages, "kind"), _shares(usages, "tenant"),
        len(group_units(usages)), txn.count("state"), txn.count("quarantine"), used, file_bytes,
        max(0, file_bytes - used), map_bytes, quota_bytes,
    )  # fmt: skip
