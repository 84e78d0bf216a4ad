"""The quota limits the file, for all processes together, and eviction never takes what a window sees."""

from __future__ import annotations

import dataclasses

import pytest

from kamera_store import KVStore, NoRoomError
from kamera_store.evict import plan_eviction
from kamera_store.ledger import UnitUsage

MIB = 1 << 20


def unit(name: str, *, tenant="t", size=100, cost=1.0, used=0.0, keys=None) -> UnitUsage:
    return UnitUsage(tenant, name, keys or (name.encode(),), 1, 0, size, size, cost, used)


def names(plan) -> list[str]:
    return [dropped.unit.unit for dropped in plan.units]


def plan_for(units, **kw):
    kw.setdefault("used_bytes", sum(u.stored_bytes for u in units))
    kw.setdefault("now_s", 1000.0)
    return plan_eviction(units, **kw)


def test_least_recently_used_goes_first():
    plan = plan_for([unit("new", used=900), unit("old", used=10), unit("mid", used=500)], to_bytes=100)
    assert names(plan) == ["old", "mid"] and plan.reached and plan.freed_bytes == 200


def test_what_is_dear_to_make_again_stays_longer():
    plan = plan_for([unit("cheap", used=500, cost=10), unit("dear", used=400, cost=5000)], to_bytes=100)
    assert names(plan) == ["cheap"]


def test_pinned_and_protected_units_stay_and_the_plan_says_so():
    units = [unit("pinned", used=1, keys=(b"a", b"b")), unit("busy", used=2), unit("free", used=3)]
    plan = plan_for(units, to_bytes=0, pinned=frozenset([b"b"]), protected=frozenset([("t", "busy")]))
    assert names(plan) == ["free"] and not plan.reached
    assert [(kept.unit.unit, kept.reason) for kept in plan.kept] == [
        ("pinned", "in a window"),
        ("busy", "being written"),
    ]


def test_age_tenant_and_aim_combine():
    units = [unit("a", used=100), unit("b", used=950), unit("c", used=100, tenant="u")]
    assert names(plan_for(units, older_than_s=500)) == ["a", "c"]
    assert names(plan_for(units, older_than_s=500, tenant="u")) == ["c"]
    assert names(plan_for(units, to_bytes=0, tenant="t")) == ["a", "b"]
    assert names(plan_for(units, to_bytes=250, older_than_s=500)) == ["a"]
    assert names(plan_for(units)) == []
    assert not plan_for(units, to_bytes=0, older_than_s=500).reached


def test_plan_is_frozen_and_does_nothing_by_itself(store, kit):
    ident = kit.put_chunk(store, 1)
    plan = store.plan_eviction(to_bytes=0)
    assert store.find(ident, tenant="t") is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.reached = False
    assert store.evict(plan) > 0 and store.find(ident, tenant="t") is None


def test_unit_goes_whole_with_the_patches_of_its_chunks(store, kit):
    a, b = kit.put_chunk(store, 1, unit="film"), kit.put_chunk(store, 2, unit="film")
    other = kit.put_chunk(store, 3, unit="page")
    kit.put_patch(store, b, [a], unit="named otherwise")
    keep = kit.put_patch(store, other, [a])
    store.touch([other.key, keep.key], now_s=2e9)
    plan = store.plan_eviction(to_bytes=store.units()[0].stored_bytes, now_s=2e9)
    assert [dropped.unit.unit for dropped in plan.units] == ["film"]
    assert plan.units[0].unit.num_chunks == 2 and plan.units[0].unit.num_patches == 1
    store.evict(plan)
    assert {r.id for r in store.iterate()} == {other.id, keep.id}
    assert store.verify().ok


def test_touch_decides_who_goes(store, kit):
    idents = [kit.put_chunk(store, n) for n in range(3)]
    store.touch([i.key for i in idents], now_s=1000.0)
    store.touch([idents[0].key], now_s=2000.0)
    store.touch([b"\0" * 16], now_s=3000.0)
    plan = store.plan_eviction(older_than_s=1500, now_s=3000.0)
    assert {key for key in plan.keys} == {idents[1].key, idents[2].key}


def test_chunks_in_windows_survive_a_full_store(folder, kit):
    with KVStore.open(folder, quota_bytes=4 * MIB) as store:
        pinned = kit.put_chunk(store, 0, tensors=[kit.noise(300_000, 0)])
        window = {"tenant": "t", "entries": [{"chunk": pinned.id}]}
        store.put_state("window", "w", window, expect=None)
        for n in range(1, 40):
            kit.put_chunk(store, n, tensors=[kit.noise(300_000, n)])
        assert store.find(pinned, tenant="t") is not None
        assert store.find(kit.identity_of(39), tenant="t") is not None
        assert store.find(kit.identity_of(1), tenant="t") is None
        store.put_state("window", "w", {"entries": []}, expect="any")
        for n in range(40, 60):
            kit.put_chunk(store, n, tensors=[kit.noise(300_000, n)])
        assert store.find(pinned, tenant="t") is None


def test_window_that_took_a_chunk_up_after_the_plan_keeps_it(store, kit):
    ident = kit.put_chunk(store, 1)
    plan = store.plan_eviction(to_bytes=0)
    store.put_state("window", "w", {"entries": [{"chunk": ident.id}]}, expect=None)
    store.evict(plan)
    assert store.find(ident, tenant="t") is not None


def test_all_pinned_is_no_room_and_nothing_is_lost(folder, kit):
    with KVStore.open(folder, quota_bytes=2 * MIB) as store:
        idents = []
        with pytest.raises(NoRoomError) as caught:
            for n in range(20):
                idents.append(kit.put_chunk(store, n, tensors=[kit.noise(300_000, n)]))
                entries = [{"chunk": i.id} for i in idents]
                store.put_state("window", "w", {"entries": entries}, expect="any")
        assert caught.value.needed_bytes > caught.value.room_bytes
        assert all(store.find(i, tenant="t") is not None for i in idents) and len(idents) >= 4
        store.put_state("window", "another", {"entries": []}, expect=None)
        assert store.verify().ok


def test_file_stays_below_quota_and_one_chunk(folder, kit):
    quota, chunk = 10 * MIB, 1_000_000
    with KVStore.open(folder, quota_bytes=quota) as store:
        for n in range(30):
            kit.put_chunk(store, n, tensors=[kit.noise(chunk, n)])
            stats = store.stats()
            assert stats.file_bytes <= quota + 1.3 * chunk
            assert stats.used_bytes <= quota
        assert stats.count >= 7
        assert store.verify().ok


def test_oversized_chunk_is_refused_before_encoding(folder, kit, monkeypatch):
    from kamera_store.format import codec

    with KVStore.open(folder, quota_bytes=10 * MIB) as store:
        keep = kit.put_chunk(store, 1)

        def encode(tensor):
            raise AssertionError("encoded although it cannot fit")

        monkeypatch.setattr(codec, "encode", encode)
        with pytest.raises(NoRoomError) as caught:
            kit.put_chunk(store, 2, tensors=[kit.noise(12 * MIB)])
        assert caught.value.needed_bytes >= 12 * MIB and caught.value.room_bytes < 10 * MIB
        assert store.find(keep, tenant="t") is not None


def test_unit_being_written_does_not_evict_its_own_first_chunks(folder, kit):
    with KVStore.open(folder, quota_bytes=3 * MIB) as store:
        kit.put_chunk(store, 100, unit="old", tensors=[kit.noise(500_000)])
        with pytest.raises(NoRoomError):
            for n in range(20):
                kit.put_chunk(store, n, unit="film", tensors=[kit.noise(500_000, n)])
        assert store.find(kit.identity_of(0), tenant="t") is not None
        assert store.find(kit.identity_of(100), tenant="t") is None


FILL = """
import sys
from conftest import *
start = int(sys.argv[2])
with KVStore.open(sys.argv[1]) as store:
    for n in range(start, start + 15):
        put_chunk(store, n, tensors=[noise(1_000_000, n)])
        assert store.stats().file_bytes <= store.quota_bytes + 2.6e6, store.stats()
print("done")
"""


def test_quota_is_of_the_store_and_not_of_each_process(folder, spawn):
    KVStore.open(folder, quota_bytes=10 * MIB).close()
    processes = [spawn(FILL, str(folder), start) for start in ("0", "1000")]
    for process in processes:
        out, error = process.communicate(timeout=60)
        assert out == "done\n", error
    with KVStore.open(folder) as store:
        stats = store.stats()
        assert stats.quota_bytes == 10 * MIB and stats.used_bytes <= 10 * MIB
        assert stats.file_bytes <= 10 * MIB + 2.6e6
        assert store.verify().ok


def test_quota_is_remembered_and_can_be_changed(folder):
    with KVStore.open(folder, quota_bytes=10 * MIB) as store:
        assert store.quota_bytes == 10 * MIB
    with KVStore.open(folder) as store:
        assert store.quota_bytes == 10 * MIB
        store.set_quota(20 * MIB)
    with KVStore.open(folder, read_only=True) as store:
        assert store.quota_bytes == 20 * MIB
    with pytest.raises(ValueError, match="at least"):
        KVStore.open(folder, quota_bytes=1000)


def test_default_quota_leaves_room_on_the_disk(folder):
    import shutil

    with KVStore.open(folder) as store:
        assert store.quota_bytes <= min(20 << 30, shutil.disk_usage(folder).total)


def test_smaller_quota_makes_room_at_the_next_write(folder, kit):
    with KVStore.open(folder, quota_bytes=10 * MIB) as store:
        for n in range(8):
            kit.put_chunk(store, n, tensors=[kit.noise(1_000_000, n)])
    with KVStore.open(folder, quota_bytes=4 * MIB) as store:
        kit.put_chunk(store, 100, tensors=[kit.noise(1_000_000)])
        assert store.stats().used_bytes <= 4 * MIB and store.verify().ok


def test_full_disk_is_no_room_and_loses_nothing(folder, kit):
    """A file size limit stands in for the full disk."""
    code = (
        "import resource, signal, sys\n"
        "from conftest import *\n"
        "from kamera_store import NoRoomError\n"
        "from kamera_store.evict import release_freed_pages\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "store = KVStore.open(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, -1))\n"
        "try:\n"
        "    for n in range(20): put_chunk(store, n, tensors=[noise(500_000, n)])\n"
        "except NoRoomError as error: print(n, error.limit)\n"
        "assert all(same_tensors(store, store.find(identity_of(m), tenant='t'), [noise(500_000, m)])\n"
        "           for m in range(n))\n"
        "assert store.find(identity_of(n), tenant='t') is None\n"
        "store.delete([identity_of(0).key]); release_freed_pages(store.environment)\n"
        "put_chunk(store, 50, tensors=[noise(400_000, 50)])\n"
        "assert store.verify().ok\n"
    )
    done = kit.run_python(code, str(folder))
    assert done.returncode == 0, done.stderr
    number, _, limit = done.stdout.partition(" ")
    assert int(number) >= 3 and limit.startswith("disk")
    with KVStore.open(folder) as store:
        assert store.stats().count == int(number) and store.verify().ok


def test_little_disk_is_refused_before_encoding(store, kit, monkeypatch):
    import shutil

    from kamera_store import write

    usage = shutil.disk_usage(store.path)
    monkeypatch.setattr(write.shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(NoRoomError, match="disk"):
        kit.put_chunk(store, 1, tensors=[kit.noise(1_000_000)])
