"""What people read: words instead of codes, numbers and names instead of ids, and what a purge takes with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
from cli_fakes import FIRST, SECOND, FakeEngine, Ran, compile_result, entry, window_view

from kamera_cli.results import (
    EvictResult,
    PlannedChunk,
    QueryPlan,
    RecallResult,
    ReplacedPatch,
    WhyNot,
    WindowView,
)
from kamera_cli.words import WHY_NOT_WORDS, advice, brief_numbers, chunks_words, compile_command, misses_words

Cli = Callable[..., Ran]
CODES = re.compile(r"\b(no_patch|max_kl|low_energy|other_\w+)\b")
ID = re.compile(r"\b[0-9a-f]{8,}\b")


def plan_of(why_not: str, reuse: str = "auto") -> QueryPlan:
    chunks = [PlannedChunk(FIRST, 1, "a.mp4", 120, "prefilled", (), None, None, None, 4096)]
    chunks += [
        PlannedChunk(SECOND, number, "a.mp4", 120, "prefilled", (), None, None, None, 4096, why_not)
        for number in (2, 3)
    ]
    because = None if reuse == "patched" else f"2 of 3 chunks without a usable patch (2 {why_not})"
    return QueryPlan("default", reuse, because, tuple(chunks))


def test_every_reason_has_words() -> None:
    assert set(WHY_NOT_WORDS) == set(get_args(WhyNot))


@pytest.mark.parametrize("reuse", ["auto", "patched"])
@pytest.mark.parametrize("why_not", get_args(WhyNot))
def test_a_plan_is_told_in_words_and_its_json_in_codes(
    cli: Cli, engine: FakeEngine, why_not: str, reuse: str
) -> None:
    engine.answers["explain"] = plan_of(why_not, reuse)
    shown = cli("query", "Which?", "--explain", "--reuse", reuse).out
    assert not CODES.search(shown)
    assert f"chunks 2, 3: {WHY_NOT_WORDS[why_not]}" in shown
    document = cli("query", "Which?", "--explain", "--reuse", reuse, "--json").json
    assert [chunk["why_not"] for chunk in document["chunks"]] == [None, why_not, why_not]


def test_a_plan_without_a_miss_still_says_why_everything_is_computed(cli: Cli, engine: FakeEngine) -> None:
    chunks = (PlannedChunk(FIRST, 1, "a.mp4", 120, "prefilled", (), None, None, None, 4096),)
    engine.answers["explain"] = QueryPlan("default", "none", "--reuse none", chunks)
    assert "(--reuse none)" in cli("query", "Which?", "--explain").out


def test_misses_are_grouped_by_reason() -> None:
    misses = [(2, "no_patch"), (3, "damaged"), (4, "no_patch")]
    assert misses_words(misses) == "chunks 2, 4: no patch for this order yet; chunk 3: stored data damaged"
    assert (chunks_words([2]), chunks_words([0, 7])) == ("chunk 2", "chunks ?, 7")


def test_advice_is_a_command_that_can_be_typed() -> None:
    assert compile_command("default", None) == "kamera compile-patches"
    assert compile_command("my clip", [3, 1]) == "kamera compile-patches 3 1 --window 'my clip'"
    assert "kamera compile-patches 3 1" in advice([(1, "no_patch"), (2, "max_kl")], "default", [3, 1])
    assert "--max-kl" in advice([(1, "max_kl")], "default", None)


def test_many_numbers_are_shortened() -> None:
    assert brief_numbers([1, 2, 3, 4, 5, 6]) == "1 2 3 … 6"
    assert (brief_numbers([]), brief_numbers([0, 2])) == ("nothing", "? 2")


def test_a_recall_names_chunks_by_number_and_its_json_by_id(cli: Cli, engine: FakeEngine) -> None:
    elsewhere = "ee" * 16
    recalled = replace(entry(1, FIRST, "a.mp4"), conditioned_on=(SECOND,))
    window = WindowView("default", "default", "f" * 64, (entry(2, SECOND, "b.mp4"), recalled))
    result = RecallResult(window, (recalled,), ("cc" * 16,), (SECOND, elsewhere), 0, 12.0, (2,), ("dd" * 16,))
    engine.answers["recall"] = result
    shown = cli("recall", "1").out
    assert not ID.search(shown)
    assert "patched for their new place: 1 (a.mp4)" in shown
    assert "2 (b.mp4) and 1 chunk of other windows" in shown
    assert "repaired, the cheapest first: 2 (b.mp4); 1 patch formed or found" in shown
    document = cli("recall", "1", "--json").json
    assert (document["patched"], document["cascade"]) == (["cc" * 16], [SECOND, elsewhere])


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_purge_counts_the_patches_that_go_with_the_chunk(
    cli: Cli, engine: FakeEngine, dry_run: bool
) -> None:
    engine.answers["evict"] = EvictResult(
        window_view(), (entry(1, FIRST),), (FIRST,), 8192, dry_run, ("cc" * 16, "dd" * 16), 2048
    )
    shown = cli("evict", "1", "--purge").out
    assert "with 2 patches of 2.0 KiB that hold something of them" in shown
    document = cli("evict", "1", "--purge", "--json").json
    assert (document["purged_patches"], document["patch_bytes"]) == (["cc" * 16, "dd" * 16], 2048)


def test_compiled_patches_are_named_by_numbers_and_say_what_they_took_the_place_of(
    cli: Cli, engine: FakeEngine
) -> None:
    result = compile_result()
    old = ReplacedPatch(14, 0.996, 1e-5, 2048, had_compositions=True)
    patch = replace(result.patches[0], antecedent_numbers=(1, 4), replaced=old, why_not="low_energy")
    engine.answers["compile_patches"] = replace(result, patches=(patch,))
    shown = cli("compile-patches", "--rank", "2").out
    assert FIRST[:10] not in shown and re.search(r"2 +cccccccccc +1 4 +formed", shown)
    assert "took the place of stored patches: chunk 2 after 1 4 (rank 14, energy 99.6 %, 2.0 KiB)" in shown
    assert "--kind pair" in shown
    (document,) = cli("compile-patches", "--json").json["patches"]
    assert document["replaced"] == {
        "rank": 14, "energy": 0.996, "kl": 1e-5, "patch_bytes": 2048, "had_compositions": True
    }  # fmt: skip
    assert (document["antecedents"], document["antecedent_numbers"]) == ([FIRST], [1, 4])
    assert document["why_not"] == "low_energy"
