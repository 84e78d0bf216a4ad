"""The source index: the chunks that a file gave before, found by the hash of its content and by how it was cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kamera_cli.media.source import RULES, decoder_versions
from kamera_cli.options import IngestOptions
from kamera_store.errors import KameraStoreError
from kamera_store.format.keys import Identity, source_identity
from kamera_store.format.records import Record

if TYPE_CHECKING:
    from kamera_cli.context import Context


def identity_of_source(context: Context, content_sha256: str, options: IngestOptions) -> Identity:
    """Key of a source: its bytes, the model, and whatever else decides its chunks."""
    return source_identity(
        content_sha256=content_sha256,
        parameters=parameters(context, options),
        fingerprint=context.fingerprint,
        tenant=context.tenant,
    )


def parameters(context: Context, options: IngestOptions) -> dict[str, Any]:
    """What, besides the file's bytes and the model fingerprint, decides the chunks of a source."""
    return {
        "fps": float(options.fps),
        "chunk_seconds": float(options.chunk_seconds),
        "max_pixels": options.max_pixels,
        "chunk_tokens": options.chunk_tokens,
        "rules": RULES,
        "decoders": decoder_versions(),
        "processor": context.contents.processor,
    }


def known_source(context: Context, identity: Identity) -> tuple[Record, tuple[Record, ...]] | None:
    """The record of a source and those of all its chunks; None when one of them was evicted or is damaged."""
    source = context.store.find(identity, tenant=context.tenant)
    if source is None:
        return None
    records = []
    for chunk in source.meta["chunks"]:
        listed = Identity("chunk", bytes.fromhex(chunk["key"]), bytes.fromhex(chunk["digest"]))
        try:
            record = context.store.find(listed, tenant=context.tenant)
        except KameraStoreError as error:
            context.warn(f"{error}; encoding the source again")
            return None
        if record is None:
            return None
        records.append(record)
    return (source, tuple(records)) if records else None


def enter_source(
    context: Context,
    identity: Identity,
    options: IngestOptions,
    records: Sequence[Record],
    *,
    kind: str,
    path: str,
    content_sha256: str,
    notes: Sequence[str],
) -> None:
    """Enter a source and its chunks, in place of what stood there.

    Parameters
    ----------
    kind : {"video", "image", "text"}
    path : str
        As it is shown.
    notes : sequence of str
        What a person should know of the file.
    """
    meta = {
        "kind": kind,
        "path": path,
        "sha256": content_sha256,
        "notes": list(notes),
        "chunks": [{"key": record.id, "digest": record.digest.hex()} for record in records],
        "parameters": parameters(context, options),
        "fingerprint": context.fingerprint,
    }
    context.store.put(
        identity, tenant=context.tenant, unit=identity.id, meta=meta, tensors=[], cost_ms=0.0, replace=True
    )


def chunk_name(meta: dict[str, Any], name: str | None) -> str:
    """Name of a chunk in a window: the source's own, or the one asked for, with the chunk's number in the source."""
    return str(meta["name"]) if name is None else f"{name}#{meta['source']['index'] + 1}"
