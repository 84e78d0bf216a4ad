"""The store on disk and one in a dictionary do the same; the suite itself needs neither LMDB nor torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance import StoreConformance
from memory_store import MemoryStore

from kamera_store import KVStore
from kamera_store.base import Store


class TestKVStore(StoreConformance):
    @pytest.fixture
    def store(self, folder: Path) -> Iterator[Store]:
        with KVStore.open(folder) as opened:
            yield opened


class TestKVStoreWithoutItsShortcuts(StoreConformance):
    """What `Store` makes of the other verbs gives what `KVStore` does in a transaction of its own."""

    @pytest.fixture
    def store(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
        for name in ("put_all", "resolve", "patches_of", "patches_naming", "read_layer", "writings"):
            monkeypatch.setattr(KVStore, name, getattr(Store, name))
        with KVStore.open(folder) as opened:
            yield opened


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with MemoryStore() as opened:
            yield opened


def test_the_suite_and_a_store_of_another_kind_load_no_lmdb(kit) -> None:
    code = (
        "import sys\n"
        "import conformance, memory_store\n"
        "store = memory_store.MemoryStore()\n"
        "identity = conformance.put(store, 1)\n"
        "conformance.put_patch(store, identity)\n"
        "assert len(store.patches_of(identity.key)) == 1\n"
        "print(sorted({'lmdb', 'torch', 'kamera_store.ledger'} & set(sys.modules)))\n"
    )
    done = kit.run_python(code)
    assert done.stdout == "[]\n", done.stderr
