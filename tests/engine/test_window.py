"""Window rules (pure): numbers that change hands, conditioning that is rewritten behind a chunk's back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kamera_cli.errors import NotFoundError, UsageError
from kamera_cli.results import WindowEntry, WindowView
from kamera_cli.window import load_window, pick, update_window
from kamera_cli.window_changes import appended, purged, recalled, reconditioned, without
from kamera_store import KVStore

KEYS = [f"{index:02x}" * 16 for index in range(1, 8)]


def entry(index: int) -> WindowEntry:
    return WindowEntry(0, KEYS[index], "00" * 32, f"clip#{index}", 10)


def of(*indices: int) -> WindowView:
    return appended(WindowView("w", "t", "f"), [entry(index) for index in indices])


def shape(window: WindowView) -> list[tuple[int, int, tuple[int, ...]]]:
    """(chunk, number, chunks it is conditioned on) of every entry."""
    return [
        (KEYS.index(one.chunk), one.number, tuple(KEYS.index(key) for key in one.conditioned_on))
        for one in window.entries
    ]


def test_appended_chunks_are_conditioned_on_what_stands_before_them():
    assert shape(of(0, 1, 2)) == [(0, 1, ()), (1, 2, (0,)), (2, 3, (0, 1))]


def test_a_chunk_that_is_there_already_stays_as_it_is():
    window = of(0, 1)
    assert appended(window, [entry(1), entry(0)]) == window
    assert shape(appended(window, [entry(1), entry(2)]))[2] == (2, 3, (0, 1))


def test_survivors_of_an_eviction_keep_their_conditioning():
    window = of(0, 1, 2)
    after = without(window, window.entries[:1])
    assert shape(after) == [(1, 2, (0,)), (2, 3, (0, 1))]
    assert [one.chunk for one in after.evicted] == [KEYS[0]]


def test_a_recalled_chunk_is_conditioned_on_what_now_stands_before_it_and_changes_nothing_after_it():
    window = without(of(0, 1, 2), of(0, 1, 2).entries[:1])
    assert shape(recalled(window, window.evicted, None)) == [(1, 2, (0,)), (2, 3, (0, 1)), (0, 1, (1, 2))]
    assert shape(recalled(window, window.evicted, 1)) == [(1, 2, (0,)), (0, 1, (1,)), (2, 3, (0, 1))]
    assert recalled(window, window.evicted, None).evicted == ()


def test_several_recalled_chunks_come_back_in_the_order_asked_for():
    window = of(0, 1, 2, 3)
    window = without(window, window.entries[:2])
    back = recalled(window, window.evicted[::-1], 1)
    assert shape(back) == [(2, 3, (0, 1)), (1, 2, (2,)), (0, 1, (2, 1)), (3, 4, (0, 1, 2))]


@pytest.mark.parametrize("at", [-1, 3, 99])
def test_a_place_outside_the_window_is_refused(at):
    window = of(0, 1, 2)
    window = without(window, window.entries[:1])
    with pytest.raises(UsageError, match=f"--at {at + 1}.*2 chunks"):
        recalled(window, window.evicted, at)


def test_a_chunk_that_is_in_the_window_cannot_be_recalled():
    window = of(0, 1)
    with pytest.raises(UsageError, match="already in window"):
        recalled(window, window.entries[:1], None)


def test_an_evicted_chunk_that_is_ingested_again_keeps_its_number():
    window = of(0, 1, 2)
    window = appended(without(window, window.entries[:1]), [entry(0), entry(3)])
    assert shape(window) == [(1, 2, (0,)), (2, 3, (0, 1)), (0, 1, (1, 2)), (3, 4, (1, 2, 0))]
    assert window.evicted == ()


def test_evicting_what_another_process_just_evicted_does_not_list_it_twice():
    window = of(0, 1, 2)
    leaving = window.entries[:2]
    elsewhere = without(window, leaving[:1])
    both = without(elsewhere, leaving)
    assert sorted(one.chunk for one in both.evicted) == KEYS[:2]


def test_purged_chunks_are_forgotten_and_their_numbers_are_not_given_again_while_higher_ones_live():
    window = of(0, 1, 2)
    window = purged(without(window, window.entries[:1]), [*window.entries[:2]])
    assert shape(window) == [(2, 3, (0, 1))] and window.evicted == ()
    assert shape(appended(window, [entry(5)]))[1] == (5, 4, (2,))


def test_reconditioning_is_what_a_prefill_of_the_whole_window_gives():
    window = of(0, 1, 2)
    assert reconditioned(window) == window
    window = recalled(without(window, window.entries[:1]), window.entries[:1], 1)
    assert shape(reconditioned(window)) == [(1, 2, ()), (0, 1, (1,)), (2, 3, (1, 0))]


def test_the_number_of_a_purged_last_chunk_is_not_given_to_the_next_one():
    window = of(0, 1, 2)
    for gone in (window.entries[2:], window.entries[1:], window.entries):
        assert shape(appended(purged(window, gone), [entry(5)]))[-1][1] == 4
    twice = purged(appended(purged(window, window.entries), [entry(5)]), [entry(5)])
    assert shape(appended(twice, [entry(6)])) == [(6, 5, ())]


def test_a_purge_of_everything_is_remembered_in_the_store(tmp_path):
    with KVStore.open(tmp_path / "store") as store:

        def change(how):
            return update_window(store, "t", "w", how, fingerprint="f")

        change(lambda window: appended(window, [entry(0), entry(1)]))
        change(lambda window: purged(window, window.entries))
        assert change(lambda window: appended(window, [entry(2)])).entries[0].number == 3


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["append", "evict", "recall", "purge"]), st.integers(0, 6), st.integers(0, 7)
        )
    )
)
def test_a_window_never_holds_a_chunk_twice_and_numbers_stay(moves):
    window, numbers, given_to = WindowView("w", "t", "f"), {}, {}
    for move, index, where in moves:
        inside = [one for one in window.entries if one.chunk == KEYS[index]]
        outside = [one for one in window.evicted if one.chunk == KEYS[index]]
        if move == "append":
            window = appended(window, [entry(index)])
        elif move == "evict":
            window = without(window, inside)
        elif move == "recall" and outside:
            window = recalled(window, outside, min(where, len(window.entries)))
        elif move == "purge":
            window = purged(window, [*inside, *outside])
            numbers.pop(KEYS[index], None)
        present = [*window.entries, *window.evicted]
        assert len({one.chunk for one in present}) == len({one.number for one in present}) == len(present)
        for one in present:
            if one.chunk not in numbers:
                assert one.number not in given_to, "a number that was given before"
                given_to[one.number] = one.chunk
            assert numbers.setdefault(one.chunk, one.number) == one.number
            assert one.chunk not in one.conditioned_on


def test_pick_says_what_there_is():
    window = of(0, 1, 2)
    assert [one.number for one in pick(window.entries, ["3", "clip#0", KEYS[1][:6]], "w")] == [3, 1, 2]
    with pytest.raises(NotFoundError, match=r"no chunk '7' in w \(chunks there: 1, 2, 3\)"):
        pick(window.entries, ["7"], "w")
    with pytest.raises(NotFoundError, match="none"):
        pick((), ["1"], "w")
    twins = [*window.entries, WindowEntry(9, KEYS[6], "00" * 32, "clip#0", 1)]
    with pytest.raises(UsageError, match="fits 2 chunks"):
        pick(twins, ["clip#0"], "w")


@pytest.mark.parametrize(("tenant", "name"), [("a/b", "c"), ("a", "b/c"), ("", "c"), ("a", "")])
def test_two_tenants_never_meet_in_one_window_name(tmp_path, tenant, name):
    with KVStore.open(tmp_path / "store") as store, pytest.raises(UsageError, match="cannot name a"):
        load_window(store, tenant, name)
