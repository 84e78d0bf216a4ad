"""Whole suites, small: what they hand over, and that a seed decides it. Nothing here asserts a time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kamera_cli.bench import (
    SUITES,
    BenchOptions,
    deficit,
    fidelity,
    orbit,
    report,
    slide,
    store,
    ttft,
)
from kamera_cli.bench.episodes import bench_episode, shuffled
from kamera_cli.bench.fidelity import COMPILED
from kamera_cli.bench.figures import BenchResult
from kamera_cli.bench.geometry import GEOMETRIES, write_checkpoint
from kamera_cli.bench.prompt import AS_COMPILED
from kamera_cli.bench.runner import Task, environment, run
from kamera_cli.errors import UsageError
from kamera_cli.settings import Settings
from kamera_cli.tiny.world import episode
from kamera_cli.words import strict_json


def test_episodes_to_measure_on_are_not_those_of_training_or_selection() -> None:
    drawn = bench_episode(0, 0)
    assert all(episode(0, num_chunks=3, split=split) != drawn for split in ("train", "eval", "example"))


@pytest.mark.parametrize("count", [2, 3, 6])
def test_an_arrangement_is_never_the_order_of_ingest(count: int) -> None:
    orders = {shuffled(count, seed) for seed in range(30)}
    assert tuple(range(count)) not in orders
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert shuffled(count, 3) == shuffled(count, 3)


def test_fidelity_runs_all_arms_and_a_seed_decides_it(settings: Settings, tmp_path: Path) -> None:
    options = BenchOptions(out=tmp_path, ranks=(2, 32), episodes=2, rivals=("oracle",))
    first = fidelity.measure(Task(settings, options))
    again = fidelity.measure(Task(settings, options))
    ignored = {"seconds_per_episode"}
    assert {k: v for k, v in first.data.items() if k not in ignored} == {
        k: v for k, v in again.data.items() if k not in ignored
    }
    arms = first.data["arms"]
    assert arms["re-prefill"]["kl_mean"] == 0.0
    assert arms["patch, rank 32"]["kl_mean"] < arms["patch, rank 2"]["kl_mean"] < arms["blind"]["kl_mean"]
    assert 0 < arms["patch, rank 2"]["energy"] < arms["patch, rank 32"]["energy"] <= 1
    assert arms["patch, rank 2"]["patch_raw_bytes"] * 16 == arms["patch, rank 32"]["patch_raw_bytes"]
    assert {name.split()[0] for name in arms} == {"re-prefill", "blind", "patch,", "patch", "oracle"}
    assert all(arm["two_hop"]["count"] == 8 for arm in arms.values())
    compiled = arms[COMPILED]
    assert compiled["kl_mean"] < 0.01 * arms["blind"]["kl_mean"]
    assert arms["patch, rank 2"]["energy"] < compiled["energy"] < arms["patch, rank 32"]["energy"]
    assert compiled["patch_raw_bytes"] < 0.3 * arms["patch, rank 32"]["patch_raw_bytes"]
    assert all(len(row) == len(table.columns) for table in first.tables for row in table.rows)
    json.dumps(strict_json(first.data), allow_nan=False)


def test_fidelity_without_rivals_runs_what_the_product_has_and_nothing_else(
    settings: Settings, tmp_path: Path
) -> None:
    options = BenchOptions(out=tmp_path, ranks=(2,), episodes=1, rivals=("none",))
    result = fidelity.measure(Task(settings, options))
    assert list(result.data["arms"]) == ["re-prefill", "blind", "patch, rank 2", COMPILED]
    assert [row[0] for row in result.tables[1].rows] == ["2", "auto"]
    assert {chart.name: len(chart.series) for chart in result.charts}["fidelity_kl"] == 1
    report.write(BenchResult((result,), environment(), 0, 1.0), tmp_path)


def test_ttft_times_four_arms_over_the_same_prompt(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ttft, "COUNTS", (1, 2))
    monkeypatch.setattr(ttft, "HEADLINE", 2)
    monkeypatch.setattr(ttft, "NUM_RUNS", 2)
    monkeypatch.setattr(ttft, "NUM_SWEEP_RUNS", 2)
    monkeypatch.setattr(ttft, "NUM_QUESTIONS", 1)
    result = ttft.measure(Task(settings, BenchOptions(out=tmp_path)))
    for point in result.data["points"]:
        assert set(point["ttft"]) == {"full", "reprefill", "patched", "blind"}
        assert all(arm["num_runs"] == 2 and arm["min_ms"] > 0 for arm in point["ttft"].values())
        assert point["num_visual_tokens"] in (128 * point["num_chunks"], 16 * point["num_chunks"])
        assert set(point["stages_ms"]["patched"]) == set(ttft.STAGES)
    longest = result.data["points"][-1]
    assert max(longest["kl"]["patched"]) < max(longest["kl"]["blind"])
    assert max(longest["kl"]["reprefill"]) < 1e-6
    assert not settings.store.exists()
    assert all(len(row) == len(table.columns) for table in result.tables for row in table.rows)
    json.dumps(strict_json(result.data), allow_nan=False)


def test_a_geometry_of_random_weights_loads_like_any_checkpoint(tmp_path: Path, settings: Settings) -> None:
    from kamera_cli.engine import Engine

    small = replace(GEOMETRIES["small"], num_layers=2, vision_depth=1, full_attention=(0,))
    parameters = write_checkpoint(small, tmp_path / "model", seed=1)
    with Engine(replace(settings, model=str(tmp_path / "model"), store=tmp_path / "store")) as engine:
        assert engine.self_test().ok
        assert sum(weight.numel() for weight in engine.runner.model.parameters()) == parameters
        assert engine.runner.family.num_layers == 2


def test_the_store_suite_measures_real_kv_raw_and_compressed(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "NUM_RECORDS", 2)
    monkeypatch.setattr(store, "NUM_CHUNKS", 1)
    monkeypatch.setattr(store, "NUM_RUNS", 1)
    result = store.measure(Task(settings, BenchOptions(out=tmp_path)))
    ratios = {(arm["dtype"], arm["codec"][:3]): arm["ratio"] for arm in result.data["arms"]}
    assert ratios["bfloat16", "raw"] == 1.0
    assert ratios["bfloat16", "byt"] > 1.2
    assert not list(tmp_path.glob("*"))


def test_a_run_writes_its_files_and_leaves_the_users_store_alone(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "NUM_RECORDS", 1)
    monkeypatch.setattr(store, "NUM_CHUNKS", 1)
    monkeypatch.setattr(store, "NUM_RUNS", 1)
    result = run(["store"], settings, BenchOptions(out=tmp_path / "out"))
    document = json.loads((tmp_path / "out" / "bench.json").read_text("utf-8"))
    assert document["suites"]["store"]["arms"] == result.to_json()["suites"]["store"]["arms"]
    assert set(document["environment"]["versions"]) >= {"torch", "transformers"}
    assert {"version", "commit", "date", "processor"} <= set(document["environment"])
    assert document["environment"]["arguments"]["suites"] == ["store"]
    assert document["environment"]["arguments"]["model"] == "kamera-tiny"
    assert len(document["suites"]["store"]["fingerprint"]) == 64
    assert not settings.store.exists()


@pytest.mark.parametrize(
    ("suites", "change", "words"),
    [
        (["speed"], {}, "no suite 'speed'"),
        (["store"], {"geometry": "huge"}, "--geometry 'huge'"),
        (["store"], {"rivals": ("magic",)}, "--rivals 'magic'"),
        (["store"], {"ranks": (0,)}, "--ranks 0"),
        (["store"], {"seed": -1}, "--seed -1"),
        (["store"], {"episodes": 0}, "--episodes 0"),
    ],
)
def test_a_wrong_request_is_refused_before_any_work(
    settings: Settings, tmp_path: Path, suites: list[str], change: dict, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        run(suites, settings, BenchOptions(out=tmp_path / "out", **change))


def test_every_suite_has_a_module_that_measures() -> None:
    from importlib import import_module

    assert all(callable(import_module(f"kamera_cli.bench.{name}").measure) for name in SUITES)


@pytest.mark.parametrize(
    ("num_layers", "cuts"), [(2, [1]), (6, [1, 2, 3, 4, 5]), (36, [1, 6, 11, 16, 21, 26, 31])]
)
def test_the_stack_is_cut_in_a_bounded_number_of_places(num_layers: int, cuts: list[int]) -> None:
    assert deficit.layer_cuts(num_layers) == cuts


def test_the_deficit_adds_up_over_layers_and_tokens(settings: Settings, tmp_path: Path) -> None:
    result = deficit.measure(Task(settings, BenchOptions(out=tmp_path, episodes=1)))
    layers = result.data["layers"]
    assert sum(row["energy_share"] for row in layers) == pytest.approx(1)
    assert layers[0]["energy_share"] == 0
    assert result.data["injected"][0]["closed_from"] == pytest.approx(1)
    assert (
        0 < result.data["token_share_for_energy"]["50%"] < result.data["token_share_for_energy"]["90%"] <= 1
    )
    assert result.data["energy_at_rank"]["values"][64] > 0.9
    capture = result.data["capture"]
    assert capture["rank 16, bare"]["kl_mean"] < capture["blind, bare"]["kl_mean"]
    assert all(len(row) == len(table.columns) for table in result.tables for row in table.rows)
    json.dumps(strict_json(result.data), allow_nan=False)


def test_slide_asks_before_after_and_on_return(settings: Settings, tmp_path: Path) -> None:
    result = slide.measure(Task(settings, BenchOptions(out=tmp_path, episodes=2, ranks=(4,))))
    arms = result.data["arms"]
    assert {name.split(",")[0] for name in arms} == {"before", "left", "left and removed", "recalled"}
    assert len({arm["through"]["count"] for arm in arms.values()}) == 1
    assert arms["before, re-prefill"]["through"]["count"] > 0
    assert arms["recalled, re-prefill"]["kl"] == 0.0 < arms["recalled, patched, rank 4"]["kl"]
    assert arms["recalled, patched, rank 4"]["kl"] < arms["recalled, all blind"]["kl"]
    for kind in ("rank 4", AS_COMPILED):
        removed, kept, back = (
            arms[f"{arm}, {kind}"]
            for arm in ("left and removed", "left, others patched", "recalled, patched")
        )
        assert removed["through"]["accuracy"] < 0.2 < 0.8 < kept["through"]["accuracy"]
        assert back["gone"]["accuracy"] == 1.0 > kept["gone"]["accuracy"]
        assert removed["kl"] < 0.1 * kept["kl"] and removed["kl_p95"] < kept["kl_p95"]
        assert kept["eta"] is None and back["eta"] > 0.9
    assert arms["recalled, all blind"]["eta"] == 0.0
    assert all(len(row) == len(table.columns) for table in result.tables for row in table.rows)
    json.dumps(strict_json(result.data), allow_nan=False)


def test_orbit_asks_every_order_and_compares_ways_to_keep_it(settings: Settings, tmp_path: Path) -> None:
    result = orbit.measure(Task(settings, BenchOptions(out=tmp_path, episodes=1, ranks=(8,))))
    for size, orders in ((3, 6), (4, 24)):
        arms = result.data[f"of_{size}"]["arms"]
        counts = {arm["two_hop"]["count"] for arm in arms.values()}
        assert len(counts) == 1 and counts.pop() % orders == 0
        assert arms["re-prefill"]["kl_max"] == 0.0
        assert arms["orbit, one per set"]["kl_mean"] < 0.1 * arms["blind"]["kl_mean"]
        assert list(arms)[2:] == ["exact, one per order", "orbit, one per set", "one order", "one mean patch"]
        assert arms["one mean patch"]["patch_bytes"] < 0.7 * arms["orbit, one per set"]["patch_bytes"]
    assert [chart.name for chart in result.charts] == ["orbit_answers"]
    assert all(len(row) == len(table.columns) for table in result.tables for row in table.rows)
    json.dumps(strict_json(result.data), allow_nan=False)
