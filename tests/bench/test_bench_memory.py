"""Bytes or ranks in the suites that are not those of ``compile-patches``, and arms that got another one's answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kamera_cli.bench import BenchOptions, memory
from kamera_cli.bench.episodes import CHUNK_SECONDS, FPS, bench_episode, encoded_episodes, write_episode
from kamera_cli.bench.figures import Size
from kamera_cli.bench.memory import sentence
from kamera_cli.bench.prompt import Prompt, kv_size, patch_size
from kamera_cli.bench.runner import Task
from kamera_cli.engine import Engine
from kamera_cli.operator.patch import FACTOR_DTYPES
from kamera_cli.operator.ranks import Worth
from kamera_cli.operator.residual import form
from kamera_cli.options import CompileOptions, parse_budget
from kamera_cli.patches.chunk import read_chunks
from kamera_cli.patches.worth import Learned, learn
from kamera_cli.settings import Settings
from kamera_cli.window import identity_of
from kamera_cli.words import strict_json


@pytest.fixture(scope="module")
def prompt(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Prompt:
    return next(encoded_episodes(engine.runner, 1, 5, tmp_path_factory.mktemp("episode"))).shuffled()


@pytest.fixture(scope="module")
def known(prompt: Prompt) -> Worth | None:
    return learn(prompt.runner, Learned(), prompt.chunks).worth


@pytest.mark.parametrize("by_worth", [False, True])
@pytest.mark.parametrize(
    "asked",
    [*(arm.options for arm in memory.arms_of((2, 90)).values()), CompileOptions(rank=1), CompileOptions(budget="900B")],
)  # fmt: skip
def test_directions_that_arms_share_give_the_factors_that_forming_gives(
    prompt: Prompt, known: Worth, asked: CompileOptions, by_worth: bool
) -> None:
    after, alone = prompt.conditioned[-1], prompt.chunks[-1].canonical
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
    layers = prompt.patch(len(prompt.chunks) - 1, asked, worth)
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
    assert budget is None or patch_size([layers]).raw <= budget


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
        read = read_chunks(engine.context, links)
        window = Prompt(engine.runner, tuple(read[link] for link in links))
        worth = learn(engine.runner, Learned(), window.chunks).worth
        for place, record in enumerate(records, start=1):
            layers = window.patch(place, CompileOptions(), worth)
            size = patch_size([layers])
            assert [[patch.rotary.rank, patch.plain.rank] for patch in layers] == record.meta["split"]
            assert size.raw == record.raw_bytes
            stored = sum(tensor.stored_bytes for tensor in record.tensors)
            assert size.stored == pytest.approx(stored, rel=0.02)
            of_layers = [tensor for tensor in chunks[place].tensors if tensor.layer >= 0]
            assert kv_size(window.chunks[place : place + 1]) == Size(
                sum(tensor.raw_bytes for tensor in of_layers),
                sum(tensor.stored_bytes for tensor in of_layers),
            )


def test_more_bytes_of_one_kind_answer_better_and_cost_what_they_say(
    settings: Settings, tmp_path: Path
) -> None:
    result = memory.measure(Task(settings, BenchOptions(out=tmp_path, episodes=2, ranks=(1, 4))))
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
