"""The same bars look the same, however they are stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from media_files import write_video

from kamera_cli.media.source import MediaError, Sampling, chunks, inspect

_BARS = np.array(
    [
        *([255, 255, 255], [255, 255, 0], [0, 255, 255], [0, 255, 0]),
        *([255, 0, 255], [255, 0, 0], [0, 0, 255], [0, 0, 0]),
    ],
    np.uint8,
)
_LOSSLESS = {"qp": "0"}
_FULL, _LIMITED, _BT709, _BT2020, _PQ, _HLG = 2, 1, 1, 9, 16, 18


def bars(width: int = 64, height: int = 48) -> np.ndarray:
    row = np.repeat(_BARS, -(-width // 8), axis=0)[:width]
    return np.ascontiguousarray(np.broadcast_to(row, (height, width, 3)))


def write_bars(
    path: Path, pix_fmt: str, codec: str = "ffv1", pixels: np.ndarray | None = None, **more
) -> Path:
    pixels = bars() if pixels is None else pixels
    options = _LOSSLESS if codec == "libx264" else {}
    return write_video(path, [pixels] * 3, codec=codec, pix_fmt=pix_fmt, options=options, **more)


def first(path) -> np.ndarray:
    return next(chunks(path, inspect(path), Sampling())).frames[0].astype(int)


@pytest.mark.parametrize(
    ("suffix", "pix_fmt", "codec", "colour"),
    [
        (".mp4", "yuvj420p", "libx264", {"color_range": _FULL}),
        (".mkv", "yuv420p10le", "ffv1", {}),
        (".mp4", "yuv444p", "libx264", {}),
        (".mp4", "yuv420p", "libx264", {"colorspace": _BT709, "color_range": _LIMITED}),
        (".mp4", "yuv444p", "libx264", {"colorspace": _BT709, "color_range": _FULL}),
        (".mkv", "yuv444p10le", "ffv1", {"colorspace": _BT2020, "color_range": _LIMITED}),
        (".avi", "yuvj420p", "mjpeg", {"color_range": _FULL}),
        (".mkv", "gbrp10le", "ffv1", {}),
        (".mkv", "bgr0", "ffv1", {}),
    ],
)
def test_range_depth_and_subsampling_do_not_change_the_colours(tmp_path, suffix, pix_fmt, codec, colour):
    # H.264 places chroma samples on the left of a pair, the others in the middle: compare like with like.
    plain = first(write_bars(tmp_path / "plain.mkv", "yuv420p", "libx264" if codec == "libx264" else "ffv1"))
    other = first(write_bars(tmp_path / f"other{suffix}", pix_fmt, codec, colour=colour))
    inside = np.arange(64) % 8 // 2 == 1  # away from the bars' edges, where 4:2:0 mixes two colours
    assert np.abs(plain - other)[:, inside].mean() < 2
    assert np.abs(other - bars())[:, inside].max() <= 4
    if "420" in pix_fmt:
        assert np.abs(plain - other).mean() < 2


def test_ten_bits_are_named(tmp_path: Path):
    assert any("10-bit" in note for note in inspect(write_bars(tmp_path / "ten.mkv", "yuv420p10le")).notes)


@pytest.mark.parametrize(("width", "height"), [(65, 49), (63, 47), (130, 33), (17, 3)])
def test_odd_sizes_keep_their_last_column_and_row(tmp_path: Path, width: int, height: int):
    pixels = bars(width, height).copy()
    pixels[:, -1], pixels[-1] = (10, 200, 30), (200, 10, 30)
    found = first(write_bars(tmp_path / "odd.mkv", "yuv444p", pixels=pixels))
    assert found.shape == (height, width, 3)
    assert np.abs(found - pixels).max() <= 4
    if height > 3:  # FFV1 in 4:2:0 needs more rows
        assert first(write_bars(tmp_path / "odd.mkv", "yuv420p", pixels=pixels)).shape == (height, width, 3)


def test_grey_is_three_equal_channels(tmp_path: Path):
    found = first(write_bars(tmp_path / "grey.mkv", "gray"))
    assert (found[..., 0] == found[..., 1]).all() and (found[..., 0] == found[..., 2]).all()
    assert found[0, 3].tolist() == [255] * 3 and found[0, 60].tolist() == [0] * 3


def test_transparency_is_laid_over_white(tmp_path: Path):
    rgba = np.zeros((48, 64, 4), np.uint8)
    rgba[..., 0], rgba[:, 32:, 3] = 200, 255
    path = write_bars(tmp_path / "clear.mkv", "bgra", pixels=rgba, source_format="rgba")
    found = first(path)
    assert found[0, 0].tolist() == [255] * 3 and found[0, 40].tolist() == [200, 0, 0]
    assert any("over white" in note for note in inspect(path).notes)


def pq_signal(nits: float) -> float:
    """SMPTE ST 2084, written out: the signal of a luminance."""
    y = (nits / 10000) ** (2610 / 16384)
    return ((3424 / 4096 + 2413 / 128 * y) / (1 + 2392 / 128 * y)) ** (2523 / 32)


def write_hdr(path: Path, signals: list[float], transfer: int) -> Path:
    """Grey patches of the given signal values, BT.2020, 10 bit."""
    row = np.repeat([round(s * 65535) for s in signals], 16)
    pixels = np.ascontiguousarray(np.broadcast_to(row[None, :, None], (32, len(row), 3)).astype(np.uint16))
    colour = {
        "colorspace": _BT2020,
        "color_primaries": _BT2020,
        "color_trc": transfer,
        "color_range": _LIMITED,
    }
    return write_bars(path, "yuv420p10le", pixels=pixels, colour=colour, source_format="rgb48le")


def test_pq_is_mapped_by_the_stated_rule(tmp_path: Path):
    nits = [0, 20, 100, 203, 1000]
    path = write_hdr(tmp_path / "pq.mkv", [pq_signal(n) for n in nits], _PQ)
    found = first(path)[16, 8::16, 1]
    assert found[0] <= 1 and found[3] >= 252 and found[4] >= 252
    assert (np.diff(found[:4]) > 0).all()
    # 100 of 203 cd/m² is half the light of white; display gammas from 2.2 to 2.4 put that at 185 to 190.
    assert found[2] == pytest.approx(188, abs=6)
    assert any("PQ" in note and "203" in note for note in inspect(path).notes)


def test_hlg_is_mapped_and_not_shown_flat(tmp_path: Path):
    path = write_hdr(tmp_path / "hlg.mkv", [0.0, 0.25, 0.5, 0.75, 1.0], _HLG)
    found = first(path)[16, 8::16, 1]
    assert found[0] <= 1 and found[3] >= 250 and (np.diff(found[:4]) > 20).all()
    assert any("HLG" in note for note in inspect(path).notes)


def test_a_colour_matrix_without_a_conversion_is_refused_by_name(tmp_path: Path):
    path = write_bars(tmp_path / "ycgco.mp4", "yuv444p", "libx264", colour={"colorspace": 8})
    with pytest.raises(MediaError, match="colour matrix"):
        inspect(path)
