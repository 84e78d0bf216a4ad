"""The store's face: put, find, read, iterate, state, quota and eviction."""

from __future__ import annotations

import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from . import eviction, ledger, rows, sharing, states
from .environment import Environment
from .errors import (
    DamagedError,
    DamagedRecordWarning,
    FormatVersionError,
    IdentityWarning,
    NoRoomError,
    ReadOnlyError,
    UnsupportedDtypeError,
)
from .eviction import EvictionPlan
from .header import decode_header, header_checksum
from .keys import Identity
from .records import Record, TensorBytes, TensorInfo
from .room import DEFAULT_QUOTA_BYTES, QUOTA_KEY, plan_room, quota_of, reserve, stored_quota
from .segments import needed_bytes
from .states import State
from .stats import Stats, gather
from .transaction import Transaction

if TYPE_CHECKING:
    import numpy as np

    from .integrity import CompactReport, VerifyReport
    from .payload import FetchedLayer, Prepared

_DISK_SHARE = 0.8
_PULSE_KEY = b"pulse"
_MIN_QUOTA_BYTES = 1 << 20
_BATCH = 256
_ROOM_TRIES = 3
_UNREADABLE = (DamagedError, FormatVersionError, UnsupportedDtypeError)


class _ShortageError(Exception):
    """A write found too little room in its own transaction, which is given up."""


class KVStore:
    """A store opened by this process: get one with `open`. A context manager, and safe between threads.

    Attributes
    ----------
    bytes_read : int
        Stored tensor bytes that were copied out of the data file through this handle so far.
    """

    def __init__(self, env: Environment, read_only: bool) -> None:
        self._env, self.read_only = env, read_only
        self.bytes_read = 0
        self._counting = threading.Lock()
        self._closed = False

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        create: bool = True,
        read_only: bool = False,
        quota_bytes: int | None = None,
        map_bytes: int | None = None,
    ) -> KVStore:
        """Open a store, or make one.

        Parameters
        ----------
        path : path-like
            Folder of the store; made with mode 0700.
        create : bool
            Whether a missing store is made.
        read_only : bool
            Refuse every write through this handle. Implies that nothing is made.
        quota_bytes : int, optional
            Limit for the bytes in use, kept in the store and valid for every process. By default the stored
            one; for a new store 20 GiB, or 80 % of the free disk space where that is less.
        map_bytes : int, optional
            Address space to begin with, 1 GiB by default; it doubles as needed.

        Raises
        ------
        NotAStoreError, StoreRefusedError, StoreDamagedError, FormatVersionError
            If the folder, its surroundings or its data file do not allow it.
        """
        if quota_bytes is not None and quota_bytes < _MIN_QUOTA_BYTES:
            raise ValueError(f"quota of {quota_bytes} bytes, at least {_MIN_QUOTA_BYTES} are needed")
        env = sharing.acquire(path, create=create and not read_only, read_only=read_only, map_bytes=map_bytes)
        store = cls(env, read_only)
        try:
            store._settle_quota(quota_bytes)
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        """Give the store back. The last handle of the process closes the data file."""
        if not self._closed:
            self._closed = True
            sharing.release(self._env)

    def __enter__(self) -> KVStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def path(self) -> str:
        """Real path of the store's folder."""
        return self._env.folder

    @property
    def quota_bytes(self) -> int:
        """The limit that is in force now, in bytes."""
        with self._env.read() as txn:
            return quota_of(txn)

    def set_quota(self, quota_bytes: int) -> None:
        """Change the limit for every process. Nothing is evicted before the next write."""
        if quota_bytes < _MIN_QUOTA_BYTES:
            raise ValueError(f"quota of {quota_bytes} bytes, at least {_MIN_QUOTA_BYTES} are needed")
        row = rows.close_row("format", QUOTA_KEY, str(int(quota_bytes)).encode())
        self._write(lambda txn: txn.put("format", QUOTA_KEY, row))

    def _settle_quota(self, wanted: int | None) -> None:
        if self.read_only:
            return
        with self._env.read() as txn:
            stored = stored_quota(txn)
        if stored is None and wanted is None:
            wanted = max(
                _MIN_QUOTA_BYTES,
                min(DEFAULT_QUOTA_BYTES, int(shutil.disk_usage(self.path).free * _DISK_SHARE)),
            )
        if wanted is not None and wanted != stored:
            self.set_quota(wanted)

    def _write(self, action: Callable[[Transaction], Any]) -> Any:
        if self.read_only:
            raise ReadOnlyError(f"store {self.path} is open for reading only")
        return self._env.write(action)

    # Records

    def put(
        self,
        identity: Identity,
        *,
        tenant: str,
        unit: str,
        meta: Mapping[str, Any],
        tensors: Iterable[TensorBytes],
        cost_ms: float,
        created_s: float | None = None,
        replace: bool = False,
    ) -> bool:
        """Store a record, all of it or nothing.

        Parameters
        ----------
        identity : Identity
            Its kind, key and digest.
        tenant, unit : str
            Who owns it, and the media unit that it is evicted with.
        meta : mapping
            Strict JSON. A patch names its ``chunk`` (hex key) and its ``antecedents`` (list of hex keys).
        tensors : iterable of TensorBytes
            No two with the same name and layer.
        cost_ms : float
            What it took to make.
        created_s : float, optional
            Unix time in seconds; now by default.
        replace : bool
            Write over a record of the same identity, in the same transaction that removes it.

        Returns
        -------
        bool
            True if it was written. False if nothing was: either the same content is there already, or another
            content stands under the same key, which is kept and reported by an `IdentityWarning`. A damaged
            record under the key is replaced.

        Raises
        ------
        NoRoomError
            If quota or disk have no room even after evicting what may go.
        ReadOnlyError, ValueError, UnsupportedDtypeError
        """
        from . import payload

        if self.read_only:
            raise ReadOnlyError(f"store {self.path} is open for reading only")
        with self._env.read() as txn:
            if self._stands(txn, identity, tenant, replace):
                return False
        items = list(tensors)
        self.check_room(sum(tensor.raw_bytes for tensor in items))
        prepared = payload.prepare(
            identity, tenant=tenant, unit=unit, meta=meta, tensors=items, cost_ms=cost_ms, created_s=created_s
        )
        for _ in range(_ROOM_TRIES):
            try:
                return self._write(lambda txn: self._put_in(txn, prepared, replace))
            except _ShortageError:
                # Evicted in a transaction of its own: the next one but one can use the pages again.
                pass
            with self._env.read() as txn:
                plan = plan_room(txn, prepared)
            self.evict(plan)
        # Others took the room each time: evict and write at once, and let the file grow by one record.
        return self._write(lambda txn: self._put_in(txn, prepared, replace, evicting=True))

    def put_all(self, items: Sequence[Mapping[str, Any]], *, replace: bool = False) -> None:
        """Store several records in one transaction, all of them or none; one by one where the room is short.

        Parameters
        ----------
        items : sequence of mapping
            Keyword arguments of `put` each, without ``replace``.

        Raises
        ------
        NoRoomError
            As `put`; the records before it then stay.
        """
        from . import payload

        if self.read_only:
            raise ReadOnlyError(f"store {self.path} is open for reading only")
        prepared = []
        for item in items:
            named = {"created_s": None, **item, "tensors": list(item["tensors"])}
            self.check_room(sum(tensor.raw_bytes for tensor in named["tensors"]))
            prepared.append(payload.prepare(named.pop("identity"), **named))
        try:
            self._write(lambda txn: [self._put_in(txn, one, replace) for one in prepared])
        except _ShortageError:
            for item in items:
                self.put(**item, replace=replace)

    def _put_in(self, txn: Transaction, prepared: Prepared, replace: bool, evicting: bool = False) -> bool:
        from . import payload

        record = prepared.record
        if self._stands(txn, Identity(record.kind, record.key, record.digest), record.tenant, replace):
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

    def _stands(self, txn: Transaction, identity: Identity, tenant: str, replace: bool) -> bool:
        """Whether the key is taken for good: by other content, or by this one if it is not to be replaced."""
        from . import payload

        header = txn.get("records", identity.key)
        if header is None:
            return False
        try:
            record = decode_header(identity.key, header)
            if _same(record, identity, tenant):
                if replace:
                    return False
                payload.require_sound(txn, record)
        except (DamagedError, UnsupportedDtypeError) as error:
            warnings.warn(f"{error}; written again", DamagedRecordWarning, stacklevel=4)
            return False
        return True

    def check_room(self, raw_bytes: int) -> None:
        """Refuse before any encoding what cannot fit even when everything evictable went.

        Parameters
        ----------
        raw_bytes : int
            Size of the tensors in memory; compression is not counted on.

        Raises
        ------
        NoRoomError
            If quota or disk are too small.
        """
        needed = needed_bytes(raw_bytes, 4096)
        with self._env.read() as txn:
            quota, used = quota_of(txn), txn.used_bytes()
        limit = quota - reserve(quota)
        if needed > limit:
            raise NoRoomError(needed, limit)
        inside = max(0, self._env.file_bytes() - used)
        free = shutil.disk_usage(self.path).free
        if needed > free + inside and used + needed <= limit:
            raise NoRoomError(needed, free + inside, "disk")

    def find(self, identity: Identity, *, tenant: str) -> Record | None:
        """The record of this content for this tenant, or None.

        The SHA-256 is compared. Another content under the same key is a miss with an `IdentityWarning`.

        Raises
        ------
        DamagedError
            If the stored header is damaged; `NotAKameraEntryError` if it is none.
        FormatVersionError
            If a newer program wrote it.
        """
        with self._env.read() as txn:
            header = txn.get("records", identity.key)
            record = None if header is None else decode_header(identity.key, header)
        return record if record is not None and _same(record, identity, tenant) else None

    def get(self, key: bytes) -> Record | None:
        """The record under a key whoever owns it, or None; raises as `find`."""
        with self._env.read() as txn:
            header = txn.get("records", bytes(key))
            return None if header is None else decode_header(bytes(key), header)

    def resolve(self, prefix: str, kind: str | None = None, tenant: str | None = None) -> list[Record]:
        """Records whose id begins with a hex prefix, in id order; damaged ones are skipped with a warning."""
        text = prefix.lower()
        if len(text) > 32 or any(character not in "0123456789abcdef" for character in text):
            return []
        whole = bytes.fromhex(text[: len(text) // 2 * 2])
        found = []
        with self._env.read() as txn:
            for key, header in txn.scan("records", whole):
                if key.hex().startswith(text):
                    record = _or_warn(key, header)
                    if record is not None and _matches(record, kind, tenant):
                        found.append(record)
        return found

    def read(
        self, record: Record, wanted: Iterable[tuple[str, int]] | None = None
    ) -> dict[tuple[str, int], TensorBytes]:
        """Tensors of a record, each checked: length, checksum, declared size, exact size.

        Parameters
        ----------
        record : Record
            From `find`, `get` or `iterate`.
        wanted : iterable of (name, layer), optional
            Which tensors; all by default.

        Returns
        -------
        dict
            By (name, layer). The bytes are fresh, writable and shared with nobody.

        Raises
        ------
        KeyError
            If the record has no such tensor.
        DamagedError
            If any check fails; nothing is returned then.
        MissingRecordError
            If the record was evicted meanwhile.
        """
        from . import payload

        with self._env.read() as txn:
            now = payload.current(txn, record)
            infos = now.tensors if wanted is None else [now.tensor(name, layer) for name, layer in wanted]
            fetched = payload.fetch(txn, now, infos)
        self._count(fetched)
        return {(info.name, info.layer): payload.decode(now, info, stored) for info, stored in fetched}

    def read_layer(self, record: Record, layer: int) -> dict[str, TensorBytes]:
        """All tensors of one layer by name; checks and errors as in `read`."""
        from . import payload

        with self._env.read() as txn:
            now = payload.current(txn, record)
            fetched = payload.fetch(txn, now, now.layer_tensors(layer))
        self._count(fetched)
        return {info.name: payload.decode(now, info, stored) for info, stored in fetched}

    def fetch_layer(self, records: Iterable[Record], layer: int) -> list[FetchedLayer]:
        """Copy one layer of many records out of the map in one short transaction, for decoding afterwards.

        Reading and decompressing can so be timed apart, and overlap between layers. Errors as in `read`.
        """
        from . import payload

        with self._env.read() as txn:
            layers = [payload.fetch_layer(txn, record, layer) for record in records]
        for fetched in layers:
            self._count(fetched.pieces)
        return layers

    def _count(self, fetched: list[tuple[TensorInfo, np.ndarray]]) -> None:
        with self._counting:
            self.bytes_read += sum(info.stored_bytes for info, _ in fetched)

    def writings(self, keys: Iterable[bytes]) -> dict[bytes, int | None]:
        """By key, which writing of a record stands (`Record.header_checksum`), in one short transaction; None for
        a key without a record. For copies in memory, which must not outlive what they were read from."""
        with self._env.read() as txn:
            headers = {bytes(key): txn.get("records", bytes(key)) for key in keys}
            return {
                key: None if header is None else header_checksum(header) for key, header in headers.items()
            }

    def iterate(self, kind: str | None = None, tenant: str | None = None) -> Iterator[Record]:
        """All sound records in id order, in short transactions; damaged ones are skipped with a warning."""
        start = b""
        while True:
            batch = []
            with self._env.read() as txn:
                for key, header in txn.scan("records", start=start):
                    batch.append((key, bytes(header)))
                    if len(batch) == _BATCH:
                        break
            for key, header in batch:
                record = _or_warn(key, header)
                if record is not None and _matches(record, kind, tenant):
                    yield record
            if len(batch) < _BATCH:
                return
            start = batch[-1][0] + b"\0"

    def patches_of(self, chunk_key: bytes, tenant: str | None = None) -> list[Record]:
        """Patches of a chunk."""
        return self._linked(ledger.CHUNK, chunk_key, tenant)

    def patches_naming(self, antecedent_key: bytes, tenant: str | None = None) -> list[Record]:
        """Patches that have a chunk among their antecedents."""
        return self._linked(ledger.ANTECEDENT, antecedent_key, tenant)

    def _linked(self, role: bytes, target: bytes, tenant: str | None) -> list[Record]:
        found = []
        with self._env.read() as txn:
            for key in ledger.linked(txn, role, bytes(target)):
                header = txn.get("records", key)
                record = None if header is None else _or_warn(key, header)
                if record is not None and _matches(record, "patch", tenant):
                    found.append(record)
        return found

    def touch(self, keys: Iterable[bytes], now_s: float | None = None) -> None:
        """Stamp records as used now; does nothing on a read-only store."""
        if not self.read_only:
            stamp, listed = time.time() if now_s is None else float(now_s), [bytes(key) for key in keys]
            if listed:
                self._write(lambda txn: ledger.touch(txn, listed, stamp))

    def delete(self, keys: Iterable[bytes]) -> int:
        """Delete records, sound or damaged, in one transaction; bytes freed inside the data file."""
        listed = [bytes(key) for key in keys]

        return self._remove(lambda txn: listed) if listed else 0

    def _remove(self, choose: Callable[[Transaction], Iterable[bytes]]) -> int:
        """Delete the records that `choose` names inside the transaction; bytes freed, as the ledger counts them."""

        def action(txn: Transaction) -> int:
            before, counted = txn.used_bytes(), 0
            for key in choose(txn):
                counted += ledger.stored_bytes_of(txn, key)
                ledger.remove(txn, key)
            return max(counted, before - txn.used_bytes())

        freed = self._write(action)
        if freed:
            self._pulse()
        return freed

    def delete_unit(self, tenant: str, unit: str) -> int:
        """Delete a media unit with the patches of its chunks; bytes freed."""
        for group in self.units():
            if (group.tenant, group.unit) == (tenant, unit):
                return self.delete(group.keys)
        return 0

    def _pulse(self) -> None:
        """A small commit: pages freed by the last transaction can be used only after another one."""

        def action(txn: Transaction) -> None:
            txn.put("format", _PULSE_KEY, rows.close_row("format", _PULSE_KEY, str(txn.id).encode()))

        self._write(action)

    # State

    def get_state(self, space: str, name: str) -> State | None:
        """A state's value and version, or None; raises DamagedError if its bytes are not what was written."""
        with self._env.read() as txn:
            return states.get(txn, space, name)

    def put_state(
        self, space: str, name: str, value: Mapping[str, Any], *, expect: int | Literal["any"] | None
    ) -> int:
        """Write a state if its version is `expect` (None: if there is none); the new version.

        Raises
        ------
        ConflictError
            If another version is there.
        ValueError
            If the value is not strict JSON.
        """
        return self._write(lambda txn: states.put(txn, space, name, value, expect))

    def delete_state(self, space: str, name: str) -> bool:
        """Delete a state; whether there was one."""
        key = states.state_key(space, name)
        return self._write(lambda txn: txn.delete("state", key))

    def list_state(self, space: str) -> list[str]:
        """Names of all states in a space."""
        with self._env.read() as txn:
            return states.names(txn, space)

    # Quota, eviction, care

    def pins(self) -> frozenset[bytes]:
        """Keys of the chunks that windows see."""
        with self._env.read() as txn:
            return states.pinned(txn)

    def units(self) -> list[eviction.UnitUsage]:
        """All media units with their sizes, costs and last use."""
        with self._env.read() as txn:
            return eviction.group_units(ledger.usages(txn))

    def stats(self) -> Stats:
        """Counts and bytes by kind and tenant, and the room inside and outside the data file."""
        with self._env.read() as txn:
            return gather(txn, self._env.file_bytes(), self._env.map_bytes(), quota_of(txn))

    def plan_eviction(
        self,
        *,
        to_bytes: int | None = None,
        older_than_s: float | None = None,
        tenant: str | None = None,
        now_s: float | None = None,
    ) -> EvictionPlan:
        """What would be evicted (`eviction.plan_eviction`); `to_bytes` limits `Stats.stored_bytes`."""
        with self._env.read() as txn:
            units, pinned = eviction.group_units(ledger.usages(txn)), states.pinned(txn)
        used = sum(unit.stored_bytes for unit in units)
        stamp = time.time() if now_s is None else float(now_s)
        return eviction.plan_eviction(
            units,
            used_bytes=used,
            now_s=stamp,
            to_bytes=to_bytes,
            older_than_s=older_than_s,
            tenant=tenant,
            pinned=pinned,
        )

    def evict(self, plan: EvictionPlan) -> int:
        """Carry out a plan; bytes freed inside the data file. Units that a window took up meanwhile stay."""

        def choose(txn: Transaction) -> list[bytes]:
            pinned = states.pinned(txn)
            units = [dropped.unit for dropped in plan.units if pinned.isdisjoint(dropped.unit.keys)]
            return [key for unit in units for key in unit.keys]

        return self._remove(choose) if plan.units else 0

    def verify(
        self, *, on_progress: Callable[[int, int], None] | None = None, quarantine: bool = True
    ) -> VerifyReport:
        """Check every stored byte; see `integrity.verify`."""
        from .integrity import verify

        return verify(self, on_progress=on_progress, quarantine=quarantine)

    def compact(self) -> CompactReport:
        """Give freed pages back to the file system; see `integrity.compact`."""
        from .integrity import compact

        return compact(self)


def _matches(record: Record, kind: str | None, tenant: str | None) -> bool:
    return (kind is None or record.kind == kind) and (tenant is None or record.tenant == tenant)


def _same(record: Record, identity: Identity, tenant: str) -> bool:
    """Whether a record found under an identity's key is that identity, for that tenant."""
    if record.digest != identity.digest or record.kind != identity.kind:
        warnings.warn(
            f"entry {record.short_id} holds another content (SHA-256 {record.digest.hex()[:16]}, "
            f"asked for {identity.digest.hex()[:16]}); counted as a miss",
            IdentityWarning,
            stacklevel=4,
        )
        return False
    return record.tenant == tenant


def _or_warn(key: bytes, header: bytes | memoryview) -> Record | None:
    try:
        return decode_header(key, header)
    except _UNREADABLE as error:
        warnings.warn(f"{error}; skipped", DamagedRecordWarning, stacklevel=3)
        return None
