"""Evict and recall through the engine: the vision tower called again, a window changed half, chunks lost to a purge."""

from __future__ import annotations

import pytest
from engine_setups import NUM_NEW, QUESTION, content, ingest, reference
from tiny_models import write_passage

from kamera_cli.errors import NotFoundError, RefusedError, UsageError


@pytest.fixture
def engine(open_engine, tmp_path):
    made = open_engine("qwen2_5_vl")
    ingest(made, "qwen2_5_vl", tmp_path)
    return made


def numbers(window) -> list[int]:
    return [entry.number for entry in window.entries]


def count_calls(module) -> list[str]:
    calls: list[str] = []
    module.register_forward_hook(lambda *_: calls.append("called"))
    return calls


def test_recall_forms_patches_from_stored_embeddings_and_never_sees_the_media_again(
    engine, open_engine, tmp_path
):
    engine.evict(["1"])
    for name in ("a.mp4", "b.png", "c.png"):
        (tmp_path / name).unlink()
    other = open_engine("qwen2_5_vl")
    calls = count_calls(other.runner.model.model.visual)
    result = other.recall(["1"])
    answer = other.query(QUESTION, reuse="auto")
    assert calls == [] and result.vision_calls == 0
    assert numbers(result.window) == numbers(other.window()) == [2, 3, 1]
    assert len(result.patched) == 1
    assert (
        answer.chunks[2].used == "prefilled"
    )  # chunk 3 was never conditioned on chunk 2 alone: no patch yet


def test_the_tower_counter_counts(engine):
    calls = count_calls(engine.runner.model.model.visual)
    before = engine.runner.vision_calls
    engine.query(QUESTION, chunks=["2", "3"], compare=True)
    assert engine.runner.vision_calls - before == 1
    assert len(calls) >= 1


def test_slide_keeps_conditioning_and_needs_no_new_patch(engine):
    """Forward-lossless: after the first chunk left, the others still hold what they took in from it."""
    engine.compile_patches(rank=10, factor_dtype="fp32")
    before = engine.query(QUESTION, reuse="patched")
    result = engine.evict(oldest=1)
    assert [entry.number for entry in result.evicted] == [1] and numbers(engine.window()) == [2, 3]
    after = engine.query(QUESTION, require_hit=True, compare=True)
    assert [chunk.patch for chunk in after.chunks] == [chunk.patch for chunk in before.chunks[1:]]
    assert after.compare.kl > 1e-6  # a prefill of the shorter window has not seen chunk 1


def test_an_explicit_order_is_conditioned_on_that_order_alone(engine):
    engine.evict(["1"])
    result = engine.query(QUESTION, chunks=["2", "3"], max_new_tokens=NUM_NEW)
    assert result.fallback is not None and result.answer == reference(engine, ["2", "3"])[1]
    assert engine.query(QUESTION, chunks=["2", "3"]).fallback is None


def test_a_prefilled_window_is_conditioned_on_itself(engine):
    engine.evict(["1"])
    assert len(engine.window().entries[0].conditioned_on) == 1
    first = engine.query(QUESTION, max_new_tokens=NUM_NEW)
    assert first.answer == reference(engine, ["2", "3"])[1]
    keys = [entry.chunk for entry in engine.window().entries]
    assert [entry.conditioned_on for entry in engine.window().entries] == [(), (keys[0],)]
    assert engine.query(QUESTION).fallback is None


def test_cascade_names_the_chunks_whose_patches_name_the_recalled_one(engine):
    engine.compile_patches(rank=4)
    ids = [entry.chunk for entry in engine.window().entries]
    engine.evict(["1", "2"])
    result = engine.recall(["2"])
    assert result.cascade == (ids[2],)
    result = engine.recall(["1"], at=1)
    assert result.cascade == tuple(sorted(ids[1:])) and result.patched == ()
    assert numbers(result.window) == [1, 3, 2]
    assert [len(entry.conditioned_on) for entry in result.window.entries] == [0, 2, 1]


def test_evict_and_recall_of_all_in_another_order(engine):
    engine.evict(["2", "1", "3"])
    assert engine.window().entries == () and len(engine.window().evicted) == 3
    result = engine.recall(["3", "2", "1"])
    assert numbers(result.window) == [3, 2, 1] and len(result.patched) == 2
    query = engine.query(QUESTION, require_hit=True, compare=True)
    blind = engine.query(QUESTION, reuse="blind", compare=True)
    assert query.compare.kl < 0.2 * blind.compare.kl


def test_evict_dry_run_changes_nothing(engine):
    window, before = engine.window(), content(engine.store)
    result = engine.evict(["2"], purge=True, dry_run=True)
    assert (
        result.dry_run
        and numbers(result.window) == [1, 3]
        and [entry.number for entry in result.evicted] == [2]
    )
    assert engine.window() == window and content(engine.store) == before


def test_purge_takes_the_chunk_and_every_patch_that_carries_its_content(engine):
    for order in (["1", "2", "3"], ["3", "2"], ["1", "3"]):
        engine.compile_patches(order, rank=3)
    entries = engine.window().entries
    patches = {record.id: record.stored_bytes for record in engine.store.iterate(kind="patch")}
    planned = engine.evict(["2"], purge=True, dry_run=True)
    result = engine.evict(["2"], purge=True)
    assert result.purged == (entries[1].chunk,) and result.freed_bytes > 0
    assert set(planned.purged_patches) == set(result.purged_patches) and len(result.purged_patches) == 3
    assert planned.patch_bytes == result.patch_bytes == sum(patches[id] for id in result.purged_patches)
    left = [record.meta for record in engine.store.iterate(kind="patch")]
    assert [(meta["chunk"], meta["antecedents"]) for meta in left] == [(entries[2].chunk, [entries[0].chunk])]
    with pytest.raises(NotFoundError):
        engine.recall(["2"])


def test_a_survivor_of_a_purged_antecedent_falls_back_to_a_prefill(engine):
    engine.compile_patches(rank=6)
    engine.evict(["1"], purge=True)
    with pytest.raises(NotFoundError, match=r"chunks 2, 3: no patch .* --kind removal"):
        engine.query(QUESTION, require_hit=True)
    with pytest.raises(NotFoundError, match="purged"):
        engine.compile_patches()
    result = engine.query(QUESTION, max_new_tokens=NUM_NEW)
    assert result.fallback is not None and result.answer == reference(engine, ["2", "3"])[1]
    assert engine.query(QUESTION, require_hit=True).answer
    assert len(engine.compile_patches().patches) == 1


@pytest.mark.parametrize(("rank", "kept"), [(10, True), (1, False)])
def test_a_recall_forms_no_patch_anew_that_auto_takes_and_every_one_that_it_does_not(engine, rank, kept):
    """A patch that was asked for with another rank or goal is not to be lost to a recall, which asks for none."""
    asked = engine.compile_patches(["2", "3", "1"], rank=rank).patches[1]
    engine.evict(["1"])
    assert (asked.why_not is None) == kept
    (recalled,) = engine.recall(["1"]).patched
    ranks = tuple(engine.store.get(bytes.fromhex(recalled)).meta["ranks"])
    assert recalled == asked.id and (ranks == asked.ranks) == kept


def test_the_number_of_a_purged_chunk_is_not_given_again(engine, tmp_path):
    engine.evict(["3"], purge=True)
    assert engine.ingest([write_passage(tmp_path / "new.txt", 20, 9)]).chunks[0].number == 4
    with pytest.raises(NotFoundError, match="no chunk '3'"):
        engine.recall(["3"])


def test_a_refusal_is_in_words_and_names_a_command_that_mends_it(engine):
    with pytest.raises(NotFoundError) as refused:
        engine.query(QUESTION, chunks=["3", "1"], require_hit=True)
    assert "chunk 1: no patch for this order yet" in str(refused.value)
    assert str(refused.value).endswith("kamera compile-patches 3 1")
    engine.compile_patches(["3", "1"])
    engine.query(QUESTION, chunks=["3", "1"], require_hit=True)
    with pytest.raises(NotFoundError, match=r"chunk 1: measured KL .* raise --max-kl"):
        engine.query(QUESTION, chunks=["3", "1"], reuse="patched", max_kl=0.0)


def test_purge_does_not_take_a_chunk_from_under_another_window(engine, tmp_path):
    engine.ingest([tmp_path / "b.png"], window="other")
    with pytest.raises(RefusedError, match="other"):
        engine.evict(["2"], purge=True)
    assert engine.query(QUESTION, window="other").answer
    engine.evict(["1"], window="other")
    engine.evict(["2"], purge=True)
    with pytest.raises(NotFoundError, match="no longer in the store"):
        engine.recall(["1"], window="other")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda e: e.evict(), UsageError, "oldest"),
        (lambda e: e.evict(["1"], oldest=1), UsageError, "one of the two"),
        (lambda e: e.evict(oldest=4), UsageError, "oldest 4.*3 chunks"),
        (lambda e: e.evict(oldest=0), UsageError, "oldest 0"),
        (lambda e: e.evict(["9"]), NotFoundError, "'9'"),
        (lambda e: e.evict(["1", "1"]), UsageError, "twice"),
        (lambda e: e.evict(["1"], window="none"), NotFoundError, "none"),
        (lambda e: e.recall(["1"]), UsageError, "already in window"),
        (lambda e: e.recall(["9"]), NotFoundError, "'9'"),
        (lambda e: e.recall(["1"], window="none"), NotFoundError, "none"),
        (lambda e: e.recall(["1"], at="top"), UsageError, "top"),
        (lambda e: e.recall(["1"], at=0), UsageError, "at 0"),
        (lambda e: e.window("none"), NotFoundError, "none"),
    ],
)
def test_a_bad_move_is_refused_and_changes_nothing(engine, call, error, message):
    window = engine.window()
    with pytest.raises(error, match=message):
        call(engine)
    assert engine.window() == window


def test_a_recall_out_of_the_window_places_nothing_and_keeps_no_patch(engine):
    engine.evict(["1"])
    window = engine.window()
    with pytest.raises(UsageError, match="--at 4"):
        engine.recall(["1"], at=4)
    assert engine.window() == window and not list(engine.store.iterate(kind="patch"))


def test_windows_of_tenants_are_apart(engine, open_engine, tmp_path):
    other = open_engine("qwen2_5_vl", tenant="guest")
    with pytest.raises(NotFoundError):
        other.query(QUESTION)
    result = other.ingest([tmp_path / "b.png"])
    assert result.chunks[0].outcome == "encoded"
    assert result.chunks[0].id != engine.window().entries[1].chunk
    assert [window.name for window in other.windows()] == ["default"]
    assert len(other.window().entries) == 1 and len(engine.window().entries) == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.query(QUESTION, chunks=["1", "2", "1"]),
        lambda e: e.query(QUESTION, chunks=["1", "1"], reuse="none"),
        lambda e: e.query(QUESTION, chunks=["1", "2", "1"], place=True),
        lambda e: e.explain(chunks=["2", "2"]),
        lambda e: e.compile_patches(["3", "3"]),
        lambda e: e.compile_patches(["1", "3", "1"], kind="orbit"),
        lambda e: e.query(QUESTION, chunks=["1", e.window().entries[0].chunk]),
    ],
)
def test_an_order_with_a_chunk_twice_is_refused_and_changes_nothing(engine, call):
    window, before = engine.window(), content(engine.store)
    with pytest.raises(UsageError, match="named twice"):
        call(engine)
    assert engine.window() == window and content(engine.store) == before


def test_a_window_that_lost_its_last_chunk_says_so_and_takes_it_back(engine):
    engine.evict(["1", "2"])
    engine.evict(["3"])
    window = engine.window()
    for call in (lambda: engine.query(QUESTION), lambda: engine.compile_patches(), lambda: engine.explain()):
        with pytest.raises(UsageError, match="is empty; put chunks back with recall"):
            call()
    with pytest.raises(UsageError, match="has 0 chunks"):
        engine.evict(oldest=1)
    with pytest.raises(NotFoundError, match="chunk 3 has left window 'default'; it can be recalled"):
        engine.evict(["3"])
    assert engine.window() == window and window.entries == ()
    back = engine.recall(["3"])
    assert back.patched == () and [entry.conditioned_on for entry in back.window.entries] == [()]
    assert engine.query(QUESTION, require_hit=True).chunks[0].used == "canonical"


def test_a_recall_of_several_of_which_one_is_held_brings_none_back(engine):
    engine.evict(["1"])
    window = engine.window()
    with pytest.raises(UsageError, match=r"chunk 2 .* is already in window default"):
        engine.recall(["1", "2"])
    assert engine.window() == window and not list(engine.store.iterate(kind="patch"))


def test_a_recall_behind_a_chunk_that_is_gone_from_the_store_changes_nothing(engine):
    engine.evict(["1"])
    window = engine.window()
    engine.store.delete([bytes.fromhex(window.entries[0].chunk)])
    with pytest.raises(NotFoundError, match="chunk 2 is no longer in the store; ingest its source again"):
        engine.recall(["1"])
    assert engine.window() == window
    back = engine.recall(["1"], at=1)
    assert numbers(back.window) == [1, 2, 3] and back.patched == ()


@pytest.mark.parametrize("kind", ["exact", "orbit", "pair"])
def test_no_patch_outlives_the_purge_of_what_it_is_about(engine, kind):
    """Not by its own key, and not as the V that other patches of an orbit share."""
    engine.compile_patches(["1", "2", "3"], kind=kind)
    gone = engine.window().entries[0].chunk
    assert any(gone in patch.meta["antecedents"] for patch in engine.store.iterate(kind="patch"))
    engine.evict(["1"], purge=True)
    assert not any(
        gone in (patch.meta["chunk"], *patch.meta["antecedents"])
        for patch in engine.store.iterate(kind="patch")
    )
    window = engine.window()
    for call in (
        lambda: engine.query(QUESTION, require_hit=True),
        lambda: engine.query(QUESTION, reuse="patched"),
        lambda: engine.compile_patches(),
        lambda: engine.query(QUESTION, chunks=["1", "2"]),
        lambda: engine.recall(["1"]),
    ):
        with pytest.raises(NotFoundError):
            call()
    assert engine.window() == window
    left = engine.query(QUESTION, chunks=["3", "2"], max_new_tokens=NUM_NEW)
    assert left.chunks[0].used in ("canonical", "prefilled") and left.chunks[1].used != "blind"
    if left.fallback is not None:
        assert left.answer == reference(engine, ["3", "2"])[1]
