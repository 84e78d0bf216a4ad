"""Encode the chunks of one source: processor, vision tower, prefill, write; each chunk once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from kamera_cli.errors import UsageError
from kamera_cli.jobs.ingest import IngestOptions, chunk_name, report
from kamera_cli.media.source import MediaChunk, Sampling, SourceInfo, chunks, inspect, num_chunks, printable
from kamera_cli.model.runner import ChunkInputs, ModelRunner
from kamera_cli.results import IngestedChunk, IngestedSource
from kamera_store.keys import Identity
from kamera_store.records import Record

if TYPE_CHECKING:
    from kamera_cli.engine import Engine

LEAST_TEMPORAL_STEP = 1.0
"""Below this many positions per grid step, neighbouring steps fall on the same time position (Qwen2.5-VL)."""


def sampling(options: IngestOptions, runner: ModelRunner) -> Sampling:
    """How a source is cut for this model: each video chunk holds whole temporal patches."""
    part = getattr(runner.processor, "video_processor", None)
    multiple = getattr(part, "temporal_patch_size", 1)
    return Sampling(options.fps, options.chunk_seconds, multiple, options.chunk_tokens)


def model_inputs(
    runner: ModelRunner, path: str, info: SourceInfo, options: IngestOptions
) -> Iterator[tuple[MediaChunk, ChunkInputs]]:
    """Chunks of a source as the model sees them, one at a time."""
    for chunk in chunks(path, info, sampling(options, runner)):
        if chunk.kind == "text":
            yield from _text_chunks(runner, chunk, options.chunk_tokens)
        else:
            frames = torch.from_numpy(chunk.frames)
            yield chunk, runner.media_inputs(chunk.kind, frames, fps=chunk.fps, max_pixels=options.max_pixels)


def _text_chunks(
    runner: ModelRunner, whole: MediaChunk, chunk_tokens: int
) -> Iterator[tuple[MediaChunk, ChunkInputs]]:
    token_ids = runner.tokenize(whole.text)
    for index, start in enumerate(range(0, token_ids.numel(), chunk_tokens)):
        yield (
            MediaChunk("text", index, whole.name),
            runner.text_inputs(token_ids[start : start + chunk_tokens].clone()),
        )


def encode_source(
    engine: Engine, path: str, content: str, options: IngestOptions, identity: Identity
) -> tuple[IngestedSource, tuple[Record, ...]]:
    """Encode what the store does not hold yet, and enter the source in the index.

    Raises
    ------
    MediaError
        The file cannot be decoded, or changed while it was read.
    UsageError
        The model does not take this kind of source, or the source holds no token.
    NoRoomError
        The quota leaves no room for a chunk; chunks before it stay.
    """
    info = inspect(path)
    if info.content_sha256 != content:
        raise UsageError(f"{info.path} changed while it was being read; ingest it again when it is finished")
    if not options.dry_run:
        engine.ensure_self_tested()
    runner = engine.runner
    library = engine.library
    kinds = engine.checkpoint.architecture.media
    if info.kind not in kinds:
        raise UsageError(
            f"model {engine.checkpoint.label} takes {', '.join(kinds)}, not {info.kind}: {info.path}"
        )
    total = num_chunks(info, sampling(options, runner)) if info.kind != "text" else None
    spent = {"decode": 0.0, "encode": 0.0, "prefill": 0.0, "write": 0.0}
    results: list[IngestedChunk] = []
    records: list[Record] = []
    warned = False
    report(engine, 0, total, info.path)
    clock = time.perf_counter()
    for chunk, inputs in model_inputs(runner, path, info, options):
        spent["decode"] += 1e3 * (time.perf_counter() - clock)
        warned = warned or _warn_coarse_time(engine, inputs)
        key = library.chunk_identity(inputs)
        meta = _meta(engine, path, info, chunk, options)
        record = engine.store.find(key, tenant=library.tenant)
        outcome = "found"
        if record is None and options.dry_run:
            outcome = "planned"
        elif record is None:
            outcome = "encoded"
            engine.store.check_room(chunk_bytes(runner, inputs.num_tokens))
            encoded = runner.encode(inputs)
            spent["encode"] += encoded.vision_ms
            spent["prefill"] += encoded.prefill_ms
            writing = time.perf_counter()
            library.put_chunk(key, inputs, encoded, unit=identity.id, meta=meta)
            record = engine.store.find(key, tenant=library.tenant)
            spent["write"] += 1e3 * (time.perf_counter() - writing)
        if record is not None:
            records.append(record)
        results.append(
            _result(runner, key, inputs, record, outcome, chunk_name(meta, options.name), meta["source"])
        )
        report(engine, len(results), total, info.path)
        clock = time.perf_counter()
    if not results:
        raise UsageError(f"{info.path} holds no token for this model")
    if not options.dry_run:
        _index(engine, identity, info, options, records)
    times = {f"{name}_ms": value for name, value in spent.items()}
    return IngestedSource(path, info.kind, tuple(results), False, info.notes, **times), tuple(records)


def chunk_bytes(runner: ModelRunner, num_tokens: int) -> int:
    """Raw bytes of a chunk: embeddings, keys and values of every layer, ids and positions."""
    family = runner.family
    item = torch.empty((), dtype=runner.dtype).element_size()
    kv = 2 * family.num_layers * family.num_kv_heads * family.head_dim
    hidden = runner.model.get_input_embeddings().weight.shape[1]
    num_axes = 3 if runner.architecture.has_vision else 1
    return num_tokens * ((kv + hidden) * item + 8 * (1 + num_axes))


def _meta(engine: Engine, path: str, info: SourceInfo, chunk: MediaChunk, options: IngestOptions) -> dict:
    source = {
        "path": info.path,
        "sha256": info.content_sha256,
        "index": chunk.index,
        "start_s": chunk.start_s,
        "end_s": chunk.end_s,
    }
    ingest = {
        "fps": options.fps,
        "chunk_seconds": options.chunk_seconds,
        "max_pixels": options.max_pixels,
        "chunk_tokens": options.chunk_tokens,
    }
    base = printable(os.path.basename(path))
    return {
        "name": base if info.kind == "image" else f"{base}#{chunk.index + 1}",
        "source": source,
        "ingest": ingest,
        "fps": chunk.fps,
        "model": engine.checkpoint.label,
    }


def _result(
    runner: ModelRunner,
    key: Identity,
    inputs: ChunkInputs,
    record: Record | None,
    outcome: str,
    name: str,
    source: dict,
) -> IngestedChunk:
    raw = chunk_bytes(runner, inputs.num_tokens) if record is None else record.raw_bytes
    stored = 0 if record is None else record.stored_bytes
    return IngestedChunk(
        key.id, name, 0, outcome, inputs.num_tokens, raw, stored, source["start_s"], source["end_s"]
    )


def _index(
    engine: Engine, identity: Identity, info: SourceInfo, options: IngestOptions, records: list[Record]
) -> None:
    listed = [{"key": record.id, "digest": record.digest.hex()} for record in records]
    meta = {
        "kind": info.kind,
        "path": info.path,
        "sha256": info.content_sha256,
        "notes": list(info.notes),
        "chunks": listed,
        "parameters": options.parameters(engine.checkpoint),
        "fingerprint": engine.fingerprint,
    }
    tenant = engine.settings.tenant
    if (old := engine.store.find(identity, tenant=tenant)) is not None:
        engine.store.delete([old.key])
    engine.store.put(identity, tenant=tenant, unit=identity.id, meta=meta, tensors=[], cost_ms=0.0)


def _warn_coarse_time(engine: Engine, inputs: ChunkInputs) -> bool:
    """One warning when neighbouring grid steps of a video fall on the same time position."""
    seconds = inputs.tensors.get("second_per_grid_ts")
    per_second = (
        getattr(engine.runner.model.config.vision_config, "tokens_per_second", None)
        if seconds is not None
        else None
    )
    if per_second is None or float(seconds.min()) * per_second >= LEAST_TEMPORAL_STEP:
        return False
    engine.warn(
        f"at this rate one grid step is {float(seconds.min()):.3g} s, less than one time position of the model "
        f"({1 / per_second:.3g} s): neighbouring steps fall together"
    )
    return True
