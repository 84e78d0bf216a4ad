"""The card world is deterministic, and the shipped checkpoint loads and answers without a network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest

from kamera_cli.tiny import model_path
from kamera_cli.tiny.render import render_chunk, write_video
from kamera_cli.tiny.vocabulary import COLOURS, DIGITS, LETTERS, SHAPES, UNKNOWN
from kamera_cli.tiny.world import Card, ChunkSpec, episode

GOLDEN_CHUNKS = (
    ChunkSpec((Card("t", digit="eight", seconds=8.0),)),
    ChunkSpec((Card("t", entity="purple triangle", seconds=8.0),)),
)
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def _facts(chunks):
    """Rebuild entity -> letter and letter -> digit from the cards, apart from the generator's own bookkeeping."""
    cards = [(i, card) for i, chunk in enumerate(chunks) for card in chunk.cards]
    entities = {card.entity: (i, card.letter) for i, card in cards if card.entity}
    digits = {card.letter: (i, card.digit) for i, card in cards if card.digit}
    return entities, digits


def _named(text: str):
    words = text.lower().replace("?", " ").replace(".", " ").replace(":", " ").split()
    colours = [w for w in words if w in COLOURS]
    letters = [w for w in words if w in LETTERS]
    digits = [w for w in words if w in DIGITS] + [DIGITS[int(w)] for w in words if w.isdigit()]
    if colours:
        return "entity", f"{colours[0]} {next(w for w in words if w in SHAPES)}"
    return ("letter", letters[0]) if letters else ("digit", digits[0])


def _asked(text: str) -> str:
    words = text.lower().replace(":", " ").split()
    place = next(i for i, word in enumerate(words) if word in ("which", "what"))
    return {"letter": "letter", "digit": "digit", "number": "digit", "shape": "entity", "figure": "entity"}[
        words[place + 1]
    ]


def expected_answer(chunks, text: str) -> str:
    """Answer a question from the cards alone."""
    entities, digits = _facts(chunks)
    by_letter = {letter: entity for entity, (_, letter) in entities.items()}
    by_digit = {digit: letter for letter, (_, digit) in digits.items()}
    sort, thing = _named(text)
    letter = {"entity": entities.get(thing, (None, None))[1], "digit": by_digit.get(thing), "letter": thing}[
        sort
    ]
    asked = _asked(text)
    if asked == "letter":
        return letter or UNKNOWN
    found = digits.get(letter, (None, None))[1] if asked == "digit" else by_letter.get(letter)
    return found or UNKNOWN


@pytest.mark.parametrize("num_chunks", [2, 3, 4, 5, 6])
def test_every_question_follows_from_the_cards(num_chunks):
    for seed in range(60):
        for facts in (1, 4):
            item = episode(seed, num_chunks=num_chunks, facts=facts)
            for question in item.questions:
                assert question.answer == expected_answer(item.chunks, question.text), question


def test_equal_seeds_give_equal_episodes_and_splits_differ():
    assert episode(3) == episode(3)
    assert episode(3) != episode(4)
    assert episode(3, split="train") != episode(3, split="eval")


def test_episode_does_not_change_between_releases():
    item = episode(0, num_chunks=2, facts=1)
    assert item.chunks == GOLDEN_CHUNKS


def test_two_hop_questions_need_both_chunks_of_a_pair():
    for seed in range(40):
        item = episode(seed)
        for question in item.questions:
            if question.hops == 2 and question.answer != UNKNOWN:
                first, second = question.chunks
                assert first < second
                assert {item.chunks[first].kind, item.chunks[second].kind} == {1, 2}


@pytest.mark.parametrize(("num_chunks", "facts"), [(1, 4), (7, 4), (3, 0), (3, 5)])
def test_counts_out_of_range_are_refused_with_the_range(num_chunks, facts):
    with pytest.raises(ValueError, match="but"):
        episode(0, num_chunks=num_chunks, facts=facts)


def test_chunk_lasts_eight_seconds_whatever_the_number_of_cards():
    for facts in (1, 2, 3, 4):
        for chunk in episode(1, facts=facts).chunks:
            assert chunk.seconds == 8.0
            assert len(chunk.cards) == facts


def test_rendering_is_deterministic_and_does_not_depend_on_the_rate():
    spec = ChunkSpec((Card("k", entity="red circle"), Card("b", entity="blue star")))
    slow = render_chunk(spec, fps=2, size=112, seed=4)
    fast = render_chunk(spec, fps=8, size=112, seed=4)
    assert slow.shape == (8, 112, 112, 3)
    assert slow.dtype == np.uint8
    assert np.array_equal(slow, fast[::4])
    assert not np.array_equal(slow, render_chunk(spec, fps=2, size=112, seed=5))


def test_written_video_shows_the_rendered_frames(tmp_path):
    item = episode(2, num_chunks=2)
    path = tmp_path / "cards.mp4"
    write_video(path, item, fps=4, crf=12, size=112, seed=9)
    with av.open(str(path)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    drawn = np.concatenate(
        [render_chunk(s, fps=4, size=112, seed=9000 + i) for i, s in enumerate(item.chunks)]
    )
    assert frames.shape == drawn.shape
    assert np.abs(frames.astype(int) - drawn).mean() < 6


def test_world_and_renderer_load_no_torch():
    code = "import sys, kamera_cli.tiny.render; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.fixture(scope="module")
def shipped():
    transformers = pytest.importorskip("transformers")
    processor = transformers.AutoProcessor.from_pretrained(model_path(), local_files_only=True)
    model = transformers.AutoModelForImageTextToText.from_pretrained(model_path(), local_files_only=True)
    return processor, model.eval()


@pytest.fixture(scope="module")
def recipe():
    """The training and evaluation modules; they are scripts, so their folder goes on the path for the import alone."""
    sys.path.insert(0, str(EXAMPLES / "tiny_model"))
    try:
        import bank
        import batches
        import evaluate
        import forward
        import make_cards
        import reader
    finally:
        sys.path.remove(str(EXAMPLES / "tiny_model"))
    modules = (bank, batches, evaluate, forward, make_cards, reader)
    return {module.__name__: module for module in modules}


def _prompt(shipped, recipe, seed):
    processor, _ = shipped
    item = episode(seed, num_chunks=3)
    videos = [render_chunk(spec, seed=i) for i, spec in enumerate(item.chunks)]
    reader = recipe["reader"].Reader(model_path())
    return processor, item, videos, reader.inputs(videos, item.questions[0].text)


def test_shipped_checkpoint_is_a_plain_model_that_fits_a_package(shipped):
    processor, model = shipped
    assert type(model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert type(processor).__name__ == "Qwen2_5_VLProcessor"
    assert (model_path() / "model.safetensors").stat().st_size < 30_000_000
    assert model.generation_config.eos_token_id == processor.tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_tokenizer_knows_every_word_that_a_question_or_answer_uses(shipped):
    tokenizer = shipped[0].tokenizer
    for seed in range(200):
        for question in episode(seed).questions:
            assert tokenizer.unk_token_id not in tokenizer(f"{question.text} {question.answer}")["input_ids"]
            answer = tokenizer(question.answer)["input_ids"]
            assert tokenizer.decode(answer) == question.answer


def test_training_lays_out_what_the_processor_gives(shipped, recipe):
    torch = pytest.importorskip("torch")
    processor, item, videos, inputs = _prompt(shipped, recipe, seed=1)
    _, model = shipped
    bank, forward = recipe["bank"], recipe["forward"]
    assert inputs["second_per_grid_ts"].tolist() == [1.0, 1.0, 1.0]
    assert inputs["video_grid_thw"].tolist() == [[8, 8, 8]] * 3
    mean, std = (
        torch.tensor(v) for v in (processor.video_processor.image_mean, processor.video_processor.image_std)
    )
    steps = [bank.resize_frames(v).view(-1, 2, 3, 112, 112) for v in videos]
    patches = torch.cat([forward.patches_of(s, mean, std) for s in steps])
    assert torch.equal(patches.flatten(0, 1), inputs["pixel_values_videos"])
    writer = recipe["batches"].Writer(processor.tokenizer.vocab)
    media = [processor.video_token_id] * 128
    start, end = (processor.tokenizer.convert_tokens_to_ids(f"<|vision_{w}|>") for w in ("start", "end"))
    ids = writer.preamble + [start, *media, end] * 3 + writer.words(item.questions[0].text) + writer.tail
    assert ids == inputs["input_ids"][0].tolist()
    with torch.inference_mode():
        expected = torch.cat(
            list(
                model.model.get_video_features(
                    inputs["pixel_values_videos"], inputs["video_grid_thw"]
                ).pooler_output
            )
        )
        assert torch.allclose(forward.see(model.model.visual, patches).flatten(0, 1), expected, atol=1e-4)


def test_training_forward_computes_what_the_plain_model_computes(shipped, recipe):
    torch = pytest.importorskip("torch")
    _, _, _, inputs = _prompt(shipped, recipe, seed=2)
    _, model = shipped
    text = model.model.language_model
    with torch.inference_mode():
        expected = model(**inputs, use_cache=False).logits
        positions, _ = model.model.get_rope_index(
            inputs["input_ids"],
            mm_token_type_ids=inputs["mm_token_type_ids"],
            video_grid_thw=inputs["video_grid_thw"],
            second_per_grid_ts=inputs["second_per_grid_ts"],
        )
        embeddings = text.embed_tokens(inputs["input_ids"])
        features = model.model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"])
        embeddings[inputs["input_ids"] == model.config.video_token_id] = torch.cat(
            list(features.pooler_output)
        )
        hidden, _, _ = recipe["forward"].read(text, embeddings, positions, embeddings.shape[1], None)
        assert torch.allclose(model.lm_head(hidden), expected, atol=1e-3)


def test_example_answers_follow_from_the_generator_and_the_model_gives_them(recipe):
    torch = pytest.importorskip("torch")
    rows = json.loads((EXAMPLES / "cards.json").read_text(encoding="utf-8"))
    make_cards, reader_module = recipe["make_cards"], recipe["reader"]
    item = episode(make_cards.SEED, num_chunks=make_cards.NUM_CHUNKS, split="example")
    assert len(rows) >= 8
    assert {row["hops"] for row in rows} == {1, 2}
    assert all(row["answer"] == expected_answer(item.chunks, row["question"]) for row in rows)
    with torch.inference_mode():
        reader = reader_module.Reader(model_path())
        prompt = reader.prompt(make_cards.sample_video(EXAMPLES / "cards.mp4"))
        kv = [(k[0], v[0]) for k, v in reader.capture(prompt.embeddings[None], prompt.positions[:, None])]
        texts, _ = reader.answers(prompt, kv, item.questions)
    assert texts == [row["answer"] for row in rows]


def test_cards_shown_as_images_are_answered(shipped):
    pytest.importorskip("torch")
    from PIL import Image

    processor, model = shipped
    for seed in range(3):
        item = episode(seed, num_chunks=2, facts=1, split="image")
        images = [Image.fromarray(render_chunk(spec, fps=1, seed=seed)[0]) for spec in item.chunks]
        for question in item.questions[:4]:
            content = [{"type": "image"}] * 2 + [{"type": "text", "text": question.text}]
            message = [{"role": "user", "content": content}]
            text = processor.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            inputs = processor(text=[text], images=images, return_tensors="pt")
            output = model.generate(**inputs, do_sample=False, max_new_tokens=8)
            answer = processor.tokenizer.decode(
                output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
            )
            assert answer == question.answer, question


def test_blind_reuse_loses_two_hops_and_keeps_one_hop(recipe):
    """Without this effect every fidelity figure of the benchmark would be empty."""
    torch = pytest.importorskip("torch")
    evaluate, reader = recipe["evaluate"], recipe["reader"]
    with torch.inference_mode():
        table = evaluate.evaluate(reader.Reader(model_path()), range(8000, 8006), [8], "render", 0, 2)["arms"]
    assert table["reprefill"]["two_hop"]["accuracy"] >= 0.95
    assert table["reprefill"]["one_hop"]["accuracy"] >= 0.95
    assert table["blind"]["two_hop"]["accuracy"] <= 0.25
    assert table["blind"]["one_hop"]["accuracy"] >= 0.95
    assert table["patch_8"]["two_hop"]["accuracy"] >= 0.9
