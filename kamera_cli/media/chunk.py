"""What media input hands on: the sampling asked for and its rule, what a file is, and its chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from .errors import SamplingError

if TYPE_CHECKING:
    import numpy as np

Kind = Literal["video", "image", "text"]

_HIGHEST_FPS = 1000.0


@dataclass(frozen=True)
class Sampling:
    """How a file is cut into chunks.

    Parameters
    ----------
    fps : float
        Samples per second of video.
    chunk_seconds : float
        Length of a video chunk; ``chunk_seconds * fps`` must reach one sample.
    frame_multiple : int
        The frame count of each chunk is filled up to a multiple of this by repeating its last frame (the
        temporal patch of the vision tower).
    chunk_tokens : int
        Length of a text chunk in tokens. Text is not cut here: a text file is one `MediaChunk`.

    Raises
    ------
    SamplingError
        If a value is not positive or a chunk would hold less than one sample.
    """

    fps: float = 2.0
    chunk_seconds: float = 8.0
    frame_multiple: int = 2
    chunk_tokens: int = 512

    def __post_init__(self) -> None:
        for name in ("fps", "chunk_seconds", "frame_multiple", "chunk_tokens"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise SamplingError(f"{name} is {value}, expected a number above 0")
        for name in ("frame_multiple", "chunk_tokens"):
            if getattr(self, name) != int(getattr(self, name)):
                raise SamplingError(f"{name} is {getattr(self, name)}, expected a whole number")
        if self.fps > _HIGHEST_FPS:
            raise SamplingError(f"fps is {self.fps:g}, the highest rate is {_HIGHEST_FPS:g}")
        if self.rate * self.chunk_length < 1:
            raise SamplingError(
                f"a chunk of {self.chunk_seconds:g} s at {self.fps:g} fps holds less than one sample, "
                f"expected at least {1 / self.fps:g} s"
            )

    @property
    def rate(self) -> Fraction:
        """Samples per second, as the exact decimal number that `fps` is written as."""
        return exact(self.fps)

    @property
    def chunk_length(self) -> Fraction:
        """Seconds per chunk, as the exact decimal number that `chunk_seconds` is written as."""
        return exact(self.chunk_seconds)

    def first_sample(self, chunk: int) -> int:
        """Return the index of the first sample of a chunk; sample k lies at k / fps seconds."""
        return math.ceil(chunk * self.chunk_length * self.rate)


def exact(value: float) -> Fraction:
    """Return a number as the fraction that its shortest decimal writing names (0.1 is 1/10)."""
    return Fraction(repr(float(value)))


class Timeline:
    """Gives each sample its frame while frames pass by in order.

    Times are relative to the first displayed frame. Sample k lies at ``k / rate`` seconds and is served by
    the frame whose presentation time is nearest; of two equally near frames by the earlier one. Samples
    exist up to the end of the last frame (half-open), and there is always one.

    Parameters
    ----------
    rate : Fraction
        Samples per second.
    """

    def __init__(self, rate: Fraction) -> None:
        self.rate = rate
        self.next_sample = 0
        self._last: Fraction | None = None

    def until(self, time_s: Fraction) -> int:
        """Return the end of the samples that the last frame keeps now that a frame at `time_s` follows it.

        Parameters
        ----------
        time_s : Fraction
            Time of the following frame, above every earlier one.

        Returns
        -------
        int
            The samples ``[next_sample, end)`` belong to the last frame; `next_sample` becomes ``end``.
        """
        end = self.next_sample
        if self._last is not None:
            midpoint = (self._last + time_s) / 2
            end = max(end, _floor(midpoint * self.rate) + 1)
        self._last = time_s
        self.next_sample = end
        return end

    def finish(self, end_s: Fraction) -> int:
        """Return the end of the samples of the last frame, which is shown until `end_s`."""
        self.next_sample = max(self.next_sample, num_samples(end_s, self.rate))
        return self.next_sample


def num_samples(end_s: float | Fraction, rate: Fraction) -> int:
    """Return how many samples a clip has whose last frame is shown until `end_s`."""
    return max(_ceil(Fraction(end_s) * rate), 1)


def _floor(value: Fraction) -> int:
    return value.numerator // value.denominator


def _ceil(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)


@dataclass(frozen=True)
class SourceInfo:
    """What a file is, from its headers and its packet times.

    Attributes
    ----------
    path : str
        The absolute path, `printable`; for showing, not for opening.
    kind : {"video", "image", "text"}
        Found from the content, never from the name.
    content_sha256 : str
        SHA-256 of the file's bytes, hex.
    size_bytes : int
    width, height : int or None
        Of the upright picture, in pixels.
    duration_s : float or None
        From the first displayed frame to the end of the last one, as the packets state it.
    num_frames : int or None
        Packets of the chosen stream: an estimate of what the decoder will show.
    stream_index : int or None
        The container's index of the chosen video stream.
    codec : str or None
        Name of the codec or of the image format.
    decoder : str
        Name and version of what decodes it; part of the source key, since another decoder may give other
        pixels.
    rotation : int
        Degrees clockwise by which stored pixels are turned to stand upright (a mirror image is in `notes`).
    notes : tuple of str
        What a user should know, one line each.
    mtime_ns : int
        Only to notice that the file changed between `inspect` and `chunks`; never identity.
    complete : bool
        False where the container names more bytes than the file has.
    """

    path: str
    kind: Kind
    content_sha256: str
    size_bytes: int
    width: int | None
    height: int | None
    duration_s: float | None
    num_frames: int | None
    stream_index: int | None
    codec: str | None
    decoder: str
    rotation: int = 0
    notes: tuple[str, ...] = ()
    mtime_ns: int = 0
    complete: bool = True


@dataclass(frozen=True, eq=False)
class MediaChunk:
    """One unit of reuse, before the processor.

    Attributes
    ----------
    kind : {"video", "image", "text"}
    index : int
        Position in its source, from 0.
    name : str
        The file's printable name; for video with ``#index``, such as ``cards.mp4#3``.
    start_s, end_s : float or None
        Video: the span that its samples stand for, relative to the first displayed frame; half-open.
    frames : np.ndarray or None
        uint8 RGB, upright and C-contiguous: (N, H, W, 3) for video, (H, W, 3) for an image.
    fps : float or None
        Video: the rate that the N frames stand at, to be handed on to the processor.
    text : str or None
    """

    kind: Kind
    index: int
    name: str
    start_s: float | None = None
    end_s: float | None = None
    frames: np.ndarray | None = None
    fps: float | None = None
    text: str | None = None
