"""Read a video file as chunks of sampled frames."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import BinaryIO

import av
import numpy as np

from .chunk import MediaChunk, Sampling, SourceInfo
from .container import choose_stream, decoded, decoder_name, last_indexed_byte, opened, reason_of
from .errors import MediaError
from .pixels import RgbConverter, has_alpha, hdr_name, orientation_of, unreadable_colour
from .timeline import Timeline

#: Names the sampling rule in the source key: raise it when another frame would be taken.
SAMPLING_RULES = "nearest-1"

#: A chunk with more pixel bytes than this is refused before it fills the memory.
MAX_CHUNK_BYTES = 4 << 30

_MAX_GAP_S = 3600
_MAX_STEP_BACK_S = Fraction(1, 2)
_INITIAL_FRAMES = 64


def inspect_video(path: str, file: BinaryIO, size_bytes: int, declared_bytes: int | None) -> dict:
    """Find a video's stream, size, orientation and length: one frame is decoded, the other packets counted.

    Parameters
    ----------
    path : str
        For errors.
    file : binary file
    size_bytes : int
        Its length.
    declared_bytes : int or None
        The length that the container's header names.

    Returns
    -------
    dict
        Fields of `SourceInfo`.

    Raises
    ------
    MediaError
        If there is no container, no video stream, no decoder, no frame, or no conversion for its colours.
    """
    with opened(path, file) as container:
        stream, notes = choose_stream(path, container)
        first, packets = _first_frame(path, container, stream)
        needed = max(declared_bytes or 0, last_indexed_byte(stream))
        complete = needed <= size_bytes
        if not complete:
            notes += (f"cut short: its index names {needed} bytes, {size_bytes} are there",)
        orientation = orientation_of(first)
        width, height = orientation.size(first.width, first.height)
        return {
            "width": width,
            "height": height,
            "duration_s": float(packets.duration_s(stream)),
            "num_frames": packets.count,
            "stream_index": stream.index,
            "codec": stream.codec_context.codec.name,
            "decoder": decoder_name(),
            "rotation": orientation.degrees_clockwise,
            "notes": notes + _frame_notes(first, stream),
            "complete": complete,
        }


@dataclass
class _Packets:
    """What the packets of one stream say about its length, in ticks of its time base."""

    count: int = 0
    start: int | None = None
    end: int | None = None

    def add(self, packet: av.Packet) -> None:
        if packet.size == 0 or packet.is_discard:
            return
        self.count += 1
        ticks = packet.pts if packet.pts is not None else packet.dts
        if ticks is not None:
            self.start = ticks if self.start is None else min(self.start, ticks)
            self.end = max(ticks + (packet.duration or 0), self.end if self.end is not None else ticks)

    def duration_s(self, stream: av.VideoStream) -> Fraction:
        if self.start is None:
            return self.count * _frame_interval(stream)
        return (self.end - self.start) * stream.time_base or _frame_interval(stream)


def _first_frame(
    path: str, container: av.container.InputContainer, stream: av.VideoStream
) -> tuple[av.VideoFrame, _Packets]:
    packets, first, damage = _Packets(), None, ""
    try:
        for packet in container.demux(stream):
            packets.add(packet)
            if first is None:
                try:
                    first = next(iter(decoded(packet)), None)
                except av.FFmpegError as error:
                    damage = f" ({reason_of(error)})"
    except av.FFmpegError as error:
        if first is None:
            raise MediaError(path, f"its video cannot be read ({reason_of(error)})") from error
    if first is None:
        if not packets.count:
            raise MediaError(path, "its video stream holds no frame")
        raise MediaError(path, f"none of its {packets.count} frames can be decoded{damage}")
    problem = unreadable_colour(first)
    if problem:
        raise MediaError(path, problem, "convert it to BT.709 first")
    return first, packets


def _frame_interval(stream: av.VideoStream) -> Fraction:
    rate = stream.average_rate or stream.guessed_rate
    return 1 / Fraction(rate) if rate else Fraction(0)


def _frame_notes(frame: av.VideoFrame, stream: av.VideoStream) -> tuple[str, ...]:
    notes = []
    orientation = orientation_of(frame)
    if not orientation.known:
        notes.append("its display matrix is no multiple of 90 degrees and is not applied")
    if orientation.degrees_clockwise or orientation.mirrored:
        mirrored = ", mirrored" if orientation.mirrored else ""
        notes.append(f"turned {orientation.degrees_clockwise} degrees clockwise{mirrored} (display matrix)")
    bits = max(component.bits for component in frame.format.components)
    if bits > 8:
        notes.append(f"{bits}-bit {frame.format.name} rounded to 8 bits")
    if hdr_name(frame):
        notes.append(f"{hdr_name(frame)} mapped to BT.709: 203 cd/m² is white, brighter light is clipped")
    if has_alpha(frame):
        notes.append("transparency laid over white")
    if frame.interlaced_frame:
        notes.append("interlaced; fields are not separated")
    aspect = stream.sample_aspect_ratio
    if aspect and aspect != 1:
        notes.append(
            f"its pixels are not square ({aspect.numerator}:{aspect.denominator}) and are not stretched"
        )
    return tuple(notes)


def video_chunks(
    path: str, name: str, file: BinaryIO, info: SourceInfo, sampling: Sampling, start: int
) -> Iterator[MediaChunk]:
    """Decode a video once, in order, and yield its chunks.

    Sample k lies at ``k / fps`` seconds after the first displayed frame and shows the frame whose presentation
    time is nearest (of two the earlier); samples end with the last frame's display. A chunk is held in memory,
    the clip is not.

    Parameters
    ----------
    path, name : str
        For errors, and for the names of chunks.
    file : binary file
    info : SourceInfo
        From `inspect_video`.
    sampling : Sampling
    start : int
        Chunks before this one are decoded but neither converted nor yielded.

    Yields
    ------
    MediaChunk

    Raises
    ------
    MediaError
        At the first damaged packet after the first frame, at time stamps that jump, and at the end of a file
        that was cut short; what was readable has been yielded before, the last chunk shortened.
    """
    with opened(path, file) as container:
        stream, _ = choose_stream(path, container)
        if stream.index != info.stream_index:
            raise MediaError(path, f"stream {info.stream_index} was inspected, now it is {stream.index}")
        collector = _Collector(path, name, sampling, start)
        held, held_s, interval, failure = None, Fraction(0), _frame_interval(stream), None
        for item in _timed_frames(path, container, stream):
            if isinstance(item, MediaError):
                failure = item
                break
            frame, time_s = item
            if held is not None:
                yield from collector.show(held, held_s, collector.timeline.until(time_s))
                interval = time_s - held_s
            else:
                collector.timeline.until(time_s)
            held, held_s = frame, time_s
        if held is None:
            raise failure or MediaError(path, "no frame can be decoded")
        shown_s = (held.duration or 0) * stream.time_base or interval
        end_s = held_s if failure else held_s + min(shown_s, _MAX_GAP_S)
        yield from collector.show(held, held_s, collector.timeline.finish(end_s))
        yield from collector.flush()
        if failure:
            raise failure
        if not info.complete:
            raise MediaError(
                path, f"cut short: its frames end at {float(end_s):.2f} s", "fetch or record it again"
            )


def _timed_frames(
    path: str, container: av.container.InputContainer, stream: av.VideoStream
) -> Iterator[tuple[av.VideoFrame, Fraction] | MediaError]:
    """Yield frames with their seconds after the first one; ends with a `MediaError` where the stream breaks.

    A frame without a time stamp follows the one before it by the stated rate; one that is not after its
    predecessor is left out.
    """
    origin, last_s, interval = None, Fraction(0), _frame_interval(stream)
    try:
        for packet in container.demux(stream):
            try:
                frames = decoded(packet)
            except av.FFmpegError:
                if origin is None:
                    continue
                raise
            for frame in frames:
                if frame.pts is None:
                    own_s = last_s + interval + (origin or 0) if origin is not None else Fraction(0)
                else:
                    own_s = frame.pts * Fraction(frame.time_base or stream.time_base)
                if origin is None:
                    origin = own_s
                    yield frame, Fraction(0)
                    continue
                time_s = own_s - origin
                if time_s < last_s - _MAX_STEP_BACK_S or time_s > last_s + _MAX_GAP_S:
                    yield MediaError(
                        path,
                        f"its time stamps jump from {float(last_s):.2f} s to {float(time_s):.2f} s",
                        "remux it, or cut it there",
                    )
                    return
                if time_s > last_s:
                    last_s = time_s
                    yield frame, time_s
    except av.FFmpegError as error:
        yield MediaError(path, f"damaged after {float(last_s):.2f} s ({reason_of(error)})")


class _Collector:
    """Gathers samples into chunks; converts a frame once, and only where a wanted sample shows it."""

    def __init__(self, path: str, name: str, sampling: Sampling, start: int) -> None:
        self.timeline = Timeline(sampling.rate)
        self._path, self._name, self._sampling = path, name, sampling
        self._chunk = 0
        self._start = start
        self._sample = 0
        self._converter: RgbConverter | None = None
        self._begin_chunk()

    def _begin_chunk(self) -> None:
        self._end = self._sampling.first_sample(self._chunk + 1)
        self._buffer: np.ndarray | None = None
        self._times: list[float] = []
        self._repeats: list[bool] = []

    def show(self, frame: av.VideoFrame, time_s: Fraction, end: int) -> Iterator[MediaChunk]:
        """Let a frame serve the samples up to `end`; yield each chunk that this completes."""
        pixels = None
        if self._converter is None:
            self._converter = RgbConverter(frame.width, frame.height, orientation_of(frame))
        first = self._sample
        while self._sample < end:
            if self._chunk >= self._start:
                if pixels is None:
                    pixels = self._converted(frame, time_s)
                self._append(pixels, float(time_s), self._sample > first)
            self._sample += 1
            if self._sample == self._end:
                yield from self.flush()

    def _converted(self, frame: av.VideoFrame, time_s: Fraction) -> np.ndarray:
        problem = unreadable_colour(frame)
        try:
            pixels = self._converter(frame)
        except (av.FFmpegError, ValueError) as error:
            problem = problem or str(error)
        if problem:
            raise MediaError(
                self._path, f"the frame at {float(time_s):.2f} s cannot be converted ({problem})"
            )
        return pixels

    def _append(self, pixels: np.ndarray, time_s: float, repeat: bool) -> None:
        count = len(self._times)
        if self._buffer is None or count == len(self._buffer):
            self._grow(pixels)
        self._buffer[count] = pixels
        self._times.append(time_s)
        self._repeats.append(repeat)

    def _grow(self, pixels: np.ndarray) -> None:
        wanted = self._filled(self._end - self._sampling.first_sample(self._chunk))
        have = 0 if self._buffer is None else len(self._buffer)
        size = min(wanted, max(_INITIAL_FRAMES, 2 * have))
        if size * pixels.nbytes > MAX_CHUNK_BYTES:
            raise MediaError(
                self._path,
                f"a chunk of {wanted} frames of {pixels.shape[1]}x{pixels.shape[0]} needs more than "
                f"{MAX_CHUNK_BYTES >> 30} GiB",
                "ask for shorter chunks or a lower rate",
            )
        larger = np.empty((size, *pixels.shape), np.uint8)
        if have:
            larger[:have] = self._buffer
        self._buffer = larger

    def _filled(self, count: int) -> int:
        multiple = self._sampling.frame_multiple
        return -(-count // multiple) * multiple

    def flush(self) -> Iterator[MediaChunk]:
        """Yield the samples gathered so far as a chunk, if there are any, and begin the next one."""
        count = len(self._times)
        if count:
            for _ in range(self._filled(count) - count):
                self._append(self._buffer[count - 1], self._times[-1], True)
            first = self._sampling.first_sample(self._chunk)
            yield MediaChunk(
                kind="video",
                index=self._chunk,
                name=f"{self._name}#{self._chunk}",
                start_s=float(first / self._sampling.rate),
                end_s=float((first + count) / self._sampling.rate),
                frames=self._buffer[: len(self._times)],
                frame_times_s=tuple(self._times),
                repeats=tuple(self._repeats),
                fps=float(self._sampling.fps),
            )
        self._chunk += 1
        self._begin_chunk()
