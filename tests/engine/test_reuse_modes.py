"""A receipt that says something else than what was done; an unnoticed miss; bad requests that get a traceback."""

from __future__ import annotations

import pytest
from engine_setups import NUM_NEW, QUESTION, ingest, reference
from tiny_models import MAX_TOKENS, passage, write_passage

from kamera_cli.errors import NotFoundError, RefusedError, UsageError
from kamera_cli.operator.plan import AUTO_MIN_ENERGY

ORDER = ["3", "1", "2"]


@pytest.fixture
def engine(open_engine, tmp_path):
    made = open_engine("qwen2_5_vl")
    ingest(made, "qwen2_5_vl", tmp_path)
    return made


def test_blind_reuse_says_so(engine):
    result = engine.query(QUESTION, chunks=ORDER, reuse="blind")
    assert [chunk.used for chunk in result.chunks] == ["canonical", "blind", "blind"]
    assert result.fallback is None and result.patches_kept == ()
    assert "1, 2" in result.warnings[0]
    assert not list(engine.store.iterate(kind="patch"))


def test_none_prefills_answers_rightly_and_keeps_nothing(engine):
    result = engine.query(QUESTION, chunks=ORDER, reuse="none", max_new_tokens=NUM_NEW)
    assert result.answer == reference(engine, ORDER)[1]
    assert [chunk.used for chunk in result.chunks] == ["prefilled"] * 3
    assert result.reused_tokens == 0 and result.fallback == "--reuse none"
    assert not list(engine.store.iterate(kind="patch"))


def test_patched_never_prefills_and_never_goes_blind_without_a_word(engine):
    with pytest.raises(NotFoundError, match="no patch for this order yet"):
        engine.query(QUESTION, chunks=ORDER, reuse="patched")
    engine.compile_patches(ORDER, rank=10)
    assert engine.query(QUESTION, chunks=ORDER, reuse="patched").fallback is None


@pytest.mark.parametrize("reuse", ["auto", "patched", "none"])
def test_require_hit_refuses_before_any_prefill(engine, reuse):
    prefills = []
    engine.runner.prefill = lambda segments: prefills.append(segments)
    with pytest.raises(NotFoundError) as caught:
        engine.query(QUESTION, chunks=ORDER, reuse=reuse, require_hit=True)
    assert caught.value.exit_code == 3 and not prefills
    assert "chunks 1, 2: no patch for this order yet" in str(caught.value) or reuse == "none"


def test_require_hit_is_met_by_patches_and_by_a_single_chunk(engine):
    engine.compile_patches(ORDER, rank=10)
    for chunks in (ORDER, ["2"]):
        assert engine.query(QUESTION, chunks=chunks, require_hit=True).reused_tokens > 0


def test_a_patch_above_the_bound_is_refused_and_the_answer_prefilled(engine):
    formed = engine.compile_patches(ORDER, energy=0.97, probe=QUESTION).patches
    bound = formed[1].kl / 2
    assert all(patch.kl > 0 for patch in formed)
    free = engine.query(QUESTION, chunks=ORDER, max_new_tokens=NUM_NEW)
    assert free.fallback is None and free.chunks[2].kl == formed[1].kl
    with pytest.raises(NotFoundError, match="measured KL of the patch too high"):
        engine.query(QUESTION, chunks=ORDER, reuse="patched", max_kl=bound)
    bounded = engine.query(QUESTION, chunks=ORDER, max_kl=bound, max_new_tokens=NUM_NEW)
    assert "max_kl" in bounded.fallback and bounded.chunks[2].why_not == "max_kl"
    assert bounded.answer == reference(engine, ORDER)[1]


def test_auto_does_not_answer_from_a_patch_that_captured_too_little(engine):
    """A KL measured on one question says little about another one that reads what the patch left out."""
    formed = engine.compile_patches(ORDER, rank=1, probe=QUESTION).patches
    assert all(patch.energy < AUTO_MIN_ENERGY for patch in formed)
    first = engine.query(QUESTION, chunks=ORDER, max_kl=100.0, max_new_tokens=NUM_NEW)
    assert [chunk.why_not for chunk in first.chunks] == [None, "low_energy", "low_energy"]
    assert first.answer == reference(engine, ORDER)[1]
    second = engine.query(QUESTION, chunks=ORDER, max_new_tokens=NUM_NEW)
    assert second.fallback is None and second.answer == first.answer
    assert all(chunk.energy >= AUTO_MIN_ENERGY for chunk in second.chunks[1:])


def patches_of(engine) -> list[bytes]:
    """Headers of all stored patches: a patch that is written again has another one."""
    return sorted(record.key + repr(record.tensors).encode() for record in engine.store.iterate(kind="patch"))


@pytest.mark.parametrize("rank", [None, 1, 3], ids=["nothing compiled", "as fine", "finer"])
def test_what_the_defaults_cannot_make_finer_is_kept_and_not_formed_again(engine, monkeypatch, rank):
    """Where the largest rank captures too little, every question is prefilled, but the work is done once."""
    for module in ("kamera_cli.operator.residual", "kamera_cli.query.keep"):
        monkeypatch.setattr(f"{module}.MAX_AUTO_RANK", 1)
    if rank is not None:
        engine.compile_patches(ORDER, rank=rank)
    first = engine.query(QUESTION, chunks=ORDER, max_new_tokens=NUM_NEW)
    assert len(first.patches_kept) == (2 if rank is None else 0)
    kept = patches_of(engine)
    assert len(kept) == 2
    second = engine.query(QUESTION, chunks=ORDER, max_new_tokens=NUM_NEW)
    assert [chunk.why_not for chunk in second.chunks] == [None, "low_energy", "low_energy"]
    assert second.patches_kept == () and patches_of(engine) == kept
    assert second.answer == first.answer == reference(engine, ORDER)[1]


@pytest.mark.parametrize("reuse", ["auto", "blind", "none"])
def test_a_rank_that_was_never_measured_is_only_for_patched(engine, reuse):
    with pytest.raises(UsageError, match="--reuse patched"):
        engine.query(QUESTION, chunks=ORDER, reuse=reuse, rank=1)


def test_a_chunk_that_stands_first_needs_no_patch(engine):
    """The preamble stood before it when it was captured, so nothing is missing."""
    result = engine.query(QUESTION, chunks=["2"], max_new_tokens=NUM_NEW, compare=True)
    assert result.chunks[0].used == "canonical" and result.fallback is None
    assert result.answer == reference(engine, ["2"])[1]
    assert result.compare.kl <= 1e-9 and result.compare.same_answer


def test_receipt_adds_up(engine):
    engine.compile_patches(ORDER, rank=10)
    result = engine.query(QUESTION, chunks=ORDER, compare=True)
    runner = engine.runner
    entries = {str(entry.number): entry for entry in engine.window().entries}
    assert [str(chunk.number) for chunk in result.chunks] == ORDER
    assert [chunk.id for chunk in result.chunks] == [entries[number].chunk for number in ORDER]
    position = runner.preamble.positions.span
    for chunk in result.chunks:
        record = engine.store.get(bytes.fromhex(chunk.id))
        patch = None if chunk.patch is None else engine.store.get(bytes.fromhex(chunk.patch))
        assert chunk.position == position and chunk.num_tokens == record.meta["num_tokens"]
        assert chunk.rank == (None if patch is None else 10)
        kv_bytes = sum(tensor.stored_bytes for tensor in record.tensors if tensor.layer >= 0)
        assert chunk.bytes_read >= kv_bytes + (0 if patch is None else patch.stored_bytes)
        position += record.meta["span"]
    num_question = runner.question_ids(QUESTION).numel()
    assert result.reused_tokens == sum(chunk.num_tokens for chunk in result.chunks)
    assert result.prefilled_tokens == num_question
    stages = result.stages
    total = sum(
        (stages.lookup, stages.read, stages.decompress, stages.transfer, stages.assemble, stages.prefill)
    )
    assert 0 < total <= result.ttft_ms * 1.001
    assert total >= 0.8 * result.ttft_ms
    assert result.total_ms >= result.ttft_ms and result.compare.full_reencode and result.compare.vision_ms > 0


def test_compare_without_the_source_prefills_from_stored_embeddings(engine, tmp_path, open_engine):
    notes = []
    (tmp_path / "a.mp4").unlink()
    other = open_engine("qwen2_5_vl", warnings=notes)
    result = other.query(QUESTION, chunks=ORDER, reuse="blind", compare=True)
    assert not result.compare.full_reencode and result.compare.vision_ms == 0.0
    assert any("a.mp4" in note for note in notes)
    write_passage(tmp_path / "a.mp4.txt", 5, 0).rename(tmp_path / "a.mp4")
    assert other.query(QUESTION, chunks=ORDER, reuse="blind", compare=True).compare.full_reencode is False


def test_compare_is_measured_against_the_same_arrangement(engine):
    for order in (ORDER, ["1", "2", "3"]):
        logits, answer = reference(engine, order)
        result = engine.query(QUESTION, chunks=order, reuse="blind", compare=True, max_new_tokens=NUM_NEW)
        assert result.compare.answer == answer
        assert result.compare.kl > 1e-4
        assert logits.shape[-1] == engine.runner.model.lm_head.out_features


def test_sampling_is_seeded(engine):
    def answers(seed: int) -> set[str]:
        return {engine.query(QUESTION, chunks=["1"], temperature=3.0, seed=seed).answer for _ in range(2)}

    assert len(answers(1)) == len(answers(2)) == 1 and answers(1) != answers(2)


def test_streamed_tokens_are_the_answer(engine):
    heard: list[str] = []
    result = engine.query(QUESTION, chunks=["1"], on_token=heard.append, max_new_tokens=NUM_NEW)
    assert len(heard) == result.new_tokens > 0
    assert "".join(heard).replace(" ", "") == result.answer.replace(" ", "")


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        ({"question": "  "}, UsageError, "question is empty"),
        ({"chunks": []}, UsageError, "no chunk"),
        ({"chunks": ["9"]}, NotFoundError, "no chunk '9'.*1, 2, 3"),
        ({"chunks": ["deadbeef"]}, NotFoundError, "deadbeef"),
        ({"chunks": ["1", "2", "1"]}, UsageError, "twice"),
        ({"window": "nowhere"}, NotFoundError, "nowhere"),
        ({"question": passage(MAX_TOKENS, 1)}, UsageError, f"context.*{MAX_TOKENS}"),
        ({"max_new_tokens": MAX_TOKENS}, UsageError, f"context.*{MAX_TOKENS}"),
        ({"max_new_tokens": 0}, UsageError, "max-new-tokens 0"),
        ({"temperature": -1.0}, UsageError, "temperature -1"),
        ({"max_kl": -0.1}, UsageError, "max-kl -0.1"),
        ({"rank": 0}, UsageError, "rank 0"),
    ],
)  # fmt: skip
def test_a_bad_request_is_one_line_with_its_exit_code_and_changes_nothing(engine, request_, error, message):
    window, records = engine.window(), [record.id for record in engine.store.iterate()]
    with pytest.raises(error, match=message) as caught:
        engine.query(**{"question": QUESTION, **request_})
    assert "\n" not in str(caught.value)
    assert engine.window() == window and [record.id for record in engine.store.iterate()] == records


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        ({"rank": 0}, UsageError, "rank 0"),
        ({"rank": 11}, UsageError, "rank 11.*10 tokens"),
        ({"energy": 0.0}, UsageError, "energy 0"),
        ({"energy": 1.5}, UsageError, "energy 1.5"),
        ({"kind": "mean"}, UsageError, "mean"),
        ({"budget": "40"}, UsageError, "chunk 2.*40 bytes"),
        ({"budget": "0.01%"}, UsageError, "budget"),
        ({"budget": "3%", "rank": 4}, UsageError, "--rank 4"),
        ({"budget": "0.01%", "kind": "orbit"}, UsageError, "chunk 1.*budget"),
        ({"budget": "much"}, UsageError, "much"),
        ({"chunks": ["1", "7"]}, NotFoundError, "'7'"),
        ({"chunks": ["1", "1"]}, UsageError, "twice"),
        ({"window": "nowhere"}, NotFoundError, "nowhere"),
    ],
)  # fmt: skip
def test_a_bad_compile_request_forms_nothing(engine, request_, error, message):
    with pytest.raises(error, match=message):
        engine.compile_patches(**request_)
    assert not list(engine.store.iterate(kind="patch"))


def test_an_empty_window_is_refused_by_name(engine):
    engine.evict(oldest=3)
    for call in (lambda: engine.query(QUESTION), engine.compile_patches):
        with pytest.raises(UsageError, match=r"'default' is empty"):
            call()


def test_another_model_is_refused_for_the_window_of_this_one(engine, open_engine, tmp_path):
    texts = open_engine("llama")
    for call in (
        lambda: texts.query(QUESTION),
        texts.compile_patches,
        lambda: texts.recall(["1"]),
        lambda: texts.ingest([write_passage(tmp_path / "t.txt", 9, 1)]),
    ):
        with pytest.raises(RefusedError, match="another model") as caught:
            call()
        assert caught.value.exit_code == 4
    assert engine.query(QUESTION, chunks=["1"]).answer


def test_chunks_go_by_number_name_and_id_prefix(engine):
    entries = engine.window().entries
    by_name = engine.query(QUESTION, chunks=["c.png", "a.mp4#1"], reuse="blind")
    by_id = engine.query(QUESTION, chunks=[entries[2].chunk[:8].upper(), entries[0].chunk], reuse="blind")
    by_number = engine.query(QUESTION, chunks=["3", "1"], reuse="blind")
    assert [c.id for c in by_name.chunks] == [c.id for c in by_id.chunks] == [c.id for c in by_number.chunks]


@pytest.mark.parametrize(
    "question", ["what does <|image_pad|> show?", "<|video_pad|>", "which \ud800 is it?"]
)
@pytest.mark.parametrize("compare", [False, True])
def test_a_question_that_the_model_would_read_as_pixels_is_refused(engine, question, compare):
    with pytest.raises(UsageError, match=r"stands for|not valid Unicode"):
        engine.query(question, compare=compare)


@pytest.mark.parametrize(
    "asked", [{"reuse": "patchd"}, {"max_kl": float("nan")}, {"max_kl": -1.0}, {"reuse": None}]
)
def test_a_mode_that_there_is_not_never_ends_in_blind_reuse(engine, asked):
    for request in (lambda: engine.query(QUESTION, chunks=ORDER, **asked), lambda: engine.explain(**asked)):
        with pytest.raises(UsageError, match=r"--reuse|--max-kl"):
            request()


@pytest.mark.parametrize(
    "asked", [{"rank": "4"}, {"rank": 2.5}, {"rank": True}, {"factor_dtype": "int2"}, {"budget": "x"}]
)
def test_patch_options_of_another_kind_are_refused_before_anything_is_loaded(engine, asked):
    with pytest.raises(UsageError, match=r"--rank|--dtype|--budget"):
        engine.compile_patches(ORDER, **asked)
    assert not list(engine.store.iterate(kind="patch"))


def test_a_temperature_that_is_no_number(engine):
    with pytest.raises(UsageError, match="--temperature"):
        engine.query(QUESTION, temperature=float("nan"))
