"""Read a video file as chunks of sampled frames."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import BinaryIO

import av

from .chunk import MediaChunk, Sampling, SourceInfo
from .collect import Collector
from .container import choose_stream, decoded, decoder_name, last_indexed_byte, opened, reason_of
from .errors import MediaError
from .frames import MAX_GAP_S, frame_interval, timed_frames
from .pixels import has_alpha, hdr_name, orientation_of, unreadable_colour


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
        needed = max(declared_bytes or 0, last_indexed_byte(container, stream))
        complete = needed <= size_bytes
        if not complete:
            notes += (f"cut short: its index names {needed} bytes, {size_bytes} are there",)
        stated_s, found_s = (container.duration or 0) / av.time_base, float(packets.duration_s(stream))
        if complete and stated_s > found_s + max(_SHORT_SECONDS, _SHORT_SHARE * stated_s):
            notes += (
                f"its header states {stated_s:.1f} s, its pictures end after {found_s:.1f} s: part may be lost",
            )
        orientation = orientation_of(first)
        width, height = orientation.size(first.width, first.height)
        return {
            "width": width,
            "height": height,
            "duration_s": found_s,
            "num_frames": packets.count,
            "stream_index": stream.index,
            "codec": stream.codec_context.codec.name,
            "decoder": decoder_name(),
            "rotation": orientation.degrees_clockwise,
            "notes": notes + _frame_notes(first, stream),
            "complete": complete,
        }


_SHORT_SECONDS, _SHORT_SHARE = 1.0, 0.05
"""A video that ends this much before its header says is noted: some containers are read past damage in silence."""


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
        if self.start is None or self.end is None:
            return self.count * frame_interval(stream)
        return (self.end - self.start) * (stream.time_base or Fraction(0)) or frame_interval(stream)


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
    path: str, name: str, file: BinaryIO, info: SourceInfo, sampling: Sampling
) -> Iterator[MediaChunk]:
    """Decode a video once, in order, and yield its chunks.

    Sample k lies at ``k / fps`` seconds after the first displayed frame and shows the frame whose
    presentation time is nearest (of two the earlier); samples end with the last frame's display. A chunk is
    held in memory, the clip is not.

    Parameters
    ----------
    path, name : str
        For errors, and for the names of chunks.
    file : binary file
    info : SourceInfo
        From `inspect_video`.
    sampling : Sampling

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
        collector = Collector(path, name, sampling)
        held, held_s, interval, failure = None, Fraction(0), frame_interval(stream), None
        for item in timed_frames(path, container, stream):
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
        shown_s = (held.duration or 0) * Fraction(held.time_base or stream.time_base or 0) or interval
        end_s = held_s if failure else held_s + min(shown_s, MAX_GAP_S)
        yield from collector.show(held, held_s, collector.timeline.finish(end_s))
        yield from collector.flush()
        if failure:
            raise failure
        if not info.complete:
            raise MediaError(
                path, f"cut short: its frames end at {float(end_s):.2f} s", "fetch or record it again"
            )
