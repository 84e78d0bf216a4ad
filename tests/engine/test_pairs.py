"""Pairs whose compositions are used without a bound, beyond the chunks it was measured on, or worse than nothing."""

from __future__ import annotations

import itertools

import pytest
from engine_setups import QUESTION, content, ingest
from tiny_backbones import save_backbone
from tiny_models import write_passage

from kamera_cli import tiny
from kamera_cli.bench.episodes import CHUNK_SECONDS, FPS, bench_episode, write_episode
from kamera_cli.errors import UsageError
from kamera_cli.patches.pair_forming import PAIR_LIMIT, sampled_orders
from kamera_cli.patches.pairs import META, composed_offer
from kamera_cli.window import identity_of

BACKBONES = ("qwen2_5_vl", "qwen3", "deepseek_v3")


def _ingest_passages(engine, folder, count: int, num_words: int = 24) -> None:
    engine.ingest([write_passage(folder / f"{seed}.txt", num_words, seed) for seed in range(count)])


def _offer(engine, chunk: str, antecedents: str):
    """What is offered for one chunk after others, by their numbers."""
    known = {str(entry.number): identity_of(entry) for entry in engine.window().entries}
    return composed_offer(
        engine.library.find_patch, known[chunk], tuple(known[number] for number in antecedents)
    )


@pytest.fixture(params=BACKBONES)
def backbone(request, open_engine, tmp_path):
    engine = open_engine(model=str(save_backbone(request.param, tmp_path / "model")))
    _ingest_passages(engine, tmp_path, 4)
    return engine


def test_a_pair_for_every_two_chunks_in_both_orders_and_none_formed_twice(open_engine, tmp_path):
    engine = open_engine("qwen3")
    ingest(engine, "qwen3", tmp_path)
    calls = engine.vision_calls
    made = engine.compile_patches(kind="pair")
    ids = {entry.number: entry.chunk for entry in engine.window().entries}
    assert {(patch.antecedents, patch.chunk) for patch in made.patches} == {
        ((ids[one],), ids[other]) for one, other in itertools.permutations(ids, 2)
    }
    assert {patch.outcome for patch in made.patches} == {"formed"}
    before = content(engine.store)
    again = engine.compile_patches(kind="pair")
    assert {patch.outcome for patch in again.patches} == {"found"}
    assert content(engine.store) == before and again.composed == made.composed
    assert engine.vision_calls == calls


def test_the_bound_of_a_composition_is_the_measured_one_for_its_number_of_antecedents(backbone):
    made = backbone.compile_patches(kind="pair", probe=QUESTION)
    assert [bound.num_antecedents for bound in made.composed] == [2, 3]
    for bound, antecedents in zip(made.composed, ("31", "312"), strict=True):
        offer = _offer(backbone, "4", antecedents)
        assert (offer.kl, offer.gain) == (bound.kl, bound.gain)
        assert len(offer.records) == bound.num_antecedents
    assert _offer(backbone, "4", "1") is None


def test_every_arrangement_of_compiled_pairs_stays_within_the_bound_where_all_were_sampled(
    open_engine, tmp_path
):
    engine = open_engine("qwen3")
    ingest(engine, "qwen3", tmp_path)
    (bound,) = engine.compile_patches(kind="pair", probe=QUESTION).composed
    assert bound.num_samples == 6
    for order in itertools.permutations("123"):
        result = engine.query(QUESTION, chunks=list(order), reuse="patched", compare=True, max_new_tokens=1)
        assert [chunk.used for chunk in result.chunks] == ["canonical", "exact", "composed"]
        assert result.compare.kl <= 1.01 * bound.kl + 1e-6


def test_compositions_are_nearer_to_a_prefill_than_no_patch_at_all(backbone):
    backbone.compile_patches(kind="pair", probe=QUESTION)
    composed = blind = 0.0
    for order in ("3142", "4231", "2413"):
        for reuse in ("patched", "blind"):
            result = backbone.query(QUESTION, chunks=list(order), reuse=reuse, compare=True, max_new_tokens=1)
            if reuse == "patched":
                assert [chunk.used for chunk in result.chunks[2:]] == ["composed", "composed"]
                composed += result.compare.kl
            else:
                blind += result.compare.kl
    assert composed < 0.7 * blind


def test_two_hop_answers_of_an_arrangement_that_nobody_compiled(open_engine, tmp_path):
    engine = open_engine(model=str(tiny.model_path()))
    episode = bench_episode(1, 3)
    write_episode(tmp_path / "cards.mp4", episode, 1)
    engine.ingest([tmp_path / "cards.mp4"], fps=FPS, chunk_seconds=CHUNK_SECONDS)
    questions = [question for question in episode.questions if question.hops == 2]
    engine.compile_patches(kind="pair", probe=questions[0].text)
    order = [str(number) for number in range(len(episode.chunks), 0, -1)]

    def right(reuse: str) -> int:
        answers = [engine.query(question.text, chunks=order, reuse=reuse).answer for question in questions]
        return sum(answer == question.answer for answer, question in zip(answers, questions, strict=True))

    assert right("none") == right("patched") > right("blind")


def test_a_pair_that_is_written_anew_has_lost_the_bound(open_engine, tmp_path):
    engine = open_engine("qwen3")
    ingest(engine, "qwen3", tmp_path)
    engine.compile_patches(kind="pair")
    assert _offer(engine, "3", "12").kl is not None
    engine.compile_patches(["1", "3"], rank=2)
    assert _offer(engine, "3", "12").kl is None
    assert _offer(engine, "1", "23").kl is not None
    engine.compile_patches(kind="pair")
    assert _offer(engine, "3", "12").kl is not None


def test_pairs_that_were_never_measured_together_have_no_bound(open_engine, tmp_path):
    engine = open_engine("qwen3")
    _ingest_passages(engine, tmp_path, 4)
    engine.compile_patches(["1", "2", "3"], kind="pair")
    engine.compile_patches(["2", "3", "4"], kind="pair")
    assert _offer(engine, "3", "12").kl is not None
    assert _offer(engine, "3", "24").kl is not None
    engine.compile_patches(["1", "4"], kind="pair")
    assert _offer(engine, "3", "214").kl is None
    assert _offer(engine, "4", "12").kl is None


def test_a_purged_antecedent_takes_its_compositions_with_it(open_engine, tmp_path):
    engine = open_engine("qwen3")
    ingest(engine, "qwen3", tmp_path)
    engine.compile_patches(kind="pair")
    known = {entry.number: identity_of(entry) for entry in engine.window().entries}
    engine.evict(["1"], purge=True)
    assert composed_offer(engine.library.find_patch, known[3], (known[1], known[2])) is None


def test_factors_and_creation_of_a_pair_stay_as_they_are_when_it_gets_its_bound(open_engine, tmp_path):
    engine = open_engine("qwen3")
    ingest(engine, "qwen3", tmp_path)
    engine.compile_patches(["1", "2"], kind="pair")
    old = {record.id: record for record in engine.store.iterate() if record.kind == "patch"}
    before = content(engine.store)
    engine.compile_patches(kind="pair")
    after = content(engine.store)
    assert len(old) == 2
    for name, record in old.items():
        new = engine.store.get(bytes.fromhex(name))
        assert after[name] == before[name] and new.created_s == record.created_s
        assert META not in record.meta and len(new.meta[META]) == 1


def test_counts_of_chunks_that_make_no_pairs_are_refused(open_engine, tmp_path):
    engine = open_engine("qwen3")
    _ingest_passages(engine, tmp_path, PAIR_LIMIT + 1, num_words=4)
    with pytest.raises(UsageError, match=f"2 to {PAIR_LIMIT} chunks, not 9"):
        engine.compile_patches(kind="pair")
    with pytest.raises(UsageError, match="not 1"):
        engine.compile_patches(["3"], kind="pair")
    with pytest.raises(UsageError, match="rank 99"):
        engine.compile_patches(["1", "2"], kind="pair", rank=99)
    assert not [record for record in engine.store.iterate() if record.kind == "patch"]


@pytest.mark.parametrize("count", [3, 4, 6])
def test_sampled_arrangements_put_each_chunk_at_each_place_equally_often(count):
    orders = sampled_orders(tuple(range(count)))
    assert len(set(orders)) == len(orders) == 2 * count
    assert all(sorted(order) == list(range(count)) for order in orders)
    for place in range(count):
        assert sorted(order[place] for order in orders) == sorted(2 * list(range(count)))
