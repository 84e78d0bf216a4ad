"""The one module that hashes: canonical encodings, identities, checksums."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import xxhash

from kamera_store.format.records import TensorBytes

ENCODING = b"kamera.encoding.v1"
_READ_BYTES = 1 << 20
_LENGTH = struct.Struct(">Q")

new_locator = xxhash.xxh3_128
"""Makes the hasher of keys. Tests replace it by a constant one to force collisions."""


@dataclass(frozen=True)
class Identity:
    """What a record is, as two hashes of one canonical encoding.

    Parameters
    ----------
    kind : str
        ``chunk``, ``patch`` or ``source``.
    key : bytes
        xxh3-128, 16 bytes big-endian: locates.
    digest : bytes
        SHA-256, 32 bytes: proves.
    """

    kind: str
    key: bytes
    digest: bytes

    @property
    def id(self) -> str:
        """What people see: lower-case hex of the key."""
        return self.key.hex()

    @property
    def short_id(self) -> str:
        """First ten characters of `id`."""
        return self.key.hex()[:10]


def checksum64(pieces: Iterable[bytes | memoryview]) -> int:
    """xxh3-64 over the pieces joined, as an unsigned integer."""
    hasher = xxhash.xxh3_64()
    for piece in pieces:
        hasher.update(piece)
    return hasher.intdigest()


def _framed(tag: bytes, payload: bytes) -> Iterator[bytes]:
    yield tag + _LENGTH.pack(len(payload))
    yield payload


def _scalar(value: object) -> tuple[bytes, bytes] | None:
    """Type tag and payload of a value without parts; None for any other value."""
    if value is None:
        return b"N", b""
    if isinstance(value, bool):
        return b"B", b"\x01" if value else b"\x00"
    if isinstance(value, int):
        return b"I", str(value).encode()
    if isinstance(value, float):
        if value != value:
            raise ValueError("NaN has no place in an identity")
        return b"F", struct.pack(">d", value)
    if isinstance(value, str):
        return b"S", value.encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return b"Y", bytes(value)
    return None


def _pieces(value: object) -> Iterator[bytes | memoryview]:
    """Canonical encoding of one value: a type tag, a length, the payload. A tensor's bytes are not copied."""
    scalar = _scalar(value)
    if scalar is not None:
        yield from _framed(*scalar)
    elif isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise TypeError("names in an identity are strings")
        yield b"M" + _LENGTH.pack(len(value))
        for name in sorted(value, key=str.encode):
            yield from _framed(b"S", name.encode())
            yield from _pieces(value[name])
    elif isinstance(value, (list, tuple)):
        yield b"L" + _LENGTH.pack(len(value))
        for item in value:
            yield from _pieces(item)
    elif isinstance(value, TensorBytes):
        yield b"T"
        yield from _pieces([value.name, value.layer, value.dtype, value.shape])
        data = value.view()
        yield _LENGTH.pack(len(data))
        yield data
    else:
        raise TypeError(f"{type(value).__name__} has no canonical encoding")


def _encoding(tag: str, fields: Mapping[str, Any]) -> Iterator[bytes | memoryview]:
    yield from _framed(b"V", ENCODING)
    yield from _framed(b"S", tag.encode())
    yield from _pieces(fields)


def encode(tag: str, fields: Mapping[str, Any]) -> bytes:
    """Canonical encoding of named fields under a tag.

    Parameters
    ----------
    tag : str
        What is encoded, so that equal fields of two purposes differ.
    fields : mapping
        Values: None, bool, int, float, str, bytes, list or tuple, mapping, `TensorBytes`.
        Names are sorted; every value carries its type and length.

    Raises
    ------
    TypeError, ValueError
        If a value is of another type, or a float is NaN.
    """
    return b"".join(bytes(piece) for piece in _encoding(tag, fields))


def identity(kind: str, fields: Mapping[str, Any]) -> Identity:
    """Key and digest of ``encode(kind, fields)``, without building it in memory."""
    locator, proof = new_locator(), hashlib.sha256()
    for piece in _encoding(kind, fields):
        locator.update(piece)
        proof.update(piece)
    return Identity(kind, locator.digest(), proof.digest())


def chunk_identity(
    *, fingerprint: str, tenant: str, inputs: Sequence[TensorBytes], extra: Mapping[str, Any] | None = None
) -> Identity:
    """Identity of a chunk: the model and exactly what it saw.

    Parameters
    ----------
    fingerprint : str
        Of the model: weights, configuration, tokenizer, dtype, preamble.
    tenant : str
        Salt, so that two tenants never share an entry.
    inputs : sequence of TensorBytes
        Token ids, pixel tensors, grids, seconds per grid step, relative positions; order counts.
    extra : mapping, optional
        Anything else that changes the stored tensors.

    Raises
    ------
    ValueError
        If there are no inputs: an item without content is never cached.
    """
    if not inputs:
        raise ValueError("a chunk without model inputs has no identity")
    fields = {
        "fingerprint": fingerprint, "tenant": tenant, "inputs": list(inputs), "extra": dict(extra or {}),
    }  # fmt: skip
    return identity("chunk", fields)


def _pair(value: Identity | tuple[bytes, bytes]) -> list[bytes]:
    key, digest = (value.key, value.digest) if isinstance(value, Identity) else value
    if len(key) != 16 or len(digest) != 32:
        raise ValueError(f"a reference is 16 + 32 bytes, not {len(key)} + {len(digest)}")
    return [bytes(key), bytes(digest)]


def patch_identity(
    *,
    chunk: Identity | tuple[bytes, bytes],
    antecedents: Sequence[Identity | tuple[bytes, bytes]],
    kind: Literal["exact", "orbit"],
    tenant: str,
    extra: Mapping[str, Any] | None = None,
) -> Identity:
    """Identity of a patch: the chunk, what stood before it, and the kind.

    Parameters
    ----------
    chunk : Identity or (key, digest)
        The patched chunk.
    antecedents : sequence of Identity or (key, digest)
        Chunks before it; their order counts except for ``orbit``, which sorts them.
    kind : str
        ``exact`` or ``orbit``.
    tenant : str
        Inherited from the antecedents.
    extra : mapping, optional
        Whatever else shapes the patch.
    """
    if kind not in ("exact", "orbit"):
        raise ValueError(f"patch kind {kind!r} is none of exact, orbit")
    pairs = [_pair(item) for item in antecedents]
    if kind == "orbit":
        pairs.sort()
    fields = {
        "chunk": _pair(chunk), "antecedents": pairs, "kind": kind, "tenant": tenant, "extra": dict(extra or {}),
    }  # fmt: skip
    return identity("patch", fields)


def source_identity(
    *, content_sha256: str, parameters: Mapping[str, Any], fingerprint: str, tenant: str
) -> Identity:
    """Identity of an ingested source: file content, how it was sampled, for which model and tenant."""
    fields = {
        "content": content_sha256, "parameters": dict(parameters), "fingerprint": fingerprint, "tenant": tenant,
    }  # fmt: skip
    return identity("source", fields)


def fingerprint_digest(fields: Mapping[str, Any]) -> str:
    """Hex SHA-256 of the canonical encoding of a model's fingerprint fields."""
    proof = hashlib.sha256()
    for piece in _encoding("fingerprint", fields):
        proof.update(piece)
    return proof.hexdigest()


def file_sha256(path: str | os.PathLike[str], on_progress: Callable[[int, int], None] | None = None) -> str:
    """Hex SHA-256 of a file's content; ``on_progress`` gets (bytes done, bytes in all) about once per MiB.

    Raises
    ------
    OSError
        If the file cannot be read.
    """
    proof, done = hashlib.sha256(), 0
    with open(path, "rb") as file:
        total = os.fstat(file.fileno()).st_size
        while block := file.read(_READ_BYTES):
            proof.update(block)
            done += len(block)
            if on_progress is not None:
                on_progress(done, total)
    return proof.hexdigest()
