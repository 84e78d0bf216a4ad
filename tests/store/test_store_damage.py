"""Any single bit that changes in any stored value is noticed, and nothing answers from it."""

from __future__ import annotations

import os
import random
import warnings
from collections import Counter

import lmdb
import pytest

from kamera_store import (
    DamagedError,
    DamagedRecordWarning,
    FormatVersionError,
    KVStore,
)
from kamera_store.lmdb import binding
from kamera_store.lmdb.binding import TABLES

NUM_FLIPS = int(os.environ.get("KAMERA_TEST_FLIPS", "10000"))


class Flipper:
    """Writes into the tables of an open store around its API, in the same environment."""

    def __init__(self, store: KVStore) -> None:
        self.env = store.environment.handle()
        self.tables = {name: self.env.open_db(name.encode(), create=False) for name in TABLES}

    def values(self) -> list[tuple[str, bytes, bytes]]:
        with self.env.begin() as txn:
            return [
                (table, bytes(key), bytes(value))
                for table, handle in self.tables.items()
                for key, value in txn.cursor(db=handle)
                if len(value)
            ]

    def write(self, table: str, key: bytes, value: bytes) -> None:
        with self.env.begin(write=True) as txn:
            txn.put(key, value, db=self.tables[table])


@pytest.fixture
def quick_commits(monkeypatch):
    """Commits that do not wait for the disk; the test restores each value anyhow."""
    real = lmdb.open

    def open_without_sync(*args, **kw):
        return real(*args, **kw, sync=False)

    monkeypatch.setattr(binding.lmdb, "open", open_without_sync)


def answers(store, kit, table, key, idents) -> str | None:
    """What the store says about a damaged value; None if it noticed."""
    try:
        if table in ("records", "segments"):
            record = store.get(key[:16])
            store.read(record)
            return "the record was read"
        if table == "state":
            space, name = key.decode().split("\0")
            return f"state {store.get_state(space, name)}"
        if table == "ledger":
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = store.stats()
            noticed = any(issubclass(w.category, DamagedRecordWarning) for w in caught)
            return None if noticed and found.count == len(idents) else f"stats {found}"
        if table == "format":
            report = store.verify(quarantine=False)
            return None if [d.table for d in report.damaged] == ["format"] else f"verify {report}"
    except (DamagedError, FormatVersionError):
        return None
    return f"no check for table {table}"


def test_ten_thousand_flipped_bits_are_all_noticed(folder, kit, quick_commits):
    rng = random.Random(7)
    with KVStore.open(folder) as store:
        idents = [
            kit.put_chunk(store, n, tensors=[*kit.tensors_of(n), kit.noise(40 * n, n)]) for n in range(4)
        ]
        idents.append(kit.put_patch(store, idents[1], [idents[0]]))
        big = [kit.noise(2000, 1), *kit.tensors_of(5, 1, num_tokens=40)]
        idents.append(kit.put_chunk(store, 5, tensors=big, meta={"text": "x" * 300}))
        store.put_state("window", "w", {"entries": [{"chunk": idents[0].id}]}, expect=None)
        flipper = Flipper(store)
        values = flipper.values()
        weights = [len(value) if table in ("records", "segments") else 60 for table, _, value in values]
        tried = Counter()
        for table, key, value in rng.choices(values, weights, k=NUM_FLIPS):
            bit = rng.randrange(8 * len(value))
            changed = bytearray(value)
            changed[bit // 8] ^= 1 << bit % 8
            flipper.write(table, key, bytes(changed))
            answer = answers(store, kit, table, key, idents)
            flipper.write(table, key, value)
            assert answer is None, f"bit {bit} of {table} {key.hex()}: {answer}"
            tried[table] += 1
        assert store.verify().ok
    assert set(tried) == {"records", "segments", "state", "ledger", "format"}


@pytest.fixture
def three(folder, kit):
    """A closed store with three chunks that have several segments each, and their identities."""
    with KVStore.open(folder) as store:
        idents = [
            kit.put_chunk(store, n, tensors=[kit.noise(600_000, n), *kit.tensors_of(n)]) for n in range(3)
        ]
    return folder, idents


def test_segments_of_two_records_cannot_be_swapped(three, raw):
    folder, (a, b, c) = three
    with raw(folder) as access:
        values = access.items("segments")
        one, two = a.key + b"\0\0\0\1", b.key + b"\0\0\0\1"
        access.put("segments", one, values[two])
        access.put("segments", two, values[one])
    with KVStore.open(folder) as store:
        for ident in (a, b):
            with pytest.raises(DamagedError, match="segment 1"):
                store.read(store.find(ident, tenant="t"))
        store.read(store.find(c, tenant="t"))
        assert {d.key for d in store.verify().damaged} == {a.key, b.key}
        assert store.stats().count == 1 and store.verify().ok


def test_segments_of_one_record_cannot_change_places(three, raw):
    folder, (a, *_) = three
    with raw(folder) as access:
        values = access.items("segments")
        access.put("segments", a.key + b"\0\0\0\0", values[a.key + b"\0\0\0\1"])
    with KVStore.open(folder) as store, pytest.raises(DamagedError, match="segment 0"):
        store.read(store.find(a, tenant="t"))


def test_lost_cut_and_grown_segments_are_noticed(three, raw):
    folder, idents = three
    with raw(folder) as access:
        values = access.items("segments")
        last = [max(k for k in values if k.startswith(i.key)) for i in idents]
        access.delete("segments", last[0])
        access.put("segments", last[1], values[last[1]][:-1])
        access.put("segments", last[2], values[last[2]] + b"\0")
    with KVStore.open(folder) as store:
        for ident in idents:
            with pytest.raises(DamagedError, match="segment 2"):
                store.read(store.find(ident, tenant="t"))


def test_header_under_another_key_is_refused(three, raw):
    folder, (a, b, _) = three
    with raw(folder) as access:
        access.put("records", a.key, access.items("records")[b.key])
    with KVStore.open(folder) as store, pytest.raises(DamagedError, match="key in header"):
        store.find(a, tenant="t")


def test_state_and_ledger_rows_cannot_be_moved(three, raw):
    folder, (a, b, _) = three
    with KVStore.open(folder) as store:
        store.put_state("s", "one", {"n": 1}, expect=None)
        store.put_state("s", "two", {"n": 2}, expect=None)
    with raw(folder) as access:
        access.put("state", b"s\0one", access.items("state")[b"s\0two"])
        access.put("ledger", a.key, access.items("ledger")[b.key])
    with KVStore.open(folder) as store:
        with pytest.raises(DamagedError):
            store.get_state("s", "one")
        with pytest.warns(DamagedRecordWarning):
            assert store.stats().count == 3
        assert {d.table for d in store.verify().damaged} == {"state", "ledger"}


def test_records_of_a_newer_format_are_refused_by_version_and_left_alone(three, raw):
    from kamera_store.format.keys import checksum64

    folder, (a, *_) = three
    with raw(folder) as access:
        value = bytearray(access.items("records")[a.key])
        value[8] = 9
        value[-8:] = checksum64((memoryview(value)[:-8],)).to_bytes(8, "little")
        access.put("records", a.key, bytes(value))
    with KVStore.open(folder) as store:
        with pytest.raises(FormatVersionError, match="version 9, this program reads version 1"):
            store.find(a, tenant="t")
        store.verify()
        with pytest.raises(FormatVersionError):
            store.find(a, tenant="t")


def test_orphan_segments_and_dangling_links_are_mended(three, raw):
    folder, (a, b, _) = three
    with raw(folder) as access:
        access.delete("records", a.key)
        access.put("links", b"c" + a.key + b.key, b"")
        access.delete("ledger", b.key)
    with KVStore.open(folder) as store:
        tables = {d.table for d in store.verify(quarantine=False).damaged}
        assert tables == {"segments", "links", "ledger"}
        assert not store.verify().ok and store.verify().ok
