"""Records that are written together: all of them or none, and none is lost where the room is short."""

from __future__ import annotations

import numpy as np
import pytest

from kamera_store.format.keys import Identity
from kamera_store.format.records import TensorBytes
from kamera_store.kvstore import KVStore


def item(number: int, size: int = 100) -> dict:
    data = np.random.default_rng(number).bytes(size)
    tensor = TensorBytes("keys", 0, "uint8", (size,), data)
    identity = Identity("chunk", bytes([number]) * 16, bytes([number]) * 32)
    return {
        "identity": identity, "tenant": "t", "unit": f"u{number}", "meta": {"number": number},
        "tensors": [tensor], "cost_ms": 1.0,
    }  # fmt: skip


def test_records_written_together_are_those_written_apart(tmp_path):
    with KVStore.open(tmp_path / "together") as together, KVStore.open(tmp_path / "apart") as apart:
        together.put_all([item(number) for number in range(1, 6)])
        for number in range(1, 6):
            apart.put(**item(number))
        for one, other in zip(together.iterate(), apart.iterate(), strict=True):
            assert (one.key, one.meta, one.unit) == (other.key, other.meta, other.unit)
            assert bytes(together.read(one)["keys", 0].view()) == bytes(apart.read(other)["keys", 0].view())
        assert together.stats().used_bytes == apart.stats().used_bytes


def test_one_that_cannot_be_written_leaves_none(tmp_path):
    broken = item(3)
    broken["meta"] = {"not json": object()}
    with KVStore.open(tmp_path / "store") as store:
        with pytest.raises((TypeError, ValueError)):
            store.put_all([item(1), item(2), broken])
        assert not list(store.iterate())


def test_short_room_evicts_instead_of_failing(tmp_path):
    with KVStore.open(tmp_path / "store", quota_bytes=4 << 20) as store:
        store.put_all([item(number, 600_000) for number in range(1, 6)])
        store.put_all([item(number, 600_000) for number in range(6, 11)])
        kept = {record.meta["number"] for record in store.iterate()}
        assert {9, 10} <= kept and len(kept) < 10
        assert store.stats().used_bytes <= 4 << 20


def test_replacing_together_keeps_one_of_each(tmp_path):
    with KVStore.open(tmp_path / "store") as store:
        store.put_all([item(1), item(2)])
        store.put_all([item(1, 300), item(2, 300)], replace=True)
        assert [record.tensors[0].shape for record in store.iterate()] == [(300,), (300,)]
