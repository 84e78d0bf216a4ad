"""Decode a video stream to frames with exact times."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import av

from .container import decoded, has_presentation_times, reason_of
from .errors import MediaError

#: A frame is shown for at most this long; a longer gap between two time stamps is an error of the file.
MAX_GAP_S = 3600

_MAX_STEP_BACK_S = Fraction(1, 2)


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
    by_presentation = has_presentation_times(container)
    try:
        for packet in container.demux(stream):
            try:
                frames = decoded(packet)
            except av.FFmpegError:
                if origin is None:
                    continue
                raise
            for frame in frames:
                ticks = frame.pts if by_presentation else frame.dts
                own_s = last_s + (origin or 0) + interval
                if ticks is not None:
                    own_s = ticks * Fraction(frame.time_base or stream.time_base)
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
    except av.FFmpegError as error:
        yield MediaError(path, f"damaged after {float(last_s):.2f} s ({reason_of(error)})")
