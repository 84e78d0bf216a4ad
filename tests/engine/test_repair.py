"""A repair that forms too much, too little, or wastefully; the reference is a prefill of the window as it stands."""

from __future__ import annotations

import pytest
from engine_setups import answered, prefilled
from plain_model import kl
from tiny_models import write_passage

from kamera_cli.errors import UsageError


@pytest.fixture
def engine(open_engine, tmp_path):
    """Chunks of 40, 30, 20 and 10 words, each conditioned on those before it."""
    made = open_engine("qwen3")
    made.ingest([write_passage(tmp_path / f"{index}.txt", 40 - 10 * index, index) for index in range(4)])
    made.compile_patches(energy=1.0, factor_dtype="fp32")
    return made


def before(engine) -> dict[int, tuple[str, ...]]:
    numbers = {entry.chunk: str(entry.number) for entry in engine.window().entries}
    return {
        entry.number: tuple(numbers.get(key, "gone") for key in entry.conditioned_on)
        for entry in engine.window().entries
    }


def test_the_cascade_holds_what_stood_where_it_stands_no_more_until_it_is_repaired(engine):
    engine.evict(["1"])
    engine.recall(["1"], at=2)
    assert before(engine) == {2: ("1",), 1: ("2",), 3: ("1", "2"), 4: ("1", "2", "3")}
    engine.evict(["1"])
    result = engine.recall(["1"], at=2, repair=True)
    assert before(engine) == {2: (), 1: ("2",), 3: ("2", "1"), 4: ("2", "1", "3")}
    assert result.repaired == (2, 3, 4) and len(result.repaired_patches) == 2
    assert result.window == engine.window() and result.vision_calls == 0


def test_a_repaired_window_answers_like_its_prefill(engine):
    engine.evict(["1"])
    engine.recall(["1"], at=2)
    kept = kl(prefilled(engine), answered(engine, reuse="patched")[1])
    engine.evict(["1"])
    engine.recall(["1"], at=2, repair=True)
    repaired = kl(prefilled(engine), answered(engine, reuse="patched")[1])
    assert repaired < 0.02 * kept


def test_a_repair_of_what_fits_already_forms_nothing(engine):
    engine.evict(["4"])
    result = engine.recall(["4"], repair=True)
    assert result.cascade == () and result.repaired == () and result.repaired_patches == ()


def test_a_chunk_whose_patches_do_not_name_the_recalled_one_is_left_alone(engine):
    engine.evict(["3"])
    result = engine.recall(["3"], at=1, repair=True)
    assert result.repaired == (4,) and before(engine)[1] == () and before(engine)[2] == ("1",)


def test_an_interrupted_repair_goes_on_when_it_is_asked_for_again(engine, monkeypatch):
    from kamera_cli import recall as recalling

    forming, calls = recalling.form_chains, []

    def stopped_in_the_repair(*arguments):
        calls.append(arguments)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return forming(*arguments)

    engine.evict(["1"])
    with monkeypatch.context() as patched:
        patched.setattr(recalling, "form_chains", stopped_in_the_repair)
        with pytest.raises(KeyboardInterrupt):
            engine.recall(["1"], at=2, repair=True)
    assert before(engine)[4] == ("1", "2", "3")
    with pytest.raises(UsageError, match="already in window"):
        engine.recall(["1"], at=1, repair=True)
    with pytest.raises(UsageError, match="already in window"):
        engine.recall(["1"], at=2)
    result = engine.recall(["1"], at=2, repair=True)
    assert result.repaired[-2:] == (3, 4) and [entry.number for entry in result.recalled] == [1]
    assert before(engine) == {2: (), 1: ("2",), 3: ("2", "1"), 4: ("2", "1", "3")}
    assert engine.recall(["1"], at=2, repair=True).repaired == ()
