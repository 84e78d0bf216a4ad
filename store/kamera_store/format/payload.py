"""A record's tensors to a payload of segments and back; needs numpy and zstandard, which a listing does not load."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kamera_store.errors import DamagedError
from kamera_store.format import codec, segments
from kamera_store.format.header import encode_header
from kamera_store.format.keys import Identity
from kamera_store.format.records import (
    KINDS,
    RAW,
    Record,
    TensorBytes,
    TensorInfo,
    references,
    sort_tensors,
)

SegmentOf = Callable[[int], memoryview | None]
"""Gives the stored value of a record's segment by number, None where there is none."""

Stored = tuple[TensorInfo, np.ndarray]
"""A tensor's row and its stored bytes, (stored_bytes,) uint8."""


@dataclass(frozen=True)
class Prepared:
    """A record encoded and ready to be written: stored header, payload in order, upper bound for the pages it takes."""

    record: Record
    header: bytes
    pieces: tuple[bytes | memoryview, ...]
    needed_bytes: int

    def segments(self) -> Iterator[bytearray]:
        """Stored values of the segments in order; each is valid until the next is taken."""
        record = self.record
        return segments.cut(record.key, record.digest, self.pieces, record.payload_bytes)


def prepare(
    identity: Identity,
    *,
    tenant: str,
    unit: str,
    meta: Mapping[str, Any],
    tensors: Iterable[TensorBytes],
    cost_ms: float,
    created_s: float | None = None,
) -> Prepared:
    """Encode a record; nothing is written. Parameters as in `kamera_store.base.Store.put`.

    Raises
    ------
    ValueError
        If the format has no such kind, two tensors share name and layer, `meta` is not strict JSON, or a reference
        in it is no key.
    """
    if identity.kind not in KINDS:
        raise ValueError(f"record kind {identity.kind!r} is none of {', '.join(KINDS)}")
    infos: list[TensorInfo] = []
    pieces: list[bytes | memoryview] = []
    offset = 0
    for tensor in sort_tensors(tensors):
        encoded = codec.encode(tensor)
        infos.append(encoded.info(tensor, offset))
        pieces.extend(encoded.pieces)
        offset += encoded.stored_bytes
    created = time.time() if created_s is None else float(created_s)
    record = Record(
        identity.kind, identity.key, identity.digest, tenant, unit, dict(meta), tuple(infos), created,
        float(cost_ms), offset, segments.num_segments(offset),
    )  # fmt: skip
    references(record)
    header = encode_header(record)
    return Prepared(record, header, tuple(pieces), segments.needed_bytes(offset, len(header)))


def fetch(record: Record, infos: Iterable[TensorInfo], segment_of: SegmentOf) -> list[Stored]:
    """Copy the stored bytes of some tensors out of the segments; only those are checked yet (`open_segment`)."""
    opened: dict[int, memoryview] = {}
    out = []
    for info in infos:
        stored = np.empty(info.stored_bytes, np.uint8)
        at = 0
        while at < info.stored_bytes:
            index, start = divmod(info.offset + at, segments.DATA_BYTES)
            data = opened.get(index)
            if data is None:
                if len(opened) > 1:
                    opened.clear()
                data = segments.open_segment(
                    record.key, record.digest, index, record.payload_bytes, segment_of(index)
                )
                opened[index] = data
            step = min(len(data) - start, info.stored_bytes - at)
            stored.data[at : at + step] = data[start : start + step]
            at += step
        out.append((info, stored))
    return out


def decode(record: Record, info: TensorInfo, stored: np.ndarray) -> TensorBytes:
    """Check and decompress one tensor; errors as in `codec.decode`."""
    whole_raw = len(info.planes) == 1 and info.planes[0].codec == RAW
    data = codec.decode(record.key, info, stored)
    return TensorBytes(info.name, info.layer, info.dtype, info.shape, data, "raw" if whole_raw else "auto")


@dataclass(frozen=True)
class Fetched:
    """Stored bytes of some tensors of a record, not yet checked against their checksums."""

    record: Record
    pieces: list[Stored]

    @property
    def num_bytes(self) -> int:
        """Stored bytes of all of them."""
        return sum(info.stored_bytes for info, _ in self.pieces)

    def tensors(self) -> list[TensorBytes]:
        """Check and decompress; DamagedError if any check fails."""
        return [decode(self.record, info, stored) for info, stored in self.pieces]

    def decode(self) -> dict[str, TensorBytes]:
        """`tensors` by name, for pieces of one layer."""
        return {tensor.name: tensor for tensor in self.tensors()}


def require_sound(record: Record, segment_of: SegmentOf, found_segments: int) -> None:
    """Check every stored byte of a record's payload, in so many segments, without decompressing it.

    Raises
    ------
    DamagedError
        If a segment or a checksum is wrong, or there are more or fewer segments than the header says.
    """
    for info in record.tensors:
        for _, stored in fetch(record, (info,), segment_of):
            codec.require_checksum(record.key, info, stored)
    expected = segments.num_segments(record.payload_bytes)
    if not expected == record.num_segments == found_segments:
        raise DamagedError(record.key, "number of segments", record.num_segments, found_segments)
