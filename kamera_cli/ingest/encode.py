"""Encode the chunks of one source: processor, vision tower, prefill, write; each chunk once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch

from kamera_cli.errors import KameraError
from kamera_cli.ingest.index import chunk_name, enter_source
from kamera_cli.media.errors import MediaError, UnfitMediaError
from kamera_cli.media.source import MediaChunk, Sampling, SourceInfo, chunks, inspect, num_chunks, printable
from kamera_cli.model.inputs import TYPES, ChunkInputs
from kamera_cli.model.runner import ModelRunner
from kamera_cli.options import IngestOptions
from kamera_cli.results import IngestedChunk, IngestedSource, Progress
from kamera_cli.writing import put_chunk
from kamera_store.format.keys import Identity
from kamera_store.format.records import Record

if TYPE_CHECKING:
    from kamera_cli.context import Context


def sampling(options: IngestOptions, runner: ModelRunner) -> Sampling:
    """How a source is cut for this model: each video chunk holds whole temporal patches."""
    part = getattr(runner.processor, "video_processor", None)
    multiple = getattr(part, "temporal_patch_size", 1)
    return options.sampling(multiple)


def model_inputs(
    runner: ModelRunner, path: str, info: SourceInfo, options: IngestOptions
) -> Iterator[tuple[MediaChunk, ChunkInputs]]:
    """Chunks of a source as the model sees them, one at a time."""
    for chunk in chunks(path, info, sampling(options, runner)):
        if chunk.kind == "text":
            yield from _text_chunks(runner, chunk, options.chunk_tokens)
        else:
            frames = torch.from_numpy(chunk.frames)
            try:
                inputs = runner.media_inputs(
                    chunk.kind,
                    frames,
                    fps=chunk.fps,
                    max_pixels=options.max_pixels,
                    start_s=chunk.start_s or 0.0,
                )
            except ValueError as error:
                raise UnfitMediaError(path, f"the model's processor refuses it: {error}") from error
            yield chunk, inputs


def _text_chunks(
    runner: ModelRunner, whole: MediaChunk, chunk_tokens: int
) -> Iterator[tuple[MediaChunk, ChunkInputs]]:
    assert whole.text is not None
    token_ids = runner.tokenize(whole.text)
    runner.refuse_placeholders(token_ids, whole.name)
    for index, start in enumerate(range(0, token_ids.numel(), chunk_tokens)):
        yield (
            MediaChunk("text", index, whole.name),
            runner.text_inputs(token_ids[start : start + chunk_tokens].clone()),
        )


def encode_source(
    context: Context, path: str, content: str, options: IngestOptions, identity: Identity
) -> tuple[IngestedSource, tuple[Record, ...]]:
    """Encode what the store does not hold yet, and enter the source in the index.

    With ``partial``, a file that is damaged further on counts as what could be read of it.

    Raises
    ------
    MediaError
        The file cannot be decoded, changed while it was read, or holds no token.
    UnfitMediaError
        The model does not take its kind, its processor refuses it, or a chunk is longer than its context.
    NoRoomError
        The quota leaves no room for a chunk; chunks before it stay.
    """
    info = inspect(path)
    if info.content_sha256 != content:
        raise MediaError(path, "it changed while it was being read", "ingest it again when it is finished")
    kinds = context.checkpoint.architecture.media
    if info.kind not in kinds:
        raise UnfitMediaError(
            path, f"it is {info.kind}, and model {context.checkpoint.label} takes {', '.join(kinds)}"
        )
    if not options.dry_run:
        context.ensure_self_tested()
    runner = context.runner
    total = num_chunks(info, sampling(options, runner)) if info.kind != "text" else None
    encoder = _Encoder(context, path, info, options, identity.id)
    notes, whole = info.notes, True
    context.progress(Progress(info.path, 0, total))
    clock = time.perf_counter()
    try:
        for chunk, inputs in model_inputs(runner, path, info, options):
            encoder.spent["decode"] += 1e3 * (time.perf_counter() - clock)
            encoder.add(chunk, inputs)
            context.progress(Progress(info.path, len(encoder.results), total))
            clock = time.perf_counter()
    except MediaError as error:
        if not (options.partial and encoder.results):
            raise
        notes, whole = (*notes, f"only the first {len(encoder.results)} chunks: {error.reason}"), False
    if not encoder.results:
        raise MediaError(path, "it holds no token for this model")
    repeated = len(encoder.results) - len({chunk.id for chunk in encoder.results})
    if repeated:
        notes = (
            *notes,
            f"{repeated} chunks show exactly what another one shows; the window holds such chunks once",
        )
    if whole and not options.dry_run:
        enter_source(
            context, identity, options, encoder.records,
            kind=info.kind, path=info.path, content_sha256=info.content_sha256, notes=notes,
        )  # fmt: skip
    times = {f"{name}_ms": value for name, value in encoder.spent.items()}
    source = IngestedSource(path, info.kind, tuple(encoder.results), False, notes, **times)
    return source, tuple(encoder.records)


class _Encoder:
    """Takes chunks of one source one at a time: finds or encodes each, and keeps count."""

    def __init__(
        self, context: Context, path: str, info: SourceInfo, options: IngestOptions, unit: str
    ) -> None:
        self.results: list[IngestedChunk] = []
        self.records: list[Record] = []
        self.spent = {"decode": 0.0, "encode": 0.0, "prefill": 0.0, "write": 0.0}
        self._context, self._path, self._info, self._options, self._unit = context, path, info, options, unit
        self._warned = False

    def add(self, chunk: MediaChunk, inputs: ChunkInputs) -> None:
        """Find a chunk by what the model would see of it, or encode and store it."""
        context = self._context
        self._refuse_too_long(inputs)
        self._warned = self._warned or _warn_coarse_time(context, inputs)
        identity = context.library.chunk_identity(inputs)
        meta = _meta(context, self._path, self._info, chunk, self._options)
        record = context.store.find(identity, tenant=context.tenant)
        outcome: Literal["encoded", "found", "planned"] = "found"
        raw_bytes = chunk_bytes(context.runner, inputs)
        if record is None:
            outcome = "planned" if self._options.dry_run else "encoded"
            context.store.check_room(raw_bytes)
        if outcome == "encoded":
            record = self._encode(identity, inputs, meta)
        if record is not None:
            self.records.append(record)
        self.results.append(
            IngestedChunk(
                id=identity.id,
                name=chunk_name(meta, self._options.name),
                number=0,
                outcome=outcome,
                num_tokens=inputs.num_tokens,
                raw_bytes=raw_bytes if record is None else record.raw_bytes,
                stored_bytes=0 if record is None else record.stored_bytes,
                start_s=chunk.start_s,
                end_s=chunk.end_s,
            )
        )

    def _refuse_too_long(self, inputs: ChunkInputs) -> None:
        runner = self._context.runner
        length = runner.preamble.positions.span + inputs.positions.span
        if length > runner.max_tokens:
            label = self._context.checkpoint.label
            raise UnfitMediaError(
                self._path,
                f"a chunk takes {length} tokens with the preamble, the context of {label} is {runner.max_tokens}",
                "cut it shorter with --chunk-tokens or --chunk-seconds",
            )

    def _encode(self, identity: Identity, inputs: ChunkInputs, meta: dict[str, Any]) -> Record:
        context = self._context
        encoded = context.runner.encode(inputs)
        self.spent["encode"] += encoded.vision_ms
        self.spent["prefill"] += encoded.prefill_ms
        writing = time.perf_counter()
        put_chunk(context.library, identity, inputs, encoded, unit=self._unit, meta=meta)
        record = context.store.find(identity, tenant=context.tenant)
        if record is None:
            raise KameraError(
                f"chunk {meta['name']} was not stored: its key {identity.id} belongs to other content"
            )
        self.spent["write"] += 1e3 * (time.perf_counter() - writing)
        return record


def chunk_bytes(runner: ModelRunner, inputs: ChunkInputs) -> int:
    """Raw bytes of a chunk: embeddings, the two tensors of every layer, deepstack features, ids and positions."""
    item = torch.empty((), dtype=runner.dtype).element_size()
    hidden = runner.preamble.embeddings.shape[1]
    num_axes = 3 if runner.mrope else 1
    num_bytes = inputs.num_tokens * ((runner.family.token_values() + hidden) * item + 8 * (1 + num_axes))
    if runner.num_deepstack_layers:
        num_visual = int((inputs.token_types != 0).sum())
        num_bytes += num_visual * (runner.num_deepstack_layers * hidden * item + 8)
    return num_bytes


def _meta(
    context: Context, path: str, info: SourceInfo, chunk: MediaChunk, options: IngestOptions
) -> dict[str, Any]:
    source = {
        "path": _reopenable(path, info),
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
        "model": context.checkpoint.label,
    }


def _reopenable(path: str, info: SourceInfo) -> str:
    """The absolute path; for a name that is not UTF-8 its printable form, which opens nothing."""
    absolute = os.path.abspath(path)
    try:
        absolute.encode()
    except UnicodeEncodeError:
        return info.path
    return absolute


def _warn_coarse_time(context: Context, inputs: ChunkInputs) -> bool:
    """One warning when neighbouring grid steps of a video fall on the same time position.

    Read off the positions themselves: releases round the seconds of a step in different ways.
    """
    seconds = inputs.tensors.get("second_per_grid_ts")
    if seconds is None:
        return False
    num_steps = int(inputs.tensors["video_grid_thw"][:, 0].sum())
    num_positions = inputs.positions.ids[0, inputs.token_types == TYPES["video"]].unique().numel()
    if num_positions == num_steps:
        return False
    context.warn(
        f"at this rate one grid step is {float(seconds.min()):.3g} s, less than the installed model tells apart "
        f"({num_steps} steps have {num_positions} time positions): neighbouring steps fall together"
    )
    return True
