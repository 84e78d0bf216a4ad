"""Hot chunks: a copy that differs from the store, outlives a purge, serves another writing, or breaks its budget."""

from __future__ import annotations

import threading

import pytest
import torch
from engine_setups import QUESTION, first_logits, ingest
from test_concurrency import run_together
from tiny_models import write_passage

from kamera_cli.errors import NotFoundError, UsageError
from kamera_cli.hot import HotCache, Version, tensor_bytes
from kamera_cli.query.read import read_and_assemble
from kamera_store.errors import MissingRecordError

ROOMY = 64 << 20


def version(name: str, *, tenant: str = "default", model: str = "f", writing: int = 1) -> Version:
    return Version(tenant, model, "chunk", name.encode(), b"digest", writing)


def logits_of(engine, *arguments, **options) -> tuple[torch.Tensor, object]:
    with first_logits(engine) as seen:
        result = engine.query(QUESTION, *arguments, reuse="patched", **options)
    return seen[0], result


def held_tensors(hot: HotCache) -> list[torch.Tensor]:
    from kamera_cli.hot import _tensors

    return [tensor for held in hot._held.values() for tensor in _tensors(list(held.parts.values()))]


@pytest.fixture
def compiled(open_engine, tmp_path):
    """A hot engine over three text chunks with patches for two orders, and a cold one on the same store."""
    hot = open_engine("llama", hot_bytes=ROOMY)
    ingest(hot, "llama", tmp_path)
    hot.compile_patches(rank=6)
    hot.compile_patches(["3", "1", "2"], rank=6)
    hot.context.hot.clear()
    return hot, open_engine("llama")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "deepseek_v3"])
def test_a_hot_answer_is_the_cold_one_bit_for_bit_and_reads_nothing(open_engine, tmp_path, family):
    from tiny_backbones import save_backbone

    options = {"model": str(save_backbone(family, tmp_path / "model"))} if family == "deepseek_v3" else {}
    engine = open_engine(hot_bytes=ROOMY, **options)
    ingest(engine, family, tmp_path)
    engine.compile_patches(rank=6)
    cold, expected = logits_of(open_engine(**options))
    assert expected.chunks[1].used == "exact" and all(chunk.hot_bytes == 0 for chunk in expected.chunks)
    engine.context.hot.clear()
    read = [chunk.bytes_read for chunk in expected.chunks]
    for wanted in (read, [0, 0, 0]):
        before = engine.store.bytes_read
        logits, result = logits_of(engine)
        assert torch.equal(logits, cold) and result.answer == expected.answer
        assert [chunk.bytes_read for chunk in result.chunks] == wanted
        assert engine.store.bytes_read - before == sum(wanted)
    assert [chunk.hot_bytes for chunk in result.chunks] == read and sum(read) > 0


def test_another_order_of_hot_chunks_reads_only_its_patches(compiled):
    engine, cold = compiled
    logits_of(engine)
    logits, result = logits_of(engine, chunks=["3", "1", "2"])
    assert torch.equal(logits, logits_of(cold, chunks=["3", "1", "2"])[0])
    for chunk in result.chunks:
        size = engine.store.get(bytes.fromhex(chunk.patch)).stored_bytes if chunk.patch else 0
        assert chunk.bytes_read == size and chunk.hot_bytes > 0


def test_a_prefill_from_hot_embeddings_reads_nothing(compiled):
    engine, _ = compiled
    first = engine.query(QUESTION, reuse="none")
    before = engine.store.bytes_read
    again = engine.query(QUESTION, reuse="none")
    assert engine.store.bytes_read == before and again.answer == first.answer
    assert [chunk.hot_bytes for chunk in again.chunks] == [chunk.bytes_read for chunk in first.chunks]
    assert all(chunk.bytes_read == 0 for chunk in again.chunks)


def test_no_use_writes_into_a_hot_copy(compiled):
    """TF-3: the cache that an answer grows is never the kept one."""
    engine, _ = compiled
    logits_of(engine)
    engine.query(QUESTION, reuse="none")
    kept = held_tensors(engine.context.hot)
    before = [tensor.clone() for tensor in kept]
    for order in (None, ["2", "1"], ["3", "1", "2"], ["2"]):
        engine.query(QUESTION, chunks=order, max_new_tokens=12)
    engine.evict(["1"])
    engine.recall(["1"])
    engine.compile_patches(["2", "3"], rank=3)
    assert len(kept) > 20 and all(map(torch.equal, kept, before))


def test_a_purge_by_another_engine_leaves_no_hot_copy(compiled):
    engine, other = compiled
    logits_of(engine)
    entries = engine.window().entries
    gone = bytes.fromhex(entries[0].chunk)
    other.evict(["1"], purge=True)
    with pytest.raises(NotFoundError):
        engine.query(QUESTION, reuse="patched")
    engine.query(QUESTION, chunks=["2"], reuse="patched")
    assert gone not in engine.context.hot.record_keys()
    assert all(engine.store.get(key) is not None for key in engine.context.hot.record_keys())


def test_a_purge_through_the_engine_drops_its_copies_at_once(compiled):
    engine, _ = compiled
    logits_of(engine)
    engine.evict(["2"], purge=True)
    assert all(engine.store.get(key) is not None for key in engine.context.hot.record_keys())
    assert engine.context.hot.held_bytes == tensor_bytes(held_tensors(engine.context.hot))


def test_records_found_before_a_purge_are_not_served_from_memory_after_it(compiled):
    engine, other = compiled
    logits_of(engine)
    library = engine.library
    records = [library.find_chunk(entry) for entry in engine.window().entries]
    other.evict(["1"], purge=True)
    with pytest.raises(MissingRecordError):
        read_and_assemble(engine.runner, library, records, [()] * 3)
    with pytest.raises(MissingRecordError):
        library.layers(records[0])


def test_a_chunk_purged_while_it_was_read_leaves_no_copy(compiled):
    engine, other = compiled
    library = engine.library
    record = library.find_chunk(engine.window().entries[0])
    engine.context.hot.clear()

    def purge_meanwhile() -> torch.Tensor:
        other.evict(["1"], purge=True)
        return torch.ones(3)

    engine.context.hot.get_or_read(engine.store, library.version(record), "segment", purge_meanwhile)
    assert len(engine.context.hot) == 0 and engine.context.hot.held_bytes == 0


def test_a_chunk_ingested_again_after_a_purge_is_read_again(compiled, tmp_path):
    engine, _ = compiled
    logits, _ = logits_of(engine, chunks=["1"])
    engine.evict(["1"], purge=True)
    engine.ingest([tmp_path / "a.txt"])
    again, result = logits_of(engine, chunks=["4"])
    assert result.chunks[0].hot_bytes == 0 and torch.equal(again, logits)


def test_a_patch_that_another_engine_wrote_anew_is_not_served_from_memory(compiled):
    engine, other = compiled
    old, before = logits_of(engine)
    other.compile_patches(rank=14)
    new, after = logits_of(engine)
    assert [chunk.patch for chunk in after.chunks] == [chunk.patch for chunk in before.chunks]
    assert torch.equal(new, logits_of(other)[0]) and not torch.equal(new, old)
    assert after.chunks[0].bytes_read == 0 and after.chunks[1].bytes_read > 0


def test_a_copy_serves_one_tenant_and_one_model(open_engine, tmp_path):
    first = open_engine("llama", hot_bytes=ROOMY)
    ingest(first, "llama", tmp_path)
    logits_of(first, chunks=["1"])
    for options in ({"tenant": "guest"}, {"dtype": "bf16"}):
        other = open_engine("llama", hot_bytes=ROOMY, **options)
        other.context._made["hot"] = first.context.hot
        other.ingest([tmp_path / "a.txt"], window="own")
        _, result = logits_of(other, window="own")
        assert result.chunks[0].hot_bytes == 0
    held = HotCache(ROOMY)
    held.put(version("a"), "layers", torch.ones(1))
    for another in ({"tenant": "guest"}, {"model": "g"}, {"writing": 2}):
        assert held.get(version("a", **another), "layers") is None


def test_the_least_recently_used_record_goes_first_and_whole():
    held = HotCache(100)
    for name in "abc":
        held.put(version(name), "layers", torch.zeros(20, dtype=torch.uint8))
        held.put(version(name), "positions", torch.zeros(10, dtype=torch.uint8))
    assert held.held_bytes == 90 and len(held) == 3
    held.get(version("a"), "positions")
    held.put(version("d"), "layers", torch.zeros(50, dtype=torch.uint8))
    assert [name for name in "abcd" if held.holds(version(name), "layers")] == ["a", "d"]
    assert not held.holds(version("b"), "positions") and held.held_bytes == 80


def test_a_record_larger_than_the_budget_is_not_kept_and_pushes_nothing_out():
    held = HotCache(100)
    held.put(version("a"), "layers", torch.zeros(60, dtype=torch.uint8))
    held.put(version("b"), "layers", torch.zeros(101, dtype=torch.uint8))
    assert held.holds(version("a"), "layers") and held.held_bytes == 60


def test_a_slice_counts_with_the_memory_that_it_keeps_alive():
    whole = torch.zeros(1000, dtype=torch.uint8)
    assert tensor_bytes([whole[:10], (whole[10:20],), {"x": 1}]) == 1000


@pytest.mark.parametrize("share", [0.5, 1.2])
def test_a_small_budget_is_kept_and_changes_no_answer(compiled, open_engine, share):
    roomy, cold = compiled
    logits_of(roomy)
    limit = int(share * roomy.context.hot.held_bytes / 3)
    engine = open_engine("llama", hot_bytes=limit)
    for order in (None, ["3", "1", "2"], None, ["2"], None):
        logits, _ = logits_of(engine, chunks=order)
        assert torch.equal(logits, logits_of(cold, chunks=order)[0])
        assert engine.context.hot.held_bytes == tensor_bytes(held_tensors(engine.context.hot)) <= limit
    assert len(engine.context.hot) > 0


def test_threads_that_share_a_small_budget_answer_as_one_does(compiled, open_engine):
    roomy, cold = compiled
    orders = [None, ["3", "1", "2"], ["2"], ["3"]]
    expected = {str(order): cold.query(QUESTION, chunks=order, reuse="patched").answer for order in orders}
    logits_of(roomy)
    engine = open_engine("llama", hot_bytes=roomy.context.hot.held_bytes // 2)
    assert engine.runner
    seen, lock = [], threading.Lock()

    def work(shift: int) -> None:
        for step in range(6):
            order = orders[(step + shift) % len(orders)]
            answer = engine.query(QUESTION, chunks=order, reuse="patched").answer
            with lock:
                seen.append((str(order), answer))

    run_together(lambda: work(0), lambda: work(1))
    assert len(seen) == 12 and all(answer == expected[order] for order, answer in seen)
    hot = engine.context.hot
    assert hot.held_bytes == tensor_bytes(held_tensors(hot)) <= hot.limit_bytes


def test_a_command_keeps_nothing_in_memory_and_a_closed_engine_neither(open_engine, tmp_path):
    assert open_engine("llama").context.hot is None
    engine = open_engine("llama", hot_bytes=ROOMY)
    ingest(engine, "llama", tmp_path)
    engine.query(QUESTION, chunks=["1"])
    assert len(engine.context.hot) > 0
    engine.close()
    assert len(engine.context.hot) == 0
    assert engine.query(QUESTION, chunks=["1"]).chunks[0].hot_bytes == 0
    with pytest.raises(UsageError, match="hot_bytes"):
        open_engine("llama", hot_bytes=-1)


def test_a_window_in_hand_is_the_stored_one(open_engine, tmp_path):
    engine = open_engine("llama", hot_bytes=ROOMY)
    window = engine.open_window("notes")
    assert window.view is None and window.chunks == () == window.evicted
    with pytest.raises(NotFoundError):
        window.query(QUESTION)
    sources = [write_passage(tmp_path / f"{seed}.txt", 12, seed) for seed in range(3)]
    window.ingest(*sources)
    assert [entry.number for entry in window.chunks] == [1, 2, 3]
    assert window.evict(2).evicted == window.evicted
    assert window.recall(2, at=1).patched == () and [entry.number for entry in window.chunks] == [2, 1, 3]
    assert len(window.compile_patches([3, 1], rank=2).patches) == 1
    assert [chunk.number for chunk in window.query(QUESTION, [3, 1]).chunks] == [3, 1]
    window.evict(oldest=1)
    assert engine.window("notes").entries == engine.open_window("notes").chunks == window.chunks
    with pytest.raises(UsageError, match="window"):
        engine.open_window("a/b")
