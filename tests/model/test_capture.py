"""Wrong capture point, norm or rotation: what is kept must be what the model's own cache holds, before RoPE."""

from __future__ import annotations

import pytest
import torch
from plain_model import own_cache
from tiny_models import FAMILIES, TEXT_FAMILIES
from vision_inputs import clip, picture

from kamera_cli.model.families.family import LayerKV

SHIFTS = (0, 1, 37, 300, 4097, 100_000)


def text_ids(runner, num_tokens: int, seed: int = 0) -> torch.Tensor:
    vocabulary = runner.model.get_input_embeddings().weight.shape[0]
    return torch.randint(9, vocabulary, (num_tokens,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stored_text_kv_rotated_is_the_models_own_cache(runners, family, dtype):
    runner = runners(family, dtype)
    ids = text_ids(runner, 41)
    encoded = runner.encode(runner.text_inputs(ids))
    own = own_cache(runner.model, torch.cat([runner.preamble_ids, ids]))
    start = runner.preamble.num_tokens
    positions = runner.positions_from(start, 41)
    assert len(encoded.layers) == len(own) == 3
    for layer, theirs in zip(encoded.layers, own, strict=True):
        assert layer.rotary.dtype == runner.dtype
        ours = runner.family.cache([layer], positions).layers[0]
        assert torch.equal(ours.keys, theirs.keys[:, :, start:])
        assert torch.equal(ours.values, theirs.values[:, :, start:])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [picture, clip])
def test_stored_media_kv_rotated_is_the_models_own_cache(runners, make, dtype):
    runner = runners("qwen2_5_vl", dtype)
    chunk = make(runner, seed=3)
    encoded = runner.encode(chunk)
    types = torch.cat([torch.zeros_like(runner.preamble_ids), chunk.token_types])
    own = own_cache(
        runner.model,
        torch.cat([runner.preamble_ids, chunk.token_ids]),
        mm_token_type_ids=types[None],
        **chunk.tensors,
    )
    start = runner.preamble.num_tokens
    for layer, theirs in zip(encoded.layers, own, strict=True):
        ours = runner.family.cache([layer], chunk.positions.at(start)).layers[0]
        assert torch.equal(ours.keys, theirs.keys[:, :, start:])
        assert torch.equal(ours.values, theirs.values[:, :, start:])


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", TEXT_FAMILIES)
@torch.no_grad()
def test_first_layer_keys_moved_are_those_of_a_cold_prefill_there(runners, family, dtype, shift):
    runner = runners(family, dtype)
    ids = text_ids(runner, 23, seed=1)
    stored = runner.encode(runner.text_inputs(ids)).layers[0]
    ours = runner.family.cache([stored], runner.positions_from(shift, 23)).layers[0].keys
    own = own_cache(runner.model, ids, position_ids=torch.arange(shift, shift + 23)[None])
    assert torch.equal(ours, own[0].keys)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [picture, clip])
def test_first_layer_media_keys_moved_are_those_of_a_cold_prefill_there(runners, make, dtype, shift):
    runner = runners("qwen2_5_vl", dtype)
    chunk = make(runner, seed=4)
    stored = runner.encode(chunk).layers[0]
    ours = runner.family.cache([stored], chunk.positions.at(shift)).layers[0].keys
    own = own_cache(
        runner.model,
        chunk.token_ids,
        mm_token_type_ids=chunk.token_types[None],
        position_ids=(chunk.positions.ids + shift)[:, None],
        **chunk.tensors,
    )
    assert torch.equal(ours, own[0].keys)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("num_before", [1, 37, 300])
@pytest.mark.parametrize("family", FAMILIES)
def test_first_layer_keys_do_not_depend_on_what_stands_before(runners, family, num_before, dtype):
    """On a CPU a row of a projection does not depend on its neighbours, so a cold whole prompt agrees too."""
    runner = runners(family, dtype)
    before, ids = text_ids(runner, num_before, seed=2), text_ids(runner, 23, seed=1)
    stored = runner.encode(runner.text_inputs(ids)).layers[0]
    ours = runner.family.cache([stored], runner.positions_from(num_before, 23)).layers[0].keys
    own = own_cache(runner.model, torch.cat([before, ids]))
    assert torch.equal(ours, own[0].keys[:, :, num_before:])


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_key_norm_is_applied_once_and_before_rotation(runners, family):
    """KV-5: a rotation keeps the length of a key, so its norm tells the projection from the normalised key."""
    runner = runners(family)
    ids = text_ids(runner, 19, seed=5)
    seen = {}
    attention = runner.family.attentions[1]
    handle = attention.k_proj.register_forward_hook(lambda _m, _i, output: seen.update(bare=output[0]))
    own = own_cache(runner.model, torch.cat([runner.preamble_ids, ids]))
    handle.remove()
    start = runner.preamble.num_tokens
    stored = runner.encode(runner.text_inputs(ids)).layers[1].rotary.norm(dim=-1)
    cached = own[1].keys[0, :, start:].transpose(0, 1).norm(dim=-1)
    bare = seen["bare"][start:].reshape(19, 2, -1).norm(dim=-1)
    torch.testing.assert_close(stored, cached, rtol=1e-5, atol=1e-5)
    assert torch.allclose(stored, bare, rtol=1e-3) == (family != "qwen3")


def test_rotating_does_not_change_what_is_stored(runners):
    runner = runners("qwen3")
    stored = runner.encode(runner.text_inputs(text_ids(runner, 9))).layers
    before = [LayerKV(layer.rotary.clone(), layer.plain.clone()) for layer in stored]
    cache = runner.family.cache(stored, runner.positions_from(5, 9))
    runner.extend(cache, runner.embed(torch.tensor([9, 10])), runner.positions_from(14, 2))
    for layer, kept in zip(stored, before, strict=True):
        assert torch.equal(layer.rotary, kept.rotary) and torch.equal(layer.plain, kept.plain)
    assert cache.get_seq_length() == 11
