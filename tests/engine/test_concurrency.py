"""Several engines on one store, several threads in one engine: windows that lose an entry, patches half there, a model
that is loaded twice, progress that misleads."""

from __future__ import annotations

import threading
import time

from engine_setups import NUM_NEW, QUESTION, content, ingest, reference
from tiny_models import write_noise_image, write_noise_video, write_passage

from kamera_cli.window import identity_of


def run_together(*jobs) -> None:
    """Run jobs in threads that start at the same moment; the first failure is raised."""
    start, failures = threading.Barrier(len(jobs)), []

    def work(job) -> None:
        try:
            start.wait()
            job()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def slowed(calls: list[str], name: str, call):
    """A function that notes its calls and takes long enough for every other thread to ask meanwhile."""

    def slow(*arguments, **options):
        calls.append(name)
        time.sleep(0.1)
        return call(*arguments, **options)

    return slow


def test_threads_that_ask_at_once_load_one_model_and_open_one_store(open_engine, monkeypatch):
    from kamera_cli.model import loading
    from kamera_store.kvstore import KVStore

    calls: list[str] = []
    monkeypatch.setattr(loading, "load", slowed(calls, "load", loading.load))
    monkeypatch.setattr(KVStore, "open", slowed(calls, "open", KVStore.open))
    context = open_engine("llama", hot_bytes=1 << 20).context
    asked = ["runner", "store", "fingerprint", "contents", "hot"]
    seen = []
    run_together(*[lambda name=name: seen.append((name, id(getattr(context, name)))) for name in 2 * asked])
    assert sorted(calls) == ["load", "open"]
    assert len(seen) == 10 and len(set(seen)) == 5


def test_a_store_that_one_thread_closes_is_opened_by_the_next_use_of_another(open_engine):
    context = open_engine("llama").context
    stop = threading.Event()

    def use() -> None:
        for _ in range(200):
            assert context.store.path
        stop.set()

    def close() -> None:
        while not stop.is_set():
            context.close()

    run_together(use, close)


def test_a_context_that_names_chunks_shares_what_was_made(open_engine, tmp_path):
    engine = open_engine("llama")
    ingest(engine, "llama", tmp_path)
    plain = engine.context
    named = plain.numbered(engine.window())
    chunk = identity_of(engine.window().entries[1])
    assert (plain.number(chunk.key), plain.label(chunk)) == (0, chunk.short_id)
    assert (named.number(chunk.key), named.label(chunk)) == (2, "2")
    assert named.runner is plain.runner and named.store is plain.store
    named.close()
    assert named.store is plain.store


def test_a_window_that_many_fill_at_once_loses_nothing(open_engine, tmp_path):
    texts = [write_passage(tmp_path / f"{index}.txt", 10, index) for index in range(8)]
    engines = [open_engine("llama") for _ in range(4)]
    assert all(engine.runner for engine in engines)
    jobs = [
        lambda e=engine, i=index: e.ingest(texts[2 * i : 2 * i + 2]) for index, engine in enumerate(engines)
    ]
    run_together(*jobs)
    entries = engines[0].window().entries
    assert sorted(entry.name for entry in entries) == sorted(f"{index}.txt#1" for index in range(8))
    assert [entry.number for entry in entries] == list(range(1, 9))
    for index, entry in enumerate(entries):
        assert entry.conditioned_on == tuple(before.chunk for before in entries[:index])


def test_evictions_and_recalls_of_two_engines_leave_every_chunk_once(open_engine, tmp_path):
    first, second = open_engine("llama"), open_engine("llama")
    ingest(first, "llama", tmp_path)
    assert second.runner
    for _ in range(4):
        run_together(lambda: first.evict(["1"]), lambda: second.evict(["2"]))
        assert [entry.number for entry in first.window().entries] == [3]
        run_together(lambda: first.recall(["1"]), lambda: second.recall(["2"]))
        window = first.window()
        assert sorted(entry.number for entry in window.entries) == [1, 2, 3] and window.evicted == ()


def test_first_queries_of_two_engines_keep_one_set_of_patches(open_engine, tmp_path):
    engines = [open_engine("qwen2_5_vl") for _ in range(2)]
    ingest(engines[0], "qwen2_5_vl", tmp_path)
    assert engines[1].runner
    order, answers = ["3", "1", "2"], []
    run_together(
        *(
            lambda e=engine: answers.append(e.query(QUESTION, chunks=order, max_new_tokens=NUM_NEW).answer)
            for engine in engines
        )
    )
    assert answers == [reference(engines[0], order)[1]] * 2
    assert len(list(engines[0].store.iterate(kind="patch"))) == 2
    assert engines[0].query(QUESTION, chunks=order, require_hit=True).fallback is None


def test_a_query_while_another_engine_ingests_sees_a_whole_window(open_engine, tmp_path):
    writer, reader = open_engine("qwen2_5_vl"), open_engine("qwen2_5_vl")
    ingest(writer, "qwen2_5_vl", tmp_path)
    clip = write_noise_video(tmp_path / "long.mp4", 9, seconds=8)
    expected = reader.query(QUESTION, chunks=["1", "2"], reuse="none").answer
    seen: list[int] = []

    def read() -> None:
        for _ in range(6):
            assert reader.query(QUESTION, chunks=["1", "2"], reuse="none").answer == expected
            seen.append(len(reader.window().entries))

    run_together(read, lambda: writer.ingest([clip], chunk_seconds=2))
    assert set(seen) <= {3, 7} and len(writer.window().entries) == 7


def test_progress_grows_to_its_total(open_engine, tmp_path):
    engine = open_engine("qwen2_5_vl")
    steps = []
    engine.context.progress = steps.append
    clip = write_noise_video(tmp_path / "clip.mp4", 3, seconds=8)
    engine.ingest([clip, write_noise_image(tmp_path / "p.png", 1)], chunk_seconds=2)
    engine.compile_patches(rank=2)
    by_job: dict[str, list] = {}
    for step in steps:
        by_job.setdefault(step.what, []).append(step)
    assert any("clip.mp4" in what for what in by_job)
    for job in by_job.values():
        done = [step.done for step in job]
        assert done == sorted(done)
        assert all(step.total is None or 0 <= step.done <= step.total for step in job)
        assert job[-1].total in (None, job[-1].done)
    assert [step.done for step in by_job[next(what for what in by_job if "clip" in what)]] == [0, 1, 2, 3, 4]


def test_the_same_work_twice_gives_the_same_bytes(open_engine, tmp_path):
    stores = []
    for name in ("one", "two"):
        engine = open_engine("qwen2_5_vl", store=tmp_path / name)
        ingest(engine, "qwen2_5_vl", tmp_path)
        engine.compile_patches(["2", "3", "1"], rank=4)
        engine.query(QUESTION)
        stores.append(content(engine.store))
    assert stores[0] == stores[1]


def test_an_engine_can_be_used_again_after_it_was_closed(open_engine, tmp_path):
    engine = open_engine("llama")
    ingest(engine, "llama", tmp_path)
    answer = engine.query(QUESTION).answer
    engine.close()
    engine.close()
    assert engine.query(QUESTION, reuse="none").answer == answer
