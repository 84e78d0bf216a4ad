"""Whether a patch is trusted is one rule: all that speak of the same patches say the same."""

from __future__ import annotations

import pytest
from tiny_backbones import save_backbone
from tiny_models import write_passage

from kamera_cli.commands.show import split, split_view
from kamera_cli.patches.report import why_not_auto
from kamera_cli.trust import AUTO_MIN_ENERGY, proven_energy


@pytest.fixture
def engine(open_engine, tmp_path, warned):
    made = open_engine(model=str(save_backbone("qwen3", tmp_path / "model")), warnings=warned)
    made.ingest([write_passage(tmp_path / f"{index}.txt", 16, index) for index in range(3)])
    warned.clear()
    return made


@pytest.fixture
def warned():
    return []


def shown_energies(records) -> list[str]:
    """The column of energies that ``kamera show`` prints."""
    grid, _ = split_view([split(record) for record in records])
    energy = next(column for column in grid.columns if str(column.header) == "energy")
    return [str(cell) for cell in energy.cells]


@pytest.mark.parametrize("request_", [{"kind": "orbit", "energy": 0.9999}, {"rank": 1}, {"energy": 0.9999}])
def test_result_warning_listing_and_plan_say_the_same_of_a_patch(engine, warned, request_):
    """An orbit patch captures the mean of orders well, and each single order of random weights badly."""
    result = engine.compile_patches(["1", "2", "3"], **request_)
    records = [engine.store.get(bytes.fromhex(patch.id)) for patch in result.patches]
    for patch, record in zip(result.patches, records, strict=True):
        assert patch.trusted_energy == proven_energy(record.meta)
        assert patch.why_not == why_not_auto(record)
        assert (patch.why_not == "low_energy") == (patch.trusted_energy < AUTO_MIN_ENERGY)
    assert shown_energies(records) == [f"{100 * patch.trusted_energy:.1f} %" for patch in result.patches]
    refused = [patch for patch in result.patches if patch.why_not]
    assert bool(warned) == bool(refused)
    order = ["1", "2", "3"]
    planned = engine.explain(chunks=order)
    numbers = tuple(map(int, order))
    for at, chunk in enumerate(planned.chunks):
        before = sorted(numbers[:at])
        said = [
            patch for patch in result.patches
            if patch.chunk_number == numbers[at] and sorted(patch.antecedent_numbers) == before
        ]  # fmt: skip
        assert [chunk.why_not] == [patch.why_not for patch in said] or not at
    patched = engine.explain(chunks=order, reuse="patched")
    energies = {
        (p.chunk_number, tuple(sorted(p.antecedent_numbers))): p.trusted_energy for p in result.patches
    }
    for at, chunk in enumerate(patched.chunks[1:], start=1):
        assert chunk.energy == energies[numbers[at], tuple(sorted(numbers[:at]))]
