"""A self-test that passes a wrong model is worse than none: each fault that it is there for must fail it by name."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, write_passage

from kamera_cli.errors import NotFiniteError, RefusedError
from kamera_cli.model import self_test as selftest
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.families.gqa import GQA
from kamera_cli.model.runner import ModelRunner
from kamera_cli.operator.patch import Factors, LayerPatch

CAPTURE, RELOCATION, FULL_RANK = (
    "captured KV = own cache",
    "layer-0 keys after relocation",
    "full-rank patch = cold prefill",
)
POSITIONS, EMBEDDINGS = "positions = own index function", "stored embeddings = pixels"


def failed(runner) -> set[str]:
    return {check.name for check in selftest.self_test(runner).checks if not check.ok}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sound_models_pass(runners, family, dtype):
    result = selftest.self_test(runners(family, dtype))
    assert result.ok and len(result.checks) == (5 if family == "qwen2_5_vl" else 3)
    selftest.require(result, family)


def test_keys_before_the_key_norm_fail(runners, monkeypatch):
    runner = runners("qwen3")
    real = GQA.hooked

    def bare(self, attention):
        """Record the projection in the place of the norm's output."""
        (_, select), values = real(self, attention)
        return (attention.k_proj, select), values

    monkeypatch.setattr(GQA, "hooked", bare)
    assert CAPTURE in failed(runner)


def swapped_values(self, layers, positions, first=0, real=GQA.cache):
    return real(self, (LayerKV(layer.rotary, layer.plain.flip(0)) for layer in layers), positions, first)


def shifted_keys(self, layers, positions, first=0, real=GQA.cache):
    return real(self, layers, positions + 1, first)


def test_values_in_the_wrong_order_fail(runners, monkeypatch):
    monkeypatch.setattr(GQA, "cache", swapped_values)
    assert {CAPTURE, FULL_RANK} <= failed(runners("llama"))


def test_keys_rotated_to_the_wrong_place_fail(runners, monkeypatch):
    monkeypatch.setattr(GQA, "cache", shifted_keys)
    assert {CAPTURE, RELOCATION} <= failed(runners("qwen2"))


def test_patches_that_restore_half_fail(runners, monkeypatch):
    real = selftest.form

    def halved(*arguments, **options):
        def half(factors: Factors) -> Factors:
            return Factors(factors.u / 2, factors.v)

        return [
            LayerPatch(half(patch.rotary), half(patch.plain), 1.0, 1.0)
            for patch in real(*arguments, **options)
        ]

    monkeypatch.setattr(selftest, "form", halved)
    assert failed(runners("llama")) == {FULL_RANK}


def test_other_positions_for_the_whole_prompt_fail(runners, monkeypatch):
    real = selftest.rope_index
    monkeypatch.setattr(selftest, "rope_index", lambda *arguments: real(*arguments).roll(1, dims=0))
    assert failed(runners("qwen2_5_vl")) == {POSITIONS}


def test_embeddings_that_lost_the_picture_fail(runners, monkeypatch):
    real = ModelRunner.encode

    def blank(self, chunk):
        encoded = real(self, chunk)
        encoded.segment.embeddings[1:-1] = 0
        return encoded

    monkeypatch.setattr(ModelRunner, "encode", blank)
    assert failed(runners("qwen2_5_vl")) == {EMBEDDINGS}


def test_a_difference_above_the_bound_is_refused_by_name(runners):
    result = selftest.SelfTest((selftest.Check("one", True, ""), selftest.Check("other", False, "off by 3")))
    with pytest.raises(
        RefusedError, match=r"model m fails the self-test 'other': off by 3; nothing was written"
    ):
        selftest.require(result, "m")


def test_a_model_whose_numbers_overflow_is_refused_and_gives_no_answer(open_engine, tmp_path):
    engine = open_engine("llama")
    broken = open_engine("llama")
    engine.ingest([write_passage(tmp_path / "a.txt", 9, 1), write_passage(tmp_path / "b.txt", 9, 2)])
    broken.runner.model.model.layers[1].mlp.down_proj.weight.fill_(torch.nan)
    for call in (
        broken.self_test,
        broken.compile_patches,
        lambda: broken.query("red", reuse="blind"),
        lambda: broken.query("red", chunks=["1"], temperature=1.0),
        lambda: broken.query("red", reuse="none"),
    ):
        with pytest.raises(NotFiniteError, match="--dtype"):
            call()
    assert not list(engine.store.iterate(kind="patch"))
