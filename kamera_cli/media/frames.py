"""Decode a video stream to frames with exact times."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import av

from .container import again, decoded, has_presentation_times, reason_of
from .errors import MediaError

#: A frame is shown for at most this long; a longer gap between two time stamps is an error of the file.
MAX_GAP_S = Fraction(3600)

_MAX_STEP_BACK_S = Fraction(1, 2)

_MOST_THREADS = 64


def frame_interval(stream: av.VideoStream) -> Fraction:
    """Return the seconds between two frames by the stated rate, 0 where none is stated."""
    rate = stream.average_rate or stream.guessed_rate
    return 1 / Fraction(rate) if rate else Fraction(0)


def timed_frames(
    path: str, container: av.container.InputContainer, stream: av.VideoStream
) -> Iterator[tuple[av.VideoFrame, Fraction] | MediaError]:
    """Yield frames with their seconds after the first one; ends with a `MediaError` where the stream breaks.

    A frame without a time stamp follows the one before it by the stated rate; one that is not after its
    predecessor is left out.
    """
    origin, last_s, interval = None, Fraction(0), frame_interval(stream)
    ending = _Ending(stream)
    by_presentation = has_presentation_times(container)
    try:
        for packet in container.demux(stream):
            try:
                frames = decoded(packet)
            except av.FFmpegError:
                if origin is None:
                    continue
                raise
            ending.add(packet, len(frames))
            for frame in frames:
                ticks = frame.pts if by_presentation else frame.dts
                own_s = last_s + (origin or 0) + interval
                if ticks is not None:
                    own_s = ticks * Fraction(frame.time_base or stream.time_base or 0)
                if origin is None:
                    origin = own_s
                    yield frame, Fraction(0)
                    continue
                time_s = own_s - origin
                if time_s < last_s - _MAX_STEP_BACK_S or time_s > last_s + MAX_GAP_S:
                    yield MediaError(
                        path,
                        f"its time stamps jump from {float(last_s):.2f} s to {float(time_s):.2f} s",
                        "remux it, or cut it there",
                    )
                    return
                if time_s > last_s:
                    last_s = time_s
                    yield frame, time_s
        ending.require_whole()
    except av.FFmpegError as error:
        yield MediaError(path, f"damaged after {float(last_s):.2f} s ({reason_of(error)})")


class _Ending:
    """The last packets of a stream. Frame threads, of which there are as many as processors, keep a damage in those
    that are still in work when the stream ends to themselves: fewer frames come out, and no error."""

    def __init__(self, stream: av.VideoStream) -> None:
        self._stream = stream
        self._before: list[av.Packet] = []
        self._packets: list[av.Packet] = []
        self._num_missing = 0
        self._is_start = True

    def add(self, packet: av.Packet, num_frames: int) -> None:
        """Take note of a packet and of how many frames came out after it."""
        self._num_missing += bool(packet.size and not packet.is_discard) - num_frames
        if not packet.size:
            return
        if packet.is_keyframe and len(self._packets) >= _MOST_THREADS:
            self._is_start = self._is_start and not self._before
            self._before, self._packets = self._packets, []
        if packet.is_keyframe or self._packets:
            self._packets.append(packet)
        else:
            self._is_start = False

    def require_whole(self) -> None:
        """Decode the last packets again, without frame threads, if fewer frames than packets came out.

        Frames that follow a keyframe may build on frames before it, so that a decoder which begins in the middle of a
        stream can fail on sound packets until its first frame.

        Raises
        ------
        av.FFmpegError
            One of them is damaged.
        """
        if self._num_missing <= 0 or not self._packets:
            return
        plain, has_begun = again(self._stream), self._is_start
        for packet in (*self._before, *self._packets, None):
            try:
                has_begun = bool(plain.decode(packet)) or has_begun
            except av.FFmpegError:
                if has_begun:
                    raise
