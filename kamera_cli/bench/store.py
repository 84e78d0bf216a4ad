"""Suite ``store``: what disk, checksum and compressor make of real KV, per dtype, raw and as byte planes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kamera_cli.bench.episodes import CHUNK_SECONDS, FPS, long_video
from kamera_cli.bench.figures import SuiteResult, Table
from kamera_cli.bench.runner import Run, Task
from kamera_cli.bench.timing import Samples, take_turns
from kamera_cli.model.families.family import LayerKV
from kamera_cli.patches.chunk import read_chunks
from kamera_cli.results import Progress
from kamera_cli.window import identity_of
from kamera_cli.words import format_bytes
from kamera_store.format.keys import identity
from kamera_store.format.records import Record, TensorBytes
from kamera_store.format.tensors import to_bytes
from kamera_store.kvstore import KVStore

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM_CHUNKS = 4
NUM_RECORDS = 16
NUM_RUNS = 5
MIB = 2**20

Row = dict[str, Any]


def measure(task: Task) -> SuiteResult:
    """Write and read the canonical KV of card chunks in a temporary store inside the run's own folder.

    Returns
    -------
    SuiteResult
        One table: ratio, write and read speed for each dtype, raw and compressed.
    """
    with task.run(folder=task.options.out) as run:
        chunks = _real_layers(run)
        arms = [(dtype, codec) for dtype in DTYPES for codec in ("raw", "auto")]
        measured = []
        for done, (dtype, codec) in enumerate(arms):
            task.on_progress(Progress("writing and reading", done, len(arms), "arms"))
            tensors = [_tensors(layers, dtype, codec) for layers in chunks]
            measured.append(_arm(run.work / f"{done}", tensors, dtype, codec))
        described = run.described()
    return _result(measured, described)


def _real_layers(run: Run) -> list[list[LayerKV]]:
    engine = run.engine
    long_video(run.work / "cards.mp4", NUM_CHUNKS, run.options.seed)
    engine.ingest([run.work / "cards.mp4"], fps=FPS, chunk_seconds=CHUNK_SECONDS)
    chunks = read_chunks(engine.context, list(map(identity_of, engine.window().entries)))
    return [chunk.canonical for chunk in chunks.values()]


def _tensors(layers: Sequence[LayerKV], dtype: torch.dtype, codec: str) -> list[TensorBytes]:
    parts = []
    for number, layer in enumerate(layers):
        for name, tensor in (("keys", layer.rotary), ("values", layer.plain)):
            parts.append(replace(to_bytes(name, tensor.to(dtype), layer=number), codec=codec))
    return parts


def _arm(folder: Path, chunks: Sequence[list[TensorBytes]], dtype: torch.dtype, codec: str) -> Row:
    """Write `NUM_RECORDS` records, then read them all; each run writes fresh ones. The page cache is warm for reads."""
    chosen = [chunks[index % len(chunks)] for index in range(NUM_RECORDS)]
    raw_bytes = sum(tensor.raw_bytes for tensors in chosen for tensor in tensors)
    turn = 0
    with KVStore.open(folder) as store:

        def write() -> float:
            nonlocal turn
            turn += 1
            keys = [identity("chunk", {"turn": turn, "index": index}) for index in range(NUM_RECORDS)]
            started = time.perf_counter()
            for key, tensors in zip(keys, chosen, strict=True):
                store.put(key, tenant="bench", unit=str(turn), meta={}, tensors=tensors, cost_ms=1.0)
            return 1e3 * (time.perf_counter() - started)

        def read() -> float:
            records = _latest(store, turn)
            started = time.perf_counter()
            for record in records:
                store.read(record)
            return 1e3 * (time.perf_counter() - started)

        samples = take_turns({"write": write, "read": read}, num_runs=NUM_RUNS)
        stored_bytes = sum(record.stored_bytes for record in _latest(store, turn))
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "codec": "byte planes, zstd where it pays" if codec == "auto" else "raw",
        "raw_bytes": raw_bytes,
        "stored_bytes": stored_bytes,
        "ratio": raw_bytes / stored_bytes,
        "write": samples["write"].to_json() | {"bytes_per_s": _rate(raw_bytes, samples["write"])},
        "read": samples["read"].to_json() | {"bytes_per_s": _rate(raw_bytes, samples["read"])},
    }


def _latest(store: KVStore, turn: int) -> list[Record]:
    keys = [identity("chunk", {"turn": turn, "index": index}) for index in range(NUM_RECORDS)]
    return [record for key in keys if (record := store.find(key, tenant="bench")) is not None]


def _rate(raw_bytes: int, samples: Samples) -> float:
    return 1e3 * raw_bytes / samples.median_ms


def _speed(arm: Row, direction: str) -> str:
    return f"{arm[direction]['bytes_per_s'] / MIB:.0f} MiB/s"


def _result(arms: list[Row], described: Row) -> SuiteResult:
    rows = tuple(
        (
            arm["dtype"],
            arm["codec"],
            format_bytes(arm["raw_bytes"]),
            f"{arm['ratio']:.2f}",
            _speed(arm, "write"),
            _speed(arm, "read"),
        )
        for arm in arms
    )
    notes = (
        f"Speeds count raw bytes; medians of {NUM_RUNS} runs over {NUM_RECORDS} records after one warm-up. Writes end "
        "on the disk (one synchronous transaction per record); reads come from the page cache and are checked.",
    )
    table = Table(
        "Store on this disk", ("dtype", "stored as", ">raw", ">ratio", ">write", ">read"), rows, notes
    )
    planes = {arm["dtype"]: arm for arm in arms if arm["codec"] != "raw"}
    best = planes["bfloat16"]
    sentence = (
        f"bf16 KV as byte planes: {best['ratio']:.2f} times smaller, written at {_speed(best, 'write')} and read at "
        f"{_speed(best, 'read')} of raw bytes"
    )
    return SuiteResult("store", sentence, {**described, "arms": arms}, (table,))
