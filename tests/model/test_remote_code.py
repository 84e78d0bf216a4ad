"""A model that runs through its own code: without consent nothing runs, with it the answers are its own."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from backbone_runners import loaded_runner
from PIL import Image
from plain_model import greedy, own_cache, whole_prompt
from tiny_models import passage, write_noise_image, write_passage
from tiny_remote import save_kimi_vl
from transformers import AutoModelForCausalLM, AutoProcessor, DynamicCache, dynamic_module_utils
from vision_inputs import picture

from kamera_cli.app import run
from kamera_cli.engine import Engine
from kamera_cli.errors import RefusedError, UsageError
from kamera_cli.model.runner import ModelRunner
from kamera_cli.model.self_test import self_test
from kamera_cli.query.compare import reopen
from kamera_cli.settings import Settings

NEW_TOKENS = 12
QUESTION = "which letter goes with the red circle?"
CHUNKS = ("3", "1", "2")
NUM_CHUNK = 12
FLAG = "--trust-remote-code"


@pytest.fixture(scope="session", autouse=True)
def modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remote code is copied to a folder of this run, never to the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.syspath_prepend(dynamic_module_utils.HF_MODULES_CACHE)
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_kimi_vl(tmp_path_factory.mktemp("remote") / "tiny-kimi-vl")


@pytest.fixture(scope="session")
def plain(folder: Path) -> tuple[torch.nn.Module, object]:
    """Model and processor as any program would load them."""
    options = {"trust_remote_code": True, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **options
    )
    return model.eval().requires_grad_(False), AutoProcessor.from_pretrained(folder, **options)


def prompt(processor: object, num_pictures: int) -> dict[str, torch.Tensor]:
    """Model inputs of a chat with pictures and some words."""
    rng = np.random.default_rng(num_pictures)
    sizes = [(56, 84, 3), (70, 40, 3), (300, 200, 3)][:num_pictures]
    pictures = [Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)) for size in sizes]
    items = [{"type": "image"}] * num_pictures + [{"type": "text", "text": passage(9, seed=num_pictures)}]
    chat = [{"role": "user", "content": items}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return dict(processor(text=[text], images=pictures or None, return_tensors="pt"))


@pytest.mark.parametrize("num_pictures", [0, 1, 3])
def test_decoding_with_its_cache_answers_as_recomputation(plain, num_pictures):
    model, processor = plain
    inputs = prompt(processor, num_pictures)
    del inputs["attention_mask"]
    ids, cache = inputs.pop("input_ids"), DynamicCache()
    logits = model(ids, past_key_values=cache, use_cache=True, **inputs).logits[0, -1]
    for _ in range(NEW_TOKENS):
        token = logits.argmax()[None, None]
        ids = torch.cat([ids, token], dim=1)
        logits = model(token, past_key_values=cache, use_cache=True).logits[0, -1]
        cold = model(ids, use_cache=False, **inputs).logits[0, -1]
        torch.testing.assert_close(logits, cold, rtol=0, atol=1e-5 * float(cold.abs().max()))
    assert cache.get_seq_length() == ids.shape[1]
    assert len(set(ids[0, -NEW_TOKENS:].tolist())) > 1


def test_its_cache_holds_expanded_heads(plain):
    model, processor = plain
    inputs, cache = prompt(processor, 1), DynamicCache()
    model(past_key_values=cache, use_cache=True, **inputs)
    num_tokens = inputs["input_ids"].shape[1]
    for layer in cache.layers:
        assert layer.keys.shape == (1, 4, num_tokens, 24)
        assert layer.values.shape == (1, 4, num_tokens, 12)


def test_its_answer_depends_on_the_picture(plain):
    model, processor = plain
    inputs = prompt(processor, 1)
    other = {**inputs, "pixel_values": inputs["pixel_values"].flip(0)}
    assert (model(**inputs).logits - model(**other).logits).abs().max() > 0.1


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def runner(request, folder) -> ModelRunner:
    return loaded_runner(folder, request.param, trust_remote_code=True)


@pytest.mark.parametrize("kind", ["image", "text"])
def test_latents_become_the_keys_and_values_of_its_own_cache(runner, kind):
    chunk = picture(runner) if kind == "image" else runner.text_inputs(torch.arange(30, 61))
    ids = torch.cat([runner.preamble_ids, chunk.token_ids])
    with runner.family.capture() as seen:
        own = own_cache(runner.model, ids, **chunk.tensors)
    ours = runner.family.cache(seen.layers(0, ids.numel()), torch.arange(ids.numel())).layers
    assert runner.family.layout == "expanded" and len(ours) == len(own) == 3
    for mine, theirs in zip(ours, own, strict=True):
        assert mine.keys.dtype == mine.values.dtype == runner.dtype
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)


@pytest.mark.parametrize("kind", ["image", "text"])
def test_a_stored_chunk_expands_to_its_part_of_the_models_own_cache(runner, kind):
    chunk = picture(runner) if kind == "image" else runner.text_inputs(torch.arange(30, 61))
    start = runner.preamble.num_tokens
    own = own_cache(runner.model, torch.cat([runner.preamble_ids, chunk.token_ids]), **chunk.tensors)
    ours = runner.family.cache(runner.encode(chunk).layers, chunk.positions.at(start)).layers
    nope = runner.family.attentions[0].qk_nope_head_dim
    # Fewer rows than the model expanded at once: their sums may round otherwise, what is rotated may not.
    close = {"rtol": 0, "atol": 1e-5 if runner.dtype == torch.float32 else 0.05}
    for mine, theirs in zip(ours, own, strict=True):
        assert torch.equal(mine.keys[..., nope:], theirs.keys[:, :, start:, nope:])
        torch.testing.assert_close(mine.keys, theirs.keys[:, :, start:], **close)
        torch.testing.assert_close(mine.values, theirs.values[:, :, start:], **close)


@torch.no_grad()
@pytest.mark.parametrize("before", [1, 37, 500])
def test_a_moved_chunk_is_turned_bit_for_bit_as_by_a_cold_prefill_there(runner, before):
    ids = torch.arange(30, 61)
    alone = runner.prefill_captured([runner.text_segment(ids)])[0][0]
    places = runner.positions_from(before, ids.numel())
    ours = runner.family.cache([alone], places).layers[0]
    own = DynamicCache()
    runner.extend(own, runner.embed(torch.arange(before) % 50 + 30), runner.positions_from(0, before))
    runner.extend(own, runner.embed(ids), places)
    assert torch.equal(ours.keys, own.layers[0].keys[:, :, before:])
    assert torch.equal(ours.values, own.layers[0].values[:, :, before:])


def test_it_passes_the_self_test(runner):
    result = self_test(runner)
    assert result.ok, result
    assert len(result.checks) == 5


def test_a_bound_on_pixels_that_its_processor_does_not_know_is_refused(runner):
    pixels = torch.zeros(56, 56, 3, dtype=torch.uint8)
    with pytest.raises(UsageError, match="--max-pixels: this model's processor has no bound"):
        runner.media_inputs("image", pixels, fps=None, max_pixels=5000)


@pytest.fixture
def open_remote(folder: Path, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Make engines over one fresh store that allow the checkpoint's code."""
    opened = []

    def make(model: Path = folder) -> Engine:
        options = {"store": tmp_path / "store", "device": "cpu", "model": str(model)}
        opened.append(Engine(Settings(trust_remote_code=True, **options)))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def write_sources(folder: Path) -> list[Path]:
    """Two pictures and a passage: one chunk each, of equally many tokens."""
    return [
        write_noise_image(folder / "a.png", 1, width=112),
        write_passage(folder / "b.txt", NUM_CHUNK, 2),
        write_noise_image(folder / "c.png", 3, height=112),
    ]


def test_answers_in_another_order_are_those_of_a_cold_prefill(open_remote, plain, tmp_path):
    engine = open_remote()
    assert len(engine.ingest(write_sources(tmp_path)).chunks) == 3
    entries = {str(entry.number): entry for entry in engine.window().entries}
    records = [engine.store.get(bytes.fromhex(entries[number].chunk)) for number in CHUNKS]
    ids, inputs = whole_prompt(engine.runner, reopen(engine.context, records), QUESTION)
    model, processor = plain
    cold = processor.tokenizer.decode(greedy(model, ids, 8, **inputs), skip_special_tokens=True).strip()

    first = engine.query(QUESTION, chunks=CHUNKS, reuse="auto", max_new_tokens=8)
    assert first.answer == cold and first.patches_kept
    assert {chunk.used for chunk in first.chunks} == {"prefilled"}
    calls = engine.runner.vision_calls
    second = engine.query(QUESTION, chunks=CHUNKS, reuse="auto", max_new_tokens=8)
    assert [chunk.used for chunk in second.chunks] == ["canonical", "exact", "exact"]
    assert engine.runner.vision_calls == calls

    engine.compile_patches(CHUNKS, rank=NUM_CHUNK, factor_dtype="fp32")
    patched = engine.query(QUESTION, chunks=CHUNKS, reuse="patched", max_new_tokens=8, compare=True)
    assert patched.answer == cold and patched.compare.kl <= 1e-6


def test_changed_code_is_another_model(open_remote, folder, tmp_path):
    changed = shutil.copytree(folder, tmp_path / "changed")
    module = changed / "image_processing_kimi_vl.py"
    module.write_bytes(module.read_bytes() + b"\n")
    sources = write_sources(tmp_path)
    engine, other = open_remote(), open_remote(changed)
    first = engine.ingest(sources)
    assert other.fingerprint != engine.fingerprint
    second = other.ingest(sources, window="other")
    assert not any(source.from_index for source in second.sources)
    assert {chunk.id for chunk in first.chunks}.isdisjoint(chunk.id for chunk in second.chunks)
    with pytest.raises(RefusedError, match="model"):
        other.query(QUESTION, window="default")


@pytest.fixture
def marked(folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy whose every Python file leaves a marker when it runs, and the marker."""
    copy, marker = shutil.copytree(folder, tmp_path / "marked"), tmp_path / "marker.txt"
    for file in copy.glob("*.py"):
        file.write_text(file.read_text() + f"\n\nopen({str(marker)!r}, 'w').close()\n", encoding="utf-8")
    return copy, marker


def ran(marker: Path) -> bool:
    """Whether code ran since the last call; the next use must run it anew."""
    found = marker.exists()
    marker.unlink(missing_ok=True)
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]
    return found


def test_code_runs_only_with_consent_and_only_where_a_model_is_needed(marked, tmp_path, capsys):
    """MLA-5."""
    copy, marker = marked
    sources = [str(source) for source in write_sources(tmp_path)]
    common = ["--store", str(tmp_path / "store"), "--device", "cpu", "-q"]
    model = ["--model", str(copy)]

    for command in (["ingest", *sources], ["ingest", "--dry-run", *sources], ["models", "check", str(copy)]):
        assert run([*common, *model, *command]) == 4
        assert FLAG in capsys.readouterr().err
    assert not ran(marker)

    assert run([*common, *model, FLAG, "ingest", *sources]) == 0
    assert ran(marker)
    for command in (["ls"], ["show", "1"], ["evict", "1"], ["recall", "--list"], ["verify"], ["stats"]):
        assert run([*common, *command]) == 0, (command, capsys.readouterr().err)
        assert run([*common, *model, *command]) == (3 if command[0] == "evict" else 0)
    assert run([*common, *model, FLAG, "ingest", *sources]) == 0
    assert not ran(marker)
    for command in (["query", QUESTION], ["models", "check", str(copy)]):
        assert run([*common, *model, FLAG, *command]) == 0
        assert ran(marker)


def test_a_chunk_comes_back_without_the_model_where_its_patch_is_kept(marked, tmp_path):
    """MLA-5: recall needs the code only to form what is not in the store."""
    copy, marker = marked
    common = ["--store", str(tmp_path / "store"), "--device", "cpu", "--model", str(copy), "-q"]
    assert run([*common, FLAG, "ingest", *map(str, write_sources(tmp_path))]) == 0
    assert ran(marker)
    for forms_a_patch in (True, False):
        assert run([*common, "evict", "1"]) == 0
        assert run([*common, FLAG, "recall", "1"]) == 0
        assert ran(marker) is forms_a_patch
    assert run([*common, "recall", "1"]) == 4
