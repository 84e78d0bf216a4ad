"""Orbit patches serve every order of a set, or say that they do not; the reference is a prefill of that order."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from engine_setups import answered, prefilled
from plain_model import kl
from tiny_backbones import save_backbone
from tiny_models import write_passage

from kamera_cli.errors import UsageError
from kamera_cli.patches.report import refused_lines


@pytest.fixture(params=["qwen3", "deepseek_v3"])
def engine(request, open_engine, tmp_path):
    made = open_engine(model=str(save_backbone(request.param, tmp_path / "model")))
    made.ingest([write_passage(tmp_path / f"{index}.txt", 16, index) for index in range(4)])
    return made


@pytest.mark.parametrize("count", [2, 3])
def test_an_order_of_the_set_that_is_not_served(engine, count):
    numbers = [str(number) for number in range(1, count + 1)]
    calls = engine.runner.vision_calls
    result = engine.compile_patches(numbers, kind="orbit", energy=1.0, factor_dtype="fp32")
    assert len(result.patches) == count * (2 ** (count - 1) - 1) and engine.runner.vision_calls == calls
    lost = kept = 0.0
    for order in itertools.permutations(numbers):
        found, logits = answered(engine, list(order), reuse="patched", require_hit=True)
        assert [chunk.used for chunk in found.chunks] == ["canonical"] + ["orbit"] * (count - 1)
        reference = prefilled(engine, list(order))
        lost += kl(reference, logits)
        kept += kl(reference, answered(engine, list(order), reuse="blind")[1])
    # Random weights read by distance, so that a set of two is two different things; a trained model hardly does.
    assert lost <= (1e-8 if count == 2 else 0.35 * kept)


def test_the_kl_of_an_orbit_patch_is_the_worst_over_orders(engine):
    result = engine.compile_patches(["1", "2", "3"], kind="orbit", energy=1.0, factor_dtype="fp32")
    pairs = [patch for patch in result.patches if len(patch.antecedents) == 1]
    triples = [patch for patch in result.patches if len(patch.antecedents) == 2]
    assert all(patch.kl <= 1e-8 < patch.kl_blind for patch in pairs)
    assert all(patch.kl > 1e-6 for patch in triples)
    assert (
        sum(patch.kl < 0.5 * patch.kl_blind for patch in triples) >= 2
    )  # experts may flip in one of the three


def test_an_exact_patch_goes_before_an_orbit_patch(engine):
    engine.compile_patches(["1", "2", "3"], kind="orbit", energy=1.0)
    engine.compile_patches(["2", "3"])
    result, _ = answered(engine, ["2", "3"], reuse="patched")
    assert [chunk.used for chunk in result.chunks] == ["canonical", "exact"]


def test_an_orbit_that_is_there_is_not_formed_again(engine):
    first = engine.compile_patches(["1", "2", "3"], kind="orbit")
    again = engine.compile_patches(["3", "1", "2"], kind="orbit")
    assert {patch.outcome for patch in first.patches} == {"formed"}
    assert {patch.outcome for patch in again.patches} == {"found"}
    assert {patch.id for patch in first.patches} == {patch.id for patch in again.patches}


def test_orbits_of_two_compilations_stand_side_by_side(engine):
    """The smaller orbit takes the place of some patches of the larger."""
    engine.compile_patches(["1", "2", "3", "4"], kind="orbit", energy=1.0, factor_dtype="fp32")
    engine.compile_patches(["1", "2", "3"], kind="orbit", rank=4)
    for order in itertools.permutations("1234", 3):
        result, logits = answered(engine, list(order), reuse="patched")
        bound = max(chunk.kl for chunk in result.chunks if chunk.used == "orbit")
        blind = kl(prefilled(engine, list(order)), answered(engine, list(order), reuse="blind")[1])
        assert [chunk.used for chunk in result.chunks] == ["canonical", "orbit", "orbit"]
        assert kl(prefilled(engine, list(order)), logits) < max(blind, 2 * bound)


@pytest.mark.parametrize("chunks", [["1"], ["1", "2", "1"]])
def test_a_set_that_is_no_orbit_is_refused(engine, chunks):
    with pytest.raises(UsageError):
        engine.compile_patches(chunks, kind="orbit")


def test_a_set_above_the_limit_is_refused_before_anything_is_formed(engine, tmp_path):
    engine.ingest([write_passage(tmp_path / f"more{index}.txt", 16, 10 + index) for index in range(2)])
    with pytest.raises(UsageError, match="2 to 5 chunks, not 6"):
        engine.compile_patches(kind="orbit")
    assert not [record for record in engine.store.iterate() if record.kind == "patch"]


def test_an_orbit_patch_is_trusted_by_what_it_holds_of_each_order(engine):
    result = engine.compile_patches(["1", "2", "3"], kind="orbit", energy=0.9999)
    for patch in result.patches:
        if len(patch.antecedents) == 1:  # one order, of which the patch was formed
            assert patch.energy_in_orders == pytest.approx(patch.captured_energy, abs=1e-3)
        else:
            assert patch.trusted_energy == patch.energy_in_orders < patch.captured_energy


def test_more_rank_is_no_advice_where_the_order_matters(engine):
    result = engine.compile_patches(["1", "2", "3"], kind="orbit", energy=0.9999)
    far = replace(result.patches[0], energy_in_orders=0.5, why_not="low_energy")
    (line,) = refused_lines(replace(result, patches=(far,)))
    assert "50.0 %" in line and "--kind exact" in line and "--rank" not in line


def test_an_orbit_patch_that_takes_the_place_of_another_says_so(engine):
    assert {patch.replaced for patch in engine.compile_patches(["1", "2"], kind="orbit", rank=2).patches} == {
        None
    }
    again = engine.compile_patches(["1", "2"], kind="orbit", rank=4)
    assert [patch.replaced.rank for patch in again.patches] == [2, 2]
