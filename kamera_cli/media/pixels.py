"""Turn a decoded video frame into upright 8-bit RGB."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import av
import numpy as np
from av.video.reformatter import ColorPrimaries, ColorTrc, Interpolation, VideoReformatter

_HDR_TRANSFERS = {int(ColorTrc.SMPTE2084): "PQ", int(ColorTrc.ARIB_STD_B67): "HLG"}
# AVColorSpace numbers that the converter has matrices for: RGB, BT.709, unspecified, reserved (both taken as
# BT.601), FCC, BT.470BG, SMPTE 170M, SMPTE 240M, BT.2020 with constant factors.
_KNOWN_MATRICES = frozenset((0, 1, 2, 3, 4, 5, 6, 7, 9))
_FULL_TURN = 1 << 16
_MATRIX_TOLERANCE = _FULL_TURN // 100
# Exact rounding and bit-exact paths only: the same pixels on every processor.
_QUALITY = (
    Interpolation.BILINEAR
    | Interpolation.ACCURATE_RND
    | Interpolation.FULL_CHR_H_INT
    | Interpolation.BITEXACT
)


@dataclass(frozen=True)
class Orientation:
    """How stored pixels become upright: first `transpose`, then the flips.

    Attributes
    ----------
    transpose : bool
        Rows become columns.
    flip_x, flip_y : bool
        Left and right, top and bottom change places.
    known : bool
        False where the display matrix is no multiple of 90 degrees; such a matrix is not applied.
    """

    transpose: bool = False
    flip_x: bool = False
    flip_y: bool = False
    known: bool = True

    @property
    def mirrored(self) -> bool:
        """Whether text reads backwards in the stored pixels."""
        return (self.transpose + self.flip_x + self.flip_y) % 2 == 1

    @property
    def degrees_clockwise(self) -> int:
        """The turn to the right, after a left-right flip where `mirrored`."""
        if self.transpose:
            return 90 if self.flip_x else 270
        return 180 if self.flip_y else 0

    def apply(self, pixels: np.ndarray) -> np.ndarray:
        """Return (H, W, 3) pixels upright, as a view."""
        if self.transpose:
            pixels = pixels.transpose(1, 0, 2)
        return pixels[:: -1 if self.flip_y else 1, :: -1 if self.flip_x else 1]

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return the upright width and height."""
        return (height, width) if self.transpose else (width, height)


def orientation_of(frame: av.VideoFrame) -> Orientation:
    """Read the display matrix of a frame, mirror images included.

    The matrix maps a stored point to a shown one, x' = a x + c y and y' = b x + d y with y downwards; it is
    stored as nine numbers a b u c d v x y w. `frame.rotation` would lose the mirror images; it stands in where
    the frame carries side data of a type that this PyAV cannot name and that hides the rest.
    """
    try:
        side_data = frame.side_data.get("DISPLAYMATRIX")
    except ValueError:
        return orientation_from_degrees(-frame.rotation)
    if side_data is None:
        return Orientation()
    matrix = np.frombuffer(bytes(cast(Any, side_data)), dtype=np.int32)
    return orientation_from_matrix(*(int(matrix[i]) for i in (0, 1, 3, 4)))


def orientation_from_degrees(clockwise: int) -> Orientation:
    """Return the orientation for a turn to the right."""
    quarters, rest = divmod(clockwise % 360, 90)
    if rest:
        return Orientation(known=False)
    return Orientation(quarters % 2 == 1, quarters in (1, 2), quarters in (2, 3))


def orientation_from_matrix(a: int, b: int, c: int, d: int) -> Orientation:
    """Return the orientation that a display matrix in 16.16 fixed point asks for."""

    def unit(value: int) -> bool:
        return abs(abs(value) - _FULL_TURN) <= _MATRIX_TOLERANCE

    def zero(value: int) -> bool:
        return abs(value) <= _MATRIX_TOLERANCE

    if unit(a) and unit(d) and zero(b) and zero(c):
        return Orientation(False, a < 0, d < 0)
    if unit(b) and unit(c) and zero(a) and zero(d):
        return Orientation(True, c < 0, b < 0)
    return Orientation(known=False)


def hdr_name(frame: av.VideoFrame) -> str | None:
    """Return "PQ" or "HLG" for a frame with such a transfer function, otherwise None."""
    return _HDR_TRANSFERS.get(int(frame.color_trc))


def unreadable_colour(frame: av.VideoFrame) -> str | None:
    """Return why the colours of a frame cannot be converted, or None."""
    if int(frame.colorspace) not in _KNOWN_MATRICES:
        return f"its colour matrix (number {int(frame.colorspace)} of ITU-T H.273) has no conversion here"
    return None


def has_alpha(frame: av.VideoFrame) -> bool:
    """Whether the frame's format carries transparency."""
    return any(component.is_alpha for component in frame.format.components)


class RgbConverter:
    """Convert frames to RGB, all to one size.

    The rules: matrix and range as the frame states them; no matrix stated is BT.601, no range stated is the
    limited one (full for the formats that imply it); more than 8 bits are rounded to 8; PQ and HLG are
    mapped to BT.709 by libswscale, colorimetrically: 203 cd/m² becomes white, brighter light is clipped;
    transparency is laid over white; fields are not deinterlaced; pixels that are not square stay as stored.

    Parameters
    ----------
    width, height : int
        Stored size of the first frame; a later frame of another size is scaled to it.
    orientation : Orientation
        Applied to every frame.
    """

    def __init__(self, width: int, height: int, orientation: Orientation) -> None:
        self.orientation = orientation
        self._width, self._height = width, height
        self._reformatter = VideoReformatter()

    def __call__(self, frame: av.VideoFrame) -> np.ndarray:
        """Return a frame as uint8 (H, W, 3), upright; a view of fresh memory.

        Raises
        ------
        av.FFmpegError
            If libswscale cannot read the frame's format.
        """
        alpha = has_alpha(frame)
        target = {"dst_color_trc": ColorTrc.BT709, "dst_color_primaries": ColorPrimaries.BT709}
        converted = self._reformatter.reformat(
            frame,
            width=self._width,
            height=self._height,
            format="rgba" if alpha else "rgb24",
            interpolation=_QUALITY,
            threads=1,
            **(target if hdr_name(frame) else {}),
        )
        pixels = converted.to_ndarray()
        return self.orientation.apply(_over_white(pixels) if alpha else pixels)


def _over_white(rgba: np.ndarray) -> np.ndarray:
    alpha = rgba[..., 3:].astype(np.uint16)
    return ((rgba[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
