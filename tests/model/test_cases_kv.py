"""Faults of other programs that reuse KV of pictures: KV-1, KV-3, KV-5 and KV-6 of the list of known cases."""

from __future__ import annotations

import pytest
import torch
from plain_model import kl, next_logits, own_cache
from tiny_models import write_noise_image
from vision_inputs import clip, picture

from kamera_cli.errors import RefusedError
from kamera_cli.model.inputs import ChunkInputs, Segment, joined_tensors
from kamera_cli.operator.assemble import assemble, joined_positions, place
from kamera_cli.operator.residual import form

DEEPSTACK = ("qwen3_vl", "qwen3_vl_moe")


def words(runner, num_tokens: int, seed: int) -> ChunkInputs:
    generator = torch.Generator().manual_seed(seed)
    return runner.text_inputs(torch.randint(10, 60, (num_tokens,), generator=generator))


def cold(runner, parts: list[ChunkInputs]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token ids and media arguments of one ordinary forward over parts."""
    accepted = frozenset(name for part in parts for name in part.tensors)
    inputs = joined_tensors(parts, accepted)
    if inputs:
        inputs["mm_token_type_ids"] = torch.cat([part.token_types for part in parts])
    return torch.cat([part.token_ids for part in parts]), inputs


def cold_layers(runner, parts: list[ChunkInputs]) -> list:
    ids, inputs = cold(runner, parts)
    if inputs:
        inputs["mm_token_type_ids"] = inputs["mm_token_type_ids"][None]
        runner.model.model.rope_deltas = None
    return own_cache(runner.model, ids, **inputs)


def test_an_image_without_pixels_is_no_ordinary_text(open_engine, tmp_path, monkeypatch):
    """KV-1: placeholders alone would match any picture."""
    engine = open_engine()
    processor = type(engine.runner.processor)
    own = processor.__call__

    def without_pixels(self, *args, **kwargs):
        output = own(self, *args, **kwargs)
        output.pop("pixel_values", None)
        return output

    engine.context.ensure_self_tested()
    monkeypatch.setattr(processor, "__call__", without_pixels)
    with pytest.raises(RefusedError, match="no pixels"):
        engine.ingest([write_noise_image(tmp_path / "a.png", 1)])
    assert not list(engine.store.iterate()) and engine.windows() == ()


@pytest.mark.parametrize("num_before", [0, 1, 37, 300])
def test_what_follows_an_image_stands_where_the_model_puts_it(runners_of, num_before):
    """KV-3: an image of grid 1x4x6 after 0, 1, 37 and 300 tokens, followed by text."""
    runner = runners_of("qwen2_5_vl")
    image, after = picture(runner, 1), words(runner, 9, 2)
    assert image.tensors["image_grid_thw"].tolist() == [[1, 4, 6]] and image.positions.span == 5
    before = [words(runner, num_before, 3)] if num_before else []
    encoded = [(chunk, runner.encode(chunk)) for chunk in [*before, image]]
    parts = [runner.text_inputs(runner.preamble_ids), *before, image, after]
    sizes = [(part.positions, part.num_tokens) for part in parts]
    placed, _ = place(sizes)
    end = placed[-1].offset

    layers = [runner.preamble_layers, *(kept.layers for _, kept in encoded), runner.encode(after).layers]
    first = [[(kv[0], None) for kv in layers]]
    ours = assemble(runner.family, first, joined_positions(placed)).layers[0].keys
    torch.testing.assert_close(ours, cold_layers(runner, parts)[0].keys, rtol=0, atol=1e-5)

    ids, inputs = cold(runner, parts)
    reference = next_logits(runner.model, ids, **inputs)
    segments = [runner.preamble, *(kept.segment for _, kept in encoded)]
    _, whole, _, _ = runner.prefill([*segments, runner.text_segment(after.token_ids)])
    torch.testing.assert_close(whole, reference, rtol=1e-5, atol=1e-5)

    conditioned = runner.prefill_captured(segments)[1:]
    results = {}
    for patched in (False, True):
        context = [[(kv, None) for kv in runner.preamble_layers]]
        for (chunk, kept), seen in zip(encoded, conditioned, strict=True):
            patch = form(seen, kept.layers, rank=chunk.num_tokens, energy=1.0, dtype=torch.float32)
            context.append(list(zip(kept.layers, patch if patched else [None] * len(patch), strict=True)))
        rows = [[part[layer] for part in context] for layer in range(runner.family.num_layers)]
        cache = assemble(runner.family, rows, joined_positions(placed[:-1]))
        positions = runner.positions_from(end, after.num_tokens)
        results[patched] = runner.extend(cache, runner.embed(after.token_ids), positions)
    assert kl(reference, results[True]) <= 1e-6
    assert (kl(reference, results[False]) <= 1e-6) == (num_before == 0)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_moe", "qwen3", "olmo2"])
def test_a_stored_key_is_the_one_after_the_norm_and_before_the_rotation(runners_of, name):
    """KV-5: norm weights are drawn from uniform(0.2, 2.0), so a missing or doubled one shows in the length."""
    runner = runners_of(name)
    chunk = picture(runner, 1) if runner.processor else words(runner, 21, 1)
    seen = {}
    handles = [
        module.register_forward_hook(lambda _m, _i, out, what=what: seen.update({what: out.detach()}))
        for what, module in (
            ("normed", runner.family.attentions[1].k_norm),
            ("bare", runner.family.attentions[1].k_proj),
        )
    ]
    stored = runner.encode(chunk).layers[1].rotary
    for handle in handles:
        handle.remove()
    start, shape = runner.preamble.num_tokens, stored.shape
    normed = seen["normed"].reshape(-1, *shape[1:])[start:]
    bare = seen["bare"].reshape(-1, *shape[1:])[start:]
    assert torch.equal(stored, normed)
    assert float((stored.norm(dim=-1) - bare.norm(dim=-1)).abs().max()) > 0.1
    parts = [runner.text_inputs(runner.preamble_ids), chunk]
    cached = cold_layers(runner, parts)[1].keys[0, :, start:].transpose(0, 1)
    torch.testing.assert_close(cached.norm(dim=-1), normed.norm(dim=-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [picture, clip])
@pytest.mark.parametrize("name", DEEPSTACK)
def test_visual_features_of_later_layers_reach_every_route(runners_of, name, make):
    """KV-6: alone, after text, and two media with text between, each from stored embeddings, against pixels."""
    runner = runners_of(name)
    medium, other, text = make(runner, 1), picture(runner, 2), words(runner, 7, 3)
    for order in ([medium], [text, medium], [medium, text, other]):
        parts = [runner.text_inputs(runner.preamble_ids), *order]
        own = cold_layers(runner, parts)
        segments = [runner.preamble, *(runner.encode(part).segment for part in order)]
        cache, _, _, _ = runner.prefill(segments)
        for ours, theirs in zip(cache.layers, own, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(ours.values, theirs.values, rtol=1e-5, atol=1e-5)
        bare = [Segment(segment.embeddings, segment.positions) for segment in segments]
        without, _, _, _ = runner.prefill(bare)
        assert torch.equal(without.layers[0].keys, cache.layers[0].keys)
        for layer in (1, 2):
            difference = without.layers[layer].keys - cache.layers[layer].keys
            assert float(difference.abs().max()) > 1.0


@pytest.mark.parametrize("name", DEEPSTACK)
def test_visual_features_come_back_from_the_store(runners_of, name, open_engine, tmp_path):
    """KV-6: a chunk that was read back conditions what follows as the ordinary forward does."""
    runner = runners_of(name)
    engine = open_engine(model=str(runner.loaded.checkpoint.path), runner=runner)
    engine.ingest([write_noise_image(tmp_path / "a.png", 1)])
    record = next(iter(engine.store.iterate(kind="chunk")))
    segment = engine.library.segment(record)
    assert segment.deepstack.features.shape == (2, segment.deepstack.at.numel(), segment.embeddings.shape[1])
    from engine_setups import model_inputs

    (chunk,) = model_inputs(engine, ["1"])
    own = cold_layers(runner, [runner.text_inputs(runner.preamble_ids), chunk])
    cache, _, _, _ = runner.prefill([runner.preamble, segment])
    for ours, theirs in zip(cache.layers, own, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-5, atol=1e-5)
