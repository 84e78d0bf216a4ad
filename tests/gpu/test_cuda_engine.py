"""On a CUDA device: other kernels, other rounding, tensors on two devices, flash-attn where it is installed."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from engine_setups import QUESTION, ingest
from tiny_models import FAMILIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KERNELS = ["sdpa", *(["flash"] if importlib.util.find_spec("flash_attn") else [])]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("attention", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_test_holds(open_engine, family, attention, dtype):
    if attention == "flash" and dtype == "fp32":
        pytest.skip("flash-attn takes half precision")
    result = open_engine(family, device="cuda", dtype=dtype, attention=attention).self_test()
    assert result.ok, result.checks


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_keys_are_rotated_to_the_same_bits_as_by_a_cold_prefill(open_engine, family):
    """The product that makes a key may round otherwise in a batch of another shape; the rotation may not."""
    runner = open_engine(family, device="cuda", dtype="bf16").runner
    text = runner.text_segment(torch.arange(9, 40))
    cache, _, captured, _ = runner.prefill([runner.preamble, text])
    start = runner.preamble.num_tokens
    for layer, own in zip(captured[1], cache.layers, strict=True):
        ours = runner.family.cache([layer], text.positions.at(start)).layers[0]
        assert torch.equal(ours.keys, own.keys[:, :, start:])


@pytest.mark.parametrize("attention", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ingest_query_evict_and_recall(open_engine, tmp_path, family, attention):
    engine = open_engine(family, device="cuda", dtype="bf16", attention=attention)
    ingest(engine, family, tmp_path)
    order = ["3", "1", "2"]
    first = engine.query(QUESTION, chunks=order, compare=True)
    assert first.fallback is not None and first.compare.kl < 1e-3
    patched = engine.query(QUESTION, chunks=order, compare=True, require_hit=True)
    blind = engine.query(QUESTION, chunks=order, compare=True, reuse="blind")
    assert patched.compare.kl < 0.5 * blind.compare.kl
    assert patched.device.startswith("cuda") and patched.dtype == "bfloat16"
    engine.evict(["1"])
    calls = engine.runner.vision_calls
    assert engine.recall(["1"]).vision_calls == 0 and engine.runner.vision_calls == calls
    assert engine.query(QUESTION).answer is not None
    again = open_engine(family, device="cuda", dtype="bf16", attention=attention)
    assert again.ingest([tmp_path / ("a.mp4" if family == "qwen2_5_vl" else "a.txt")]).sources[0].from_index
