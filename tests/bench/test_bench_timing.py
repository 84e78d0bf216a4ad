"""Clocks that stop before the device has finished, first runs counted among the rest, arms that do not take turns."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kamera_cli.bench.episodes import CHUNK_SECONDS, FPS, long_video
from kamera_cli.bench.timing import Samples, take_turns, timed
from kamera_cli.bench.ttft import Order, query_arm
from kamera_cli.bench.ttft_report import Point, break_even
from kamera_cli.engine import Engine
from kamera_cli.results import Stages


class LateDevice:
    """Work that is handed over at once and finished 200 ms later."""

    def __init__(self) -> None:
        self.ready_at = 0.0

    def submit(self) -> None:
        self.ready_at = time.perf_counter() + 0.2

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.ready_at - time.perf_counter()))


def test_a_clock_counts_work_that_finishes_later() -> None:
    device = LateDevice()
    assert timed(device.submit, device.synchronize) >= 200


def test_work_from_before_is_not_counted() -> None:
    device = LateDevice()
    device.submit()
    started = time.perf_counter()
    measured = timed(lambda: None, device.synchronize)
    waited_ms = 1e3 * (time.perf_counter() - started)
    assert measured < waited_ms - 150


def test_ttft_of_a_query_waits_for_the_device(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = long_video(tmp_path / "cards.mp4", 2, seed=0)
    engine.ingest([tmp_path / "cards.mp4"], window="late", fps=FPS, chunk_seconds=CHUNK_SECONDS)
    runner, device = engine.runner, LateDevice()
    extend = runner.extend

    def late(*args, **kwargs):
        logits = extend(*args, **kwargs)
        device.submit()
        return logits

    monkeypatch.setattr(runner, "extend", late)
    monkeypatch.setattr(runner, "synchronize", device.synchronize)
    seen: list[Stages] = []
    measured = query_arm(engine, questions[0].text, Order("late", ["1", "2"]), "blind", seen)()
    assert measured >= 200
    assert seen[0].prefill >= 200


def test_the_first_run_is_kept_apart_and_arms_take_turns() -> None:
    calls: list[str] = []

    def arm(name: str, times: list[float]):
        remaining = iter(times)

        def run() -> float:
            calls.append(name)
            return next(remaining)

        return run

    measured = take_turns({"a": arm("a", [99, 1, 2, 3]), "b": arm("b", [88, 4, 9, 5])}, num_runs=3)
    assert calls == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert measured["a"].warm_up_ms == 99
    assert measured["a"].times_ms == (1, 2, 3)
    assert (measured["b"].median_ms, measured["b"].min_ms, measured["b"].max_ms) == (5, 4, 9)
    assert measured["b"].to_json()["num_runs"] == 3


def test_a_prefix_cache_has_only_what_still_stands_at_the_start() -> None:
    assert Order("w", ["1", "2", "4", "3"]).num_leading == 2
    assert Order("w", ["2", "1", "3"]).num_leading == 0


def point(num_tokens: int, slow: float, fast: float) -> Point:
    samples = {"full": Samples((slow,), 0.0), "patched": Samples((fast,), 0.0)}
    return Point(1, num_tokens, 0, num_tokens, 5, samples, {}, 0.0, 0.0, {}, {}, 1, 1)


def test_break_even_lies_where_the_two_lines_cross() -> None:
    points = [point(100, 10, 20), point(200, 30, 20), point(400, 90, 25)]
    assert break_even(points, "full", "patched") == pytest.approx(150)


def test_break_even_says_never_and_always() -> None:
    assert break_even([point(100, 10, 20), point(200, 19, 20)], "full", "patched") is None
    assert break_even([point(100, 30, 20), point(200, 90, 20)], "full", "patched") == 0.0
