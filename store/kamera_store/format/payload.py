"""Between a record and its segments: prepare one for writing, read one back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kamera_store import ledger
from kamera_store.errors import DamagedError, MissingRecordError
from kamera_store.format import codec, segments
from kamera_store.format.header import decode_header, encode_header, header_checksum
from kamera_store.format.keys import Identity, checksum64
from kamera_store.format.records import (
    RAW,
    Record,
    TensorBytes,
    TensorInfo,
    sort_tensors,
)
from kamera_store.lmdb.transaction import Transaction


@dataclass(frozen=True)
class Prepared:
    """A record encoded and ready to be written in one transaction.

    Attributes
    ----------
    record : Record
        What its header says.
    header : bytes
        The stored header.
    pieces : tuple of bytes-like
        The payload in order.
    needed_bytes : int
        Pages that it takes, in bytes, an upper bound.
    """

    record: Record
    header: bytes
    pieces: tuple[bytes | memoryview, ...]
    needed_bytes: int


def prepare(
    identity: Identity,
    *,
    tenant: str,
    unit: str,
    meta: Mapping[str, Any],
    tensors: Iterable[TensorBytes],
    cost_ms: float,
    created_s: float | None,
) -> Prepared:
    """Encode a record; nothing is written.

    Raises
    ------
    ValueError
        If two tensors share name and layer, or `meta` is not strict JSON, or a reference in it is no key.
    """
    infos, pieces, offset = [], [], 0
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
    ledger.references(record)
    header = encode_header(record)
    return Prepared(record, header, tuple(pieces), segments.needed_bytes(offset, len(header)))


def write(txn: Transaction, prepared: Prepared, now_s: float) -> None:
    """Write header, segments, ledger row and links."""
    record = prepared.record
    txn.put("records", record.key, prepared.header)
    values = segments.cut(record.key, record.digest, prepared.pieces, record.payload_bytes)
    for index, value in enumerate(values):
        txn.put("segments", segments.segment_key(record.key, index), value)
    ledger.add(txn, ledger.usage_of(record, len(prepared.header), now_s), record)


def current(txn: Transaction, record: Record) -> Record:
    """The record in hand, or its present writing if it was written again meanwhile.

    Raises
    ------
    MissingRecordError
        If the store has no such record any more.
    DamagedError
        If the stored header is damaged or is of another content.
    """
    header = txn.get("records", record.key)
    if header is None:
        raise MissingRecordError(record.key)
    found = decode_header(record.key, header) if header_checksum(header) != record.header_checksum else None
    if found is None:
        return record
    if found.digest != record.digest:
        raise DamagedError(record.key, "identity", record.digest.hex(), found.digest.hex())
    return found


def fetch(
    txn: Transaction, record: Record, infos: Iterable[TensorInfo]
) -> list[tuple[TensorInfo, np.ndarray]]:
    """Copy the stored bytes of some tensors out of the map; only the segments' frames are checked yet."""
    opened: dict[int, memoryview] = {}
    out = []
    for info in infos:
        stored = np.empty(info.stored_bytes, np.uint8)
        target, at = memoryview(stored), 0
        while at < info.stored_bytes:
            index, start = divmod(info.offset + at, segments.DATA_BYTES)
            data = opened.get(index)
            if data is None:
                if len(opened) > 1:
                    opened.clear()
                value = txn.get("segments", segments.segment_key(record.key, index))
                data = segments.open_segment(record.key, record.digest, index, record.payload_bytes, value)
                opened[index] = data
            step = min(len(data) - start, info.stored_bytes - at)
            target[at : at + step] = data[start : start + step]
            at += step
        out.append((info, stored))
    return out


def decode(record: Record, info: TensorInfo, stored: np.ndarray) -> TensorBytes:
    """Check and decompress one tensor."""
    whole_raw = len(info.planes) == 1 and info.planes[0].codec == RAW
    data = codec.decode(record.key, info, stored)
    return TensorBytes(info.name, info.layer, info.dtype, info.shape, data, "raw" if whole_raw else "auto")


@dataclass(frozen=True)
class FetchedLayer:
    """Stored bytes of one layer of a record, not yet checked against their checksums."""

    record: Record
    pieces: list[tuple[TensorInfo, np.ndarray]]

    def decode(self) -> dict[str, TensorBytes]:
        """Check and decompress: tensors by name.

        Raises
        ------
        DamagedError
            If any check fails.
        """
        return {info.name: decode(self.record, info, stored) for info, stored in self.pieces}


def fetch_layer(txn: Transaction, record: Record, layer: int) -> FetchedLayer:
    """Copy the stored bytes of one layer out of the map; errors as in `current`."""
    now = current(txn, record)
    return FetchedLayer(now, fetch(txn, now, now.layer_tensors(layer)))


def require_sound(txn: Transaction, record: Record) -> None:
    """Check every stored byte of a record's payload without decompressing it.

    Raises
    ------
    DamagedError
        If a segment or a checksum is wrong.
    """
    for info in record.tensors:
        for _, stored in fetch(txn, record, (info,)):
            checksum = checksum64((memoryview(stored),))
            if checksum != info.checksum:
                what = f"tensor {info.name!r} of layer {info.layer} (checksum)"
                raise DamagedError(record.key, what, f"{info.checksum:016x}", f"{checksum:016x}")
    extra = sum(1 for _ in txn.keys("segments", record.key)) - record.num_segments
    if extra or record.num_segments != segments.num_segments(record.payload_bytes):
        raise DamagedError(record.key, "number of segments", record.num_segments, record.num_segments + extra)
