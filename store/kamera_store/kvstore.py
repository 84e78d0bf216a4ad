"""The store's face, one documented method for each thing it does; how it is done stands in the module behind it.

Finding is `lookup`, reading `payload`, writing `writing`, room and quota `room`, deleting `deletion`, small mutable
values `states`, checks of everything `integrity`; every transaction comes from `environment`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from kamera_store import delete as deletion
from kamera_store import evict_plan as eviction
from kamera_store import ledger, lookup, room, states
from kamera_store.errors import ReadOnlyError
from kamera_store.evict_plan import EvictionPlan
from kamera_store.format.header import header_checksum
from kamera_store.format.keys import Identity
from kamera_store.format.records import Record, TensorBytes, TensorInfo
from kamera_store.lmdb import process_registry as sharing
from kamera_store.lmdb.environment import Environment
from kamera_store.lmdb.transaction import Transaction
from kamera_store.states import State
from kamera_store.stats import Stats, gather

if TYPE_CHECKING:
    import numpy as np

    from kamera_store.compact import CompactReport
    from kamera_store.format.payload import FetchedLayer
    from kamera_store.verify import VerifyReport


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
        if quota_bytes is not None:
            room.require_quota(quota_bytes)
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
            return room.quota_of(txn)

    def set_quota(self, quota_bytes: int) -> None:
        """Change the limit for every process. Nothing is evicted before the next write."""
        room.require_quota(quota_bytes)
        self._write(lambda txn: room.store_quota(txn, quota_bytes))

    def _settle_quota(self, wanted: int | None) -> None:
        if self.read_only:
            return
        with self._env.read() as txn:
            stored = room.stored_quota(txn)
        if stored is None and wanted is None:
            wanted = room.quota_for_disk(self.path)
        if wanted is not None and wanted != stored:
            self.set_quota(wanted)

    def _require_writable(self) -> None:
        if self.read_only:
            raise ReadOnlyError(f"store {self.path} is open for reading only")

    def _write(self, action: Callable[[Transaction], Any]) -> Any:
        self._require_writable()
        return self._env.write(action)

    # Writing

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
        from kamera_store import write as writing

        item = {
            "identity": identity, "tenant": tenant, "unit": unit, "meta": meta, "tensors": tensors,
            "cost_ms": cost_ms, "created_s": created_s,
        }  # fmt: skip
        return writing.put(self, item, replace=replace)

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
        from kamera_store import write as writing

        writing.put_all(self, items, replace=replace)

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
        room.check_room(self._env, raw_bytes)

    # Finding

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
            record = lookup.under(txn, identity.key)
        return record if record is not None and lookup.is_same(record, identity, tenant) else None

    def get(self, key: bytes) -> Record | None:
        """The record under a key whoever owns it, or None; raises as `find`."""
        with self._env.read() as txn:
            return lookup.under(txn, bytes(key))

    def resolve(self, prefix: str, kind: str | None = None, tenant: str | None = None) -> list[Record]:
        """Records whose id begins with a hex prefix, in id order; damaged ones are skipped with a warning."""
        with self._env.read() as txn:
            return lookup.resolve(txn, prefix, kind, tenant)

    def iterate(self, kind: str | None = None, tenant: str | None = None) -> Iterator[Record]:
        """All sound records in id order, in short transactions; damaged ones are skipped with a warning."""
        return lookup.iterate(self._env, kind, tenant)

    def patches_of(self, chunk_key: bytes, tenant: str | None = None) -> list[Record]:
        """Patches of a chunk."""
        with self._env.read() as txn:
            return lookup.linked(txn, ledger.CHUNK, bytes(chunk_key), tenant)

    def patches_naming(self, antecedent_key: bytes, tenant: str | None = None) -> list[Record]:
        """Patches that have a chunk among their antecedents."""
        with self._env.read() as txn:
            return lookup.linked(txn, ledger.ANTECEDENT, bytes(antecedent_key), tenant)

    # Reading

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
        from kamera_store.format import payload

        with self._env.read() as txn:
            now = payload.current(txn, record)
            infos = now.tensors if wanted is None else [now.tensor(name, layer) for name, layer in wanted]
            fetched = payload.fetch(txn, now, infos)
        self._count(fetched)
        return {(info.name, info.layer): payload.decode(now, info, stored) for info, stored in fetched}

    def read_layer(self, record: Record, layer: int) -> dict[str, TensorBytes]:
        """All tensors of one layer by name; checks and errors as in `read`."""
        from kamera_store.format import payload

        with self._env.read() as txn:
            now = payload.current(txn, record)
            fetched = payload.fetch(txn, now, now.layer_tensors(layer))
        self._count(fetched)
        return {info.name: payload.decode(now, info, stored) for info, stored in fetched}

    def fetch_layer(self, records: Iterable[Record], layer: int) -> list[FetchedLayer]:
        """Copy one layer of many records out of the map in one short transaction, for decoding afterwards.

        Reading and decompressing can so be timed apart, and overlap between layers. Errors as in `read`.
        """
        from kamera_store.format import payload

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

    # Use and deletion

    def touch(self, keys: Iterable[bytes], now_s: float | None = None) -> None:
        """Stamp records as used now; does nothing on a read-only store."""
        if not self.read_only:
            stamp, listed = time.time() if now_s is None else float(now_s), [bytes(key) for key in keys]
            if listed:
                self._write(lambda txn: ledger.touch(txn, listed, stamp))

    def delete(self, keys: Iterable[bytes]) -> int:
        """Delete records, sound or damaged, in one transaction; bytes freed inside the data file."""
        listed = [bytes(key) for key in keys]
        return deletion.remove(self, lambda txn: listed) if listed else 0

    def delete_unit(self, tenant: str, unit: str) -> int:
        """Delete a media unit with the patches of its chunks; bytes freed."""
        for group in self.units():
            if (group.tenant, group.unit) == (tenant, unit):
                return self.delete(group.keys)
        return 0

    def _pulse(self) -> None:
        self._write(deletion.pulse)

    # Small values with a version

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

    # Eviction and care

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
            return gather(txn, self._env.file_bytes(), self._env.map_bytes(), room.quota_of(txn))

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
        return deletion.remove(self, lambda txn: deletion.still_evictable(txn, plan)) if plan.units else 0

    def verify(
        self, *, on_progress: Callable[[int, int], None] | None = None, quarantine: bool = True
    ) -> VerifyReport:
        """Check every stored byte; see `integrity.verify`."""
        from kamera_store.verify import verify

        return verify(self, on_progress=on_progress, quarantine=quarantine)

    def compact(self) -> CompactReport:
        """Give freed pages back to the file system; see `compaction.compact`."""
        from kamera_store.compact import compact

        return compact(self._env)
