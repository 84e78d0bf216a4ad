"""Compositions of other pairs than those of the chunk, or under another rule than the arm's name says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kamera_cli.bench import BenchOptions, compose
from kamera_cli.bench.compose import COMPOSED, EXACT, MEAN, NO_GAIN, SUM
from kamera_cli.bench.figures import BLIND, REFERENCE
from kamera_cli.bench.runner import Task
from kamera_cli.operator.patch import Factors, LayerPatch
from kamera_cli.patches.pairs import with_calibration
from kamera_cli.results import ComposedBound
from kamera_cli.settings import Settings
from kamera_cli.words import strict_json


def _pair(rank: int) -> LayerPatch:
    def factors() -> Factors:
        return Factors(torch.randn(rank, 7, generator=_RANDOM), torch.randn(rank, 5, generator=_RANDOM), 8)

    return LayerPatch(factors(), factors(), 1.0, 1.0)


_RANDOM = torch.Generator().manual_seed(0)


def _dense(patch: LayerPatch) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(part.u.T.float() @ part.v.float() for part in (patch.rotary, patch.plain))


def test_each_rule_is_what_its_arm_is_called() -> None:
    pairs = [_pair(2), _pair(3), _pair(1)]
    bound = ComposedBound(3, kl=0.0, kl_blind=1.0, energy=0.9, gain=0.5, num_samples=6)
    records = [SimpleNamespace(meta=with_calibration({}, ["a", "b", "c", "d"], [bound])) for _ in pairs]
    made = {name: _dense(rule(pairs, records)) for name, rule in compose.RULES.items()}
    for at in (0, 1):
        true = torch.stack([_dense(pair)[at] for pair in pairs])
        assert torch.allclose(made[SUM][at], true.sum(0), atol=1e-5)
        assert torch.allclose(made[MEAN][at], true.mean(0), atol=1e-5)
        assert torch.allclose(made[COMPOSED][at], 0.5 * made[NO_GAIN][at], atol=1e-5)
        weights = true.norm(dim=-1) ** 3
        expected = (true * (weights / weights.sum(0))[..., None]).sum(0)
        assert torch.allclose(made[NO_GAIN][at], expected, atol=1e-5)


def test_compositions_are_between_exact_patches_and_the_sum(settings: Settings, tmp_path: Path) -> None:
    result = compose.measure(Task(settings, BenchOptions(out=tmp_path, episodes=4)))
    arms = result.data["arms"]
    assert list(arms) == [REFERENCE, BLIND, EXACT, COMPOSED, NO_GAIN, SUM, MEAN]
    assert result.data["num_antecedents"] == [1, 2, 3, 4]
    alone = {name: arms[name]["1"]["kl_mean"] for name in arms}
    assert len({alone[name] for name in (COMPOSED, NO_GAIN, SUM, MEAN)}) == 1
    assert alone[COMPOSED] == pytest.approx(alone[EXACT], abs=1e-4)
    most = {name: arms[name]["4"]["kl_mean"] for name in arms}
    assert most[REFERENCE] == 0.0 < most[EXACT] < most[COMPOSED] < 0.1 * most[SUM] < 0.1 * most[BLIND]
    assert most[COMPOSED] < 0.1 * most[MEAN]
    assert (
        arms[BLIND]["all"]["two_hop"]["accuracy"] < 0.2 < 0.8 < arms[COMPOSED]["all"]["two_hop"]["accuracy"]
    )
    for found in arms.values():
        numbers = [str(number) for number in result.data["num_antecedents"]]
        assert found["all"]["two_hop"]["count"] == sum(
            found[number]["two_hop"]["count"] for number in numbers
        )
    assert {chart.name for chart in result.charts} == {"compose_two_hop", "compose_kl"}
    assert all(len(row) == len(table.columns) for table in result.tables for row in table.rows)
    json.dumps(strict_json(result.data), allow_nan=False)
    assert not settings.store.exists()


def test_without_rivals_the_products_rule_stands_alone(settings: Settings, tmp_path: Path) -> None:
    options = BenchOptions(out=tmp_path, episodes=1, rivals=("none",))
    result = compose.measure(Task(settings, options))
    assert list(result.data["arms"]) == [REFERENCE, BLIND, EXACT, COMPOSED]
