"""Put, find, read, iterate, links and state, each against the way it could go wrong."""

from __future__ import annotations

import threading
import warnings

import numpy as np
import pytest

from kamera_store import (
    ConflictError,
    DamagedRecordWarning,
    KVStore,
    MissingRecordError,
    NotAKameraEntryError,
    ReadOnlyError,
    StoreRefusedError,
    TensorBytes,
)


def test_record_comes_back_as_it_was_put(store, kit):
    tensors = [*kit.tensors_of(1, 3), kit.noise(700_000)]
    ident = kit.put_chunk(store, 1, tensors=tensors, meta={"span": 3, "name": "é\n\"'"}, created_s=12.5)
    record = store.find(ident, tenant="t")
    assert (record.kind, record.key, record.digest, record.tenant, record.unit) == (
        "chunk", ident.key, ident.digest, "t", "unit1",
    )  # fmt: skip
    assert (
        record.meta == {"span": 3, "name": "é\n\"'"} and record.created_s == 12.5 and record.cost_ms == 10.0
    )
    assert record.num_layers == 3 and record.id == ident.id and record.short_id == ident.id[:10]
    assert record.raw_bytes == sum(t.raw_bytes for t in tensors)
    assert kit.same_tensors(store, record, tensors)
    assert store.read_layer(record, 1) == {t.name: t for t in tensors if t.layer == 1}
    assert store.read(record, [("keys", 2)]) == {("keys", 2): tensors[4]}
    assert store.read_layer(record, 7) == {}
    with pytest.raises(KeyError, match="no tensor 'latent'"):
        store.read(record, [("latent", 0)])


def test_second_put_of_the_same_content_writes_nothing(store, kit):
    ident = kit.put_chunk(store, 1)
    before = store.stats()
    assert store.put(ident, tenant="t", unit="other", meta={}, tensors=kit.tensors_of(1), cost_ms=1) is False
    assert store.stats() == before


def test_another_tenant_never_gets_the_record(store, kit):
    ident = kit.put_chunk(store, 1, tenant="alice")
    assert store.find(ident, tenant="bob") is None
    assert store.find(ident, tenant="alice") is not None
    assert [r.id for r in store.iterate(tenant="bob")] == []
    assert store.resolve(ident.id[:6], tenant="bob") == []


def test_wrong_kind_under_the_same_key_is_a_miss(store, kit):
    from dataclasses import replace

    ident = kit.put_chunk(store, 1)
    with pytest.warns(UserWarning, match="another content"):
        assert store.find(replace(ident, kind="patch"), tenant="t") is None


def test_stored_data_does_not_change_when_the_caller_writes_into_its_arrays(store, kit):
    data = np.arange(64, dtype=np.float32)
    ident = kit.put_chunk(store, 1, tensors=[TensorBytes("x", 0, "float32", (64,), data)])
    data += 1
    record = store.find(ident, tenant="t")
    store.read_layer(record, 0)["x"].data[:] = 0
    back = np.frombuffer(store.read_layer(record, 0)["x"].view(), np.float32)
    assert (back == np.arange(64)).all()


def test_prefixes_resolve_whole_and_half_bytes(store, kit):
    idents = [kit.put_chunk(store, n) for n in range(40)]
    ids = sorted(i.id for i in idents)
    for prefix in ("", ids[0][:1], ids[3][:2], ids[7][:3], ids[9], ids[9].upper()):
        assert [r.id for r in store.resolve(prefix)] == [i for i in ids if i.startswith(prefix.lower())]
    assert store.resolve("xyz") == store.resolve("0" * 33) == []
    assert store.resolve(ids[0], kind="patch") == []


def test_iteration_in_batches_visits_all_once_while_others_write(store, kit, monkeypatch):
    from kamera_store import tables

    monkeypatch.setattr(tables, "_BATCH", 3)
    idents = {kit.put_chunk(store, n).id for n in range(20)}
    seen = []
    for number, record in enumerate(store.iterate()):
        seen.append(record.id)
        if number == 4:
            extra = kit.put_chunk(store, 100).id
    assert len(seen) == len(set(seen)) and idents <= set(seen) <= idents | {extra}


def test_patches_are_found_from_their_chunk_and_from_their_antecedents(store, kit):
    a, b, c = (kit.put_chunk(store, n) for n in range(3))
    first = kit.put_patch(store, c, [a, b])
    second = kit.put_patch(store, c, [b])
    third = kit.put_patch(store, b, [a], tenant="t")

    def ids(records):
        return {r.id for r in records}

    assert ids(store.patches_of(c.key)) == {first.id, second.id}
    assert ids(store.patches_naming(a.key)) == {first.id, third.id}
    assert ids(store.patches_naming(b.key)) == {first.id, second.id}
    assert store.patches_of(c.key, tenant="u") == []
    store.delete([first.key])
    assert ids(store.patches_of(c.key)) == {second.id} and ids(store.patches_naming(a.key)) == {third.id}
    assert store.verify().ok


def test_deleting_reports_the_bytes_of_what_was_there(store, kit):
    idents = [kit.put_chunk(store, n) for n in range(3)]
    sizes = {unit.keys[0]: unit.stored_bytes for unit in store.units()}
    assert store.delete([idents[0].key]) >= sizes[idents[0].key] > 0
    assert store.delete([idents[0].key]) == 0
    plan = store.plan_eviction(to_bytes=0)
    assert store.evict(plan) >= plan.freed_bytes > 0


@pytest.mark.parametrize("meta", [{"chunk": "xyz"}, {"chunk": "00" * 15}, {"antecedents": [5]}])
def test_patch_that_names_no_key_is_refused(store, kit, meta):
    from dataclasses import replace

    ident = replace(kit.identity_of(1), kind="patch")
    with pytest.raises(ValueError, match="not the 32 hex digits"):
        store.put(ident, tenant="t", unit="u", meta=meta, tensors=[], cost_ms=1)


def test_record_evicted_under_a_reader_is_missing_and_not_damaged(store, kit):
    ident = kit.put_chunk(store, 1)
    record = store.find(ident, tenant="t")
    store.delete([ident.key])
    with pytest.raises(MissingRecordError):
        store.read(record)


def test_record_written_again_under_a_reader_is_read_in_its_new_writing(store, kit):
    ident, tensors = kit.put_chunk(store, 1), kit.tensors_of(1)
    record = store.find(ident, tenant="t")
    store.delete([ident.key])
    plain = [TensorBytes(t.name, t.layer, t.dtype, t.shape, t.data, "raw") for t in tensors]
    kit.put_chunk(store, 1, tensors=plain, meta={"other": 1})
    assert kit.same_tensors(store, record, tensors)


def test_state_is_compared_and_swapped(store):
    assert store.get_state("window", "a") is None
    first = store.put_state("window", "a", {"n": 1}, expect=None)
    with pytest.raises(ConflictError) as caught:
        store.put_state("window", "a", {"n": 2}, expect=None)
    assert (caught.value.expected, caught.value.found) == (None, first)
    second = store.put_state("window", "a", {"n": 2}, expect=first)
    assert second > first
    with pytest.raises(ConflictError):
        store.put_state("window", "a", {"n": 3}, expect=first)
    third = store.put_state("window", "a", {"n": 4}, expect="any")
    state = store.get_state("window", "a")
    assert (state.value, state.version) == ({"n": 4}, third)


def test_states_of_spaces_do_not_mix(store):
    for space, name in (("window", "b"), ("window", "é"), ("windows", "c"), ("w", "d")):
        store.put_state(space, name, {}, expect=None)
    assert store.list_state("window") == ["b", "é"]
    assert store.list_state("none") == []
    for space, name in (("", "a"), ("a", ""), ("a\0", "b"), ("a", "x" * 600)):
        with pytest.raises(ValueError):
            store.put_state(space, name, {}, expect=None)


def test_two_threads_never_lose_an_update_of_a_state(store):
    store.put_state("s", "n", {"count": 0}, expect=None)

    def add(times):
        for _ in range(times):
            while True:
                state = store.get_state("s", "n")
                try:
                    store.put_state("s", "n", {"count": state.value["count"] + 1}, expect=state.version)
                except ConflictError:
                    continue
                break

    threads = [threading.Thread(target=add, args=(15,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.get_state("s", "n").value == {"count": 45}


def test_read_only_store_refuses_every_write(folder, kit):
    with KVStore.open(folder) as store:
        ident = kit.put_chunk(store, 1)
    with KVStore.open(folder, read_only=True) as store:
        assert kit.same_tensors(store, store.find(ident, tenant="t"), kit.tensors_of(1))
        store.touch([ident.key])
        with pytest.raises(ReadOnlyError):
            kit.put_chunk(store, 2)
        for write in (
            lambda: store.delete([ident.key]),
            lambda: store.put_state("a", "b", {}, expect=None),
            lambda: store.compact(),
            lambda: store.set_quota(1 << 30),
        ):
            with pytest.raises(ReadOnlyError):
                write()
        assert store.verify().ok


def test_writable_handle_after_a_read_only_one_in_the_same_process(folder, kit):
    with KVStore.open(folder) as store:
        kit.put_chunk(store, 1)
    with KVStore.open(folder, read_only=True) as reader, KVStore.open(folder) as writer:
        ident = kit.put_chunk(writer, 2)
        assert reader.find(ident, tenant="t") is not None
        with pytest.raises(ReadOnlyError):
            kit.put_chunk(reader, 3)


def test_closed_store_says_so(folder, kit):
    store = KVStore.open(folder)
    store.close()
    for use in (store.stats, lambda: kit.put_chunk(store, 1), lambda: list(store.iterate())):
        with pytest.raises(StoreRefusedError, match="closed"):
            use()


def test_two_handles_of_one_process_share_the_environment(folder, kit):
    one, two = KVStore.open(folder), KVStore.open(folder)
    ident = kit.put_chunk(one, 1)
    one.close()
    one.close()
    assert two.find(ident, tenant="t") is not None
    two.close()
    with KVStore.open(folder) as again:
        assert again.find(ident, tenant="t") is not None


def test_pickles_and_saved_tensors_are_no_entries_and_run_nothing(folder, kit, raw, tmp_path):
    import io
    import pickle

    import zstandard

    marker = tmp_path / "marker.txt"

    class Bomb:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    torch = pytest.importorskip("torch")
    saved = io.BytesIO()
    torch.save({"x": torch.zeros(3)}, saved)
    payloads = [pickle.dumps(Bomb()), saved.getvalue(), b"", b"\x80"]
    payloads += [zstandard.ZstdCompressor().compress(payload) for payload in payloads[:2]]
    idents = [kit.identity_of(n) for n in range(len(payloads) + 1)]
    with KVStore.open(folder) as store:
        good = kit.put_chunk(store, len(payloads))
    with raw(folder) as access:
        for ident, payload in zip(idents, payloads, strict=False):
            access.put("records", ident.key, payload)
            access.put("segments", ident.key + bytes(4), payload)
    with KVStore.open(folder) as store:
        for ident in idents[:-1]:
            with pytest.raises(NotAKameraEntryError, match="not a kamera entry"):
                store.find(ident, tenant="t")
        with pytest.warns(DamagedRecordWarning):
            assert [r.id for r in store.iterate()] == [good.id]
        with pytest.warns(DamagedRecordWarning):
            assert store.stats().count == 1
        report = store.verify()
        assert {d.key for d in report.damaged if d.table == "records"} == {i.key for i in idents[:-1]}
        assert all(d.quarantined for d in report.damaged)
        assert all(store.find(ident, tenant="t") is None for ident in idents[:-1])
        assert store.stats().quarantined == len(payloads) and store.verify().ok
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert store.plan_eviction(to_bytes=0).reached
    assert not marker.exists()


def test_damaged_record_is_replaced_by_the_next_put(folder, kit, raw):
    with KVStore.open(folder) as store:
        ident = kit.put_chunk(store, 1)
    with raw(folder) as access:
        key, value = next(iter(access.items("segments").items()))
        access.put("segments", key, value[:60] + bytes([value[60] ^ 4]) + value[61:])
    with KVStore.open(folder) as store:
        with pytest.warns(DamagedRecordWarning, match="written again"):
            assert store.put(ident, tenant="t", unit="u", meta={}, tensors=kit.tensors_of(1), cost_ms=1)
        assert kit.same_tensors(store, store.find(ident, tenant="t"), kit.tensors_of(1))
        assert store.verify().ok
