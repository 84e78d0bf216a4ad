"""Chunks in the wrong place of the cache, patches on the wrong chunk, stored tensors changed by use."""

from __future__ import annotations

import itertools

import pytest
import torch
from plain_model import own_cache
from tiny_models import FAMILIES, passage

from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator.assemble import assemble, joined_positions, patched_layer, place
from kamera_cli.operator.patch import Factors, LayerPatch
from kamera_cli.operator.residual import form


def random_layer(num_tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> LayerKV:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(num_tokens, 2, 8, generator=generator).to(dtype) for _ in range(2))
    return LayerKV(keys, values)


def random_patch(num_tokens: int, rank: int, seed: int) -> LayerPatch:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (
        Factors(
            torch.randn(rank, num_tokens, generator=generator), torch.randn(rank, 16, generator=generator)
        )
        for _ in range(2)
    )
    return LayerPatch(keys, values, 1.0, 1.0)


@pytest.mark.parametrize("rank", [None, 1, 3, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_part_gets_its_own_patch_in_order(dtype, rank):
    sizes, ranks = [4, 9, 0, 6], [None, 5, None, 2]
    layers = [random_layer(size, seed, dtype) for seed, size in enumerate(sizes)]
    patches = [
        None if many is None else random_patch(size, many, 10 + seed)
        for seed, (size, many) in enumerate(zip(sizes, ranks, strict=True))
    ]
    kept = [(layer.rotary.clone(), layer.plain.clone()) for layer in layers]
    whole = patched_layer(list(zip(layers, patches, strict=True)), rank)
    start = 0
    for layer, patch, size in zip(layers, patches, sizes, strict=True):
        for ours, theirs, factors in (
            (whole.rotary, layer.rotary, patch and patch.rotary),
            (whole.plain, layer.plain, patch and patch.plain),
        ):
            expected = theirs.double().flatten(1)
            if factors is not None:
                many = min(rank or factors.rank, factors.rank)
                expected = expected + factors.u[:many].T.double() @ factors.v[:many].double()
            found = ours[start : start + size].double().flatten(1)
            torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
        start += size
    assert start == whole.rotary.shape[0] == whole.plain.shape[0]
    for layer, (keys, values) in zip(layers, kept, strict=True):
        assert torch.equal(layer.rotary, keys) and torch.equal(layer.plain, values)


def test_assembled_parts_share_no_memory_with_what_is_stored():
    alone = random_layer(5, 1)
    whole = patched_layer([(alone, None)])
    whole.rotary.zero_()
    assert alone.rotary.abs().sum() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_full_rank_patches_give_the_models_own_cache_in_every_order(runners, family):
    runner = runners(family)
    ids = [runner.tokenize(passage(9 + 4 * seed, seed)) for seed in range(3)]
    texts = [runner.text_segment(each) for each in ids]
    alone = [runner.prefill_captured([runner.preamble, text])[1] for text in texts]
    for order in itertools.permutations(range(3)):
        conditioned = runner.prefill_captured([runner.preamble, *(texts[index] for index in order)])
        parts = [[(layer, None) for layer in runner.preamble_layers]]
        for place_in_prompt, index in enumerate(order, start=1):
            after = conditioned[place_in_prompt]
            patch = form(after, alone[index], rank=texts[index].num_tokens, energy=1.0, dtype=torch.float32)
            parts.append(list(zip(alone[index], patch, strict=True)))
        placed, _ = place(
            [(part.positions, part.num_tokens) for part in (runner.preamble, *(texts[i] for i in order))]
        )
        layers = ([part[layer] for part in parts] for layer in range(3))
        cache = assemble(runner.family, layers, joined_positions(placed))
        own = own_cache(runner.model, torch.cat([runner.preamble_ids, *(ids[index] for index in order)]))
        for ours, theirs in zip(cache.layers, own, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(ours.values, theirs.values, rtol=1e-4, atol=1e-4)
