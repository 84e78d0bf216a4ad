"""Bytes or ranks in the suites that are not those of ``compile-patches``, and arms that got another one's answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kamera_cli.bench import BenchOptions, memory
from kamera_cli.bench.arrangement import Arrangement
from kamera_cli.bench.cards import CHUNK_SECONDS, FPS, bench_episode, write_episode
from kamera_cli.bench.episodes import tasks
from kamera_cli.bench.forming import Learner, Residual
from kamera_cli.bench.memory_report import sentence
from kamera_cli.bench.sizes import Size
from kamera_cli.engine import Engine
from kamera_cli.operator.patch import FACTOR_DTYPES
from kamera_cli.operator.ranks import Worth
from kamera_cli.operator.residual import form
from kamera_cli.options import parse_budget
from kamera_cli.patches.request import PatchOptions
from kamera_cli.settings import Settings
from kamera_cli.window import identity_of
from kamera_cli.words import strict_json


@pytest.fixture(scope="module")
def arrangement(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Arrangement:
    return next(tasks(engine.runner, 1, 5, tmp_path_factory.mktemp("episode"))).arrangement


@pytest.fixture(scope="module")
def known(arrangement: Arrangement) -> Worth:
    return Learner().worth(arrangement)


@pytest.mark.parametrize("by_worth", [False, True])
@pytest.mark.parametrize(
    "asked",
    [*(arm.options for arm in memory.arms_of((2, 90)).values()), PatchOptions(rank=1), PatchOptions(budget="900B")],
)  # fmt: skip
def test_directions_that_arms_share_give_the_factors_that_forming_gives(
    arrangement: Arrangement, known: Worth, asked: PatchOptions, by_worth: bool
) -> None:
    after, alone = arrangement.conditioned[-1], arrangement.canonical[-1]
    worth = known if by_worth else None
    kv_bytes = sum(kv.rotary.nbytes + kv.plain.nbytes for kv in alone)
    budget = None if asked.budget is None else parse_budget(asked.budget).of(kv_bytes)
    expected = form(
        after,
        alone,
        rank=asked.rank,
        energy=asked.energy,
        dtype=FACTOR_DTYPES[asked.factor_dtype],
        budget_bytes=budget,
        worth=worth,
    )
    layers, size = Residual(after, alone).cut(asked, worth)
    for made, wanted in zip(layers, expected, strict=True):
        for name in ("rotary", "plain"):
            ours, theirs = getattr(made, name), getattr(wanted, name)
            assert (ours.rank, ours.bits) == (theirs.rank, theirs.bits)
            assert (ours.u.shape, ours.u.dtype) == (theirs.u.shape, theirs.u.dtype)
            # The signs of directions are free, and so are directions of equal size among themselves.
            energy = getattr(wanted, f"{name}_energy")
            assert getattr(made, f"{name}_energy") == pytest.approx(
                energy, abs=1e-2 if ours.bits == 4 else 1e-4
            )
    assert budget is None or size.raw <= budget


def test_a_suites_default_patches_are_the_records_that_compiling_writes(
    settings: Settings, tmp_path: Path
) -> None:
    video = tmp_path / "cards.mp4"
    write_episode(video, bench_episode(0, 5), 5)
    with Engine(replace(settings, store=tmp_path / "store")) as engine:
        engine.ingest([video], fps=FPS, chunk_seconds=CHUNK_SECONDS)
        engine.compile_patches()
        links = [identity_of(entry) for entry in engine.window().entries]
        chunks = [engine.library.find_chunk(entry) for entry in engine.window().entries]
        records = [
            engine.library.find_patch(link, tuple(links[:place]), "exact")
            for place, link in enumerate(links)
            if place
        ]
        window = Arrangement(
            engine.runner,
            [engine.library.segment(chunk) for chunk in chunks],
            [engine.library.layers(chunk) for chunk in chunks],
        )
        worth = Learner().worth(window)
        for place, record in enumerate(records, start=1):
            residual = Residual(window.conditioned[place], window.canonical[place])
            layers, size = residual.cut(PatchOptions(), worth)
            assert [[patch.rotary.rank, patch.plain.rank] for patch in layers] == record.meta["split"]
            arranged = window.patch(place, "auto", worth=worth)
            assert [(patch.rotary.rank, patch.plain.rank) for patch in arranged] == [
                (patch.rotary.rank, patch.plain.rank) for patch in layers
            ]
            assert size.raw == record.raw_bytes
            stored = sum(tensor.stored_bytes for tensor in record.tensors)
            assert size.stored == pytest.approx(stored, rel=0.02)
            of_layers = [tensor for tensor in chunks[place].tensors if tensor.layer >= 0]
            assert residual.kv == Size(
                sum(tensor.raw_bytes for tensor in of_layers),
                sum(tensor.stored_bytes for tensor in of_layers),
            )


def test_more_bytes_of_one_kind_answer_better_and_cost_what_they_say(
    settings: Settings, tmp_path: Path
) -> None:
    result = memory.measure(
        settings, BenchOptions(out=tmp_path, episodes=2, ranks=(1, 4)), lambda _step: None
    )
    arms = result.data["arms"]
    assert [name for name in arms if "rank" in name] == ["rank 1, fp16", "rank 4, fp16", "rank 4, int8"]
    assert arms["re-prefill"]["kl_mean"] == 0.0 < arms["rank 4, fp16"]["kl_mean"]
    assert arms["rank 4, fp16"]["kl_mean"] < arms["rank 1, fp16"]["kl_mean"] < arms["blind"]["kl_mean"]
    assert arms["blind"]["two_hop"]["accuracy"] < 0.5 < arms["auto 0.999, int8"]["two_hop"]["accuracy"]
    assert arms["blind"]["eta"] == 0.0 < arms["rank 1, fp16"]["eta"] < arms["auto 0.999, int8"]["eta"] < 1
    raw = {name: arm["patch_raw_bytes"] for name, arm in arms.items()}
    assert raw["rank 4, fp16"] == 4 * raw["rank 1, fp16"]
    assert 0.5 * raw["rank 4, fp16"] < raw["rank 4, int8"] < 0.55 * raw["rank 4, fp16"]
    for dtype, bits in (("int8", 8), ("int6", 6)):
        assert raw[f"auto 0.95, {dtype}"] < raw[f"auto 0.99, {dtype}"] < raw[f"auto 0.995, {dtype}"], bits
    assert raw["auto 0.95, int8"] < 0.7 * raw["rank 4, int8"], "ranks do not go by worth"
    assert raw["auto 0.99, int6"] == pytest.approx(0.75 * raw["auto 0.99, int8"], rel=0.03)
    assert arms["budget 1 %, int8"]["patch_to_kv_raw_ratio"] <= 0.01
    assert arms["budget 3 %, int8"]["patch_to_kv_raw_ratio"] <= 0.03
    assert raw["re-prefill"] is raw["blind"] is None
    assert all(arm["two_hop"]["count"] == 8 for arm in arms.values())
    assert {chart.name for chart in result.charts} == {"memory_two_hop", "memory_kl"}
    assert all(len(row) == len(table.columns) for table in result.tables for row in table.rows)
    json.dumps(strict_json(result.data), allow_nan=False)


def _row(kind: str, setting: float | None, raw: int | None, accuracy: float) -> dict:
    ratio = None if raw is None else raw / 1000
    two_hop = {"accuracy": accuracy, "low": 0.0, "high": 1.0}
    return {
        "kind": kind, "setting": setting, "patch_raw_bytes": raw, "patch_to_kv_raw_ratio": ratio, "two_hop": two_hop
    }  # fmt: skip


def test_the_sentence_compares_the_least_bytes_with_the_smallest_fixed_rank_that_suffices() -> None:
    rows = {
        "re-prefill": _row("re-prefill", None, None, 0.98),
        "blind": _row("blind", None, None, 0.98),
        "rank 1": _row("fixed, fp16", 1, 10, 0.969),
        "rank 2": _row("fixed, fp16", 2, 20, 0.975),
        "rank 4": _row("fixed, fp16", 4, 40, 0.98),
        "small": _row("auto, int8", 0.9, 5, 0.9),
        "auto": _row("auto, int8", 0.95, 7, 0.971),
    }
    assert sentence(rows).endswith("patches take 0.70 % of the KV (auto) against 2.00 % for rank 2")
    short = {name: rows[name] for name in ("re-prefill", "rank 1", "auto")}
    assert sentence(short).endswith("against no fixed rank of this run")
    assert sentence({name: rows[name] for name in ("re-prefill", "small")}).startswith("no patch of this run")
