"""Factors that miss energy, lose directions or blow up on matrices of low rank."""

from __future__ import annotations

import math

import pytest
import torch
from plain_factors import factorise

from kamera_cli.errors import NotFiniteError, UsageError
from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator.patch import MAX_AUTO_RANK, add_into, check_rank
from kamera_cli.operator.residual import form

SHAPES = [(200, 32), (32, 200), (48, 48), (1, 16), (16, 1), (512, 128), (128, 512)]


def matrix(shape: tuple[int, int], seed: int, *, decay: float = 0.8) -> torch.Tensor:
    """Random with singular values decay**i."""
    generator = torch.Generator().manual_seed(seed)
    u, _ = torch.linalg.qr(torch.randn(shape[0], min(shape), generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(shape[1], min(shape), generator=generator, dtype=torch.float64))
    singular = 3.0 * decay ** torch.arange(min(shape), dtype=torch.float64)
    return ((u * singular) @ v.T).float()


def product(factors) -> torch.Tensor:
    return factors.u.T.double() @ factors.v.double()


@pytest.mark.parametrize("rank", [1, 2, 7, 16, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_factors_are_as_good_as_a_truncated_svd(shape, rank):
    delta = matrix(shape, seed=sum(shape))
    factors, energy = factorise(delta, rank, 0.99, torch.float32)
    squares = torch.linalg.svdvals(delta.double()).square()
    kept = min(rank, min(shape))
    assert factors.rank == kept
    best = math.sqrt(float(squares[kept:].sum()))
    error = float((delta.double() - product(factors)).norm())
    assert error <= best + 2e-6 * float(delta.norm())
    assert energy == pytest.approx(float(squares[:kept].sum() / squares.sum()), abs=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_full_rank_factors_leave_no_error(shape):
    delta = matrix(shape, seed=1, decay=0.3)
    factors, energy = factorise(delta, shape[0], 1.0, torch.float32)
    assert float((delta.double() - product(factors)).norm()) <= 1e-6 * float(delta.norm())
    assert energy == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("shape", [(200, 32), (32, 200), (40, 40)])
@pytest.mark.parametrize("true_rank", [1, 3])
def test_more_directions_than_the_matrix_has_stay_finite(shape, true_rank, scale):
    """The Gram matrix of a matrix of low rank has eigenvalues that are zero or negative by rounding."""
    generator = torch.Generator().manual_seed(5)
    left = torch.randn(shape[0], true_rank, generator=generator)
    delta = scale * left @ torch.randn(true_rank, shape[1], generator=generator)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, None):
        factors, energy = factorise(delta, 30, 0.99, dtype)
        assert factors.u.isfinite().all() and factors.v.isfinite().all()
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert float((delta.double() - product(factors)).norm()) <= tolerance * float(delta.norm())
        assert 1 - tolerance <= energy <= 1


def test_duplicate_rows_and_a_zero_column_are_no_trouble():
    delta = torch.zeros(24, 64)
    delta[::2, 3] = 2.0
    factors, energy = factorise(delta, 24, 0.99)
    assert torch.allclose(product(factors).float(), delta, atol=1e-3) and energy > 0.999


def test_no_difference_has_rank_zero():
    factors, energy = factorise(torch.zeros(9, 12), 4, 0.99)
    assert (factors.rank, factors.u.shape, factors.v.shape, energy) == (0, (0, 9), (0, 12), 1.0)


@pytest.mark.parametrize("shape", [(200, 64), (64, 200)])
def test_the_first_directions_of_a_high_rank_are_the_low_rank(shape):
    delta = matrix(shape, seed=8, decay=0.95)
    high, _ = factorise(delta, 64, 0.99, torch.float16)
    low, _ = factorise(delta, 8, 0.99, torch.float16)
    assert torch.equal(high.at_rank(8).u, low.u) and torch.equal(high.at_rank(8).v, low.v)
    assert high.at_rank(None) is high and high.at_rank(65) is high


@pytest.mark.parametrize("shape", [(200, 64), (64, 200)])
@pytest.mark.parametrize("energy", [0.5, 0.9, 0.99, 0.9999])
def test_auto_takes_the_smallest_rank_that_captures_the_energy(shape, energy):
    delta = matrix(shape, seed=9, decay=0.9)
    shares = torch.linalg.svdvals(delta.double()).square()
    shares = shares.cumsum(0) / shares.sum()
    expected = min(int((shares < energy).sum()) + 1, MAX_AUTO_RANK)
    factors, captured = factorise(delta, "auto", energy, torch.float32)
    assert factors.rank == expected
    assert captured >= energy - 1e-5


def test_auto_is_bounded():
    delta = torch.randn(300, 256, generator=torch.Generator().manual_seed(0))
    assert factorise(delta, "auto", 1.0)[0].rank == MAX_AUTO_RANK


def test_values_beyond_half_precision_are_kept_in_single():
    factors, energy = factorise(1e6 * matrix((40, 20), seed=2), 20, 0.99, torch.float16)
    assert torch.float32 in (factors.u.dtype, factors.v.dtype) and energy > 0.999


@pytest.mark.parametrize("rank", [0, -1, 25])
def test_a_rank_out_of_range_is_refused(rank):
    with pytest.raises(UsageError, match=f"rank {rank}.*24 tokens"):
        check_rank(rank, 24)
    check_rank(24, 24)
    check_rank("auto", 24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_patching_adds_in_single_precision_and_leaves_the_canonical_alone(dtype):
    generator = torch.Generator().manual_seed(3)
    alone, after = (torch.randn(21, 2, 8, generator=generator).to(dtype) for _ in range(2))
    kept = alone.clone()
    patch = form([LayerKV(after, after)], [LayerKV(alone, alone)], rank=21, energy=1.0, dtype=torch.float32)[
        0
    ]
    target = torch.empty(21, 16, dtype=dtype)
    add_into(target, alone.flatten(1), patch.rotary)
    expected = after.flatten(1)
    ulp = torch.finfo(dtype).eps
    assert torch.allclose(target.float(), expected.float(), atol=1e-5, rtol=ulp)
    assert torch.equal(alone, kept)
    add_into(target, alone.flatten(1), None)
    assert torch.equal(target, alone.flatten(1))


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_residual_that_is_not_finite_is_refused(value):
    delta = torch.zeros(6, 8)
    delta[2, 3] = value
    with pytest.raises(NotFiniteError):
        factorise(delta, 2, 0.99)
