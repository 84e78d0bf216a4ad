"""Tensors formed at once that get other ranks, or worse factors, than one by one from all directions of each."""

from __future__ import annotations

import pytest
import torch
from plain_factors import truncated

from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator import residual as module
from kamera_cli.operator.factorise import OVERSAMPLING, WITHIN, Stack, directions, stacks
from kamera_cli.operator.patch import FACTOR_DTYPES, MAX_AUTO_RANK, direction_bytes
from kamera_cli.operator.ranks import Spectrum, Worth, choose
from kamera_cli.operator.residual import form

KINDS = {
    "fast": lambda count: 0.5 ** torch.arange(count, dtype=torch.float64),
    "slow": lambda count: 0.97 ** torch.arange(count, dtype=torch.float64),
    "flat": lambda count: torch.ones(count, dtype=torch.float64),
    "three": lambda count: (torch.arange(count) < 3).double(),
    "cluster": lambda count: torch.where(torch.arange(count) < 20, 1.0, 1e-3).double(),
    "zero": lambda count: torch.zeros(count, dtype=torch.float64),
}
"""Singular values."""


def delta(shape: tuple[int, int], kind: str, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    u, v = (
        torch.linalg.qr(torch.randn(size, min(shape), generator=generator, dtype=torch.float64))[0]
        for size in shape
    )
    return (scale * (u * KINDS[kind](min(shape))) @ v.T).float()


def layers_of(shapes: tuple[tuple[int, int], tuple[int, int]], kinds: list[str], scale: float = 1.0):
    """Conditioned and canonical KV whose differences are of some kinds, two tensors a layer."""
    after, alone = [], []
    for number in range(0, len(kinds), 2):
        pair = [
            delta(shape, kind, number + at, scale)
            for at, (shape, kind) in enumerate(zip(shapes, kinds[number : number + 2], strict=True))
        ]
        after.append(LayerKV(*(each[:, None] for each in pair)))
        alone.append(LayerKV(*(torch.zeros_like(each)[:, None] for each in pair)))
    return after, alone


def one_by_one(after, alone, rank, energy, dtype, budget_bytes=None, worth=None):
    """(U Vᵀ, energy, rank, directions) of every tensor from all directions of each."""
    deltas = [tensor.float().flatten(1) for layer in after for tensor in (layer.rotary, layer.plain)]
    known = [directions(each) for each in deltas]
    flat = None if worth is None else worth.shares(deltas[0].shape[0])
    spectra = [
        Spectrum(
            tuple(one.squares[:MAX_AUTO_RANK].tolist()), one.total, direction_bytes(*each.shape, dtype),
            1.0 / (one.total or 1.0) if flat is None else flat[index],
        )
        for index, (each, one) in enumerate(zip(deltas, known, strict=True))
    ]  # fmt: skip
    if rank != "auto":
        ranks = [rank] * len(deltas)
    elif worth is None and budget_bytes is None:
        ranks = [choose([spectrum], energy=energy)[0] for spectrum in spectra]
    else:
        typical = None if worth is None else 1.0
        ranks = choose(spectra, energy=energy, typical=typical, budget_bytes=budget_bytes)
    made = [truncated(each, one, rank, dtype) for each, one, rank in zip(deltas, known, ranks, strict=True)]
    return [
        (factors.u.T.float() @ factors.v.float(), share, factors.rank, one)
        for (factors, share), one in zip(made, known, strict=True)
    ]


@pytest.mark.parametrize("dtype_name", ["auto", "int4", "fp32", "fp16"])
@pytest.mark.parametrize("asked", ["energy", "worth", "budget", 3, 40])
@pytest.mark.parametrize("shapes", [((130, 128), (130, 128)), ((90, 256), (90, 96)), ((40, 16), (40, 24))])
def test_ranks_and_factors_are_those_of_one_tensor_after_the_other(shapes, asked, dtype_name):
    kinds = ["zero", "fast", "three", "slow", "flat", "cluster", "fast", "fast"]
    after, alone = layers_of(shapes, kinds)
    worth = Worth(((1.0, 2.0), (3.0, 0.1), (0.2, 0.2), (5.0, 1.0)), 0.1) if asked == "worth" else None
    budget = 20_000 if asked == "budget" else None
    rank = asked if isinstance(asked, int) else "auto"
    dtype = FACTOR_DTYPES[dtype_name]
    made = form(after, alone, rank=rank, energy=0.99, dtype=dtype, budget_bytes=budget, worth=worth)
    expected = one_by_one(after, alone, rank, 0.99, dtype, budget, worth)
    found = [
        (factors, share)
        for layer in made
        for factors, share in ((layer.rotary, layer.rotary_energy), (layer.plain, layer.plain_energy))
    ]
    for (factors, share), (product, energy, count, known), kind in zip(found, expected, kinds, strict=True):
        fewer, more = sorted((factors.rank, count))
        # A goal that cannot be met takes directions as long as there are any, down to those that are rounding.
        assert fewer == more or float(known.squares[fewer:more].sum()) <= 1e-6 * known.total
        assert share == pytest.approx(energy, abs=2e-2 if dtype_name == "int4" else 2e-4)
        if kind == "fast" and dtype_name == "fp32":
            ours = factors.u.T @ factors.v
            assert float((ours - product).square().sum()) <= 1e-6 * known.total


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("shape", [(130, 128), (90, 256)])
def test_what_is_reported_as_found_is_true(shape, kind, scale):
    """Fewer directions may be reported than there are, never one that is none, and none is left out before them."""
    deltas = torch.stack([delta(shape, kind, seed, scale) for seed in range(3)])
    totals = deltas.square().sum((1, 2)).tolist()
    for found, each, total in zip(
        Stack([0, 1, 2], deltas, totals).strongest(16), deltas, totals, strict=True
    ):
        count = len(found.squares)
        assert count <= 16 and (count == 16 or kind != "fast")
        true = torch.linalg.svdvals(each.double()).square()[:count].float()
        torch.testing.assert_close(found.squares, true, rtol=0, atol=2 * WITHIN * total)
        gram = found.vectors.T @ found.vectors
        torch.testing.assert_close(gram, torch.eye(count), rtol=0, atol=1e-4)


def test_only_a_tensor_that_takes_all_that_is_known_is_looked_at_whole(monkeypatch):
    seen = []
    monkeypatch.setattr(module, "directions", lambda one, most: seen.append(1) or directions(one, most))
    after, alone = layers_of(((130, 128), (130, 128)), ["fast", "fast", "fast", "slow"])
    made = form(after, alone, rank="auto", energy=0.99)
    assert len(seen) == 1 and made[1].plain.rank == MAX_AUTO_RANK
    assert made[0].rotary.rank < 24 - OVERSAMPLING


def test_a_difference_that_is_rounding_is_none():
    base = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    nearly = (base.float() * (1 + 1e-3)).bfloat16()
    (stack,) = stacks([(nearly, base), (base + 1, base)])
    assert stack.totals[0] == 0.0 and stack.totals[1] > 1.0 and not stack.deltas[0].any()


@pytest.mark.parametrize("shape", [(130, 128), (90, 256)])
@pytest.mark.parametrize("base", [0.3, 0.5, 0.7])
def test_a_difference_whose_columns_fade_beyond_single_precision_is_factored(shape, base):
    """LAPACK fails to converge on every eighth of such Gram matrices."""
    for seed in range(16):
        generator = torch.Generator().manual_seed(seed)
        faded = torch.randn(shape, generator=generator) * base ** torch.arange(shape[1])
        after, alone = (
            LayerKV(faded[:, None], faded[:, None]),
            LayerKV(*[torch.zeros_like(faded)[:, None]] * 2),
        )
        for rank in ("auto", 100 if shape[0] > 100 else 80):
            (made,) = form([after], [alone], rank=rank, energy=0.999, dtype=torch.float32)
            assert made.plain_energy >= 0.999 - 1e-5
