"""What is sound in a damaged store can be saved, whatever kills the process that looks at it."""

from __future__ import annotations

import os
import shutil

import pytest

from kamera_store import KVStore, NotAStoreError, StoreDamagedError, salvage


@pytest.fixture
def filled(folder, kit):
    with KVStore.open(folder) as store:
        for n in range(40):
            kit.put_chunk(store, n, tensors=[kit.noise(5000, n), *kit.tensors_of(n)])
        kit.put_patch(store, kit.identity_of(1), [kit.identity_of(0)])
        store.put_state("window", "w", {"entries": []}, expect=None)
    return folder


def pages_with_headers(folder) -> list[int]:
    """Pages that hold headers, alive or freed, most of them first."""
    data = (folder / "data.mdb").read_bytes()
    counts = {at // 4096: data[at : at + 4096].count(b"KAMERAKV") for at in range(0, len(data), 4096)}
    return sorted((page for page, count in counts.items() if count), key=lambda page: -counts[page])


def test_records_outside_a_zeroed_page_are_saved(filled, kit, tmp_path):
    for page in pages_with_headers(filled):
        damaged, new = tmp_path / f"damaged{page}", tmp_path / f"new{page}"
        shutil.copytree(filled, damaged)
        with open(damaged / "data.mdb", "r+b") as file:
            file.seek(page * 4096)
            file.write(bytes(4096))
        before, seen = (damaged / "data.mdb").read_bytes(), []
        report = salvage(damaged, new, on_progress=lambda *step, seen=seen: seen.append(step))
        if report.lost:
            break
    assert 0 < len(report.lost) < 20 and report.num_records == 41 - len(report.lost)
    assert report.num_states == 1 and seen[-1] == (42, 42)
    assert (damaged / "data.mdb").read_bytes() == before
    with pytest.raises(StoreDamagedError, match="kamera verify"):
        KVStore.open(damaged)
    with KVStore.open(new) as store:
        assert store.verify().ok and store.stats().count == report.num_records
        assert store.get_state("window", "w").value == {"entries": []}
        for n in range(40):
            record = store.find(kit.identity_of(n), tenant="t")
            assert (record is None) == (kit.identity_of(n).id in report.lost)
            tensors = [kit.noise(5000, n), *kit.tensors_of(n)]
            assert record is None or kit.same_tensors(store, record, tensors)
    with pytest.raises(NotAStoreError, match="already"):
        salvage(damaged, new)


def test_cut_store_gives_what_lies_before_the_cut(filled, tmp_path):
    path = filled / "data.mdb"
    os.truncate(path, int(path.stat().st_size * 0.97) // 4096 * 4096)
    report = salvage(filled, tmp_path / "new")
    with KVStore.open(tmp_path / "new") as store:
        assert store.verify().ok and store.stats().count == report.num_records


def test_store_that_is_all_zeros_gives_an_empty_one(filled, tmp_path):
    path = filled / "data.mdb"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:8192] + bytes(size - 8192))
    report = salvage(filled, tmp_path / "new")
    assert (report.num_records, report.num_states) == (0, 0)
    shutil.rmtree(tmp_path / "new")
    path.write_bytes(bytes(size))
    assert salvage(filled, tmp_path / "new").num_records == 0
