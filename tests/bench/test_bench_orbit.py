"""The orbit suite measures another thing than what the product makes, or spends its time on arms nobody asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kamera_cli.bench import BenchOptions, orbit
from kamera_cli.bench.episodes import encoded_episodes
from kamera_cli.bench.figures import BLIND, REFERENCE
from kamera_cli.bench.orbit import EXACT, ORBIT
from kamera_cli.bench.runner import Task
from kamera_cli.engine import Engine
from kamera_cli.patches.tree import conditioned
from kamera_cli.settings import DEFAULT_ENERGY, Settings
from kamera_cli.words import strict_json


def test_conditioned_kv_of_every_order_is_that_of_a_cold_prefill(engine: Engine, tmp_path: Path) -> None:
    encoded = next(encoded_episodes(engine.runner, 1, 3, tmp_path, num_chunks=3))
    found = conditioned(engine.runner, orbit.chains_of(encoded.chunks))
    assert len(found) == 3 * 5
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        prompt = encoded.arranged(order)
        for place, cold in enumerate(prompt.conditioned):
            for one, other in zip(found[prompt.chunks[: place + 1]], cold, strict=True):
                assert torch.allclose(one.rotary, other.rotary, atol=2e-4, rtol=1e-4)
                assert torch.allclose(one.plain, other.plain, atol=2e-4, rtol=1e-4)


def test_by_default_patches_are_those_of_the_product_and_none_drops_the_rivals(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orbit, "SIZES", (3,))
    result = orbit.measure(Task(settings, BenchOptions(out=tmp_path, episodes=2, rivals=("none",))))
    assert result.data["rank"] == "auto" and result.data["energy"] == DEFAULT_ENERGY
    assert result.data["windows_learned_on"] == 1
    arms = result.data["of_3"]["arms"]
    assert set(arms) == {REFERENCE, BLIND, EXACT, ORBIT}
    assert arms[ORBIT]["kl_mean"] < 0.05 * arms[BLIND]["kl_mean"]
    assert arms[ORBIT]["two_hop"]["accuracy"] >= arms[EXACT]["two_hop"]["accuracy"] - 0.05
    assert arms[ORBIT]["patch_bytes"] < 0.06 * result.data["of_3"]["kv_bytes"]
    assert arms[ORBIT]["patch_bytes"] < arms[EXACT]["patch_bytes"]
    assert f"as compile-patches forms them, energy {DEFAULT_ENERGY}" in result.tables[0].notes[0]
    assert result.data["of_3"]["seconds_per_episode"] > 0
    json.dumps(strict_json(result.data), allow_nan=False)


def test_the_bytes_of_the_orbit_arm_are_those_that_the_product_stores(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from kamera_cli.bench.episodes import CHUNK_SECONDS, FPS, bench_episode, write_episode

    monkeypatch.setattr(orbit, "SIZES", (3,))
    options = BenchOptions(out=tmp_path, episodes=1, seed=6, rivals=("none",))
    measured = orbit.measure(Task(settings, options)).data["of_3"]
    write_episode(tmp_path / "0.mp4", bench_episode(0, 6), 600_000)
    with Engine(replace(settings, store=tmp_path / "store")) as product:
        product.ingest([tmp_path / "0.mp4"], fps=FPS, chunk_seconds=CHUNK_SECONDS)
        patches = product.compile_patches(kind="orbit").patches
    assert sum(patch.chunk_kv_bytes for patch in patches) == measured["kv_bytes"]
    assert sum(patch.patch_bytes for patch in patches) == pytest.approx(
        measured["arms"][ORBIT]["patch_bytes"], rel=0.02
    )
