"""A composed patch that sums what attention merges, lets an idle antecedent count, or loses a direction."""

from __future__ import annotations

import pytest
import torch
from plain_factors import factorise

from kamera_cli.operator.compose import EXPONENT, GainFit, compose, token_sizes, weights
from kamera_cli.operator.patch import Factors, LayerPatch


def _factors(delta: torch.Tensor, dtype: torch.dtype = torch.float32) -> Factors:
    return factorise(delta, min(delta.shape), 1.0, dtype)[0]


def _patch(rotary: torch.Tensor, plain: torch.Tensor, dtype: torch.dtype = torch.float32) -> LayerPatch:
    return LayerPatch(_factors(rotary, dtype), _factors(plain, dtype), 0.99, 0.97)


def _dense(factors: Factors) -> torch.Tensor:
    return factors.u.float().T @ factors.v.float()


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _attention(query: torch.Tensor, sources: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    keys, values = (torch.cat(parts) for parts in zip(*sources, strict=True))
    return torch.softmax(query @ keys.T, dim=-1) @ values


def test_weights_of_every_token_sum_up_to_the_gain():
    found = weights(_random(4, 9, seed=1).abs() + 0.1, gain=1.3)
    assert torch.allclose(found.sum(0), torch.full((9,), 1.3))
    assert bool((found >= 0).all())


def test_equal_sizes_give_the_mean_and_exponent_zero_always_does():
    assert torch.allclose(weights(torch.full((3, 2), 5.0)), torch.full((3, 2), 1 / 3))
    assert torch.allclose(weights(_random(3, 2, seed=2).abs() + 0.1, exponent=0.0), torch.full((3, 2), 1 / 3))


def test_an_antecedent_that_changes_nothing_takes_nothing_from_the_others():
    delta, none = _random(6, 8, seed=3), torch.zeros(6, 8)
    made = compose([_patch(delta, none), _patch(none, delta), _patch(none, none)])
    assert torch.allclose(_dense(made.rotary), delta, atol=1e-5)
    assert torch.allclose(_dense(made.plain), delta, atol=1e-5)


def test_a_token_that_no_antecedent_changes_stays_finite_and_unchanged():
    sizes = torch.tensor([[0.0, 1e-30, 2.0], [0.0, 0.0, 1.0]])
    found = weights(sizes)
    assert bool(torch.isfinite(found).all())
    assert found[:, 0].tolist() == [0.0, 0.0] and found[:, 1].tolist() == [1.0, 0.0]


def test_weights_go_by_token_so_that_each_follows_the_antecedent_it_attends_to():
    first, second = torch.zeros(2, 4), torch.zeros(2, 4)
    first[0], second[1] = 1.0, 1.0
    first[1], second[0] = 0.01, 0.01
    made = _dense(compose([_patch(first, first), _patch(second, second)]).rotary)
    assert torch.allclose(made, torch.ones(2, 4), atol=1e-4)


def test_one_pair_is_its_own_composition():
    pair = _patch(_random(5, 7, seed=4), _random(5, 6, seed=5))
    made = compose([pair])
    assert torch.allclose(_dense(made.rotary), _dense(pair.rotary), atol=1e-5)
    assert torch.allclose(_dense(made.plain), _dense(pair.plain), atol=1e-5)


def test_composing_does_not_depend_on_the_order_of_the_pairs():
    pairs = [_patch(_random(5, 7, seed=seed), _random(5, 6, seed=seed + 9)) for seed in range(3)]
    forth, back = compose(pairs), compose(pairs[::-1])
    assert torch.allclose(_dense(forth.rotary), _dense(back.rotary), atol=1e-5)


def test_factors_are_the_weighted_sum_of_the_pairs_at_the_sum_of_their_ranks():
    deltas = [_random(5, 7, seed=seed) for seed in (6, 7, 8)]
    made = compose([_patch(delta, delta) for delta in deltas], gain=0.9)
    sizes = torch.stack([delta.norm(dim=1) for delta in deltas])
    scale = 0.9 * sizes**EXPONENT / (sizes**EXPONENT).sum(0)
    expected = sum(each[:, None] * delta for each, delta in zip(scale, deltas, strict=True))
    assert torch.allclose(_dense(made.rotary), expected, atol=1e-5)
    assert made.rotary.rank == made.plain.rank == 15
    assert (made.rotary_energy, made.plain_energy) == (0.99, 0.97)


def test_a_lower_rank_keeps_the_largest_directions_of_all_pairs_and_not_the_first_pair():
    small, large = _random(6, 8, seed=10), 10 * _random(6, 8, seed=11)
    made = compose([_patch(small, small), _patch(large, large)])
    cut = _dense(made.rotary.at_rank(6))
    assert float((cut - _dense(made.rotary)).norm()) < 0.1 * float(_dense(made.rotary).norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtype_of_the_factors_stays_and_the_wider_one_wins(dtype):
    delta = _random(5, 7, seed=12)
    made = compose([_patch(delta, delta, dtype), _patch(delta, delta, dtype)])
    assert made.rotary.u.dtype == made.rotary.v.dtype == dtype
    mixed = compose([_patch(delta, delta, dtype), _patch(delta, delta)])
    assert mixed.rotary.u.dtype == torch.float32


def test_pairs_of_rank_zero_compose_to_rank_zero():
    none = torch.zeros(5, 7)
    made = compose([_patch(none, none), _patch(none, none)])
    assert made.rotary.u.shape == (0, 5) and made.rotary.v.shape == (0, 7)


def test_sizes_are_those_of_the_product_also_where_v_is_not_orthonormal():
    u, v = _random(3, 5, seed=13), _random(3, 7, seed=14)
    assert torch.allclose(token_sizes(Factors(u, v)), (u.T @ v).norm(dim=1), atol=1e-5)


def test_a_token_that_looks_at_one_antecedent_gets_what_attention_over_all_of_them_gives():
    """The merge identity where one mass is large: composing is then exact, and summing is not."""
    width = 16
    query = 6 * torch.linalg.qr(_random(width, 4, seed=15))[0].T
    own = (_random(5, width, seed=16) * 0.1, _random(5, width, seed=17))
    antecedents = []
    for index in range(2):
        keys = _random(4, width, seed=20 + index) * 0.1
        keys[index] = query[index] / 2
        antecedents.append((keys, 4 * _random(4, width, seed=30 + index)))
    alone = _attention(query, [own])
    pairs = [_attention(query, [antecedent, own]) - alone for antecedent in antecedents]
    true = _attention(query, [*antecedents, own]) - alone
    made = _dense(compose([_patch(pair, pair) for pair in pairs]).rotary)
    looks = slice(0, 2)
    assert float((made - true)[looks].norm()) < 0.03 * float(true[looks].norm())
    assert float((sum(pairs) - true)[looks].norm()) > 0.15 * float(true[looks].norm())


def test_the_gain_of_samples_that_are_too_small_by_a_factor_is_that_factor_whatever_their_scale():
    fit = GainFit()
    for true in (_random(4, 6, seed=40), 1000 * _random(4, 6, seed=41)):
        fit.add(_factors(true / 1.4), true)
    assert fit.gain == pytest.approx(1.4)
    assert fit.energy(fit.gain) == pytest.approx(1.0)
    assert fit.energy(1.0) == pytest.approx(1 - (0.4 / 1.4) ** 2)


def test_nothing_to_fit_leaves_the_gain_at_one():
    fit = GainFit()
    fit.add(_factors(torch.zeros(2, 3)), torch.zeros(2, 3))
    assert fit.gain == fit.energy(1.0) == 1.0
