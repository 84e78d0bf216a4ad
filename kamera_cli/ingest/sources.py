"""Ingest: source → chunks → model inputs → canonical KV in the store → window.

A source that was ingested before with the same options is found in the source index by the hash of its content: nothing
is decoded, encoded, or even imported for that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kamera_cli.errors import NotFoundError
from kamera_cli.ingest.index import chunk_name, identity_of_source, known_source
from kamera_cli.media.errors import MediaError
from kamera_cli.media.source import content_sha256
from kamera_cli.options import IngestOptions
from kamera_cli.results import (
    IngestedChunk,
    IngestedSource,
    IngestResult,
    SourceFailure,
    WindowEntry,
    WindowView,
)
from kamera_cli.window import load_window, update_window
from kamera_cli.window_changes import appended
from kamera_store.errors import NoRoomError
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
    window = options.window
    with suppress(NotFoundError):
        view = load_window(context.store, context.tenant, window)
        context.refuse_other_model(view, "name another with --window")
    done: list[IngestedSource] = []
    kept: list[Record] = []
    failures: list[SourceFailure] = []
    for path in paths:
        try:
            source, records = _one(context, path, options)
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
            fingerprint=context.fingerprint,
        )
        done = [_numbered(source, view) for source in done]
    total_ms = 1e3 * (time.perf_counter() - started)
    return IngestResult(window, tuple(done), tuple(failures), total_ms, options.dry_run)


def _refuse_pushed_out(context: Context, kept: Sequence[Record]) -> None:
    """Nothing pins a chunk before its window is written: later sources may have pushed earlier ones out, or another
    process deleted them."""
    if all(context.store.get(record.key) is not None for record in kept):
        return
    needed = sum({record.key: record.stored_bytes for record in kept}.values())
    if context.store.quota_bytes is not None and needed > context.store.quota_bytes:
        raise NoRoomError(needed, context.store.quota_bytes, "quota, for all sources of one ingest")
    raise NotFoundError("a chunk of this ingest was deleted from the store meanwhile; ingest again")


def _one(context: Context, path: str, options: IngestOptions) -> tuple[IngestedSource, tuple[Record, ...]]:
    """A source as it was ingested before, or encoded now, and the records of its chunks."""
    content = content_sha256(path)
    identity = identity_of_source(context, content, options)
    known = known_source(context, identity)
    if known is None:
        from kamera_cli.ingest.encode import encode_source

        return encode_source(context, path, content, options, identity)
    source, records = known
    if not options.dry_run:
        context.store.touch([source.key, *(record.key for record in records)])
    chunks = tuple(_described(record, options.name) for record in records)
    return IngestedSource(path, source.meta["kind"], chunks, True, tuple(source.meta["notes"])), records


def _described(record: Record, name: str | None) -> IngestedChunk:
    source = record.meta["source"]
    return IngestedChunk(
        id=record.id,
        name=chunk_name(record.meta, name),
        number=0,
        outcome="found",
        num_tokens=record.meta["num_tokens"],
        raw_bytes=record.raw_bytes,
        stored_bytes=record.stored_bytes,
        start_s=source["start_s"],
        end_s=source["end_s"],
    )


def _entry(record: Record, name: str | None) -> WindowEntry:
    return WindowEntry(
        0, record.id, record.digest.hex(), chunk_name(record.meta, name), record.meta["num_tokens"]
    )


def _numbered(source: IngestedSource, window: WindowView) -> IngestedSource:
    numbers = {entry.chunk: entry.number for entry in window.entries}
    return replace(
        source, chunks=tuple(replace(chunk, number=numbers.get(chunk.id, 0)) for chunk in source.chunks)
    )
