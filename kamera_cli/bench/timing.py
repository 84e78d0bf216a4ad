"""Clocks that count finished work, repetitions that take turns (each arm sees the same machine), and how fast this
machine could be at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kamera_cli.model.runner import ModelRunner
from kamera_cli.patches.tree import multiplications
from kamera_store.format import codec
from kamera_store.format.keys import checksum64
from kamera_store.format.tensors import to_bytes

_COPY_BYTES = 64 * 2**20
_MATRIX = 512
_RUNS = 20


@dataclass(frozen=True)
class Samples:
    """Times of one arm in ms.

    Attributes
    ----------
    times_ms : tuple of float
        Counted runs, by the clock on the wall.
    warm_up_ms : float
        The first run, which is not among them.
    cpu_ms : tuple of float
        Processor time of the whole call, all threads, for each counted run. A busy machine stretches the wall clock and
        hardly this.
    """

    times_ms: tuple[float, ...]
    warm_up_ms: float
    cpu_ms: tuple[float, ...] = ()

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)

    @property
    def min_ms(self) -> float:
        return min(self.times_ms)

    @property
    def max_ms(self) -> float:
        return max(self.times_ms)

    @property
    def median_cpu_ms(self) -> float | None:
        return statistics.median(self.cpu_ms) if self.cpu_ms else None

    def to_json(self) -> dict[str, Any]:
        """Median, extremes, count, the warm-up run apart, and every time."""
        return {
            "median_ms": self.median_ms,
            "min_ms": self.min_ms,
            "max_ms": self.max_ms,
            "num_runs": len(self.times_ms),
            "warm_up_ms": self.warm_up_ms,
            "median_cpu_ms": self.median_cpu_ms,
            "times_ms": list(self.times_ms),
        }


def timed(run: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """Time of ``run`` in ms, with the device idle before the start and its work finished before the stop."""
    synchronize()
    started = time.perf_counter()
    run()
    synchronize()
    return 1e3 * (time.perf_counter() - started)


def take_turns(arms: Mapping[str, Callable[[], float]], *, num_runs: int) -> dict[str, Samples]:
    """Measure arms one after the other, again and again, each round starting with another arm.

    Parameters
    ----------
    arms : mapping of str to callable
        Each call does the work once and returns its time in ms.
    num_runs : int
        Counted runs per arm; one more run before them is the warm-up.

    Returns
    -------
    dict of str to Samples
    """
    names = list(arms)
    times: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(num_runs + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            started = time.process_time()
            times[name].append(arms[name]())
            cpu[name].append(1e3 * (time.process_time() - started))
    return {
        name: Samples(tuple(measured[1:]), measured[0], tuple(cpu[name][1:]))
        for name, measured in times.items()
    }


def measure_floor(
    runner: ModelRunner, *, num_tokens: int, question_tokens: int, raw_bytes: int, stored_bytes: int
) -> dict[str, Any]:
    """Speeds of this machine and the least time of each stage of patched reuse at one context length.

    A stage is near its floor when nothing but the memory, the decompressor or the matrix unit is waited for.

    Parameters
    ----------
    num_tokens, question_tokens : int
        Of the chunks, and of what follows them.
    raw_bytes, stored_bytes : int
        Of the chunks' KV, as tensors and as they are read.

    Returns
    -------
    dict
        ``speeds``, ``work`` and ``floor_ms`` by stage; bytes per second, operations per second, ms.
    """
    copy, checksum, decode = _copy_speed(runner.device), _checksum_speed(), _decode_speed(runner)
    host = _copy_speed(torch.device("cpu"))
    flops = _matmul_speed(runner.device, runner.dtype)
    weights, per_pair = multiplications(runner)

    def operations(new: int, cached: int) -> int:
        pairs = new * cached + new * (new + 1) // 2
        return 2 * weights * new + 2 * per_pair * pairs

    context = num_tokens + runner.preamble.num_tokens
    work = {
        "stored_bytes": stored_bytes,
        "raw_bytes": raw_bytes,
        "question_operations": operations(question_tokens, context),
        "prefill_operations": operations(question_tokens + context, 0),
    }
    floor_ms = {
        "read": 1e3 * (stored_bytes / host + stored_bytes / checksum + raw_bytes / decode),
        "assemble": 1e3 * 2 * raw_bytes / copy,
        "prefill": 1e3 * work["question_operations"] / flops,
        "re-prefill, language model": 1e3 * work["prefill_operations"] / flops,
    }
    speeds = {
        "copy_bytes_per_s": copy,
        "host_copy_bytes_per_s": host,
        "checksum_bytes_per_s": checksum,
        "decode_bytes_per_s": decode,
        "matmul_operations_per_s": flops,
    }
    return {"speeds": speeds, "work": work, "floor_ms": floor_ms}


def _best_s(run: Callable[[], object], synchronize: Callable[[], None]) -> float:
    run()
    return min(timed(run, synchronize) for _ in range(_RUNS)) / 1e3


def _wait(device: torch.device) -> Callable[[], None]:
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


def _copy_speed(device: torch.device) -> float:
    source = torch.ones(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return _COPY_BYTES / _best_s(lambda: target.copy_(source), _wait(device))


def _checksum_speed() -> float:
    data = memoryview(bytearray(_COPY_BYTES // 4))
    return len(data) / _best_s(lambda: checksum64((data,)), lambda: None)


def _decode_speed(runner: ModelRunner) -> float:
    """Raw bytes per second out of stored bytes in memory, on the preamble-free KV of a real layer of this model."""
    generator = torch.Generator().manual_seed(0)
    model: Any = runner.model
    ids = torch.randint(min(100, model.get_input_embeddings().weight.shape[0]), (512,), generator=generator)
    layer = runner.prefill_captured([runner.text_segment(ids)])[0][-1]
    tensor = to_bytes("keys", layer.rotary, layer=0)
    encoded = codec.encode(tensor)
    info = encoded.info(tensor, 0)
    stored = np.frombuffer(bytearray(b"".join(bytes(piece) for piece in encoded.pieces)), np.uint8)
    return tensor.raw_bytes / _best_s(lambda: codec.decode(b"\0" * 16, info, stored), lambda: None)


def _matmul_speed(device: torch.device, dtype: torch.dtype) -> float:
    left = torch.ones(_MATRIX, _MATRIX, device=device, dtype=dtype)
    return 2 * _MATRIX**3 / _best_s(lambda: left @ left, _wait(device))
