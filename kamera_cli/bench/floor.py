"""The floor of reuse: bytes to move and operations to do, at the speeds that this machine was measured to have.

A stage is near its floor when nothing but the memory, the decompressor or the matrix unit is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from kamera_cli.bench.results import Table
from kamera_cli.bench.timing import timed
from kamera_cli.model.compat import decoder_of
from kamera_cli.words import format_bytes, format_ms, format_number
from kamera_store.format import codec
from kamera_store.format.keys import checksum64
from kamera_store.format.tensors import to_bytes

if TYPE_CHECKING:
    from kamera_cli.bench.ttft_points import Point
    from kamera_cli.model.runner import ModelRunner

_COPY_BYTES = 64 * 2**20
_MATRIX = 512
_RUNS = 20


def measure_floor(runner: ModelRunner, point: Point) -> dict:
    """Speeds of this machine and the least time of each stage of patched reuse at one context length.

    Parameters
    ----------
    point : Point
        The measured prompt: its bytes, tokens and stage medians.

    Returns
    -------
    dict
        ``speeds``, ``work`` and ``stages``; bytes per second, operations per second, ms.
    """
    copy, checksum, decode = _copy_speed(runner.device), _checksum_speed(), _decode_speed(runner)
    host = _copy_speed(torch.device("cpu"))
    flops = _matmul_speed(runner.device, runner.dtype)
    decoder = decoder_of(runner.model)
    weights = sum(weight.numel() for name, weight in decoder.named_parameters() if "embed_tokens" not in name)
    per_pair = decoder.config.num_attention_heads * runner.family.width_per_pair * runner.family.num_layers

    def operations(new: int, cached: int) -> int:
        pairs = new * cached + new * (new + 1) // 2
        return 2 * weights * new + 2 * per_pair * pairs

    question, context = point.question_tokens, point.num_tokens + runner.preamble.num_tokens
    work = {
        "stored_bytes": point.stored_bytes,
        "raw_bytes": point.raw_bytes,
        "question_operations": operations(question, context),
        "prefill_operations": operations(question + context, 0),
    }
    measured = point.stages["patched"]
    reading = 1e3 * (point.stored_bytes / host + point.stored_bytes / checksum)
    stages = {
        "read": _stage(reading + 1e3 * point.raw_bytes / decode, measured["read"] + measured["decompress"]),
        "assemble": _stage(1e3 * 2 * point.raw_bytes / copy, measured["assemble"]),
        "prefill": _stage(1e3 * work["question_operations"] / flops, measured["prefill"]),
        "re-prefill, language model": _stage(
            1e3 * work["prefill_operations"] / flops, point.stages["reprefill"]["prefill"]
        ),
    }
    speeds = {
        "copy_bytes_per_s": copy,
        "host_copy_bytes_per_s": host,
        "checksum_bytes_per_s": checksum,
        "decode_bytes_per_s": decode,
        "matmul_operations_per_s": flops,
    }
    return {"speeds": speeds, "work": work, "stages": stages}


def _stage(floor_ms: float, measured_ms: float) -> dict[str, float]:
    return {"floor_ms": floor_ms, "measured_ms": measured_ms}


def floor_table(floor: dict) -> Table:
    """Measured against least time, per stage."""
    speeds, work = floor["speeds"], floor["work"]
    rows = tuple(
        (name, format_ms(stage["floor_ms"]), format_ms(stage["measured_ms"]),
         f"{stage['measured_ms'] / stage['floor_ms']:.1f}×" if stage["floor_ms"] else "–")
        for name, stage in floor["stages"].items()
    )  # fmt: skip
    notes = (
        f"Measured here, one after the other: copy {format_bytes(int(speeds['copy_bytes_per_s']))}/s, checksum "
        f"{format_bytes(int(speeds['checksum_bytes_per_s']))}/s, decompress and merge planes "
        f"{format_bytes(int(speeds['decode_bytes_per_s']))}/s of raw KV, matrix product "
        f"{format_number(speeds['matmul_operations_per_s'] / 1e9, 3)} GFLOP/s.",
        f"read: copy and checksum {format_bytes(work['stored_bytes'])}, restore {format_bytes(work['raw_bytes'])}; "
        "assemble: write the KV once joined and once rotated; prefill: the question's matrix products and attention.",
    )
    return Table("Against the floor", ("stage", ">least", ">measured", ">measured : least"), rows, notes)


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
    ids = torch.randint(
        min(100, runner.model.get_input_embeddings().weight.shape[0]), (512,), generator=generator
    )
    layer = runner.prefill_captured([runner.text_segment(ids)])[0][-1]
    tensor = to_bytes("keys", layer.rotary, layer=0)
    encoded = codec.encode(tensor)
    info = encoded.info(tensor, 0)
    stored = _joined(encoded)
    return tensor.raw_bytes / _best_s(lambda: codec.decode(b"\0" * 16, info, stored), lambda: None)


def _joined(encoded: codec.Encoded):
    import numpy as np

    return np.frombuffer(bytearray(b"".join(bytes(piece) for piece in encoded.pieces)), np.uint8)


def _matmul_speed(device: torch.device, dtype: torch.dtype) -> float:
    left = torch.ones(_MATRIX, _MATRIX, device=device, dtype=dtype)
    return 2 * _MATRIX**3 / _best_s(lambda: left @ left, _wait(device))
