"""Integer factors that lose more than they may, or that do not come back as they were written."""

from __future__ import annotations

import pytest
import torch
from plain_factors import factorise

from kamera_cli.operator.patch import FACTOR_DTYPES, direction_bytes
from kamera_cli.operator.quantise import BITS, pack, rounded, row_bytes, unpack

LENGTHS = [1, 2, 3, 4, 5, 6, 7, 23, 130]


def rows(count: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, length, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 7 - 3)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("length", LENGTHS)
def test_packed_rows_come_back_as_they_were_rounded(length, bits):
    kept = rounded(rows(5, length, seed=length), bits)
    packed = pack(kept, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (5, row_bytes(length, bits))
    back = unpack(packed, length, bits)
    assert torch.allclose(back, kept, rtol=1e-6, atol=0)
    assert torch.equal(pack(back, bits)[:, 4:], packed[:, 4:])


@pytest.mark.parametrize("bits", BITS)
def test_the_packed_bytes_are_the_stated_ones(bits):
    """Scale, then words of 24 bits, first integer lowest, each plus 2^(bits-1)."""
    largest = (1 << (bits - 1)) - 1
    numbers = torch.tensor([[largest, -largest, 0, 1, -1, 2, 0]], dtype=torch.float32)
    packed = pack(numbers * 0.5, bits)[0]
    assert packed[:4].view(torch.float32).item() == 0.5
    each = 24 // bits
    for at, number in enumerate(numbers[0].tolist()):
        word = int.from_bytes(bytes(packed[4 + 3 * (at // each) :][:3].tolist()), "little")
        assert (word >> bits * (at % each)) % (1 << bits) - (1 << (bits - 1)) == number


@pytest.mark.parametrize("bits", BITS)
def test_every_value_is_within_half_a_step(bits):
    given = rows(8, 200)
    step = given.abs().amax(1, keepdim=True) / ((1 << (bits - 1)) - 1)
    assert ((rounded(given, bits) - given).abs() <= 0.5 * step * (1 + 1e-4)).all()


@pytest.mark.parametrize("bits", BITS)
def test_a_row_of_zeros_and_no_row_at_all(bits):
    assert torch.equal(rounded(torch.zeros(2, 9), bits), torch.zeros(2, 9))
    assert torch.equal(unpack(pack(torch.zeros(2, 9), bits), 9, bits), torch.zeros(2, 9))
    assert pack(torch.zeros(0, 9), bits).shape == (0, row_bytes(9, bits))
    assert unpack(pack(torch.zeros(0, 9), bits), 9, bits).shape == (0, 9)


def test_other_widths_are_refused():
    with pytest.raises(ValueError, match="5 bits"):
        rounded(rows(1, 3), 5)


@pytest.mark.parametrize("shape", [(200, 64), (64, 200)])
@pytest.mark.parametrize(("name", "lost"), [("int8", 4e-4), ("int6", 6e-3), ("int4", 9e-2)])
def test_integers_cost_no_more_energy_than_stated(shape, name, lost):
    generator = torch.Generator().manual_seed(1)
    delta = torch.randn(shape[0], 12, generator=generator) @ torch.randn(12, shape[1], generator=generator)
    exact, captured = factorise(delta, 12, 1.0, torch.float32)
    factors, energy = factorise(delta, 12, 1.0, FACTOR_DTYPES[name])
    assert captured - lost <= energy <= captured
    assert factors.bits == FACTOR_DTYPES[name] and exact.bits is None


@pytest.mark.parametrize("name", ["int8", "int6", "int4", None])
def test_a_lower_rank_is_the_first_rows(name):
    delta = rows(40, 30) @ rows(30, 50, seed=1)
    dtype = FACTOR_DTYPES[name or "auto"]
    high, _ = factorise(delta, 20, 0.99, dtype)
    low, _ = factorise(delta, 5, 0.99, dtype)
    bits = high.bits
    assert bits == low.bits == high.at_rank(5).bits
    for one, other in ((high.u, low.u), (high.v, low.v)):
        assert torch.equal(pack(one, bits)[:5], pack(one[:5], bits))
        assert torch.allclose(one[:5], other, atol=float(other.abs().max()) / 7)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float16, 516), (torch.float32, 1032), (8, 4 + 132 + 4 + 129), (6, 4 + 99 + 4 + 96)],
)
def test_bytes_of_a_direction_are_those_that_are_written(dtype, size):
    assert direction_bytes(130, 128, dtype) == size
    factors, _ = factorise(rows(130, 128), 3, 0.99, dtype)
    if factors.bits is None:
        found = factors.u.nbytes + factors.v.nbytes
    else:
        found = pack(factors.u, factors.bits).nbytes + pack(factors.v, factors.bits).nbytes
    assert found == 3 * size
