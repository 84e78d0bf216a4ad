"""Draw chunks of cards as frames, and write them as H.264 video.

Positions are in units of the frame side, so one style looks the same at every size.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from kamera_cli.tiny.vocabulary import DIGITS
from kamera_cli.tiny.world import Card, ChunkSpec, Episode

COLOUR_RGB = {
    "red": (214, 32, 38),
    "orange": (245, 130, 20),
    "yellow": (250, 212, 24),
    "green": (36, 150, 62),
    "blue": (30, 92, 208),
    "purple": (128, 48, 168),
    "pink": (248, 130, 182),
    "black": (28, 28, 32),
}
_SUPERSAMPLE = 2


@dataclass(frozen=True)
class Style:
    """How one chunk looks; drawn once for each chunk."""

    hue: float
    upright: bool
    swapped: bool
    paper: tuple[int, int, int]
    ink: tuple[int, int, int]
    stroke: float


def _draw_style(rng: np.random.Generator) -> Style:
    paper, ink = _rgb(255 - rng.integers(0, 16, 3)), _rgb(rng.integers(15, 75, 3))
    return Style(
        hue=float(rng.random()),
        upright=bool(rng.random() < 0.25),
        swapped=bool(rng.random() < 0.5),
        paper=paper,
        ink=ink,
        stroke=float(rng.uniform(0.004, 0.012)),
    )


def _rgb(values: np.ndarray) -> tuple[int, int, int]:
    red, green, blue = (int(value) for value in values)
    return red, green, blue


@lru_cache(maxsize=64)
def _font(pixels: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(pixels)


def _background(style: Style, side: int, rng: np.random.Generator) -> Image.Image:
    """Return a soft gradient with a few pale discs, (side, side) RGB."""
    top = np.array(colorsys.hsv_to_rgb(style.hue, rng.uniform(0.2, 0.5), rng.uniform(0.6, 0.95)))
    low = np.array(colorsys.hsv_to_rgb((style.hue + 0.08) % 1, rng.uniform(0.3, 0.6), rng.uniform(0.4, 0.8)))
    ramp = np.linspace(0, 1, side)[:, None, None]
    rows = (255 * (top * (1 - ramp) + low * ramp)).astype(np.uint8)
    image = Image.fromarray(np.repeat(rows, side, axis=1))
    brush = ImageDraw.Draw(image, "RGBA")
    for _ in range(5):
        x, y, r = rng.uniform(0, 1), rng.uniform(0, 1), rng.uniform(0.05, 0.2)
        box = [(x - r) * side, (y - r) * side, (x + r) * side, (y + r) * side]
        brush.ellipse(box, fill=(255, 255, 255, int(rng.integers(10, 40))))
    return image


def _shape_points(shape: str, x: float, y: float, r: float, turn: float) -> list[tuple[float, float]]:
    """Return the corners of a polygon around (x, y) in pixels."""
    if shape == "square":
        angles, radii = np.pi / 4 + np.arange(4) * np.pi / 2, np.full(4, r * 1.15)
    elif shape == "triangle":
        angles, radii = -np.pi / 2 + np.arange(3) * 2 * np.pi / 3, np.full(3, r * 1.2)
    else:
        angles, radii = -np.pi / 2 + np.arange(10) * np.pi / 5, np.where(np.arange(10) % 2, r * 0.5, r * 1.2)
    return [(x + q * np.cos(a + turn), y + q * np.sin(a + turn)) for a, q in zip(angles, radii, strict=True)]


def _draw_entity(
    brush: ImageDraw.ImageDraw,
    entity: str,
    x: float,
    y: float,
    r: float,
    turn: float,
    rgb: tuple[int, int, int],
) -> None:
    shape = entity.split()[1]
    if shape == "circle":
        brush.ellipse([x - r, y - r, x + r, y + r], fill=rgb)
    else:
        brush.polygon(_shape_points(shape, x, y, r, turn), fill=rgb)


def _draw_glyph(
    brush: ImageDraw.ImageDraw, text: str, x: float, y: float, pixels: int, style: Style, side: int
) -> None:
    brush.text(
        (x, y),
        text,
        fill=style.ink,
        font=_font(pixels),
        anchor="mm",
        stroke_width=style.stroke * side,
        stroke_fill=style.ink,
    )


@dataclass(frozen=True)
class Motion:
    """Where a card lies and how it drifts; drawn once for each card."""

    shift: tuple[float, float]
    drift: tuple[float, float]
    phase: float
    turn: float
    scale: tuple[float, float]
    tint: tuple[int, int, int]


def _draw_motion(rng: np.random.Generator) -> Motion:
    return Motion(
        shift=tuple(rng.uniform(-0.035, 0.035, 2).tolist()),
        drift=tuple(rng.uniform(0.004, 0.016, 2).tolist()),
        phase=float(rng.uniform(0, 2 * np.pi)),
        turn=float(rng.uniform(-0.14, 0.14)),
        scale=tuple(rng.uniform(0.85, 1.1, 2).tolist()),
        tint=tuple(rng.integers(-14, 15, 3).tolist()),
    )


def _draw_card(canvas: Image.Image, card: Card, style: Style, motion: Motion, seconds: float) -> None:
    side = canvas.width
    brush = ImageDraw.Draw(canvas)
    wave = motion.phase + 1.6 * seconds
    cx = 0.5 + motion.shift[0] + motion.drift[0] * np.sin(wave)
    cy = 0.5 + motion.shift[1] + motion.drift[1] * np.cos(0.8 * wave)
    wide, high = (0.29, 0.43) if style.upright else (0.44, 0.28)
    box = np.array([cx - wide, cy - high, cx + wide, cy + high]) * side
    shadow = 0.018 * side
    dark = colorsys.hsv_to_rgb(style.hue, 0.5, 0.3)
    brush.rounded_rectangle((box + shadow).tolist(), 0.05 * side, fill=tuple(int(255 * v) for v in dark))
    brush.rounded_rectangle(box.tolist(), 0.05 * side, fill=style.paper)
    first = np.array([cx, cy - high / 2]) if style.upright else np.array([cx - wide / 2, cy])
    second = np.array([cx, cy + high / 2]) if style.upright else np.array([cx + wide / 2, cy])
    line = (
        [cx - wide * 0.8, cy, cx + wide * 0.8, cy]
        if style.upright
        else [cx, cy - high * 0.8, cx, cy + high * 0.8]
    )
    brush.line([v * side for v in line], fill=(200, 200, 205), width=max(1, round(0.006 * side)))
    if style.swapped:
        first, second = second, first
    turn = motion.turn + 0.05 * np.sin(wave * 1.3)
    letter_at, other_at = (second, first) if card.kind == 1 else (first, second)
    x, y = letter_at * side
    _draw_glyph(brush, card.letter.upper(), x, y, round(0.31 * side * motion.scale[0]), style, side)
    x, y = other_at * side
    if card.kind == 2:
        text = str(DIGITS.index(card.thing))
        _draw_glyph(brush, text, x, y, round(0.31 * side * motion.scale[1]), style, side)
        return
    rgb = _rgb(np.clip(np.add(COLOUR_RGB[card.thing.split()[0]], motion.tint), 0, 255))
    _draw_entity(brush, card.thing, x, y, 0.125 * side * motion.scale[1], turn, rgb)


def render_chunk(spec: ChunkSpec, *, fps: float = 2, size: int = 224, seed: int) -> np.ndarray:
    """Draw a chunk without encoding it.

    Parameters
    ----------
    spec : ChunkSpec
        The cards.
    fps : float
        Frames per second; frame k shows the time k / fps.
    size : int
        Side of the frames in pixels, even.
    seed : int
        Seed of look, places and motion; the same seed at another ``fps`` gives the same picture at the same time.

    Returns
    -------
    numpy.ndarray
        uint8, (N, size, size, 3), RGB, N = seconds * fps.
    """
    rng = np.random.default_rng([seed, 0xCA4D])
    style = _draw_style(rng)
    side = size * _SUPERSAMPLE
    background = _background(style, side, rng)
    motions = [_draw_motion(rng) for _ in spec.cards]
    ends = np.cumsum([card.seconds for card in spec.cards])
    frames = np.empty((round(spec.seconds * fps), size, size, 3), dtype=np.uint8)
    for k in range(len(frames)):
        index = int(np.searchsorted(ends, k / fps, side="right"))
        canvas = background.copy()
        _draw_card(canvas, spec.cards[index], style, motions[index], k / fps)
        frames[k] = np.asarray(canvas.resize((size, size), Image.Resampling.BOX))
    return frames


def write_video(
    path: str | Path,
    chunks: Episode | Sequence[ChunkSpec],
    *,
    fps: float = 24,
    crf: int = 23,
    size: int = 448,
    seed: int = 0,
) -> None:
    """Write chunks one after the other as an H.264 video.

    Parameters
    ----------
    path : str or pathlib.Path
        Its suffix chooses the container, for example ``.mp4``.
    chunks : Episode or sequence of ChunkSpec
        What to show; chunk i is drawn with the seed ``1000 * seed + i``.
    fps : float
        Frames per second of the file.
    crf : int
        Quality of x264, lower is better.
    size : int
        Side of the frames in pixels, even.
    seed : int
        Seed of the look.
    """
    specs = chunks.chunks if isinstance(chunks, Episode) else tuple(chunks)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=round(fps))
        stream.width = stream.height = size
        stream.pix_fmt = "yuv420p"
        # Without it, x264 writes other bytes for equal frames on another processor, and even from one call to the next.
        deterministic = "cpu-independent=1"
        stream.options = {"crf": str(crf), "preset": "medium", "x264-params": deterministic}
        stream.codec_context.thread_count = 1
        for index, spec in enumerate(specs):
            for pixels in render_chunk(spec, fps=fps, size=size, seed=1000 * seed + index):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
