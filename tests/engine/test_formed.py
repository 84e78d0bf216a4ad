"""Patches that are worse than what stood there, or than what auto uses, without a word; patches of a newer kamera."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_setups import QUESTION, ingest

from kamera_cli.errors import RefusedError, UnknownFactorsError
from kamera_cli.patches.report import refused_lines
from kamera_cli.results import CompileResult, ComposedBound, FormedPatch
from kamera_store.format.keys import Identity


@pytest.fixture
def warned():
    return []


@pytest.fixture
def engine(open_engine, tmp_path, warned):
    made = open_engine("qwen2_5_vl", warnings=warned)
    ingest(made, "qwen2_5_vl", tmp_path)
    warned.clear()
    return made


def test_a_patch_that_takes_the_place_of_a_better_one_says_so(engine):
    first = engine.compile_patches()
    assert all(patch.replaced is None for patch in first.patches)
    again = engine.compile_patches()
    assert all(patch.outcome == "found" and patch.replaced is None for patch in again.patches)
    worse = engine.compile_patches(rank=1)
    for old, new in zip(first.patches, worse.patches, strict=True):
        assert new.outcome == "formed" and new.ranks != old.ranks
        assert new.replaced.rank == max(old.ranks) and new.replaced.patch_bytes == old.patch_bytes
        assert new.replaced.energy == old.trusted_energy > new.trusted_energy
        assert new.replaced.kl == old.kl and not new.replaced.had_compositions


def test_a_pair_that_takes_a_measured_composition_with_it_says_so(engine):
    engine.compile_patches(kind="pair")
    (patch,) = engine.compile_patches(["1", "2"], rank=1).patches
    assert patch.replaced.had_compositions


def test_patches_that_auto_will_not_use_are_one_warning_that_names_them(engine, warned):
    result = engine.compile_patches(rank=1)
    assert {patch.why_not for patch in result.patches} == {"low_energy"}
    (line,) = warned
    assert "chunks 2, 3" in line and "below 95 %" in line and "--rank" in line
    planned = engine.explain()
    assert [chunk.why_not for chunk in planned.chunks] == [None, "low_energy", "low_energy"]
    warned.clear()
    assert {patch.why_not for patch in engine.compile_patches().patches} == {None}
    assert not warned and engine.explain().fallback is None


def formed(number: int, **fields) -> FormedPatch:
    plain = FormedPatch("cc" * 16, "bb" * 16, number, (), "formed", (2,), 0.99, 0.001, 0.4, 512, 4096, 1.0)
    return replace(plain, **fields)


def test_a_kl_that_auto_will_not_take_is_told_with_the_bound():
    patches = (formed(2), formed(3, kl=0.2, why_not="max_kl"), formed(4, kl=0.2, why_not="max_kl"))
    (line,) = refused_lines(CompileResult("w", "exact", patches, 1.0, 1.0))
    assert "chunks 3, 4" in line and "0.2, above 0.05" in line and "--max-kl" in line


def test_compositions_that_auto_will_not_take_are_told():
    bounds = (ComposedBound(2, 0.01, 0.4, 0.97, 1.0, 6), ComposedBound(3, 0.02, 0.4, 0.6, 1.0, 6))
    (line,) = refused_lines(CompileResult("w", "pair", (formed(2),), 1.0, 1.0, composed=bounds))
    assert "compositions of 3 pairs" in line and "60 %" in line and "--reuse patched" in line
    assert refused_lines(CompileResult("w", "pair", (formed(2),), 1.0, 1.0, composed=bounds[:1])) == []


@pytest.mark.parametrize(
    ("factors", "kind"),
    [({"bits": 3}, "int3"), ({"kind": "codebook"}, "codebook"), ({"groups": 32}, "int8")],
)
def test_a_patch_of_a_newer_kamera_is_refused_by_name_and_not_by_a_shape(engine, factors, kind):
    engine.compile_patches()
    store = engine.store
    patch = next(iter(store.iterate("patch")))
    store.put(
        Identity("patch", patch.key, patch.digest), tenant=patch.tenant, unit=patch.unit,
        meta={**patch.meta, "factors": {**patch.meta["factors"], **factors}},
        tensors=list(store.read(patch).values()), cost_ms=patch.cost_ms, replace=True,
    )  # fmt: skip
    calls = (
        lambda: engine.query(QUESTION), engine.explain, engine.compile_patches,
        lambda: engine.query(QUESTION, reuse="patched"),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(
            UnknownFactorsError, match=f"patch {patch.id[:10]}.*'{kind}'.*upgrade kamera"
        ) as found:
            call()
        assert isinstance(found.value, RefusedError) and found.value.exit_code == 4


def test_integers_without_a_description_are_not_taken_for_numbers(engine):
    engine.compile_patches()
    store = engine.store
    patch = next(iter(store.iterate("patch")))
    store.put(
        Identity("patch", patch.key, patch.digest), tenant=patch.tenant, unit=patch.unit,
        meta={**patch.meta, "factors": None}, tensors=list(store.read(patch).values()),
        cost_ms=patch.cost_ms, replace=True,
    )  # fmt: skip
    with pytest.raises(UnknownFactorsError, match="'uint8'"):
        engine.explain()
