"""A patch of a set that is trusted by the mean of two orders, whatever it lacks of either."""

from __future__ import annotations

import pytest
import torch

from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator.orbit import energy_in_order, mean_kv
from kamera_cli.operator.ranks import Worth
from kamera_cli.operator.residual import form


def layers(seed: int, num_tokens: int = 12) -> list[LayerKV]:
    generator = torch.Generator().manual_seed(seed)
    return [
        LayerKV(*(torch.randn(num_tokens, 2, 4, generator=generator) for _ in range(2))) for _ in range(2)
    ]


def added(base: list[LayerKV], *parts: tuple[float, list[LayerKV]]) -> list[LayerKV]:
    return [
        LayerKV(
            kv.rotary + sum(scale * part[at].rotary for scale, part in parts),
            kv.plain + sum(scale * part[at].plain for scale, part in parts),
        )
        for at, kv in enumerate(base)
    ]


def test_what_another_order_adds_counts_as_missing():
    alone, shared, apart = layers(0), layers(1), layers(2)
    orders = [added(alone, (1.0, shared), (sign, apart)) for sign in (0.2, -0.2)]
    patch = form(mean_kv(orders), alone, rank=8, energy=1.0, dtype=torch.float32)
    for order, sign in zip(orders, (0.2, -0.2), strict=True):
        least = min(
            1 - (sign * getattr(apart[at], name)).square().sum() / delta.square().sum()
            for at in range(2)
            for name in ("rotary", "plain")
            for delta in [getattr(order[at], name) - getattr(alone[at], name)]
        )
        assert energy_in_order(patch, order, alone, None) == pytest.approx(float(least), abs=1e-5)
        assert energy_in_order(patch, added(alone, (1.0, shared)), alone, None) == pytest.approx(
            1.0, abs=1e-5
        )


def test_a_layer_that_is_worth_nothing_may_lack_what_it_likes():
    alone, shared, apart = layers(0), layers(1), layers(2)
    order = added(alone, (1.0, shared), (1.0, apart))
    patch = form(added(alone, (1.0, shared)), alone, rank=8, energy=1.0, dtype=torch.float32)
    missing = [
        float(getattr(apart[at], name).square().sum()) for at in range(2) for name in ("rotary", "plain")
    ]
    worth = Worth(layers=((0.0, 0.0), (1e-3, 0.0)), per_token=1.0)
    assert energy_in_order(patch, order, alone, worth) == pytest.approx(1 - 1e-3 * missing[2] / 12, abs=1e-5)
    assert energy_in_order(patch, order, alone, Worth(((0.0, 0.0),) * 2, 1.0)) == pytest.approx(1.0)
