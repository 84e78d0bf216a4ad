"""Phone clips come out upright, whatever way the phone was held."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from media_files import WIDTH, picture, write_video

from kamera_cli.media.pixels import Orientation, orientation_from_matrix, orientation_of
from kamera_cli.media.source import Sampling, chunks, inspect


def first(path) -> np.ndarray:
    return next(chunks(path, inspect(path), Sampling())).frames


@pytest.mark.parametrize("turn", [90, 180, 270])
def test_a_rotation_in_the_container_is_applied(clip: Path, turned, turn: int):
    stored, upright = first(clip), first(turned(turn))
    assert np.array_equal(upright, np.rot90(stored, -turn // 90, axes=(1, 2)))
    info = inspect(turned(turn))
    assert (info.height, info.width) == upright.shape[1:3]
    assert info.rotation == turn
    assert any("clockwise" in note for note in info.notes)


def test_turning_by_90_puts_the_left_side_on_top(turned):
    upright = first(turned(90))[0]
    assert upright.shape == (64, 48, 3)
    assert upright[5, 40, 0] > 240 and upright[5, 8, 1] > 240 and upright[60, :, :2].max() < 16


@pytest.mark.parametrize("turn", [90, 180, 270])
def test_a_turned_clip_equals_the_same_pixels_stored_upright_without_loss(turned, tmp_path: Path, turn: int):
    upright = first(turned(turn))
    copy = write_video(tmp_path / "upright.mkv", list(upright), codec="ffv1", pix_fmt="bgr0", rate=2)
    assert np.array_equal(first(copy), upright)
    assert inspect(copy).rotation == 0


def test_a_mirrored_selfie_is_turned_over(clip: Path, turned):
    assert np.array_equal(first(turned("mirror")), first(clip)[:, :, ::-1])
    assert np.array_equal(first(turned("transpose")), first(clip).transpose(0, 2, 1, 3))
    assert any("mirrored" in note for note in inspect(turned("mirror")).notes)


def test_a_matrix_off_the_right_angles_is_named_and_not_applied(clip: Path, turned):
    assert np.array_equal(first(turned("crooked")), first(clip))
    assert any("no multiple of 90" in note for note in inspect(turned("crooked")).notes)


def test_each_matrix_moves_points_as_it_says():
    height, width = 2, 3
    stored = np.arange(height * width, dtype=np.uint8).reshape(height, width, 1)
    seen = set()
    for a, b, c, d in [(s, 0, 0, t) for s in (1, -1) for t in (1, -1)] + [
        (0, s, t, 0) for s in (1, -1) for t in (1, -1)
    ]:
        orientation = orientation_from_matrix(*(v << 16 for v in (a, b, c, d)))
        shown = orientation.apply(stored)
        points = [
            (a * x + c * y, b * x + d * y, stored[y, x, 0]) for y in range(height) for x in range(width)
        ]
        left, top = min(p[0] for p in points), min(p[1] for p in points)
        for x, y, value in points:
            assert shown[y - top, x - left, 0] == value
        assert orientation.size(width, height) == shown.shape[1::-1]
        again = stored[:, ::-1] if orientation.mirrored else stored
        assert np.array_equal(np.rot90(again, -orientation.degrees_clockwise // 90), shown)
        seen.add((orientation.transpose, orientation.flip_x, orientation.flip_y))
    assert len(seen) == 8
    assert orientation_from_matrix(0, 0, 0, 0) == Orientation(known=False)


class _FrameWithUnknownSideData:
    """What PyAV gives where FFmpeg attaches a type of side data that it cannot name."""

    def __init__(self, rotation: int) -> None:
        self.rotation = rotation  # counterclockwise

    @property
    def side_data(self) -> dict:
        raise ValueError("31 is not a valid Type")


@pytest.mark.parametrize(("rotation", "clockwise"), [(0, 0), (-90, 90), (-180, 180), (180, 180), (90, 270)])
def test_unknown_side_data_does_not_hide_the_rotation(rotation: int, clockwise: int):
    orientation = orientation_of(_FrameWithUnknownSideData(rotation))
    assert (orientation.degrees_clockwise, orientation.mirrored) == (clockwise, False)
    assert not orientation_of(_FrameWithUnknownSideData(45)).known


def test_the_fixture_writes_where_the_format_puts_the_matrix(clip: Path, turned):
    data = turned(90).read_bytes()
    start = data.index(b"tkhd") + 44
    assert struct.unpack(">i", data[start + 4 : start + 8]) == (65536,)
    assert struct.unpack(">I", data[start + 36 : start + 40])[0] >> 16 == WIDTH
    assert len(picture(0)) == 48
