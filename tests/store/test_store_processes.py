"""Processes that fork, run at once, or are killed in the middle."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest

from kamera_store import KVStore
from kamera_store.lmdb import files

NUM_KILLS = int(os.environ.get("KAMERA_TEST_KILLS", "6"))


WRITER = """
import sys
from conftest import *
first = int(sys.argv[2])
with KVStore.open(sys.argv[1], map_bytes=1 << 20) as store:
    for n in range(first, first + 100000):
        ident = put_chunk(store, n, tensors=[noise(90_000, n), *tensors_of(n)])
        store.put_state("window", "w", {"last": n}, expect="any")
        if n % 3 == 2:
            store.delete([identity_of(n - 2).key])
        print(n, flush=True)
"""


def test_kill_at_any_moment_loses_nothing_that_was_committed(folder, kit, spawn):
    rng, first = random.Random(1), 0
    for _ in range(NUM_KILLS):
        child = spawn(WRITER, str(folder), str(first))
        lines = [child.stdout.readline()]
        reader = threading.Thread(target=lambda c=child, seen=lines: seen.extend(c.stdout))
        reader.start()
        time.sleep(rng.random() * 0.25)
        child.send_signal(signal.SIGKILL)
        child.wait()
        reader.join()
        assert child.stderr.read() == ""
        done = [int(line) for line in lines if line.endswith("\n")]
        last = done[-1]
        with KVStore.open(folder) as store:
            assert store.verify().ok
            window = store.get_state("window", "w").value["last"]
            assert last <= window <= last + 1
            for n in done[-3:]:
                record = store.find(kit.identity_of(n), tenant="t")
                may_be_gone = n % 3 == 0 and last >= n + 1
                assert (may_be_gone and record is None) or kit.same_tensors(
                    store, record, [kit.noise(90_000, n), *kit.tensors_of(n)]
                )
            first = last + 3 - last % 3 + 3


COMPACTOR = """
import sys
from conftest import *
with KVStore.open(sys.argv[1]) as store:
    print("open", flush=True)
    while True:
        store.compact()
"""


def test_kill_during_compact_leaves_a_whole_store(folder, kit, spawn):
    rng = random.Random(2)
    with KVStore.open(folder) as store:
        for n in range(12):
            kit.put_chunk(store, n, tensors=[kit.noise(300_000, n)])
    for _ in range(max(3, NUM_KILLS // 2)):
        child = spawn(COMPACTOR, str(folder))
        child.stdout.readline()
        time.sleep(rng.random() * 0.1)
        child.send_signal(signal.SIGKILL)
        child.wait()
        with KVStore.open(folder) as store:
            assert not [name for name in os.listdir(folder) if name.startswith(files.SCRATCH_PREFIX)]
            assert store.stats().count == 12 and store.verify().ok


def test_reader_killed_in_a_transaction_does_not_hold_pages_for_ever(folder, kit, spawn):
    code = (
        "import sys, time\n"
        "from conftest import *\n"
        "store = KVStore.open(sys.argv[1])\n"
        "with store.environment.read() as txn:\n"
        "    print('reading', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with KVStore.open(folder) as keeper:
        kit.put_chunk(keeper, 1)
        child = spawn(code, str(folder))
        assert child.stdout.readline() == "reading\n"
        child.send_signal(signal.SIGKILL)
        child.wait()
        again = spawn("import sys\nfrom conftest import *\nKVStore.open(sys.argv[1]).close()", str(folder))
        assert again.wait(30) == 0
        assert keeper.environment.handle().reader_check() == 0, (
            "the second process should have cleared the slot"
        )


def test_seal_is_there_after_a_clean_end_and_gone_while_in_use(folder, kit, monkeypatch):
    walked = []
    monkeypatch.setattr(files, "walk_in_child", lambda *args, **kw: walked.append(args))
    with KVStore.open(folder) as store:
        assert not (folder / "seal").exists()
        kit.put_chunk(store, 1)
    assert (folder / "seal").exists()
    KVStore.open(folder).close()
    assert walked == []
    os.utime(folder / "data.mdb")
    KVStore.open(folder).close()
    assert len(walked) == 1
    (folder / "seal").unlink()
    KVStore.open(folder, read_only=True).close()
    assert len(walked) == 2
    KVStore.open(folder, read_only=True).close()
    assert len(walked) == 2


def test_process_that_ends_without_close_still_leaves_a_seal(folder, kit):
    code = "import sys\nfrom conftest import *\nstore = KVStore.open(sys.argv[1])\nput_chunk(store, 1)\n"
    assert kit.run_python(code, str(folder)).returncode == 0
    assert (folder / "seal").exists()


def test_fork_opens_its_own_environment(folder, kit):
    with KVStore.open(folder) as store:
        ident = kit.put_chunk(store, 1)
        mine = store.environment.handle()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                record = store.find(ident, tenant="t")
                same = (
                    kit.same_tensors(store, record, kit.tensors_of(1))
                    and store.environment.handle() is not mine
                )
                kit.put_chunk(store, 2)
                code = 0 if same else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert store.environment.handle() is mine
        assert store.find(kit.identity_of(2), tenant="t") is not None
        kit.put_chunk(store, 3)
        assert store.verify().ok


def test_fork_while_another_thread_writes_does_not_hang(folder, kit):
    with KVStore.open(folder) as store:
        stop = threading.Event()

        def write():
            n = 0
            while not stop.is_set():
                kit.put_chunk(store, n)
                n += 1

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(5):
                pid = os.fork()
                if pid == 0:
                    code = 1
                    try:
                        signal.alarm(20)
                        sum(1 for _ in store.iterate())
                        code = 0
                    finally:
                        os._exit(code)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        finally:
            stop.set()
            thread.join()
        assert store.verify().ok


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_threads_read_and_write_while_the_map_grows(folder, kit):
    errors: list[BaseException] = []
    with KVStore.open(folder, map_bytes=1 << 20) as store:

        def work(first: int) -> None:
            try:
                for n in range(first, first + 12):
                    tensors = [kit.noise(120_000, n), *kit.tensors_of(n)]
                    kit.put_chunk(store, n, tensors=tensors)
                    for m in range(first, n + 1, 3):
                        mine = [kit.noise(120_000, m), *kit.tensors_of(m)]
                        assert kit.same_tensors(store, store.find(kit.identity_of(m), tenant="t"), mine)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(1000 * k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert store.stats().count == 48 and store.verify().ok


def test_two_processes_that_ingest_the_same_content_store_it_once(folder, kit, spawn):
    code = (
        "import sys\n"
        "from conftest import *\n"
        "with KVStore.open(sys.argv[1]) as store:\n"
        "    options = {'tenant': 't', 'unit': 'u', 'meta': {}, 'cost_ms': 1}\n"
        "    print(sum(store.put(identity_of(n), tensors=tensors_of(n), **options) for n in range(40)))\n"
    )
    children = [spawn(code, str(folder)) for _ in range(2)]
    written = [int(child.communicate(timeout=60)[0]) for child in children]
    assert sum(written) == 40
    with KVStore.open(folder) as store:
        assert store.stats().count == 40 and store.verify().ok
