"""A rival that is beaten because its sets hold less than was asked, or keep more than they need."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera_cli.bench.shared_orbit import form_shared
from kamera_cli.bench.shared_ranks import SharedTensor, choose_shared
from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator.patch import side_bytes
from kamera_cli.operator.ranks import Worth

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


def bytes_of(patches) -> list[float]:
    """Of each set: its coefficients and its share of V, whose rows the first set holds."""
    num_sets = len(patches)
    basis = sum(
        side_bytes(part.v.shape[1]) * part.rank for kv in patches[0] for part in (kv.rotary, kv.plain)
    )
    own = [
        sum(side_bytes(TOKENS) * part.rank for kv in patch for part in (kv.rotary, kv.plain))
        for patch in patches
    ]
    return [mine + basis / num_sets for mine in own]


@pytest.mark.parametrize("energy", [0.8, 0.97, 0.995])
@pytest.mark.parametrize("num_sets", [1, 3, 7])
def test_every_set_holds_the_weighted_energy_that_was_asked_for(num_sets, energy):
    sets, canonical = made(num_sets, seed=num_sets)
    worth = measured_worth(sets, canonical)
    patches = form_shared(sets, canonical, rank="auto", energy=energy, worth=worth)
    for patch, after in zip(patches, sets, strict=True):
        assert recomputed(patch, after, canonical, worth) >= energy - 1e-6
        assert patch[0].rank == 0  # nothing is absorbed in the first layer
        for first, layer in zip(patches[0], patch, strict=True):
            for whole, part in ((first.rotary, layer.rotary), (first.plain, layer.plain)):
                assert torch.equal(part.v, whole.v[: part.rank])
    without = form_shared(sets, canonical, rank="auto", energy=energy)
    assert all(min(layer.rotary_energy, layer.plain_energy) >= energy for patch in without for layer in patch)


def test_a_set_with_less_to_lose_keeps_fewer_coefficients():
    sets, canonical = made(3)
    patches = form_shared(
        sets[::-1], canonical, rank="auto", energy=0.95, worth=measured_worth(sets, canonical)
    )
    sizes = bytes_of(patches)
    assert sizes[0] >= sizes[1] > sizes[2]


def test_rounding_of_half_precision_takes_no_directions():
    sets, canonical = made(3, dtype=torch.bfloat16)
    noisy = [
        [LayerKV((kv.rotary.float() * (1 + 6e-3)).to(kv.rotary.dtype), kv.plain) for kv in chunk[:1]]
        for chunk in sets
    ]
    assert not torch.equal(noisy[0][0].rotary, canonical[0].rotary)
    patches = form_shared(noisy, canonical[:1], rank="auto", energy=0.99)
    assert [layer.rank for patch in patches for layer in patch] == [0, 0, 0]


def test_the_ranks_of_a_number_are_those_of_every_set():
    sets, canonical = made(3)
    patches = form_shared(sets, canonical, rank=4, energy=0.5)
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
@given(tensors(), st.floats(0, 1))
def test_any_curves_are_met(drawn, share):
    num_sets, parts = drawn
    allowed = [share * sum(part.missing[one][0] for part in parts) + 1e-9 for one in range(num_sets)]
    chosen = choose_shared(parts, allowed)
    lacks = [
        sum(part.missing[one][rank] for part, rank in zip(parts, ranks, strict=True))
        for one, ranks in enumerate(chosen)
    ]
    assert all(lack <= limit + 1e-9 for lack, limit in zip(lacks, allowed, strict=True))
    for ranks in chosen[1:]:
        assert all(rank <= most for rank, most in zip(ranks, chosen[0], strict=True))
