"""Removal: what survivors took in from a chunk that has left is taken out; reference is the model's cold prefill."""

from __future__ import annotations

import pytest
from engine_setups import answered, prefilled
from plain_model import kl
from tiny_backbones import save_backbone
from tiny_models import write_noise_image, write_noise_video, write_passage

from kamera_cli.errors import UsageError

SERVED = {"reuse": "patched", "require_hit": True}


@pytest.fixture(params=["qwen3_vl", "deepseek_v3"])
def engine(request, open_engine, tmp_path):
    """Three chunks with full-rank patches: a picture, a clip and a text where the model has deepstack features."""
    folder = save_backbone(request.param, tmp_path / "model")
    made = open_engine(model=str(folder))
    if request.param == "qwen3_vl":
        sources = [
            write_noise_image(tmp_path / "a.png", 1),
            write_noise_video(tmp_path / "b.mp4", 2, seconds=2),
        ]
    else:
        sources = [write_passage(tmp_path / f"{name}.txt", 24, seed) for seed, name in enumerate("ab")]
    made.ingest([*sources, write_passage(tmp_path / "c.txt", 24, 7)])
    made.compile_patches(energy=1.0, factor_dtype="fp32")
    return made


def test_survivors_that_still_hold_what_left_after_a_removal(engine):
    engine.evict(["1"])
    result, kept = answered(engine, **SERVED)
    assert [chunk.used for chunk in result.chunks] == ["exact", "exact"]
    calls = engine.runner.vision_calls
    result = engine.compile_patches(kind="removal", energy=1.0, factor_dtype="fp32")
    asked, removed = answered(engine, **SERVED)
    assert result.survivors == (2, 3) and [patch.chunk_number for patch in result.patches] == [3]
    assert [chunk.used for chunk in asked.chunks] == ["canonical", "exact"]
    assert engine.runner.vision_calls == calls
    assert kl(prefilled(engine), removed) <= 1e-6 < 1e-4 < kl(prefilled(engine), kept)
    assert result.kl_removed <= 1e-6 < result.kl_kept


def test_a_removal_where_nothing_has_left_changes_nothing(engine):
    before = engine.window()
    result = engine.compile_patches(kind="removal")
    assert result.survivors == () and result.patches == () and result.kl_kept is None
    assert engine.window() == before


def test_a_removal_twice_finds_nothing_more_to_remove(engine):
    engine.evict(["1"])
    engine.compile_patches(kind="removal", energy=1.0)
    again = engine.compile_patches(kind="removal", energy=1.0)
    assert again.survivors == () and again.patches == ()


def test_a_removal_names_no_chunks(engine):
    with pytest.raises(UsageError, match="own order"):
        engine.compile_patches(["2", "3"], kind="removal")


def test_a_removal_without_old_patches_says_that_it_has_nothing_to_compare(engine):
    engine.evict(["1"])
    for record in list(engine.store.iterate()):
        if record.kind == "patch":
            engine.store.delete([record.key])
    result = engine.compile_patches(kind="removal", energy=1.0)
    assert result.kl_kept is None and result.kl_removed < 1e-3
