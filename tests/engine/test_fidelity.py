"""Answers from reused KV that differ from the plain model's, in any order, at any rank, after any other query."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from engine_setups import NUM_NEW, QUESTION, content, first_logits, ingest, reference
from plain_model import kl
from tiny_models import FAMILIES

ORDERS = [list(order) for order in itertools.permutations("123")]


@pytest.mark.parametrize("family", FAMILIES)
def test_full_rank_patches_answer_like_the_plain_model_in_every_order(open_engine, tmp_path, family):
    engine = open_engine(family)
    ingest(engine, family, tmp_path)
    rank = min(entry.num_tokens for entry in engine.window().entries)
    worst = 0.0
    for order in ORDERS:
        engine.compile_patches(order, rank=rank, factor_dtype="fp32")
        with first_logits(engine) as seen:
            result = engine.query(QUESTION, chunks=order, reuse="patched", max_new_tokens=NUM_NEW)
        logits, answer = reference(engine, order)
        worst = max(worst, kl(logits, seen[0]))
        assert result.answer == answer
        assert [chunk.used for chunk in result.chunks] == ["canonical", "exact", "exact"]
    assert worst <= 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_first_query_prefills_and_answers_rightly_and_the_second_reuses_its_patches(
    open_engine, tmp_path, family
):
    engine = open_engine(family)
    ingest(engine, family, tmp_path)
    for order in (["2", "3", "1"], ["3", "1", "2"]):
        _, answer = reference(engine, order)
        first = engine.query(QUESTION, chunks=order, max_new_tokens=NUM_NEW)
        assert first.answer == answer
        assert [chunk.used for chunk in first.chunks] == ["prefilled"] * 3
        assert [chunk.why_not for chunk in first.chunks] == [None, "no_patch", "no_patch"]
        assert len(first.patches_kept) == 2 and first.reused_tokens == 0
        second = engine.query(QUESTION, chunks=order, max_new_tokens=NUM_NEW, compare=True)
        blind = engine.query(QUESTION, chunks=order, max_new_tokens=NUM_NEW, reuse="blind", compare=True)
        assert [chunk.used for chunk in second.chunks] == ["canonical", "exact", "exact"]
        assert {chunk.patch for chunk in second.chunks[1:]} == set(first.patches_kept)
        assert second.fallback is None and second.patches_kept == () and second.reused_tokens > 0
        assert second.compare.kl < 0.1 * blind.compare.kl
        assert second.chunks[1].kl == pytest.approx(second.compare.kl, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_first_query_in_window_order_answers_like_the_plain_model(open_engine, tmp_path, family):
    engine = open_engine(family)
    ingest(engine, family, tmp_path)
    result = engine.query(QUESTION, max_new_tokens=NUM_NEW)
    assert result.answer == reference(engine, ["1", "2", "3"])[1]
    assert engine.query(QUESTION, max_new_tokens=NUM_NEW).fallback is None


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3"])
def test_half_precision_models_reuse_in_their_own_dtype(open_engine, tmp_path, family, dtype):
    engine = open_engine(family, dtype=dtype)
    ingest(engine, family, tmp_path)
    engine.compile_patches(["3", "2", "1"], rank=10, factor_dtype="fp32")
    with first_logits(engine) as seen:
        patched = engine.query(QUESTION, chunks=["3", "2", "1"], reuse="patched")
    logits, _ = reference(engine, ["3", "2", "1"])
    assert seen[0].dtype == logits.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert patched.dtype == {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    blind = engine.query(QUESTION, chunks=["3", "2", "1"], reuse="blind", compare=True)
    assert kl(logits, seen[0]) < min(2e-2, 0.5 * blind.compare.kl)


def test_a_high_rank_patch_read_at_a_low_rank_is_the_low_rank_patch(open_engine, tmp_path):
    order, found = ["3", "1", "2"], []
    for formed, read in ((20, 4), (4, None)):
        engine = open_engine("llama", store=tmp_path / f"store-{formed}")
        ingest(engine, "llama", tmp_path)
        engine.compile_patches(order, rank=formed)
        with first_logits(engine) as seen:
            result = engine.query(QUESTION, chunks=order, reuse="patched", rank=read)
        assert [chunk.rank for chunk in result.chunks] == [None, 4, 4]
        found.append(seen[0])
    assert torch.equal(*found)


def test_a_request_for_less_does_not_undo_a_patch_of_higher_rank(open_engine, tmp_path):
    engine = open_engine("llama")
    ingest(engine, "llama", tmp_path)
    high = engine.compile_patches(rank=16)
    low = engine.compile_patches(rank=4)
    assert [patch.outcome for patch in low.patches] == ["found", "found"]
    assert [patch.ranks for patch in low.patches] == [patch.ranks for patch in high.patches]
    assert [patch.outcome for patch in engine.compile_patches(rank=20).patches] == ["formed", "formed"]


def test_compiling_measures_the_patch_and_the_blind_reuse(open_engine, tmp_path):
    engine = open_engine("qwen2_5_vl")
    ingest(engine, "qwen2_5_vl", tmp_path)
    result = engine.compile_patches(rank=3, probe=QUESTION)
    for patch in result.patches:
        assert 0 <= patch.kl < patch.kl_blind and 0 < patch.energy <= 1
        assert max(patch.ranks) == 3 and patch.patch_bytes < patch.chunk_kv_bytes
    last = engine.query(QUESTION, reuse="patched", compare=True)
    assert last.compare.kl == pytest.approx(result.patches[-1].kl, rel=1e-3)
    blind = engine.query(QUESTION, reuse="blind", compare=True)
    assert blind.compare.kl == pytest.approx(result.patches[-1].kl_blind, rel=1e-3)


def test_interleaved_queries_equal_queries_of_their_own_engines(open_engine, tmp_path):
    """TF-1: nothing is left on the model by a video prompt when a text prompt goes on, and the other way round."""
    (tmp_path / "texts").mkdir()
    engine = open_engine("qwen2_5_vl")
    ingest(engine, "qwen2_5_vl", tmp_path)
    engine.ingest([tmp_path / "texts" / name for name in _texts(tmp_path / "texts")], window="texts")
    windows = ["default", "texts", "default", "texts"]
    engine.query(QUESTION), engine.query(QUESTION, window="texts")
    together = [engine.query(QUESTION, window=window) for window in windows]
    for window, result in zip(windows, together, strict=True):
        apart = open_engine("qwen2_5_vl").query(QUESTION, window=window)
        assert (apart.answer, apart.fallback) == (result.answer, None)


def _texts(folder):
    from engine_setups import write_sources

    return [path.name for path in write_sources("llama", folder)]


def test_stored_entries_are_not_changed_by_use(open_engine, tmp_path):
    """TF-3: a cache that grows by generating is never the stored one."""
    engine = open_engine("qwen2_5_vl")
    ingest(engine, "qwen2_5_vl", tmp_path)
    questions = ["which letter?", "which shape goes with the letter b?", "tell me which digit."]
    for question in questions:
        engine.query(question)
    before = content(engine.store)
    answers = [engine.query(question).answer for question in questions]
    assert content(engine.store) == before
    again = [open_engine("qwen2_5_vl").query(question).answer for question in questions]
    assert again == answers


def test_threads_that_share_an_engine_get_the_answers_of_one_thread(open_engine, tmp_path):
    engine = open_engine("qwen2_5_vl")
    ingest(engine, "qwen2_5_vl", tmp_path)
    for order in ORDERS:
        engine.query(QUESTION, chunks=order)
    jobs = [(question, order) for question in (QUESTION, "which shape?") for order in ORDERS]
    alone = [engine.query(question, chunks=order).answer for question, order in jobs]
    shared: dict[int, str] = {}

    def work(start: int) -> None:
        for index in range(start, len(jobs), 3):
            question, order = jobs[index]
            reuse = "none" if start == 2 else "auto"
            shared[index] = engine.query(question, chunks=order, reuse=reuse).answer

    threads = [threading.Thread(target=work, args=(start,)) for start in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    prefilled = {
        index: engine.query(question, chunks=order, reuse="none").answer
        for index, (question, order) in enumerate(jobs)
        if index % 3 == 2
    }
    assert [prefilled.get(index, alone[index]) for index in range(len(jobs))] == [
        shared[i] for i in range(len(jobs))
    ]


def test_patches_formed_by_two_threads_at_once_are_those_of_one(open_engine, tmp_path):
    engine = open_engine("llama")
    ingest(engine, "llama", tmp_path)
    failures = []

    def work(order: list[str]) -> None:
        try:
            engine.compile_patches(order, rank=8)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(order,)) for order in ORDERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    other = open_engine("llama", store=tmp_path / "other")
    ingest(other, "llama", tmp_path)
    for order in ORDERS:
        other.compile_patches(order, rank=8)
    assert content(engine.store) == content(other.store)
