"""Checkpoints as they are published: other RoPE variants, head counts and config layouts than the tiny ones here."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from plain_model import next_logits, own_cache, whole_prompt
from tiny_models import save, write_noise_image, write_noise_video
from vision_inputs import clip, picture

from kamera_cli.errors import RefusedError
from kamera_cli.model.self_test import self_test

ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256, "rope_theta": 500000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0},
}  # fmt: skip


def check_moves(runner) -> None:
    """Stored KV, rotated, is the model's own cache here, and its first layer is that of a cold prefill far away."""
    ids = torch.arange(9, 40)
    encoded = runner.encode(runner.text_inputs(ids))
    start = runner.preamble.num_tokens
    for layer, own in zip(
        encoded.layers, own_cache(runner.model, torch.cat([runner.preamble_ids, ids])), strict=True
    ):
        ours = runner.family.cache([layer], runner.positions_from(start, 31)).layers[0]
        assert torch.equal(ours.keys, own.keys[:, :, start:]) and torch.equal(
            ours.values, own.values[:, :, start:]
        )
    moved = runner.family.cache([encoded.layers[0]], runner.positions_from(100_000, 31)).layers[0].keys
    cold = own_cache(runner.model, ids, position_ids=torch.arange(100_000, 100_031)[None])
    assert torch.equal(moved, cold[0].keys)
    assert self_test(runner).ok


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("rope", ROPES)
def test_rope_variants_move_like_the_models_own(open_engine, tmp_path, rope, dtype):
    folder = save("llama", tmp_path / rope, rope_parameters=ROPES[rope])
    check_moves(open_engine("llama", model=str(folder), dtype=dtype).runner)


@pytest.mark.parametrize(("family", "num_kv_heads"), [("llama", 1), ("llama", 4), ("qwen3", 1), ("qwen2", 4)])
def test_one_kv_head_and_as_many_as_query_heads(open_engine, tmp_path, family, num_kv_heads):
    folder = save(family, tmp_path / "model", num_key_value_heads=num_kv_heads)
    runner = open_engine(family, model=str(folder)).runner
    assert {shape[0][0] for shape in runner.family.layer_shapes} == {num_kv_heads}
    check_moves(runner)


def test_tied_embeddings(open_engine, tmp_path):
    runner = open_engine(
        "qwen2", model=str(save("qwen2", tmp_path / "model", tie_word_embeddings=True))
    ).runner
    check_moves(runner)


TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}"
    "<|im_end|>\n{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|>"
    "<|vision_end|>{% elif content['type'] == 'video' or 'video' in content %}"
    "{% set video_count.value = video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}<|vision_start|><|video_pad|>"
    "<|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def published(checkpoints, tmp_path):
    """The tiny Qwen2.5-VL laid out as the hub has the large ones: flat config, one preprocessor, their template."""
    folder = shutil.copytree(checkpoints("qwen2_5_vl"), tmp_path / "published")
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    for name in ("model_type", "layer_types", "dtype"):
        text.pop(name, None)
    flat = {**text, **config, "rope_theta": rope["rope_theta"]}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    vision = flat["vision_config"]
    vision.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(flat))
    processor = json.loads((folder / "processor_config.json").read_text())
    part = processor["image_processor"]
    size = part.pop("size")
    part |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    part |= {"processor_class": "Qwen2_5_VLProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(part))
    (folder / "processor_config.json").unlink()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def test_a_published_layout_is_the_same_model(open_engine, published, runners, tmp_path):
    engine = open_engine(model=str(published))
    runner = engine.runner
    assert self_test(runner).ok
    assert runner.prompt.preamble.startswith("<|im_start|>system\nYou are a helpful assistant.")
    chunk, ours = picture(runners("qwen2_5_vl"), 1), picture(runner, 1)
    assert torch.equal(chunk.tensors["pixel_values"], ours.tensors["pixel_values"])
    chunks = [ours, clip(runner, 2)]
    ids, inputs = whole_prompt(runner, chunks, "which letter?")
    run = runner.reencode(chunks, runner.question_ids("which letter?"))
    torch.testing.assert_close(run.logits, next_logits(runner.model, ids, **inputs), rtol=1e-5, atol=1e-5)
    sources = [write_noise_video(tmp_path / "a.mp4", 1, seconds=2), write_noise_image(tmp_path / "b.png", 2)]
    engine.ingest(sources, max_pixels=56 * 56)
    assert engine.query("which letter?", compare=True).compare.same_answer
    assert engine.query("which letter?", require_hit=True).answer


def test_a_published_layout_with_numbered_pictures_is_refused(open_engine, published):
    template = TEMPLATE.replace("{% if add_vision_id %}Picture", "{% if true %}Picture")
    (published / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(RefusedError, match="image item"):
        assert open_engine(model=str(published)).runner


DATED = (
    "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "Today: {{ date_string }}\n{{ messages[0]['content'] }}\nassistant:"
)


def test_a_template_with_todays_date_has_one_preamble_on_every_day(checkpoints, open_engine, tmp_path):
    """Canonical KV has seen the preamble, so that tomorrow's must be the same."""
    from datetime import datetime

    folder = shutil.copytree(checkpoints("llama"), tmp_path / "dated")
    (folder / "chat_template.jinja").write_text(DATED)
    preamble = open_engine("llama", model=str(folder)).runner.prompt.preamble
    assert preamble.startswith("Today: ") and datetime.now().strftime("%d %b %Y") not in preamble


def test_a_template_whose_date_cannot_be_set_is_refused(checkpoints, open_engine, tmp_path):
    folder = shutil.copytree(checkpoints("llama"), tmp_path / "dated")
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}{{ messages[0]['content'] }}")
    with pytest.raises(RefusedError, match="date"):
        assert open_engine("llama", model=str(folder)).runner
