"""Ranks that waste bytes, overspend a budget, or trust a sensitivity that was not measured."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera_cli.errors import UsageError
from kamera_cli.operator.ranks import (
    FLOOR,
    Sensitivity,
    Spectrum,
    check_budget,
    choose,
    weighted_energy,
    weights,
    worth,
)
from kamera_cli.options import Budget, parse_budget
from kamera_cli.trust import proven_energy


def spectrum(squares, *, size: int = 10, weight: float = 1.0) -> Spectrum:
    ordered = tuple(sorted(map(float, squares), reverse=True))
    return Spectrum(ordered, sum(ordered), size, weight)


spectra = st.lists(
    st.builds(
        lambda squares, weight: spectrum(squares, weight=weight),
        st.lists(st.floats(0.01, 100), min_size=0, max_size=4),
        st.sampled_from([0.0, 0.1, 1.0, 7.0]),
    ),
    min_size=1,
    max_size=4,
)


def value(parts, ranks) -> float:
    return sum(part.weight * sum(part.squares[:rank]) for part, rank in zip(parts, ranks, strict=True))


def every(parts):
    return itertools.product(*(range(len(part.squares) + 1) for part in parts))


@settings(max_examples=150, deadline=None)
@given(spectra, st.integers(0, 100))
def test_no_other_split_of_a_budget_captures_more(parts, budget):
    ranks = choose(parts, energy=1.0, budget_bytes=budget)
    assert sum(10 * rank for rank in ranks) <= budget
    best = max(value(parts, other) for other in every(parts) if 10 * sum(other) <= budget)
    assert value(parts, ranks) == pytest.approx(best, rel=1e-9, abs=1e-12)


@settings(max_examples=150, deadline=None)
@given(spectra, st.floats(0.05, 1.0))
def test_no_cheaper_split_reaches_the_energy(parts, energy):
    ranks = choose(parts, energy=energy)
    goal = energy * sum(part.weight * part.total for part in parts)
    assert value(parts, ranks) >= goal * (1 - 1e-9)
    cheaper = [other for other in every(parts) if sum(other) < sum(ranks)]
    assert all(value(parts, other) < goal * (1 + 1e-9) for other in cheaper)


def test_a_chunk_that_took_in_little_may_lose_the_same_and_so_a_larger_share():
    little = [spectrum([0.9, 0.05, 0.04, 0.01]), spectrum([0.02])]
    assert choose(little, energy=0.99, typical=100.0) == (1, 0)
    assert choose(little, energy=0.99, typical=200.0) == (0, 0)
    assert choose(little, energy=0.99) == (3, 1)
    assert choose([spectrum([60, 50, 2])], energy=0.99, typical=100.0) == (3,)


@settings(max_examples=100, deadline=None)
@given(spectra, st.integers(0, 60), st.integers(0, 60))
def test_more_bytes_never_take_a_direction_away(parts, budget, more):
    low = choose(parts, energy=1.0, budget_bytes=budget)
    high = choose(parts, energy=1.0, budget_bytes=budget + more)
    assert all(one <= other for one, other in zip(low, high, strict=True))


def test_directions_are_weighed_per_byte_and_small_ones_fill_the_rest():
    wide, narrow = spectrum([9, 8], size=100), spectrum([4, 3], size=10)
    assert choose([wide, narrow], energy=1.0, budget_bytes=20) == (0, 2)
    assert choose([wide, narrow], energy=1.0, budget_bytes=119) == (0, 2)
    assert choose([wide, narrow], energy=1.0, budget_bytes=120) == (1, 2)


def test_a_budget_stops_at_the_energy_and_an_insensitive_tensor_gets_nothing():
    deep, shallow = spectrum([90, 9, 1], weight=2.0), spectrum([500, 400], weight=0.0)
    assert choose([shallow, deep], energy=0.99, budget_bytes=10**6) == (0, 2)
    assert choose([spectrum([]), deep], energy=1.0) == (0, 3)
    assert choose([], energy=0.99) == ()


def measured(kl: float, total: float = 4.0) -> Sensitivity:
    return Sensitivity(kl, 0.1 * total, total)


def test_a_layer_counts_as_its_more_sensitive_tensor_and_none_counts_nothing():
    """A probe that reads no key says nothing about the value behind it."""
    none = Sensitivity(0.0, 0.0, 0.0)
    found = weights([(none, none), (measured(1e-6), measured(0.0)), (measured(0.5), measured(0.0, 2.0))])
    assert found[0] == (0.0, 0.0)
    assert found[2] == (5.0 / 4.0, 5.0 / 2.0)
    assert found[1] == pytest.approx((FLOOR * 5.0 / 4.0,) * 2)


def test_layers_of_which_nothing_was_felt_weigh_the_same():
    found = weights([(measured(0.0, 4.0), measured(0.0, 2.0)), (measured(-1e-9, 4.0), measured(0.0, 2.0))])
    assert found == [(0.25, 0.5), (0.25, 0.5)]
    assert weights([]) == []


@pytest.mark.parametrize(
    ("text", "size"),
    [("3%", 300), ("0.5 %", 50), ("20KB", 20_000), ("1KiB", 1024), ("77", 77), ("100%", 10_000)],
)
def test_budgets_are_read(text, size):
    assert parse_budget(text).of(10_000) == size


@pytest.mark.parametrize("text", ["", "%", "3 percent", "-1%", "0%", "0", "0KB", "nan%", "20K", "1e3"])
def test_what_is_no_budget_is_refused(text):
    with pytest.raises(UsageError, match="budget"):
        parse_budget(text)


def test_a_budget_below_one_direction_is_refused_with_both_sides():
    with pytest.raises(UsageError, match=r"chunk 2: 0\.0100% of 10000 bytes of KV is 1 bytes.*takes 202"):
        check_budget(Budget(share=1e-4), 10_000, 202, "chunk 2")
    check_budget(Budget(num_bytes=202), 10_000, 202, "chunk 2")


def test_weighted_energy_lacks_what_is_missing_of_a_typical_patch():
    assert weighted_energy([(0.75, 1.0), (0.25, 0.5), (0.0, 0.0)]) == 0.875
    assert weighted_energy([(0.1, 0.0)]) == 0.9
    assert weighted_energy([(1.5, 0.0)]) == 0.0
    assert weighted_energy([(None, 0.3), (0.1, 0.3)]) is None
    assert weighted_energy([]) is None


def test_worth_is_counted_in_typical_patches_of_as_many_tokens():
    found = worth([(measured(0.1, 4.0), measured(0.0, 2.0)), (measured(0.0, 0.0), measured(0.0, 0.0))], 10)
    assert found.per_token == pytest.approx(2 * 1.0 / 10)
    shares = found.shares(20)
    assert sum(
        share * total for share, total in zip(shares, (8.0, 4.0, 0.0, 0.0), strict=True)
    ) == pytest.approx(1.0)
    assert proven_energy({"energy": [0.9, 0.4], "energy_weighted": None}) == 0.4
    assert proven_energy({"energy": [0.9, 0.4], "energy_weighted": 0.97}) == 0.97
