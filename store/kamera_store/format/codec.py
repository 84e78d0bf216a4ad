"""Tensor bytes to stored bytes and back: byte planes, each compressed where that pays and raw where not.

The exponent bytes of floating point tensors repeat, the mantissa bytes hardly do. Splitting an array into
planes (byte 0 of all elements, byte 1 of all elements, ...) lets zstd work on the former alone, which is
smaller and several times faster than compressing the whole.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import zstandard

from kamera_store.errors import DamagedError
from kamera_store.format.keys import checksum64
from kamera_store.format.records import RAW, ZSTD, Plane, TensorBytes, TensorInfo, byte_view, item_bytes

LEVEL = 1
"""zstd level. Higher ones gain nothing on exponent bytes and cost speed."""

LAYOUTS = {
    "float32": ((0, 2), (2, 1), (3, 1)),
    "float64": ((0, 4), (4, 2), (6, 1), (7, 1)),
    "float16": ((0, 1), (1, 1)),
    "bfloat16": ((0, 1), (1, 1)),
}
"""(first byte, width) of each plane, widest first so that a plane stands aligned in the payload."""

_MIN_COMPRESS_BYTES = 128
_SAMPLE_BYTES = 16 * 1024
_NUM_SAMPLES = 4
_PAYS_RATIO = 0.95
_MAX_ZSTD_RATIO = 32768
"""A zstd block of at most 128 KiB takes at least 4 bytes, so no honest frame expands more."""


@dataclass(frozen=True)
class Encoded:
    """A tensor ready to be written.

    Attributes
    ----------
    planes : tuple of Plane
        Layout of the stored bytes.
    pieces : tuple of bytes-like
        The stored bytes, one piece for each plane.
    stored_bytes, checksum : int
        Their length and xxh3-64.
    """

    planes: tuple[Plane, ...]
    pieces: tuple[bytes | memoryview, ...]
    stored_bytes: int
    checksum: int

    def info(self, tensor: TensorBytes, offset: int) -> TensorInfo:
        """The table row for this tensor at an offset of the payload."""
        return TensorInfo(
            tensor.name, tensor.layer, tensor.dtype, tensor.shape, tensor.raw_bytes,
            offset, self.stored_bytes, self.checksum, self.planes,
        )  # fmt: skip


class _PerThread(threading.local):
    """zstd contexts are not to be shared between threads."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True, write_checksum=False)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _PerThread()


def encode(tensor: TensorBytes) -> Encoded:
    """A tensor's stored bytes: as they are with ``codec="raw"``; with ``"auto"`` what pays is compressed."""
    view = tensor.view()
    size = item_bytes(tensor.dtype)
    if not len(view):
        return _finish((), ())
    whole = ((0, size),)
    if tensor.codec == "raw":
        return _finish((Plane(0, size, RAW, len(view)),), (view,))
    layout = LAYOUTS.get(tensor.dtype, whole)
    parts = [view] if layout == whole else _split(np.frombuffer(view, np.uint8), size, layout)
    planes: list[Plane] = []
    pieces: list[bytes | memoryview] = []
    for (start, width), part in zip(layout, parts, strict=True):
        packed = _compress(part)
        pieces.append(part if packed is None else packed)
        planes.append(Plane(start, width, RAW if packed is None else ZSTD, len(pieces[-1])))
    if all(plane.codec == RAW for plane in planes):
        return _finish((Plane(0, size, RAW, len(view)),), (view,))
    return _finish(tuple(planes), tuple(pieces))


def _finish(planes: tuple[Plane, ...], pieces: tuple[bytes | memoryview, ...]) -> Encoded:
    return Encoded(planes, pieces, sum(plane.stored_bytes for plane in planes), checksum64(pieces))


def _split(flat: np.ndarray, size: int, layout: Sequence[tuple[int, int]]) -> list[memoryview]:
    """Planes of a flat byte array, each contiguous."""
    rows = flat.reshape(-1, size)
    return [
        byte_view(np.ascontiguousarray(rows[:, start : start + width]).reshape(-1)) for start, width in layout
    ]


def _compress(part: memoryview) -> bytes | None:
    """The part as one zstd frame with its size declared, or None where that does not pay."""
    num_bytes = len(part)
    if num_bytes < _MIN_COMPRESS_BYTES:
        return None
    compressor = _contexts.compressor
    if num_bytes > 2 * _NUM_SAMPLES * _SAMPLE_BYTES:
        step = (num_bytes - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1)
        sample = b"".join(part[i * step : i * step + _SAMPLE_BYTES] for i in range(_NUM_SAMPLES))
        if len(compressor.compress(sample)) > _PAYS_RATIO * len(sample):
            return None
    packed = compressor.compress(part)
    return packed if len(packed) <= _PAYS_RATIO * num_bytes else None


def decode(key: bytes, info: TensorInfo, stored: np.ndarray) -> np.ndarray:
    """Check stored bytes and turn them back into a tensor's bytes.

    Length first, then checksum, then each declared size, and only then is anything allocated or decompressed.

    Parameters
    ----------
    key, info
        The record's key, for messages, and the tensor's table row.
    stored : numpy.ndarray
        (stored_bytes,) uint8, owned by the caller; where the tensor is stored raw it is returned itself.

    Returns
    -------
    numpy.ndarray
        uint8, flat, ``info.raw_bytes`` long, writable and shared with nobody.

    Raises
    ------
    DamagedError
        If any check fails.
    """
    what = f"tensor {info.name!r} of layer {info.layer}"
    if len(stored) != info.stored_bytes:
        raise DamagedError(key, f"{what} (length)", info.stored_bytes, len(stored))
    require_checksum(key, info, stored)
    if not info.raw_bytes:
        return np.empty(0, np.uint8)
    size = item_bytes(info.dtype)
    num_items = info.raw_bytes // size
    frames, at = [], 0
    for plane in info.planes:
        frame = stored[at : at + plane.stored_bytes]
        at += plane.stored_bytes
        require_frame(key, what, frame, plane.codec, num_items * plane.width)
        frames.append(frame)
    if len(frames) == 1 and info.planes[0].codec == RAW:
        return stored
    parts: list[np.ndarray] = []
    for plane, frame in zip(info.planes, frames, strict=True):
        parts.append(frame if plane.codec == RAW else _decompress(key, what, frame, num_items * plane.width))
    if len(parts) == 1:
        return parts[0].copy()
    out = np.empty(info.raw_bytes, np.uint8)
    merge(parts, [(plane.start, plane.width) for plane in info.planes], size, out)
    return out


def require_checksum(key: bytes, info: TensorInfo, stored: np.ndarray) -> None:
    """Refuse a tensor's stored bytes, (stored_bytes,) uint8, whose checksum is not that of its row (`DamagedError`)."""
    checksum = checksum64((byte_view(stored),))
    if checksum != info.checksum:
        what = f"tensor {info.name!r} of layer {info.layer} (checksum)"
        raise DamagedError(key, what, f"{info.checksum:016x}", f"{checksum:016x}")


def require_frame(
    key: bytes, what: str, frame: np.ndarray | memoryview, codec: int, expected_bytes: int
) -> None:
    """Refuse, before anything is allocated, a plane that claims another size than the table (`DamagedError`)."""
    if codec == RAW:
        if len(frame) != expected_bytes:
            raise DamagedError(key, f"{what} (raw plane)", f"{expected_bytes} bytes", len(frame))
        return
    if expected_bytes > len(frame) * _MAX_ZSTD_RATIO:
        raise DamagedError(
            key, f"{what} (frame)", f"{expected_bytes} bytes", f"a frame of {len(frame)} bytes"
        )
    try:
        declared = zstandard.frame_content_size(byte_view(frame))
    except zstandard.ZstdError as error:
        raise DamagedError(key, f"{what} (frame)", "a zstd frame", str(error)) from error
    if declared != expected_bytes:
        found = "no declared size" if declared < 0 else f"{declared} bytes declared"
        raise DamagedError(key, f"{what} (frame)", f"{expected_bytes} bytes", found)


def _decompress(key: bytes, what: str, frame: np.ndarray, expected_bytes: int) -> np.ndarray:
    try:
        data = _contexts.decompressor.decompress(
            byte_view(frame), max_output_size=expected_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise DamagedError(key, f"{what} (frame)", f"{expected_bytes} bytes", str(error)) from error
    if len(data) != expected_bytes:
        raise DamagedError(key, f"{what} (frame)", f"{expected_bytes} bytes", len(data))
    return np.frombuffer(data, np.uint8)


def merge(parts: Sequence[np.ndarray], layout: Sequence[tuple[int, int]], size: int, out: np.ndarray) -> None:
    """Interleave planes into ``out``; arithmetic on whole words for the common layouts.

    Parameters
    ----------
    parts, layout
        One flat uint8 array and one (first byte, width) for each plane.
    size : int
        Bytes of an element.
    out : numpy.ndarray
        uint8, flat, written in full.
    """
    layout = tuple(layout)
    if layout == LAYOUTS["bfloat16"] and size == 2:
        words = out.view(np.uint16)
        np.left_shift(parts[1], 8, out=words, dtype=np.uint16, casting="unsafe")
        np.bitwise_or(words, parts[0], out=words)
    elif layout == LAYOUTS["float32"] and size == 4:
        high = np.left_shift(parts[2], 8, dtype=np.uint16, casting="unsafe")
        np.bitwise_or(high, parts[1], out=high)
        words = out.view(np.uint32)
        np.left_shift(high, 16, out=words, dtype=np.uint32, casting="unsafe")
        np.bitwise_or(words, parts[0].view(np.uint16), out=words)
    else:
        merge_reference(parts, layout, size, out)


def merge_reference(
    parts: Sequence[np.ndarray], layout: Sequence[tuple[int, int]], size: int, out: np.ndarray
) -> None:
    """What `merge` computes, said plainly; also the path for every other layout."""
    rows = out.reshape(-1, size)
    for part, (start, width) in zip(parts, layout, strict=True):
        rows[:, start : start + width] = part.reshape(-1, width)
