"""The store against a plain dictionary: any sequence of operations gives what the dictionary gives."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from store_room import ROOM

from kamera_store import ConflictError, KVStore, NoRoomError, TensorBytes, chunk_identity, patch_identity

TENANTS = ("alice", "bob")
SIZES = (0, 1, 500, 5_000, 300_000)


class StoreMachine(RuleBasedStateMachine):
    """Two handles, one of them reopened now and then, against dictionaries."""

    chunks = Bundle("chunks")

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kamera-model-", dir=ROOM)) / "store"
        self.store = KVStore.open(self.folder, map_bytes=1 << 20, quota_bytes=64 << 20)
        self.records: dict[bytes, tuple] = {}
        self.states: dict[str, tuple[dict, int]] = {}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder.parent)

    def put(self, ident, tenant: str, unit: str, meta: dict, number: int, size: int) -> None:
        rng = np.random.default_rng(number)
        tensors = [
            TensorBytes(
                "keys", 0, "float32", (size // 4,), rng.standard_normal(size // 4).astype(np.float32)
            ),
            TensorBytes("ids", -1, "uint8", (size,), rng.integers(0, 4, size, np.uint8)),
        ]
        new = self.store.put(
            ident, tenant=tenant, unit=unit, meta=meta, tensors=tensors, cost_ms=number + 1.0
        )
        assert new == (ident.key not in self.records)
        if new:
            self.records[ident.key] = (ident, tenant, unit, meta, {(t.name, t.layer): t for t in tensors})

    @rule(
        target=chunks, number=st.integers(0, 20), tenant=st.sampled_from(TENANTS), size=st.sampled_from(SIZES)
    )
    def put_chunk(self, number, tenant, size):
        ids = TensorBytes("ids", -1, "int64", (2,), np.array([number, size], np.int64))
        ident = chunk_identity(fingerprint="m", tenant=tenant, inputs=[ids], extra={})
        self.put(ident, tenant, f"unit{number % 3}", {"n": number}, number, size)
        return ident, tenant

    @rule(chunk=chunks, others=st.lists(chunks, max_size=2), kind=st.sampled_from(("exact", "orbit")))
    def put_patch(self, chunk, others, kind):
        antecedents = [ident for ident, _ in others]
        ident = patch_identity(chunk=chunk[0], antecedents=antecedents, kind=kind, tenant=chunk[1], extra={})
        meta = {"chunk": chunk[0].id, "antecedents": [a.id for a in antecedents]}
        if ident.key in self.records:
            meta = self.records[ident.key][3]
        self.put(ident, chunk[1], "patches", meta, len(others), 2_000)

    @rule(chunk=chunks)
    def delete(self, chunk):
        self.store.delete([chunk[0].key])
        self.records.pop(chunk[0].key, None)

    @rule(unit=st.sampled_from(("unit0", "unit1", "patches")))
    def evict_unit(self, unit):
        plan = self.store.plan_eviction(to_bytes=0)
        due = tuple(one for one in plan.units if one.unit.unit == unit)
        self.store.evict(replace(plan, units=due))
        homes = {key: (t, u) for key, (i, t, u, _, _) in self.records.items() if i.kind == "chunk"}
        for key, (ident, own_tenant, own_unit, meta, _) in list(self.records.items()):
            home = (own_tenant, own_unit)
            if ident.kind == "patch":
                home = homes.get(bytes.fromhex(meta["chunk"]), home)
            if home[1] == unit:
                del self.records[key]

    @rule(name=st.sampled_from(("a", "b")), number=st.integers(0, 9), stale=st.booleans())
    def put_state(self, name, number, stale):
        known = self.states.get(name)
        expect = None if known is None else known[1]
        if stale:
            try:
                self.store.put_state("s", name, {}, expect=12345678)
            except ConflictError as error:
                assert error.found == expect
            else:
                raise AssertionError("a wrong version was taken")
        version = self.store.put_state("s", name, {"n": number}, expect=expect)
        assert expect is None or version > expect
        self.states[name] = ({"n": number}, version)

    @rule()
    def reopen(self):
        self.store.close()
        self.store = KVStore.open(self.folder)

    @rule()
    def compact(self):
        self.store.compact()

    @rule()
    def verify(self):
        assert self.store.verify().ok

    @rule(chunk=chunks)
    def refused_for_size_changes_nothing(self, chunk):
        huge = TensorBytes("x", 0, "uint8", (80 << 20,), np.zeros(80 << 20, np.uint8))
        ids = TensorBytes("ids", -1, "int64", (1,), np.array([-1], np.int64))
        ident = chunk_identity(fingerprint="m", tenant="alice", inputs=[ids], extra={})
        try:
            self.store.put(ident, tenant="alice", unit="u", meta={}, tensors=[huge], cost_ms=1)
        except NoRoomError:
            return
        raise AssertionError("a record larger than the quota was taken")

    @rule(chunk=chunks)
    def find(self, chunk):
        ident, tenant = chunk
        record = self.store.find(ident, tenant=tenant)
        if ident.key not in self.records:
            assert record is None
            return
        _, _, unit, meta, tensors = self.records[ident.key]
        assert (record.unit, record.meta) == (unit, meta)
        assert self.store.read(record) == tensors
        other = TENANTS[1 - TENANTS.index(tenant)]
        assert self.store.find(ident, tenant=other) is None
        naming = {
            k
            for k, (i, *_, m, _) in self.records.items()
            if i.kind == "patch" and ident.id in m["antecedents"]
        }
        assert {r.key for r in self.store.patches_naming(ident.key)} == naming

    @invariant()
    def lists_are_equal(self):
        if not hasattr(self, "store"):
            return
        assert [r.key for r in self.store.iterate()] == sorted(self.records)
        assert self.store.list_state("s") == sorted(self.states)
        for name, (value, version) in self.states.items():
            state = self.store.get_state("s", name)
            assert (state.value, state.version) == (value, version)
        stats = self.store.stats()
        assert stats.count == len(self.records)
        assert stats.raw_bytes == sum(t.raw_bytes for *_, ts in self.records.values() for t in ts.values())


TestStoreAgainstDictionary = StoreMachine.TestCase
TestStoreAgainstDictionary.settings = settings(
    max_examples=12,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
