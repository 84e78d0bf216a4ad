"""Gather sampled frames into chunks."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import av
import numpy as np

from .chunk import MediaChunk, Sampling, Timeline
from .container import reason_of
from .errors import MediaError
from .pixels import RgbConverter, orientation_of, unreadable_colour

#: A chunk with more pixel bytes than this is refused before it fills the memory.
MAX_CHUNK_BYTES = 4 << 30

_INITIAL_FRAMES = 64


class Collector:
    """Gathers samples into chunks; converts a frame once, and only where a wanted sample shows it."""

    def __init__(self, path: str, name: str, sampling: Sampling) -> None:
        self.timeline = Timeline(sampling.rate)
        self._path, self._name, self._sampling = path, name, sampling
        self._chunk = 0
        self._sample = 0
        self._converter: RgbConverter | None = None
        self._begin_chunk()

    def _begin_chunk(self) -> None:
        self._end = self._sampling.first_sample(self._chunk + 1)
        self._buffer: np.ndarray | None = None
        self._count = 0

    def show(self, frame: av.VideoFrame, time_s: Fraction, end: int) -> Iterator[MediaChunk]:
        """Let a frame serve the samples up to `end`; yield each chunk that this completes."""
        pixels = None
        if self._converter is None:
            self._converter = RgbConverter(frame.width, frame.height, orientation_of(frame))
        while self._sample < end:
            if pixels is None:
                pixels = self._converted(self._converter, frame, time_s)
            self._append(pixels)
            self._sample += 1
            if self._sample == self._end:
                yield from self.flush()

    def _converted(self, convert: RgbConverter, frame: av.VideoFrame, time_s: Fraction) -> np.ndarray:
        problem = unreadable_colour(frame)
        if not problem:
            try:
                return convert(frame)
            except av.FFmpegError as error:
                problem = reason_of(error)
        raise MediaError(self._path, f"the frame at {float(time_s):.2f} s cannot be converted: {problem}")

    def _append(self, pixels: np.ndarray) -> None:
        if self._buffer is None or self._count == len(self._buffer):
            self._buffer = self._grown(pixels)
        self._buffer[self._count] = pixels
        self._count += 1

    def _grown(self, pixels: np.ndarray) -> np.ndarray:
        wanted = self._filled(self._end - self._sampling.first_sample(self._chunk))
        have = self._count
        size = min(wanted, max(_INITIAL_FRAMES, 2 * have))
        if size * pixels.nbytes > MAX_CHUNK_BYTES:
            raise MediaError(
                self._path,
                f"a chunk of {wanted} frames of {pixels.shape[1]}x{pixels.shape[0]} needs more than "
                f"{MAX_CHUNK_BYTES >> 30} GiB",
                "ask for shorter chunks or a lower rate",
            )
        larger = np.empty((size, *pixels.shape), np.uint8)
        if self._buffer is not None:
            larger[:have] = self._buffer
        return larger

    def _filled(self, count: int) -> int:
        multiple = self._sampling.frame_multiple
        return -(-count // multiple) * multiple

    def flush(self) -> Iterator[MediaChunk]:
        """Yield the samples gathered so far as a chunk, if there are any, and begin the next one."""
        count = self._count
        if self._buffer is not None:
            for _ in range(self._filled(count) - count):
                self._append(self._buffer[count - 1])
            first = self._sampling.first_sample(self._chunk)
            yield MediaChunk(
                kind="video",
                index=self._chunk,
                name=f"{self._name}#{self._chunk}",
                start_s=float(first / self._sampling.rate),
                end_s=float((first + count) / self._sampling.rate),
                frames=self._buffer[: self._count],
                fps=float(self._sampling.fps),
            )
        self._chunk += 1
        self._begin_chunk()
