"""Faults around MLA caches: MLA-1 and MLA-3 of the list of known cases."""

from __future__ import annotations

import pytest
import torch
from backbone_runners import backbone_runner
from engine_setups import QUESTION, reference
from plain_model import own_cache
from tiny_models import write_passage

from kamera_cli.errors import RefusedError
from kamera_cli.model.families.mla import MLA

NAMES = ("deepseek_v2", "deepseek_v3")
LATENT, EXPANDED = ((1, 24), (1, 8)), ((4, 24), (4, 12))
"""(heads, width) of the two cached tensors in either layout: 24 latents, 8 rotary; 16 + 8 keys, 12 values."""


@pytest.fixture(scope="module", params=NAMES)
def runner(request, tmp_path_factory):
    """F6: two layers, the first dense; latents of 24, 8 rotary and 16 other key columns, values of 12."""
    folder = tmp_path_factory.mktemp("mla")
    return backbone_runner(request.param, folder, num_hidden_layers=2)


@torch.no_grad()
def test_both_cache_layouts_come_from_one_stored_chunk(runner):
    """MLA-1: what is stored has neither layout, so a chunk of one release serves another."""
    ids = torch.arange(20, 27)
    encoded = runner.encode(runner.text_inputs(ids))
    start = runner.preamble.num_tokens
    positions = encoded.segment.positions.at(start)
    latent = MLA(runner._decoder, LATENT).cache(encoded.layers, positions)
    expanded = MLA(runner._decoder, EXPANDED).cache(encoded.layers, positions)
    for layer, attention in enumerate(runner.family.attentions):
        held, kept = latent.layers[layer], encoded.layers[layer]
        assert held.keys.shape == (1, 1, 7, 24) and held.values.shape == (1, 1, 7, 8)
        assert torch.equal(held.keys[0, 0], kept.plain[:, 0])
        heads = (kept.plain[:, 0] @ attention.kv_b_proj.weight.T).reshape(7, 4, 16 + 12)
        ours = expanded.layers[layer]
        assert ours.keys.shape == (1, 4, 7, 24) and ours.values.shape == (1, 4, 7, 12)
        torch.testing.assert_close(ours.keys[0, :, :, :16].transpose(0, 1), heads[..., :16])
        torch.testing.assert_close(ours.values[0].transpose(0, 1), heads[..., 16:])
        for head in range(4):
            assert torch.equal(ours.keys[0, head, :, 16:], held.values[0, 0])
    own = own_cache(runner.model, torch.cat([runner.preamble_ids, ids]))
    for layer, theirs in enumerate(own):
        ours = (latent if runner.family.layout == "latent" else expanded).layers[layer]
        assert torch.equal(ours.keys, theirs.keys[:, :, start:])
        assert torch.equal(ours.values, theirs.values[:, :, start:])


@pytest.mark.parametrize(
    "shapes", [((1, 8), (1, 24)), ((1, 32), (1, 0)), ((4, 16), (4, 12)), ((2, 24), (2, 12))]
)
def test_another_cache_layout_is_refused_by_name_and_never_reshaped(runner, shapes):
    """MLA-1: also where the number of values would fit."""
    with pytest.raises(RefusedError, match="MLA cache holds tensors of"):
        MLA(runner._decoder, shapes)


def test_a_chunk_stored_under_one_layout_is_answered_from_under_the_other(runner, open_engine, tmp_path):
    """MLA-1: the stored names are k_rope and latent, whatever the cache holds."""
    engine = open_engine(model=str(runner.loaded.checkpoint.path), runner=runner)
    engine.ingest([write_passage(tmp_path / f"{seed}.txt", 15, seed) for seed in range(2)])
    record = next(iter(engine.store.iterate(kind="chunk")))
    sizes = {(tensor.name, tensor.shape[1:]) for tensor in record.tensors if tensor.layer >= 0}
    assert sizes == {("k_rope", (1, 8)), ("latent", (1, 24))}
    engine.compile_patches(energy=1.0, factor_dtype="fp32")
    _, answer = reference(engine, ["1", "2"])
    assert engine.query(QUESTION, max_new_tokens=8, require_hit=True).answer == answer
