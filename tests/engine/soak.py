"""Ingest and compile in processes that are killed at any moment; what they leave is compared with an undisturbed run.

Run it for more kills than the suite does: ``python tests/engine/soak.py 50``.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 120


def start(job: str, store: Path, model: Path, source: Path) -> tuple[BaseProcess, Connection]:
    """Start a job in a process of its own, which sends a word when its model is loaded.

    Processes are forked from a server that has the libraries imported and nothing opened.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["kamera_cli.model.runner", "kamera_cli.ingest.encode", "kamera_cli.query.answer"]
    )
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(job, store, model, source, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _work(job: str, store: Path, model: Path, source: Path, ready: Connection) -> None:
    import torch

    from kamera_cli.engine import Engine
    from kamera_cli.settings import Settings

    torch.set_num_threads(1)
    with Engine(Settings(store=store, model=str(model), device="cpu")) as engine:
        ready.send(engine.runner.dtype is not None)
        if job == "ingest":
            engine.ingest([source], chunk_seconds=2)
        else:
            for order, rank in ((None, 6), (["4", "3", "2", "1"], 6), (["2", "4", "1"], 6), (None, 8)):
                engine.compile_patches(order, rank=rank)


@dataclass(frozen=True)
class Soaked:
    """What a soak did: kills that hit a job, records that were committed at those moments, completed runs."""

    num_kills: int
    num_committed: int
    num_completed: int


def soak(folder: Path, model: Path, source: Path, num_kills: int, seed: int = 0) -> Soaked:
    """Kill jobs until ``num_kills`` were hit, checking the store after each, then finish and compare.

    Raises
    ------
    AssertionError
        Something committed was lost, the store did not open, or the finished store holds other content.
    """
    from engine_setups import content

    from kamera_store.kvstore import KVStore

    rng = random.Random(seed)
    lengths = _undisturbed(folder / "calm", model, source)
    with KVStore.open(folder / "calm", create=False) as store:
        expected = content(store)
    hit = committed = completed = 0
    rounds = 0
    while hit < num_kills:
        rounds += 1
        shaken = folder / f"shaken-{rounds}"
        before: dict[str, str] = {}
        for job in ("ingest", "compile"):
            for attempt in range(4):
                last = attempt == 3 or hit >= num_kills
                killed = _run(job, shaken, model, source, None if last else rng.uniform(0, lengths[job]))
                hit += killed
                if (shaken / "data.mdb").exists():
                    with KVStore.open(shaken, create=False) as store:
                        report = store.verify(quarantine=False)
                        assert not report.damaged, report
                        now = content(store)
                    lost = [
                        key for key, value in before.items() if now.get(key) not in (value, expected[key])
                    ]
                    assert not lost, f"{len(lost)} committed records lost or changed by a kill in {job}"
                    committed += len(now) if killed else 0
                    before = now
                if not killed:
                    break
        completed += 1
        assert before == expected, (
            f"round {rounds}: {len(before)} records, expected {len(expected)}, or other bytes"
        )
    return Soaked(hit, committed, completed)


def _undisturbed(store: Path, model: Path, source: Path) -> dict[str, float]:
    """Run both jobs to their end; how long each worked after its model was loaded, in seconds."""
    lengths = {}
    for job in ("ingest", "compile"):
        process, ready = start(job, store, model, source)
        assert ready.recv()
        started = time.monotonic()
        process.join(_LIMIT_S)
        assert process.exitcode == 0
        lengths[job] = time.monotonic() - started
    return lengths


def _run(job: str, store: Path, model: Path, source: Path, kill_after_s: float | None) -> bool:
    """Run a job, or kill it after some time of work; whether the kill hit it."""
    process, ready = start(job, store, model, source)
    if kill_after_s is not None:
        ready.recv()
        time.sleep(kill_after_s)
        process.kill()
    process.join(_LIMIT_S)
    ready.close()
    assert process.exitcode in (0, -signal.SIGKILL), f"{job} ended with {process.exitcode}"
    return process.exitcode != 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "store"), str(ROOT / "tests")]
    from tiny_models import save, write_noise_video

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        clip = write_noise_video(place / "clip.mp4", 3, seconds=8, fps=8)
        began = time.monotonic()
        done = soak(place, save("qwen2_5_vl", place / "model"), clip, int(sys.argv[1]))
        print(f"{done} in {time.monotonic() - began:.0f} s")
