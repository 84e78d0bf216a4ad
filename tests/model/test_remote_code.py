"""A model that runs through its own code: without consent nothing runs, with it the answers are its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_models import passage
from tiny_remote import save_kimi_vl
from transformers import AutoModelForCausalLM, AutoProcessor, DynamicCache, dynamic_module_utils

NEW_TOKENS = 12


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
