"""An orbit whose sets hold less than was asked, or that takes more bytes than it may."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator.orbit import Coefficients, form_orbit
from kamera_cli.operator.patch import direction_bytes, side_bytes
from kamera_cli.operator.ranks import Worth, weighted_energy
from kamera_cli.operator.shared_ranks import SharedTensor, choose_shared

TOKENS, WIDTHS, LAYERS = 24, (10, 14), 3
WEIGHTS = ((0.0, 0.0), (1.0, 2.0), (8.0, 0.5))


def made(num_sets: int, seed: int = 0, dtype: torch.dtype = torch.float32):
    """Canonical KV, and that of every set with a Δ of falling spectrum of its own on top of a common one."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(width: int) -> torch.Tensor:
        fall = 0.5 ** torch.arange(width)
        return (
            torch.randn(TOKENS, width, generator=generator)
            * fall
            @ torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
        )

    def layer(before: LayerKV | None, scale: float) -> LayerKV:
        parts = []
        for at, width in enumerate(WIDTHS):
            added = scale * matrix(width)
            alone = (
                torch.zeros(TOKENS, width) if before is None else (before.rotary, before.plain)[at].flatten(1)
            )
            parts.append((alone + added)[:, None].to(dtype))
        return LayerKV(*parts)

    canonical = [layer(None, 5.0) for _ in range(LAYERS)]
    common = [layer(kv, 1.0) for kv in canonical]
    sets = [[canonical[0], *(layer(kv, 0.2 + 0.3 * one) for kv in common[1:])] for one in range(num_sets)]
    return sets, canonical


def measured_worth(sets, canonical) -> Worth:
    """As it would be if the first set were the typical patch."""
    total = sum(
        weight * float((getattr(after, name) - getattr(alone, name)).square().sum())
        for after, alone, pair in zip(sets[0], canonical, WEIGHTS, strict=True)
        for name, weight in zip(("rotary", "plain"), pair, strict=True)
    )
    return Worth(WEIGHTS, total / TOKENS)


def recomputed(patch, after, canonical, worth: Worth) -> float:
    """1 less what the factors lack of Δ, weighted, over what a typical patch is worth; from the factors themselves."""
    missing = 0.0
    for layer, kv, alone, pair in zip(patch, after, canonical, WEIGHTS, strict=True):
        for name, weight in zip(("rotary", "plain"), pair, strict=True):
            factors = getattr(layer, name)
            delta = (getattr(kv, name) - getattr(alone, name)).flatten(1).double()
            missing += weight * float((delta - factors.u.T.double() @ factors.v.double()).square().sum())
    return 1.0 - missing / (worth.per_token * TOKENS)


def claimed(patch) -> float:
    parts = [
        part
        for layer in patch
        for part in ((layer.rotary_worth, layer.rotary_energy), (layer.plain_worth, layer.plain_energy))
    ]
    return weighted_energy(parts)


def bytes_of(patches, dtype=None) -> list[int]:
    """Of each set: its coefficients and its share of V, whose rows the first set holds."""
    num_sets = len(patches)
    basis = sum(
        side_bytes(part.v.shape[1], dtype) * part.rank for kv in patches[0] for part in (kv.rotary, kv.plain)
    )
    own = [
        sum(side_bytes(TOKENS, dtype) * part.rank for kv in patch for part in (kv.rotary, kv.plain))
        for patch in patches
    ]
    return [mine + basis / num_sets for mine in own]


@pytest.mark.parametrize(
    ("energy", "dtype"),
    [(0.8, None), (0.97, 6), (0.97, torch.float16), (0.995, None), (0.995, torch.float16)],
)
@pytest.mark.parametrize("num_sets", [1, 3, 7])
def test_every_set_holds_the_weighted_energy_that_was_asked_for(num_sets, energy, dtype):
    sets, canonical = made(num_sets, seed=num_sets)
    worth = measured_worth(sets, canonical)
    patches = form_orbit(sets, canonical, rank="auto", energy=energy, dtype=dtype, worth=worth)
    for patch, after in zip(patches, sets, strict=True):
        assert claimed(patch) >= energy
        assert recomputed(patch, after, canonical, worth) == pytest.approx(claimed(patch), abs=1e-5)
        assert patch[0].rank == 0  # nothing is absorbed in the first layer
    without = form_orbit(sets, canonical, rank="auto", energy=energy, dtype=dtype)
    assert all(
        min(layer.rotary_energy, layer.plain_energy) >= energy and layer.rotary_worth is None
        for patch in without
        for layer in patch
    )


@pytest.mark.parametrize("worthy", [True, False])
def test_no_set_takes_more_than_the_budget_and_more_of_it_buys_energy(worthy):
    sets, canonical = made(3)
    worth = measured_worth(sets, canonical) if worthy else None
    before = [-1.0] * 3
    for budget in (60, 200, 500, 900):
        patches = form_orbit(sets, canonical, rank="auto", energy=1.0, worth=worth, budget_bytes=budget)
        assert 0 < max(bytes_of(patches)) <= budget
        held = [recomputed(patch, after, canonical, measured_worth(sets, canonical)) for patch, after in
                zip(patches, sets, strict=True)]  # fmt: skip
        if worthy:
            assert all(now >= then for now, then in zip(held, before, strict=True)) and held != before
            before = held


def test_a_budget_below_one_direction_leaves_nothing_and_one_direction_has_room_from_there():
    sets, canonical = made(3)
    least = min(direction_bytes(TOKENS, width, num_sharing=3) for width in WIDTHS)
    for budget, rank in ((least - 1, 0), (least, 1)):
        patches = form_orbit(sets, canonical, rank="auto", energy=1.0, budget_bytes=budget)
        assert max(layer.rank for patch in patches for layer in patch) == rank


def test_coefficients_go_with_the_first_rows_of_the_basis():
    """The first set holds all of V, and reading another one over it gives what was formed."""
    sets, canonical = made(7)
    patches = form_orbit(sets, canonical, rank="auto", energy=0.9, worth=measured_worth(sets, canonical))
    ranks = {tuple(part.rank for kv in patch for part in (kv.rotary, kv.plain)) for patch in patches}
    assert len(ranks) > 1
    for patch in patches[1:]:
        for basis, layer in zip(patches[0], patch, strict=True):
            assert layer.rotary.rank <= basis.rotary.rank and layer.plain.rank <= basis.plain.rank
            read = Coefficients(layer.rotary.u, layer.plain.u, 1.0, 1.0).on(basis)
            assert torch.equal(read.rotary.v, layer.rotary.v) and torch.equal(read.plain.v, layer.plain.v)


def test_a_set_with_less_to_lose_keeps_fewer_coefficients():
    sets, canonical = made(3)
    patches = form_orbit(
        sets[::-1], canonical, rank="auto", energy=0.95, worth=measured_worth(sets, canonical)
    )
    sizes = bytes_of(patches)
    assert sizes[0] >= sizes[1] > sizes[2]


def test_rounding_of_half_precision_takes_no_directions():
    sets, canonical = made(3, dtype=torch.bfloat16)
    noisy = [
        [LayerKV(kv.rotary.float() * (1 + 2e-3), kv.plain.float()) for kv in chunk[:1]] for chunk in sets
    ]
    patches = form_orbit(noisy, canonical[:1], rank="auto", energy=0.99)
    assert [layer.rank for patch in patches for layer in patch] == [0, 0, 0]


def test_the_ranks_of_a_number_are_those_of_every_set():
    sets, canonical = made(3)
    patches = form_orbit(sets, canonical, rank=4, energy=0.5)
    assert {layer.rank for patch in patches for layer in patch[1:]} == {4}
    assert all(0.3 < layer.rotary_energy < 1 for patch in patches for layer in patch[1:])


curve = st.lists(st.floats(0, 10), min_size=1, max_size=5).map(
    lambda falls: tuple(sum(falls[at:]) for at in range(len(falls) + 1))
)


@st.composite
def tensors(draw):
    num_sets = draw(st.integers(1, 3))
    made = []
    for _ in range(draw(st.integers(1, 3))):
        first = draw(curve)
        curves = [tuple(size * value for value in first) for size in draw(
            st.lists(st.floats(0.1, 3), min_size=num_sets, max_size=num_sets))]  # fmt: skip
        made.append(SharedTensor(tuple(curves), draw(st.integers(1, 20)), draw(st.integers(1, 20))))
    return num_sets, made


@settings(max_examples=80, deadline=None)
@given(tensors(), st.floats(0, 1), st.one_of(st.none(), st.integers(1, 120)))
def test_any_curves_are_met_or_the_budget_is_what_stopped_it(drawn, share, budget):
    num_sets, parts = drawn
    allowed = [share * sum(part.missing[one][0] for part in parts) + 1e-9 for one in range(num_sets)]
    chosen = choose_shared(parts, allowed, budget_bytes=budget)
    lacks = [
        sum(part.missing[one][rank] for part, rank in zip(parts, ranks, strict=True))
        for one, ranks in enumerate(chosen)
    ]
    spent = [sum(part.share_bytes(num_sets) * rank for part, rank in zip(parts, chosen[0], strict=True))]
    if budget is None:
        assert all(lack <= limit + 1e-9 for lack, limit in zip(lacks, allowed, strict=True))
    else:
        assert spent[0] <= budget
    for ranks in chosen[1:]:
        assert all(rank <= most for rank, most in zip(ranks, chosen[0], strict=True))
    assert lacks[0] >= 0
