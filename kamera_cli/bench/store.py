"""Suite ``store``: what disk, checksum and compressor make of real KV, per dtype, raw and as byte planes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kamera_cli.bench.cards import CHUNK_SECONDS, FPS, long_video
from kamera_cli.bench.results import SuiteResult, Table
from kamera_cli.bench.timing import Samples, take_turns
from kamera_cli.engine import Engine
from kamera_cli.model.families.family import LayerKV
from kamera_cli.results import Progress
from kamera_cli.settings import Settings
from kamera_cli.words import format_bytes
from kamera_store.format.keys import identity
from kamera_store.format.records import Record, TensorBytes
from kamera_store.format.tensors import to_bytes
from kamera_store.kvstore import KVStore

if TYPE_CHECKING:
    from kamera_cli.bench import BenchOptions

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM_CHUNKS = 4
NUM_RECORDS = 16
NUM_RUNS = 5
MIB = 2**20


def measure(
    settings: Settings, options: BenchOptions, on_progress: Callable[[Progress], None]
) -> SuiteResult:
    """Write and read the canonical KV of card chunks in a temporary store inside ``options.out``.

    Returns
    -------
    SuiteResult
        One table: ratio, write and read speed for each dtype, raw and compressed.
    """
    with tempfile.TemporaryDirectory(prefix="store-", dir=options.out) as folder:
        work = Path(folder)
        chunks = _real_layers(settings, work, options.seed, on_progress)
        arms = [(dtype, codec) for dtype in DTYPES for codec in ("raw", "auto")]
        measured = []
        for done, (dtype, codec) in enumerate(arms):
            on_progress(Progress("writing and reading", done, len(arms), "arms"))
            tensors = [_tensors(layers, dtype, codec) for layers in chunks]
            measured.append(_arm(work / f"{done}", tensors, dtype, codec))
    return _result(measured)


def _real_layers(
    settings: Settings, work: Path, seed: int, on_progress: Callable[[Progress], None]
) -> list[list[LayerKV]]:
    long_video(work / "cards.mp4", NUM_CHUNKS, seed)
    own = replace(settings, store=work / "source", quota_bytes=None, rehash=False)
    with Engine(own, on_progress=on_progress) as engine:
        engine.ingest([work / "cards.mp4"], fps=FPS, chunk_seconds=CHUNK_SECONDS)
        records = [engine.library.find_chunk(entry) for entry in engine.window().entries]
        return [engine.library.layers(record) for record in records]


def _tensors(layers: Sequence[LayerKV], dtype: torch.dtype, codec: str) -> list[TensorBytes]:
    parts = []
    for number, layer in enumerate(layers):
        for name, tensor in (("keys", layer.rotary), ("values", layer.plain)):
            parts.append(replace(to_bytes(name, tensor.to(dtype), layer=number), codec=codec))
    return parts


def _arm(folder: Path, chunks: Sequence[list[TensorBytes]], dtype: torch.dtype, codec: str) -> dict:
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


def _speed(arm: dict, direction: str) -> str:
    return f"{arm[direction]['bytes_per_s'] / MIB:.0f} MiB/s"


def _result(arms: list[dict]) -> SuiteResult:
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
    return SuiteResult("store", sentence, {"arms": arms}, (table,))
