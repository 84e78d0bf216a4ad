"""Writing over a record: in one transaction, and never over another content."""

from __future__ import annotations

import pytest

from kamera_store import KVStore
from kamera_store.errors import NoRoomError
from kamera_store.format.keys import identity
from kamera_store.format.records import TensorBytes


def put(store: KVStore, name: str, size: int, *, replace: bool = False) -> bool:
    tensor = TensorBytes("keys", 0, "uint8", (size,), bytes(range(256)) * (size // 256))
    return store.put(
        identity("patch", {"name": name}),
        tenant="t",
        unit="u",
        meta={"chunk": "00" * 16, "antecedents": [], "size": size},
        tensors=[tensor],
        cost_ms=1.0,
        replace=replace,
    )


def test_a_replaced_record_is_the_new_one(tmp_path) -> None:
    with KVStore.open(tmp_path / "store") as store:
        assert put(store, "a", 256)
        assert not put(store, "a", 512)
        assert put(store, "a", 512, replace=True)
        record = store.find(identity("patch", {"name": "a"}), tenant="t")
        assert record.meta["size"] == 512
        assert len(store.patches_of(bytes(16), tenant="t")) == 1
        assert store.verify().damaged == ()


def test_a_replacement_without_room_leaves_the_old_record(tmp_path) -> None:
    with KVStore.open(tmp_path / "store", quota_bytes=1 << 20) as store:
        assert put(store, "a", 256)
        with pytest.raises(NoRoomError):
            put(store, "a", 8 << 20, replace=True)
        assert store.find(identity("patch", {"name": "a"}), tenant="t").meta["size"] == 256
