"""What LMDB does when the map is full, the file is cut, the locks are missing, or a process dies."""

from __future__ import annotations

import os
import shutil

import lmdb
import pytest

from kamera_store import (
    FormatVersionError,
    KVStore,
    NoRoomError,
    NotAStoreError,
    StoreBusyError,
    StoreDamagedError,
    StoreRefusedError,
)
from kamera_store.evict import release_freed_pages
from kamera_store.lmdb import binding, environment, files

MIB = 1 << 20


def test_map_grows_under_an_ingest_and_nothing_is_lost(folder, kit):
    with KVStore.open(folder, map_bytes=MIB) as store:
        idents = [kit.put_chunk(store, n, tensors=[kit.noise(300_000, n)]) for n in range(10)]
        assert store.stats().map_bytes > 3 * MIB
        for n, ident in enumerate(idents):
            assert kit.same_tensors(store, store.find(ident, tenant="t"), [kit.noise(300_000, n)])


def test_one_record_larger_than_the_whole_map_is_written(folder, kit):
    with KVStore.open(folder, map_bytes=MIB) as store:
        ident = kit.put_chunk(store, 1, tensors=[kit.noise(9 * MIB)])
        assert kit.same_tensors(store, store.find(ident, tenant="t"), [kit.noise(9 * MIB)])


READER = """
import sys
from conftest import *
with KVStore.open(sys.argv[1], read_only=sys.argv[2] == "r", map_bytes=1 << 20) as store:
    print("open", flush=True)
    for line in sys.stdin:
        n = int(line)
        ok = same_tensors(store, store.find(identity_of(n), tenant="t"), [noise(300_000, n)])
        if sys.argv[2] == "w":
            put_chunk(store, n + 1000)
        print(ok, flush=True)
"""


@pytest.mark.parametrize("mode", ["r", "w"])
def test_process_that_opened_earlier_follows_a_map_that_another_one_grew(folder, kit, mode, spawn):
    KVStore.open(folder, map_bytes=MIB).close()
    child = spawn(READER, str(folder), mode)
    try:
        assert child.stdout.readline() == "open\n", child.stderr.read()
        with KVStore.open(folder, map_bytes=64 * MIB) as store:
            for n in (1, 20):
                for number in range(n, n + 15):
                    kit.put_chunk(store, number, tensors=[kit.noise(300_000, number)])
                child.stdin.write(f"{n + 14}\n")
                child.stdin.flush()
                assert child.stdout.readline() == "True\n", child.stderr.read()
    finally:
        child.stdin.close()
        child.wait(20)
    assert child.returncode == 0


def test_headroom_is_added_when_a_store_is_opened_with_a_small_setting(folder, kit):
    with KVStore.open(folder) as store:
        kit.put_chunk(store, 1, tensors=[kit.noise(5 * MIB)])
    with KVStore.open(folder, map_bytes=64 << 10) as store:
        assert store.stats().map_bytes > 6 * MIB
        kit.put_chunk(store, 2, tensors=[kit.noise(500_000)])


def test_freed_room_is_used_again_and_the_file_does_not_grow(folder, kit):
    with KVStore.open(folder) as store:
        for n in range(10):
            kit.put_chunk(store, n, tensors=[kit.noise(500_000, n)])
        full = store.stats().file_bytes
        for turn in range(1, 12):
            store.delete([kit.identity_of(n + 10 * (turn - 1)).key for n in range(10)])
            for n in range(10):
                kit.put_chunk(store, n + 10 * turn, tensors=[kit.noise(500_000, n)])
        assert store.stats().file_bytes <= full + MIB


def test_records_of_changing_sizes_do_not_fragment_the_file(folder, kit):
    import random

    rng = random.Random(0)
    sizes: dict[int, int] = {}
    with KVStore.open(folder) as store:
        for n in range(220):
            while sum(sizes.values()) > 8 * MIB:
                gone = rng.choice(list(sizes))
                del sizes[gone]
                store.delete([kit.identity_of(gone).key])
            sizes[n] = rng.choice((3_000, 40_000, 150_000, 600_000, 1_300_000))
            kit.put_chunk(store, n, tensors=[kit.noise(sizes[n], n)])
        assert store.stats().file_bytes < 1.5 * (9.5 * MIB)
        assert store.verify().ok


def test_compact_gives_space_back_and_keeps_everything(folder, kit):
    with KVStore.open(folder) as store:
        idents = [kit.put_chunk(store, n, tensors=[kit.noise(50_000, n)]) for n in range(20)]
        store.put_state("window", "w", {"entries": []}, expect=None)
        freed = store.delete([i.key for i in idents[:19]])
        stats = store.stats()
        assert freed > 19 * 50_000 and stats.free_inside_bytes > 19 * 50_000, "delete alone shortens nothing"
        report = store.compact()
        assert report.after_bytes < 150_000 < report.before_bytes == stats.file_bytes
        assert store.stats().file_bytes == report.after_bytes
        assert kit.same_tensors(store, store.find(idents[19], tenant="t"), [kit.noise(50_000, 19)])
        assert store.get_state("window", "w").value == {"entries": []}
        kit.put_chunk(store, 100)
        assert oct((folder / "data.mdb").stat().st_mode)[-4:] == "0600"
    with KVStore.open(folder) as store:
        assert store.stats().count == 2 and store.verify().ok


def test_compact_is_refused_while_another_process_has_the_store(folder, kit, spawn):
    with KVStore.open(folder) as store:
        kit.put_chunk(store, 1)
        child = spawn(READER, str(folder), "r")
        assert child.stdout.readline() == "open\n"
        with pytest.raises(StoreBusyError, match="another process"):
            store.compact()
        child.stdin.close()
        assert child.wait(20) == 0
        store.compact()


def test_compact_checks_the_disk_for_the_copy(store, kit, monkeypatch):
    kit.put_chunk(store, 1)
    usage = shutil.disk_usage(store.path)
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(NoRoomError, match="compact"):
        store.compact()
    monkeypatch.undo()
    assert store.verify().ok


@pytest.mark.parametrize("fstype", ["nfs4", "lustre", "9p", "fuse.sshfs", "NFS", "cifs"])
def test_network_file_systems_are_refused_in_one_line(folder, monkeypatch, fstype):
    monkeypatch.setattr(files, "file_system_of", lambda path: fstype)
    with pytest.raises(StoreRefusedError) as caught:
        KVStore.open(folder)
    assert (
        fstype in str(caught.value) and "KAMERA_STORE" in str(caught.value) and "\n" not in str(caught.value)
    )


@pytest.mark.parametrize("fstype", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "unknown"])
def test_local_file_systems_are_taken(fstype):
    assert not files.refused_file_system(fstype)


def test_the_innermost_mount_decides_and_names_with_spaces_are_read():
    table = "\n".join(
        [
            "/dev/a / ext4 rw 0 0",
            "srv:/x /data nfs4 rw 0 0",
            "/dev/b /data/my\\040disk xfs rw 0 0",
            "x /dat 9p rw 0 0",
        ]
    )
    assert files.file_system_of("/home/x", table) == "ext4"
    assert files.file_system_of("/data/store", table) == "nfs4"
    assert files.file_system_of("/data/my disk/store", table) == "xfs"
    assert files.file_system_of("/database", table) == "ext4"


@pytest.mark.parametrize(
    "error",
    [lmdb.Error("No locks available"), lmdb.LockError("lock"), lmdb.Error("Function not implemented")],
    ids=["locks", "lock error", "not implemented"],
)
def test_missing_locks_are_refused_and_never_switched_off(folder, monkeypatch, error):
    asked = []

    def refuse(*args, **kw):
        asked.append(kw)
        raise error

    monkeypatch.setattr(binding.lmdb, "open", refuse)
    with pytest.raises(StoreRefusedError, match="KAMERA_STORE") as caught:
        KVStore.open(folder)
    assert "\n" not in str(caught.value)
    assert [(kw["lock"], kw["writemap"]) for kw in asked] == [(True, False)]


def test_map_beyond_the_address_space_names_the_limit(folder, kit):
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "from kamera_store import KVStore, StoreRefusedError\n"
        "try: KVStore.open(sys.argv[1], map_bytes=1 << 40)\n"
        "except StoreRefusedError as error: print(error)\n"
        "with KVStore.open(sys.argv[1]) as store: print(store.stats().count)\n"
    )
    done = kit.run_python(code, str(folder))
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "ulimit -v" in first and second == "0"


def test_map_that_cannot_grow_leaves_the_store_usable(folder, kit):
    code = (
        "import resource, sys\n"
        "from conftest import *\n"
        "from kamera_store import StoreRefusedError\n"
        "from kamera_store.lmdb.environment import Environment\n"
        "real = Environment._resize\n"
        "def tight(self, size, old):\n"
        "    used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), -1))\n"
        "    try: real(self, size, old)\n"
        "    finally: resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n"
        "Environment._resize = tight\n"
        "store = KVStore.open(sys.argv[1], map_bytes=4 << 20)\n"
        "put_chunk(store, 1)\n"
        "try: put_chunk(store, 2, tensors=[noise(5 << 20)])\n"
        "except StoreRefusedError as error: print(error)\n"
        "print(same_tensors(store, store.find(identity_of(1), tenant='t'), tensors_of(1)))\n"
        "put_chunk(store, 3)\n"
        "print(store.stats().count)\n"
    )
    done = kit.run_python(code, str(folder))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "ulimit -v" in lines[0] and lines[1:] == ["True", "2"]


@pytest.fixture
def filled(folder, kit):
    """A closed store with forty chunks."""
    with KVStore.open(folder) as store:
        for n in range(40):
            kit.put_chunk(store, n, tensors=[kit.noise(5000, n), *kit.tensors_of(n)])
    return folder


READ_ALL = """
import sys, warnings
warnings.simplefilter("ignore")
from kamera_store import *
for folder in sys.argv[1:]:
    try:
        with KVStore.open(folder) as store:
            good = bad = 0
            for record in store.iterate():
                try:
                    store.read(record)
                    good += 1
                except DamagedError:
                    bad += 1
            store.stats()
            print("read", good, bad, flush=True)
    except DamagedError as error:
        print("damaged:", error, flush=True)
"""
"""One line for each store named, all in one process, so that a signal from any of them ends it."""


@pytest.mark.parametrize("share", [0.5, 0.02, 0.97, 0.0001])
def test_cut_data_file_is_reported_and_kills_nobody(filled, kit, share):
    path = filled / "data.mdb"
    os.truncate(path, int(path.stat().st_size * share))
    done = kit.run_python(READ_ALL, str(filled))
    assert done.returncode == 0, f"ended by signal {-done.returncode}"
    assert done.stdout.startswith("damaged:") and "kamera verify" in done.stdout


def test_file_cut_behind_the_last_live_page_still_opens(folder, kit):
    """Pages that a transaction took and gave back may never have been written; that is no damage."""
    with KVStore.open(folder) as store:
        for n in range(6):
            kit.put_chunk(store, n, tensors=[kit.noise(500_000, n)])
        store.delete([kit.identity_of(5).key])
        release_freed_pages(store.environment)
    data = files.read_data_file(str(folder))
    live = data.needed_bytes - 100 * 4096
    os.truncate(folder / "data.mdb", live)
    with KVStore.open(folder) as store:
        assert store.stats().count == 5 and store.verify().ok


def test_any_zeroed_page_ends_in_an_answer_and_never_in_a_signal(filled, kit, tmp_path):
    num_pages = (filled / "data.mdb").stat().st_size // 4096
    pages = range(0, num_pages, max(1, num_pages // 14))
    for page in pages:
        copy = tmp_path / f"page{page}"
        shutil.copytree(filled, copy)
        with open(copy / "data.mdb", "r+b") as file:
            file.seek(page * 4096)
            file.write(bytes(4096))
    done = kit.run_python(READ_ALL, *(str(tmp_path / f"page{page}") for page in pages))
    assert done.returncode == 0, f"after {done.stdout}: {done.returncode} {done.stderr[-300:]}"
    outcomes = [line.split()[0] for line in done.stdout.splitlines()]
    assert {"read", "damaged:"} == set(outcomes) and len(outcomes) == len(pages)


def test_copy_taken_while_a_writer_ran_is_read_or_refused(folder, kit, tmp_path):
    with KVStore.open(folder) as store:
        kit.put_chunk(store, 0)
        for n in range(1, 6):
            copy = tmp_path / f"copy{n}"
            copy.mkdir()
            data = (folder / "data.mdb").read_bytes()
            kit.put_chunk(store, n, tensors=[kit.noise(40_000, n)])
            later = (folder / "data.mdb").read_bytes()
            (copy / "data.mdb").write_bytes(later[: 4096 * n] + data[4096 * n :])
    done = kit.run_python(READ_ALL, *(str(tmp_path / f"copy{n}") for n in range(1, 6)))
    assert done.returncode == 0, done.stderr[-300:]
    outcomes = [line.split()[0] for line in done.stdout.splitlines()]
    assert len(outcomes) == 5 and set(outcomes) <= {"read", "damaged:"}


def test_other_things_at_the_path_are_no_store(tmp_path, kit):
    with pytest.raises(NotAStoreError, match="nothing there"):
        KVStore.open(tmp_path / "none", create=False)
    with pytest.raises(NotAStoreError, match="nothing there"):
        KVStore.open(tmp_path / "none", read_only=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotAStoreError, match="not a folder"):
        KVStore.open(tmp_path / "file")
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter.txt").write_text("x")
    with pytest.raises(NotAStoreError, match=r"letter\.txt"):
        KVStore.open(home)
    assert sorted(os.listdir(home)) == ["letter.txt"]
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    with lmdb.open(str(other), max_dbs=3) as env:
        table = env.open_db(b"things")
        with env.begin(write=True) as txn:
            txn.put(b"a", b"b", db=table)
    with pytest.raises(NotAStoreError, match="something else"):
        KVStore.open(other)
    junk = tmp_path / "junk"
    junk.mkdir(mode=0o700)
    (junk / "data.mdb").write_bytes(b"hello" * 5000)
    with pytest.raises(StoreDamagedError, match="meta page"):
        KVStore.open(junk)


def test_store_of_another_format_version_is_refused(folder, raw):
    from kamera_store.format.header import close_row

    KVStore.open(folder).close()
    with raw(folder) as access:
        access.put("format", b"version", close_row("format", b"version", b"2"))
    with pytest.raises(FormatVersionError, match="version 2, this program reads version 1"):
        KVStore.open(folder)


def test_half_made_store_is_finished_by_the_next_open(folder):
    folder.mkdir(mode=0o700)
    (folder / "data.mdb").touch(mode=0o600)
    KVStore.open(folder).close()
    shutil.rmtree(folder)
    folder.mkdir(mode=0o700)
    lmdb.open(str(folder), max_dbs=2).close()
    with KVStore.open(folder) as store:
        assert store.stats().count == 0
