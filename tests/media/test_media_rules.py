"""The rules have a version, and what names them loads no decoder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
from media_files import source_parameters

from kamera_cli.media.errors import MediaError
from kamera_cli.media.pixels import Orientation, RgbConverter
from kamera_cli.media.source import (
    IMAGE_RULES,
    PIXEL_RULES,
    SAMPLING_RULES,
    TEXT_RULES,
    content_sha256,
    decoder_versions,
)


def test_names_and_hashes_load_no_decoder():
    code = (
        "import sys, kamera_cli.media.source as r, kamera_cli.media.errors;"
        "r.decoder_versions(); print(sorted({'av', 'PIL', 'numpy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert decoder_versions().startswith(f"av {av.__version__} pillow ")


def test_the_source_key_names_every_rule_and_decoder():
    found = source_parameters()
    assert set(found["rules"].split()) == {SAMPLING_RULES, PIXEL_RULES, IMAGE_RULES, TEXT_RULES}
    assert found["decoders"] == decoder_versions()


@pytest.mark.skipif(
    av.library_versions["libswscale"] != (9, 5, 102), reason="the digests are of libswscale 9.5.102"
)
@pytest.mark.parametrize(
    ("pix_fmt", "digest"),
    [
        ("yuv420p", "6fdc78b68479474e"),
        ("yuv422p10le", "944e66cd310b2e4e"),
        ("yuvj444p", "b917eea95135358f"),
    ],
)
def test_a_change_of_pixels_needs_a_new_rule_version(pix_fmt: str, digest: str):
    rng = np.random.default_rng(0)
    frame = av.VideoFrame(66, 50, pix_fmt)
    for plane in frame.planes:
        if "10" in pix_fmt:
            plane.update(rng.integers(0, 1024, plane.buffer_size // 2, np.uint16).tobytes())
        else:
            plane.update(rng.integers(0, 256, plane.buffer_size, np.uint8).tobytes())
    pixels = RgbConverter(66, 50, Orientation())(frame)
    assert PIXEL_RULES == "pixels-1"
    assert hashlib.sha256(pixels.tobytes()).hexdigest()[:16] == digest


def test_the_hash_of_a_source_refuses_what_cannot_be_one(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"abc")
    assert content_sha256(tmp_path / "a.txt") == hashlib.sha256(b"abc").hexdigest()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "empty", tmp_path / "none"):
        with pytest.raises(MediaError):
            content_sha256(path)
