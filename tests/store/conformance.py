"""What every implementation of `kamera_store.base.Store` must do: subclass `StoreConformance` and give it a store.

Nothing here knows LMDB or torch. The tests of one implementation stand beside these, in its own file.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kamera_store.base import Store
from kamera_store.errors import ConflictError, IdentityWarning, MissingRecordError, UnsupportedDtypeError
from kamera_store.format.keys import Identity, chunk_identity, patch_identity
from kamera_store.format.records import TensorBytes


def chunk(number: int, tenant: str = "t") -> Identity:
    """Identity of a chunk that saw one token id."""
    ids = TensorBytes("token_ids", -1, "int64", (1,), np.array([number], np.int64))
    return chunk_identity(fingerprint="model", tenant=tenant, inputs=[ids])


def tensors(number: int) -> list[TensorBytes]:
    """Keys and values of two layers, positions, and a tensor without bytes."""
    random = np.random.default_rng(number)
    return [
        *(
            TensorBytes(name, layer, "float32", (3, 8), random.standard_normal((3, 8)).astype(np.float32))
            for layer in range(2)
            for name in ("keys", "values")
        ),
        TensorBytes("positions", -1, "int32", (3, 1), np.arange(3, dtype=np.int32)),
        TensorBytes("none", 1, "bfloat16", (0, 4), b""),
    ]


def put(store: Store, number: int, *, tenant: str = "t", **options: object) -> Identity:
    """Put a chunk; its identity."""
    identity = chunk(number, tenant)
    item = {"tenant": tenant, "unit": f"unit{number}", "meta": {"n": number}, "tensors": tensors(number)}
    assert store.put(identity, **item, cost_ms=1.0, **options)
    return identity


def put_patch(store: Store, of: Identity, *antecedents: Identity, tenant: str = "t") -> Identity:
    """Put an exact patch; its identity."""
    identity = patch_identity(chunk=of, antecedents=antecedents, kind="exact", tenant=tenant)
    meta = {"chunk": of.id, "antecedents": [antecedent.id for antecedent in antecedents]}
    assert store.put(identity, tenant=tenant, unit="p", meta=meta, tensors=tensors(99), cost_ms=1.0)
    return identity


def ids(records: Iterator | list) -> set[str]:
    return {record.id for record in records}


class StoreConformance:
    """Tests of the verbs; ``store`` gives an open, empty store and closes it."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        raise NotImplementedError("a subclass gives the store")

    def test_a_record_comes_back_as_it_was_put(self, store: Store) -> None:
        identity = chunk(1)
        given, meta = tensors(1), {"span": 3, "name": "é\n\"'", "deep": [{"x": None}]}
        assert store.put(
            identity, tenant="t", unit="u", meta=meta, tensors=given, cost_ms=2.5, created_s=12.5
        )
        record = store.find(identity, tenant="t")
        assert record == store.get(identity.key)
        assert (record.kind, record.key, record.digest) == ("chunk", identity.key, identity.digest)
        assert (record.tenant, record.unit, record.meta) == ("t", "u", meta)
        assert (record.cost_ms, record.created_s, record.num_layers) == (2.5, 12.5, 2)
        assert store.read(record) == {(tensor.name, tensor.layer): tensor for tensor in given}
        assert store.read(record, [("keys", 1)]) == {("keys", 1): given[2]}
        assert store.read_layer(record, 0) == {tensor.name: tensor for tensor in given if tensor.layer == 0}
        assert store.read_layer(record, 7) == {}
        with pytest.raises(KeyError, match="no tensor 'latent'"):
            store.read(record, [("latent", 0)])

    def test_what_is_not_there_is_none(self, store: Store) -> None:
        assert store.get(bytes(16)) is None and store.find(chunk(1), tenant="t") is None
        assert list(store.iterate()) == [] and store.resolve("") == []
        assert store.delete([bytes(16)]) == 0
        store.touch([bytes(16)])
        assert store.get_state("window", "a") is None and store.list_state("window") == []

    def test_the_same_content_is_written_once(self, store: Store) -> None:
        identity = put(store, 1)
        assert not store.put(identity, tenant="t", unit="v", meta={}, tensors=tensors(1), cost_ms=9.0)
        assert store.get(identity.key).unit == "unit1"

    def test_replacing_gives_the_new_writing_also_to_a_record_in_hand(self, store: Store) -> None:
        identity = put(store, 1)
        record = store.get(identity.key)
        assert store.put(
            identity, tenant="t", unit="v", meta={"n": 2}, tensors=tensors(2), cost_ms=1.0, replace=True
        )
        assert store.read(record) == {(tensor.name, tensor.layer): tensor for tensor in tensors(2)}
        assert store.get(identity.key).meta == {"n": 2}
        assert store.writings([identity.key, bytes(16)]) == {
            identity.key: store.get(identity.key).header_checksum,
            bytes(16): None,
        }
        assert store.writings([identity.key])[identity.key] != record.header_checksum

    def test_another_content_under_a_key_stays_and_is_a_miss(self, store: Store) -> None:
        identity = put(store, 1)
        other = replace(identity, digest=bytes(32))
        for again in (False, True):
            with pytest.warns(IdentityWarning, match="another content"):
                assert not store.put(
                    other, tenant="t", unit="v", meta={}, tensors=tensors(2), cost_ms=1.0, replace=again
                )
        with pytest.warns(IdentityWarning):
            assert store.find(other, tenant="t") is None
        assert store.get(identity.key).digest == identity.digest

    def test_a_tenant_finds_only_its_own(self, store: Store) -> None:
        mine, other = put(store, 1, tenant="alice"), put(store, 2, tenant="bob")
        assert store.find(mine, tenant="bob") is None and store.find(mine, tenant="alice") is not None
        assert ids(store.iterate(tenant="bob")) == {other.id}
        assert store.resolve(mine.id, tenant="bob") == []

    def test_what_cannot_be_stored_is_refused_and_nothing_is_written(self, store: Store) -> None:
        first, *rest = tensors(1)
        options = {"tenant": "t", "unit": "u", "cost_ms": 1.0}
        for identity, meta, given in (
            (chunk(1), {"x": float("nan")}, [first]),
            (chunk(1), {"x": b"bytes"}, [first]),
            (chunk(1), {}, [first, first, *rest]),
            (replace(chunk(1), kind="film"), {}, [first]),
            (replace(chunk(1), kind="patch"), {"chunk": "no key"}, [first]),
            (replace(chunk(1), kind="patch"), {"antecedents": 5}, [first]),
        ):
            with pytest.raises(ValueError):
                store.put(identity, meta=meta, tensors=given, **options)
        with pytest.raises(UnsupportedDtypeError, match="float6"):
            TensorBytes("x", 0, "float6", (1,), b"1")
        assert list(store.iterate()) == []

    def test_records_are_listed_in_id_order_and_found_by_prefix(self, store: Store) -> None:
        chunks = [put(store, number) for number in range(20)]
        patch = put_patch(store, chunks[0], chunks[1])
        listed = [record.id for record in store.iterate()]
        assert listed == sorted(identity.id for identity in (*chunks, patch))
        assert ids(store.iterate("patch")) == {patch.id}
        assert ids(store.iterate("chunk", "t")) == {identity.id for identity in chunks}
        for prefix in ("", listed[0][:1], listed[3][:3], listed[9], listed[9].upper()):
            found = [record.id for record in store.resolve(prefix)]
            assert found == [one for one in listed if one.startswith(prefix.lower())]
        assert store.resolve("xyz") == store.resolve("0" * 33) == []
        assert store.resolve(patch.id, kind="chunk") == []

    def test_listing_goes_on_while_records_are_written(self, store: Store) -> None:
        known = {put(store, number).id for number in range(10)}
        seen = []
        for number, record in enumerate(store.iterate()):
            seen.append(record.id)
            if number == 3:
                extra = put(store, 100).id
        assert len(seen) == len(set(seen)) and known <= set(seen) <= known | {extra}

    def test_patches_are_found_from_their_chunk_and_from_their_antecedents(self, store: Store) -> None:
        a, b, c = (put(store, number) for number in range(3))
        first, second, third = put_patch(store, c, a, b), put_patch(store, c, b), put_patch(store, b, a)
        assert ids(store.patches_of(c.key)) == {first.id, second.id}
        assert ids(store.patches_naming(a.key)) == {first.id, third.id}
        assert ids(store.patches_naming(b.key)) == {first.id, second.id}
        assert store.patches_of(c.key, tenant="u") == []
        store.delete([first.key])
        assert ids(store.patches_of(c.key)) == {second.id}
        assert ids(store.patches_naming(a.key)) == {third.id}

    def test_records_put_together_are_those_put_apart(self, store: Store) -> None:
        items = [
            {"identity": chunk(number), "tenant": "t", "unit": "u", "meta": {"n": number},
             "tensors": iter(tensors(number)), "cost_ms": 1.0}
            for number in range(5)
        ]  # fmt: skip
        store.put_all(items)
        for number in range(5):
            record = store.find(chunk(number), tenant="t")
            assert record.meta == {"n": number}
            assert store.read(record) == {(tensor.name, tensor.layer): tensor for tensor in tensors(number)}

    def test_what_was_read_and_what_was_given_share_no_memory_with_the_store(self, store: Store) -> None:
        data = np.arange(64, dtype=np.float32)
        given = TensorBytes("x", 0, "float32", (64,), data, "raw")
        store.put(chunk(1), tenant="t", unit="u", meta={}, tensors=[given], cost_ms=1.0)
        record = store.get(chunk(1).key)
        data += 1
        np.frombuffer(store.read(record)["x", 0].data, np.uint8)[:] = 0
        assert np.frombuffer(store.read(record)["x", 0].view(), np.float32).tolist() == list(range(64))

    def test_a_record_deleted_under_a_reader_is_missing_and_not_damaged(self, store: Store) -> None:
        identity = put(store, 1)
        record = store.get(identity.key)
        assert store.delete([identity.key]) > 0
        assert store.get(identity.key) is None
        with pytest.raises(MissingRecordError):
            store.read(record)

    def test_a_state_is_compared_and_swapped(self, store: Store) -> None:
        first = store.put_state("window", "a", {"n": 1}, expect=None)
        for expected in (None, first + 1000):
            with pytest.raises(ConflictError) as caught:
                store.put_state("window", "a", {"n": 2}, expect=expected)
            assert (caught.value.expected, caught.value.found) == (expected, first)
        second = store.put_state("window", "a", {"n": 2}, expect=first)
        third = store.put_state("window", "a", {"n": 3}, expect="any")
        assert first < second < third
        state = store.get_state("window", "a")
        assert (state.value, state.version) == ({"n": 3}, third)

    def test_states_of_spaces_do_not_mix(self, store: Store) -> None:
        for space, name in (("window", "é"), ("window", "b"), ("windows", "c"), ("w", "d")):
            store.put_state(space, name, {}, expect=None)
        assert store.list_state("window") == ["b", "é"] and store.list_state("none") == []
        for space, name in (("", "a"), ("a", ""), ("a\0", "b")):
            with pytest.raises(ValueError):
                store.put_state(space, name, {}, expect=None)
        with pytest.raises(ValueError):
            store.put_state("window", "x", {"n": float("inf")}, expect=None)

    def test_sound_records_give_no_warning(self, store: Store) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            identity = put(store, 1)
            store.touch([identity.key], now_s=1e9)
            assert len(list(store.iterate())) == len(store.resolve("")) == 1

    def test_a_store_closes_once_and_for_all(self, store: Store) -> None:
        with store as same:
            assert same is store and not store.read_only
        store.close()
