"""Small media files, made here: no download, no external program."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np

from kamera_cli.ingest.index import parameters
from kamera_cli.options import IngestOptions

WIDTH, HEIGHT, RATE = 64, 48, 10

_DISPLAY_MATRICES = {
    90: (0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30),
    180: (-65536, 0, 0, 0, -65536, 0, 0, 0, 1 << 30),
    270: (0, -65536, 0, 65536, 0, 0, 0, 0, 1 << 30),
    "mirror": (-65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30),
    "transpose": (0, 65536, 0, 65536, 0, 0, 0, 0, 1 << 30),
    "crooked": (46341, 46341, 0, -46341, 46341, 0, 0, 0, 1 << 30),
}


def source_parameters(**options: object) -> dict[str, object]:
    """What the source index keeps of an ingest with these options, besides the file's bytes."""
    context = SimpleNamespace(contents=SimpleNamespace(processor=""))
    return parameters(context, IngestOptions(**options))


def picture(number: int, width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """Red over green on the left, on the right a blue that tells the frame number: uint8 (H, W, 3)."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2] = (255, 0, 0)
    pixels[height // 2 :, : width // 2] = (0, 255, 0)
    pixels[:, width // 2 :, 2] = 8 * number % 256
    return pixels


def number_of(frame: np.ndarray) -> int:
    """The frame number that `picture` wrote into an upright frame."""
    return round(float(frame[:, frame.shape[1] * 3 // 4 :, 2].mean()) / 8)


def write_video(
    path: Path,
    pictures: Sequence[np.ndarray],
    *,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    rate: int = RATE,
    pts: Sequence[int] | None = None,
    colour: dict[str, int] | None = None,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    source_format: str = "rgb24",
) -> Path:
    """Encode pictures; `colour` sets colorspace, color_range, color_trc and color_primaries of the stream."""
    colour = colour or {}
    height, width = pictures[0].shape[:2]
    with av.open(str(path), "w", options=container_options or {}) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        stream.codec_context.time_base = Fraction(1, rate)
        stream.options = options or {}
        for field, value in colour.items():
            setattr(stream.codec_context, field, value)
        for number, pixels in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(pixels, format=source_format).reformat(
                format=pix_fmt,
                dst_colorspace=colour.get("colorspace"),
                dst_color_range=colour.get("color_range"),
                interpolation="BICUBIC",
            )
            frame.pts = number if pts is None else pts[number]
            frame.time_base = Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_sound(path: Path, *, cover: bool = False, video_without_frames: bool = False) -> Path:
    """Write half a second of AAC, with a cover picture or an empty video stream where asked for."""
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000, layout="mono")
        picture_stream = None
        if cover:
            picture_stream = container.add_stream("png", rate=1)
            picture_stream.width, picture_stream.height, picture_stream.pix_fmt = WIDTH, HEIGHT, "rgb24"
            picture_stream.disposition = av.stream.Disposition.attached_pic
            container.mux(picture_stream.encode(av.VideoFrame.from_ndarray(picture(3), format="rgb24")))
            container.mux(picture_stream.encode())
        if video_without_frames:
            container.add_stream("libx264", rate=RATE)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        sound.sample_rate, sound.pts = 16000, 0
        container.mux(stream.encode(sound))
        container.mux(stream.encode())
    return path


def with_display_matrix(source: Path, target: Path, turn: int | str) -> Path:
    """Copy an MP4 and overwrite the display matrix of its track header."""
    data = bytearray(source.read_bytes())
    start = data.index(b"tkhd") + 44
    data[start : start + 36] = struct.pack(">9i", *_DISPLAY_MATRICES[turn])
    target.write_bytes(data)
    return target
