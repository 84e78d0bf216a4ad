"""A patch that answered one question well and another one badly, and is used again as if nothing had been seen."""

from __future__ import annotations

from engine_setups import QUESTION, ingest

import kamera_cli.query.answer as jobs_query
from kamera_cli.query.compare import compare
from kamera_cli.query.keep import FINEST_ENERGY
from kamera_cli.writing import restate

OTHERS = ["number seven: what letter goes with it?", "tell me which shape is paired with letter k.", "who?"]
ORDER = ["2", "3", "1"]


def stated(engine, chunks=ORDER):
    return [chunk.kl for chunk in engine.explain(chunks=chunks, reuse="patched").chunks]


def compiled(open_engine, tmp_path, **options):
    engine = open_engine("llama", warnings=[])
    ingest(engine, "llama", tmp_path)
    engine.compile_patches(ORDER, **options)
    return engine


def test_a_worse_question_raises_what_the_patches_state_and_a_better_one_does_not(open_engine, tmp_path):
    engine = compiled(open_engine, tmp_path, energy=0.96)
    for chunk in engine.explain(chunks=ORDER).chunks[1:]:
        restate(engine.library, engine.store.get(bytes.fromhex(chunk.patches[-1])), {"kl": 0.0})
    worst = 0.0
    for question in [QUESTION, *OTHERS]:
        compared = engine.query(question, chunks=ORDER, reuse="patched", compare=True, max_new_tokens=1)
        worst = max(worst, compared.compare.kl)
        assert stated(engine) == [None, worst, worst]
    assert worst > 0.0
    assert not engine.store.verify().damaged


def test_finer_patches_take_the_place_of_those_that_a_question_was_too_hard_for(open_engine, tmp_path):
    engine = compiled(open_engine, tmp_path, energy=0.96)
    before = engine.query(QUESTION, chunks=ORDER, compare=True, max_new_tokens=1)
    assert before.fallback is None
    bound = 0.5 * max(stated(engine)[1:])
    prefilled = engine.query(QUESTION, chunks=ORDER, max_kl=bound, max_new_tokens=1)
    assert prefilled.fallback is not None
    assert "max_kl" in [chunk.why_not for chunk in prefilled.chunks]
    after = engine.query(QUESTION, chunks=ORDER, max_kl=bound, compare=True, max_new_tokens=1)
    assert after.fallback is None
    assert after.compare.kl < bound < before.compare.kl * 1.01
    assert sum(chunk.rank or 0 for chunk in after.chunks) > sum(chunk.rank or 0 for chunk in before.chunks)


def test_a_prefill_for_another_chunks_sake_keeps_what_a_patch_was_seen_to_do(open_engine, tmp_path):
    engine = compiled(open_engine, tmp_path, energy=0.9995)
    for question in [QUESTION, *OTHERS]:
        engine.query(question, chunks=ORDER[:2], compare=True, max_new_tokens=1)
    seen, fine = stated(engine, ORDER[:2])[1], engine.explain(chunks=ORDER[:2]).chunks[1].rank
    engine.store.delete([bytes.fromhex(engine.explain(chunks=ORDER).chunks[2].patches[-1])])
    assert engine.query("x", chunks=ORDER, max_new_tokens=1).fallback is not None
    assert stated(engine, ORDER[:2])[1] >= seen
    assert engine.explain(chunks=ORDER[:2]).chunks[1].rank == fine


def test_a_comparison_says_nothing_of_patches_for_another_order(open_engine, tmp_path):
    engine = open_engine("llama")
    ingest(engine, "llama", tmp_path)
    engine.compile_patches()
    engine.evict(["1"])
    before = [chunk.kl for chunk in engine.explain(reuse="patched").chunks]
    slid = engine.query(QUESTION, reuse="patched", compare=True, max_new_tokens=1)
    assert slid.compare.kl > max(kl for kl in before if kl is not None)
    assert [chunk.kl for chunk in engine.explain(reuse="patched").chunks] == before


def test_the_finest_patch_keeps_the_largest_kl_that_was_seen_with_it(open_engine, tmp_path):
    engine = compiled(open_engine, tmp_path, energy=FINEST_ENERGY)
    for chunk in engine.explain(chunks=ORDER).chunks[1:]:
        restate(engine.library, engine.store.get(bytes.fromhex(chunk.patches[-1])), {"kl": 0.5})
    easier = engine.query(QUESTION, chunks=ORDER, max_new_tokens=1)
    assert easier.fallback is not None and not easier.patches_kept
    assert stated(engine) == [None, 0.5, 0.5]


def test_a_patch_of_coarse_integers_is_not_the_finest(open_engine, tmp_path):
    engine = compiled(open_engine, tmp_path, energy=FINEST_ENERGY, factor_dtype="int6")
    for chunk in engine.explain(chunks=ORDER, reuse="patched").chunks[1:]:
        restate(engine.library, engine.store.get(bytes.fromhex(chunk.patches[-1])), {"kl": 0.5})
    assert len(engine.query(QUESTION, chunks=ORDER, max_new_tokens=1).patches_kept) == 2


def measuring_while(engine, monkeypatch, happens):
    """A comparison of stored patches during which something else happens to the store."""

    def compare_meanwhile(*args):
        found = compare(*args)
        happens()
        return found

    monkeypatch.setattr(jobs_query, "compare", compare_meanwhile)
    return engine.query(QUESTION, chunks=ORDER, reuse="patched", compare=True, max_new_tokens=1).compare.kl


def test_of_two_comparisons_at_once_the_larger_kl_is_kept(open_engine, tmp_path, monkeypatch):
    engine, other = compiled(open_engine, tmp_path, energy=0.96), open_engine("llama")
    patches = [bytes.fromhex(chunk.patches[-1]) for chunk in engine.explain(chunks=ORDER).chunks[1:]]

    def state(kl):
        for patch in patches:
            restate(other.library, other.store.get(patch), {"kl": kl})

    state(0.0)
    measured = measuring_while(engine, monkeypatch, lambda: state(1e-9))
    assert stated(engine) == [None, measured, measured]
    measuring_while(engine, monkeypatch, lambda: state(2 * measured))
    assert stated(engine) == [None, 2 * measured, 2 * measured]


def test_a_patch_that_was_purged_meanwhile_costs_no_other_its_kl(open_engine, tmp_path, monkeypatch):
    engine = compiled(open_engine, tmp_path, energy=0.96)
    first, second = [bytes.fromhex(chunk.patches[-1]) for chunk in engine.explain(chunks=ORDER).chunks[1:]]
    for patch in (first, second):
        restate(engine.library, engine.store.get(patch), {"kl": 0.0})
    measured = measuring_while(engine, monkeypatch, lambda: engine.store.delete([first]))
    assert engine.store.get(second).meta["kl"] == measured > 0.0
