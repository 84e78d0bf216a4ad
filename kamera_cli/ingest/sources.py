"""Ingest: source → chunks → model inputs → canonical KV in the store → window.

A source that was ingested before with the same options is found in the source index by the hash of its content: nothing
is decoded, encoded, or even imported for that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kamera_cli.errors import NotFoundError, RefusedError
from kamera_cli.media.errors import MediaError
from kamera_cli.media.files import content_sha256
from kamera_cli.media.rules import RULES, decoder_versions
from kamera_cli.model.checkpoint import Contents
from kamera_cli.options import IngestOptions
from kamera_cli.results import (
    IngestedChunk,
    IngestedSource,
    IngestResult,
    Progress,
    SourceFailure,
    WindowEntry,
    WindowView,
)
from kamera_cli.window import appended, load_window, update_window
from kamera_store.errors import KameraStoreError, NoRoomError
from kamera_store.format.keys import Identity, source_identity
from kamera_store.format.records import Record

if TYPE_CHECKING:
    from kamera_cli.context import Context


def ingest(context: Context, sources: Sequence[str | Path], options: IngestOptions) -> IngestResult:
    """Ingest sources in order; see ``Engine.ingest``.

    Raises
    ------
    UsageError
        No source, or ``name`` for more than one.
    RefusedError
        The window belongs to another model.
    NoRoomError
        The quota does not hold all sources at once.
    """
    paths = options.checked_sources(sources)
    started = time.perf_counter()
    window, fingerprint = options.window, context.fingerprint
    _refuse_other_model(context, window, fingerprint)
    done: list[IngestedSource] = []
    kept: list[Record] = []
    failures: list[SourceFailure] = []
    for path in paths:
        try:
            source, records = _one(context, path, options, fingerprint)
        except MediaError as error:
            if len(paths) == 1:
                raise
            failures.append(
                SourceFailure(path, error.reason if not error.hint else f"{error.reason}; {error.hint}")
            )
            continue
        done.append(source)
        kept += records
    if not options.dry_run and kept and (options.partial or not failures):
        _refuse_pushed_out(context, kept)
        entries = [_entry(record, options.name) for record in kept]
        view = update_window(
            context.store,
            context.tenant,
            window,
            lambda old: appended(old, entries),
            fingerprint=fingerprint,
        )
        done = [_numbered(source, view) for source in done]
    total_ms = 1e3 * (time.perf_counter() - started)
    return IngestResult(window, tuple(done), tuple(failures), total_ms, options.dry_run)


def parameters(options: IngestOptions, contents: Contents) -> dict[str, object]:
    """What, besides the file's bytes and the model fingerprint, decides the chunks of a source."""
    return {
        "fps": float(options.fps),
        "chunk_seconds": float(options.chunk_seconds),
        "max_pixels": options.max_pixels,
        "chunk_tokens": options.chunk_tokens,
        "rules": RULES,
        "decoders": decoder_versions(),
        "processor": contents.processor,
    }


def _refuse_pushed_out(context: Context, kept: Sequence[Record]) -> None:
    """Nothing pins a chunk before its window is written: later sources may have pushed earlier ones out, or another
    process deleted them."""
    if all(context.store.get(record.key) is not None for record in kept):
        return
    needed = sum({record.key: record.stored_bytes for record in kept}.values())
    if context.store.quota_bytes is not None and needed > context.store.quota_bytes:
        raise NoRoomError(needed, context.store.quota_bytes, "quota, for all sources of one ingest")
    raise NotFoundError("a chunk of this ingest was deleted from the store meanwhile; ingest again")


def _refuse_other_model(context: Context, window: str, fingerprint: str) -> None:
    try:
        owner = load_window(context.store, context.tenant, window).fingerprint
    except NotFoundError:
        return
    if owner != fingerprint:
        raise RefusedError(
            f"window {window!r} holds chunks of another model (its fingerprint {owner[:10]}, "
            f"{context.settings.model} has {fingerprint[:10]}); name another with --window"
        )


def _one(
    context: Context, path: str, options: IngestOptions, fingerprint: str
) -> tuple[IngestedSource, tuple[Record, ...]]:
    tenant = context.tenant
    content = content_sha256(path)
    identity = source_identity(
        content_sha256=content,
        parameters=parameters(options, context.contents),
        fingerprint=fingerprint,
        tenant=tenant,
    )
    known = context.store.find(identity, tenant=tenant)
    records = () if known is None else _still_there(context, known)
    if records and not options.dry_run:
        context.store.touch([known.key, *(record.key for record in records)])
    if records:
        chunks = tuple(_described(record, "found", options.name) for record in records)
        return IngestedSource(path, known.meta["kind"], chunks, True, tuple(known.meta["notes"])), records
    from kamera_cli.ingest.encode import encode_source

    return encode_source(context, path, content, options, identity)


def _still_there(context: Context, source: Record) -> tuple[Record, ...]:
    """Records of all chunks of a known source, or nothing when one of them was evicted or damaged."""
    records = []
    for chunk in source.meta["chunks"]:
        identity = Identity("chunk", bytes.fromhex(chunk["key"]), bytes.fromhex(chunk["digest"]))
        try:
            record = context.store.find(identity, tenant=context.tenant)
        except KameraStoreError as error:
            context.warn(f"{error}; encoding the source again")
            return ()
        if record is None:
            return ()
        records.append(record)
    return tuple(records)


def _described(record: Record, outcome: str, name: str | None) -> IngestedChunk:
    source = record.meta["source"]
    return IngestedChunk(
        id=record.id,
        name=chunk_name(record.meta, name),
        number=0,
        outcome=outcome,
        num_tokens=record.meta["num_tokens"],
        raw_bytes=record.raw_bytes,
        stored_bytes=record.stored_bytes,
        start_s=source["start_s"],
        end_s=source["end_s"],
    )


def chunk_name(meta: dict, name: str | None) -> str:
    """Name of a chunk in a window: the source's own, or the one asked for, with the chunk's number in the source."""
    return meta["name"] if name is None else f"{name}#{meta['source']['index'] + 1}"


def _entry(record: Record, name: str | None) -> WindowEntry:
    return WindowEntry(
        0, record.id, record.digest.hex(), chunk_name(record.meta, name), record.meta["num_tokens"]
    )


def _numbered(source: IngestedSource, window: WindowView) -> IngestedSource:
    numbers = {entry.chunk: entry.number for entry in window.entries}
    return replace(
        source, chunks=tuple(replace(chunk, number=numbers.get(chunk.id, 0)) for chunk in source.chunks)
    )


def report(context: Context, done: int, total: int | None, what: str) -> None:
    """Tell how far an encode is."""
    context.progress(Progress(what, done, total))
