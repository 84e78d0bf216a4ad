"""A plan that is shown is the plan that is run; a placement reads less and rebuilds nothing."""

from __future__ import annotations

import pytest
from engine_setups import QUESTION
from tiny_models import write_passage

from kamera_cli.errors import NotFoundError, UsageError


@pytest.fixture
def engine(open_engine, tmp_path):
    made = open_engine("qwen3")
    made.ingest([write_passage(tmp_path / f"{index}.txt", 16, index) for index in range(4)])
    return made


def used(result) -> list[tuple[int, str, str | None]]:
    return [(chunk.number, chunk.used, chunk.why_not) for chunk in result.chunks]


@pytest.mark.parametrize("reuse", ["auto", "blind", "none"])
@pytest.mark.parametrize("chunks", [None, ["3", "1"], ["2", "3", "1"]])
def test_a_plan_that_is_not_the_one_that_runs(engine, reuse, chunks):
    engine.compile_patches(["1", "2", "3"], kind="orbit")
    planned = engine.explain(chunks=chunks, reuse=reuse)
    answered = engine.query(QUESTION, chunks=chunks, reuse=reuse)
    assert used(planned) == used(answered) and planned.fallback == answered.fallback
    if planned.fallback is None:
        for planned_chunk, chunk in zip(planned.chunks, answered.chunks, strict=True):
            assert planned_chunk.rank == chunk.rank and planned_chunk.kl == chunk.kl
            assert planned_chunk.bytes_to_read == chunk.bytes_read


PLANS = {
    "exact": (lambda engine: engine.compile_patches(["3", "1", "2"]), "auto", ["3", "1", "2"]),
    "orbit": (
        lambda engine: engine.compile_patches(["1", "2", "3"], kind="orbit"),
        "patched",
        ["3", "1", "2"],
    ),
    "composed": (lambda engine: engine.compile_patches(kind="pair"), "patched", ["4", "2", "1", "3"]),
    "blind": (lambda engine: None, "blind", ["2", "1"]),
    "prefilled": (lambda engine: None, "none", ["2", "1"]),
}


@pytest.mark.parametrize("used", PLANS)
def test_a_plan_that_states_other_bytes_than_the_query_reads(engine, used):
    prepare, reuse, order = PLANS[used]
    prepare(engine)
    planned = engine.explain(chunks=order, reuse=reuse)
    answered = engine.query(QUESTION, chunks=order, reuse=reuse)
    assert used in {chunk.used for chunk in answered.chunks}
    assert [chunk.bytes_to_read for chunk in planned.chunks] == [
        chunk.bytes_read for chunk in answered.chunks
    ]
    read = {tensor.name: tensor for tensor in engine.store.get(bytes.fromhex(planned.chunks[0].id)).tensors}
    assert planned.chunks[0].bytes_to_read > read["positions"].stored_bytes


def test_explaining_changes_nothing(engine):
    before = engine.window()
    engine.explain()
    assert engine.window() == before
    assert not [record for record in engine.store.iterate() if record.kind == "patch"]


def test_a_placement_takes_the_order_that_is_there(engine):
    engine.compile_patches(["3", "1", "4"])
    planned = engine.explain(chunks=["1", "3", "4"], place=True)
    assert planned.placed.order == (3, 1, 4) and planned.placed.given_misses == 2
    result = engine.query(QUESTION, chunks=["1", "3", "4"], place=True, require_hit=True)
    assert [chunk.number for chunk in result.chunks] == [3, 1, 4] and result.placed == planned.placed


def test_a_placement_on_an_orbit_reads_least(engine):
    import itertools

    engine.compile_patches(["1", "2", "3"], kind="orbit")
    placed = engine.explain(chunks=["3", "2", "1"], place=True, reuse="patched").placed
    sizes = [
        engine.explain(chunks=list(order), place=True, reuse="patched").placed.given_patch_bytes
        for order in itertools.permutations("123")
    ]
    assert placed.given_misses == 0 and placed.patch_bytes == min(sizes) <= placed.given_patch_bytes


def test_a_placement_that_finds_nothing_keeps_the_order(engine):
    result = engine.query(QUESTION, chunks=["3", "1"], place=True)
    assert [chunk.number for chunk in result.chunks] == [3, 1]
    assert result.placed.patch_bytes is None and result.fallback is not None


def test_a_placement_never_rebuilds_what_a_bound_refuses(engine):
    engine.compile_patches(["2", "1"], rank=1)
    assert engine.explain(chunks=["1", "2"], place=True).placed.patch_bytes is None


@pytest.mark.parametrize("reuse", ["blind", "none"])
def test_a_placement_without_patches_is_refused(engine, reuse):
    with pytest.raises(UsageError, match="--place"):
        engine.query(QUESTION, reuse=reuse, place=True)
    with pytest.raises(UsageError, match="--place"):
        engine.explain(reuse=reuse, place=True)


def test_a_placement_looks_no_patch_up_twice(engine, monkeypatch):
    """Of n chunks there are about e n! orders of some of them, and a look into the store for each took seconds."""
    engine.compile_patches(kind="pair")
    engine.compile_patches(["1", "2", "3"], kind="orbit")
    asked = []
    found = type(engine.library).find_patch
    monkeypatch.setattr(
        type(engine.library), "find_patch", lambda *request: asked.append(request[1:]) or found(*request)
    )
    planned = engine.explain(chunks=["4", "3", "2", "1"], place=True, reuse="patched")
    searched = len(asked)
    assert planned.placed.patch_bytes is not None
    assert searched <= len([record for record in engine.store.iterate() if record.kind == "patch"]) + 12
    engine.explain(chunks=[str(number) for number in planned.placed.order], reuse="patched")
    assert planned.placed.patch_bytes == sum(
        sum(engine.store.get(bytes.fromhex(patch)).stored_bytes for patch in chunk.patches)
        for chunk in planned.chunks
    )


def test_a_plan_for_a_window_that_is_not_there(engine):
    with pytest.raises(NotFoundError):
        engine.explain(window="other")
