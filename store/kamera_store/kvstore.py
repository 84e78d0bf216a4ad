"""The store on local disk: every verb, each a call of the module that does it in the environment's transactions."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from kamera_store import evict, ledger, states, tables, write
from kamera_store.base import State, Store
from kamera_store.errors import ReadOnlyError
from kamera_store.evict import EvictionPlan
from kamera_store.format.header import header_checksum
from kamera_store.format.keys import Identity
from kamera_store.format.records import Record, TensorBytes, TensorInfo
from kamera_store.ledger import Stats, UnitUsage
from kamera_store.lmdb import environment
from kamera_store.lmdb.environment import Environment
from kamera_store.lmdb.files import CompactReport

if TYPE_CHECKING:
    from kamera_store.format.payload import Fetched
    from kamera_store.verify import VerifyReport


class KVStore(Store):
    """A store opened by this process: get one with `open`. A context manager, and safe between threads.

    Attributes
    ----------
    environment : Environment
        What gives transactions; all handles of a process on one path share it.
    read_only : bool
        Whether every write through this handle is refused.
    bytes_read : int
        Stored tensor bytes that were copied out of the data file through this handle so far.
    """

    def __init__(self, environment: Environment, read_only: bool) -> None:
        self.environment, self.read_only = environment, read_only
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
            write.require_quota(quota_bytes)
        env = environment.acquire(
            path, create=create and not read_only, read_only=read_only, map_bytes=map_bytes
        )
        store = cls(env, read_only)
        try:
            if not read_only:
                write.settle_quota(env, quota_bytes)
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        """Give the store back. The last handle of the process closes the data file."""
        if not self._closed:
            self._closed = True
            environment.release(self.environment)

    @property
    def path(self) -> str:
        """Real path of the store's folder."""
        return self.environment.folder

    @property
    def quota_bytes(self) -> int:
        """The limit that is in force now, in bytes."""
        with self.environment.read() as txn:
            return write.quota_of(txn)

    def set_quota(self, quota_bytes: int) -> None:
        """Change the limit for every process. Nothing is evicted before the next write."""
        write.require_quota(quota_bytes)
        write.store_quota(self._writable(), quota_bytes)

    def _writable(self) -> Environment:
        """The environment, for a write through this handle."""
        if self.read_only:
            raise ReadOnlyError(f"store {self.path} is open for reading only")
        return self.environment

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
        """Store a record in one transaction; see `Store.put`."""
        item = {
            "identity": identity, "tenant": tenant, "unit": unit, "meta": meta, "tensors": tensors,
            "cost_ms": cost_ms, "created_s": created_s,
        }  # fmt: skip
        return write.put(self._writable(), item, replace=replace)

    def put_all(self, items: Sequence[Mapping[str, Any]], *, replace: bool = False) -> None:
        """Store several records in one transaction; one by one where the room is short. See `Store.put_all`."""
        write.put_all(self._writable(), items, replace=replace)

    def check_room(self, raw_bytes: int) -> None:
        """Refuse before any encoding, with a NoRoomError, what cannot fit even when everything evictable went.

        ``raw_bytes`` is the size of the tensors in memory; compression is not counted on.
        """
        write.check_room(self.environment, raw_bytes)

    # Finding

    def get(self, key: bytes) -> Record | None:
        """The record under a key whoever owns it, or None; see `Store.get`."""
        with self.environment.read() as txn:
            return tables.under(txn, bytes(key))

    def resolve(self, prefix: str, kind: str | None = None, tenant: str | None = None) -> list[Record]:
        """Records whose id begins with a hex prefix, in id order; see `Store.resolve`."""
        with self.environment.read() as txn:
            return tables.resolve(txn, prefix, kind, tenant)

    def iterate(self, kind: str | None = None, tenant: str | None = None) -> Iterator[Record]:
        """All readable records in id order, in short transactions; see `Store.iterate`."""
        return tables.iterate(self.environment, kind, tenant)

    def patches_of(self, chunk_key: bytes, tenant: str | None = None) -> list[Record]:
        """Patches of a chunk."""
        with self.environment.read() as txn:
            return tables.linked(txn, tables.CHUNK, bytes(chunk_key), tenant)

    def patches_naming(self, antecedent_key: bytes, tenant: str | None = None) -> list[Record]:
        """Patches that have a chunk among their antecedents."""
        with self.environment.read() as txn:
            return tables.linked(txn, tables.ANTECEDENT, bytes(antecedent_key), tenant)

    def writings(self, keys: Iterable[bytes]) -> dict[bytes, int | None]:
        """By key, which writing of a record stands, in one short transaction; see `Store.writings`."""
        with self.environment.read() as txn:
            headers = {bytes(key): txn.get("records", bytes(key)) for key in keys}
            return {
                key: None if header is None else header_checksum(header) for key, header in headers.items()
            }

    # Reading

    def read(
        self, record: Record, wanted: Iterable[tuple[str, int]] | None = None
    ) -> dict[tuple[str, int], TensorBytes]:
        """Tensors of a record, each checked; see `Store.read`."""

        def choose(now: Record) -> Iterable[TensorInfo]:
            return now.tensors if wanted is None else [now.tensor(name, layer) for name, layer in wanted]

        return {
            (tensor.name, tensor.layer): tensor for tensor in self._fetched([record], choose)[0].tensors()
        }

    def read_layer(self, record: Record, layer: int) -> dict[str, TensorBytes]:
        """All tensors of one layer by name; checks and errors as in `read`."""
        return self.fetch_layer([record], layer)[0].decode()

    def fetch_layer(self, records: Iterable[Record], layer: int) -> list[Fetched]:
        """Copy one layer of many records out of the map in one short transaction, for decoding afterwards.

        Reading and decompressing can so be timed apart, and overlap between layers. Errors as in `read`.
        """
        return self._fetched(records, lambda now: now.layer_tensors(layer))

    def _fetched(
        self, records: Iterable[Record], choose: Callable[[Record], Iterable[TensorInfo]]
    ) -> list[Fetched]:
        with self.environment.read() as txn:
            fetched = [tables.fetch(txn, record, choose) for record in records]
        with self._counting:
            self.bytes_read += sum(one.num_bytes for one in fetched)
        return fetched

    # Use and deletion

    def touch(self, keys: Iterable[bytes], now_s: float | None = None) -> None:
        """Stamp records as used now; does nothing on a read-only store."""
        stamp, listed = time.time() if now_s is None else float(now_s), [bytes(key) for key in keys]
        if listed and not self.read_only:
            self.environment.write(lambda txn: ledger.touch(txn, listed, stamp))

    def delete(self, keys: Iterable[bytes]) -> int:
        """Delete records, readable or not, in one transaction; bytes freed inside the data file."""
        listed = [bytes(key) for key in keys]
        return evict.remove(self._writable(), lambda txn: listed) if listed else 0

    # Small values with a version

    def get_state(self, space: str, name: str) -> State | None:
        """A state's value and version, or None; raises DamagedError if its bytes are not what was written."""
        with self.environment.read() as txn:
            return states.get(txn, space, name)

    def put_state(
        self, space: str, name: str, value: Mapping[str, Any], *, expect: int | Literal["any"] | None
    ) -> int:
        """Write a state if its version is `expect` (None: if there is none); see `Store.put_state`."""
        return self._writable().write(lambda txn: states.put(txn, space, name, value, expect))

    def list_state(self, space: str) -> list[str]:
        """Names of all states in a space."""
        with self.environment.read() as txn:
            return states.names(txn, space)

    # Eviction and care

    def units(self) -> list[UnitUsage]:
        """All media units with their sizes, costs and last use."""
        with self.environment.read() as txn:
            return ledger.group_units(ledger.usages(txn))

    def stats(self) -> Stats:
        """Counts and bytes by kind and tenant, and the room inside and outside the data file."""
        env = self.environment
        with env.read() as txn:
            return ledger.gather(txn, env.file_bytes(), env.map_bytes(), write.quota_of(txn))

    def plan_eviction(
        self,
        *,
        to_bytes: int | None = None,
        older_than_s: float | None = None,
        tenant: str | None = None,
        now_s: float | None = None,
    ) -> EvictionPlan:
        """What would be evicted (`evict.plan_eviction`); `to_bytes` limits `Stats.stored_bytes`."""
        with self.environment.read() as txn:
            units = ledger.group_units(ledger.usages(txn))
            return evict.plan_stored(
                txn,
                units,
                used_bytes=sum(unit.stored_bytes for unit in units),
                now_s=time.time() if now_s is None else float(now_s),
                to_bytes=to_bytes,
                older_than_s=older_than_s,
                tenant=tenant,
            )

    def evict(self, plan: EvictionPlan) -> int:
        """Carry out a plan; bytes freed inside the data file. Units that a window took up meanwhile stay."""
        return evict.evict(self._writable(), plan) if plan.units else 0

    def verify(
        self, *, on_progress: Callable[[int, int], None] | None = None, quarantine: bool = True
    ) -> VerifyReport:
        """Check every stored byte; see `verify.verify`. A handle for reading only moves nothing."""
        from kamera_store.verify import verify

        quarantine = quarantine and not self.read_only
        return verify(self.environment, on_progress=on_progress, quarantine=quarantine)

    def compact(self) -> CompactReport:
        """Give freed pages back to the file system; see `Environment.compact`."""
        return self._writable().compact()
