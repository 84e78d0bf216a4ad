"""Pictures and texts: every storage form comes to the same RGB, or is refused."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from media_files import source_parameters
from PIL import Image

from kamera_cli.media.source import MediaError, Sampling, chunks, inspect, num_chunks


def read(path: Path):
    (chunk,) = chunks(path, inspect(path), Sampling())
    return chunk


def pixels(path: Path) -> np.ndarray:
    chunk = read(path)
    assert (chunk.kind, chunk.index, chunk.frames.dtype) == ("image", 0, np.uint8)
    assert chunk.frames.flags["C_CONTIGUOUS"]
    return chunk.frames


@pytest.fixture
def scene() -> np.ndarray:
    """Unlike under every turn and mirror image."""
    return np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)


@pytest.mark.parametrize("form", ["png", "bmp", "tiff", "webp", "avif", "jpeg"])
def test_formats_in_common_use(tmp_path: Path, form: str):
    path = tmp_path / "scene"  # no suffix: the content decides
    Image.new("RGB", (31, 17), (200, 30, 90)).save(
        path, form, **({"lossless": True} if form == "webp" else {})
    )
    assert np.abs(pixels(path).astype(int) - (200, 30, 90)).max() <= 3
    info = inspect(path)
    assert (info.kind, info.codec, info.width, info.height) == ("image", form, 31, 17)
    assert info.decoder.startswith("pillow ")
    assert num_chunks(info, Sampling()) == 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["png", "tiff", "jpeg"])
def test_exif_orientation_is_applied(tmp_path: Path, scene: np.ndarray, orientation: int, form: str):
    if form == "jpeg":
        scene = np.kron(scene[:2, :3], np.ones((16, 16, 1), np.uint8))
    # What EXIF says of row 0 and column 0 of the stored picture, turned back.
    stored = {
        1: scene,
        2: scene[:, ::-1],
        3: scene[::-1, ::-1],
        4: scene[::-1],
        5: scene.transpose(1, 0, 2),
        6: np.rot90(scene, 1),
        7: scene[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(scene, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "turned"
    Image.fromarray(np.ascontiguousarray(stored)).save(
        path, form, exif=exif, **({"quality": 100, "subsampling": 0} if form == "jpeg" else {})
    )
    assert np.abs(pixels(path).astype(int) - scene).max() <= (6 if form == "jpeg" else 0)
    info = inspect(path)
    assert (info.height, info.width) == scene.shape[:2]
    assert any("EXIF" in note for note in info.notes) == (orientation != 1)


def test_a_damaged_exif_block_does_not_stop_a_picture(tmp_path: Path, scene: np.ndarray):
    path = tmp_path / "a.png"
    Image.fromarray(scene).save(path, exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert np.array_equal(pixels(path), scene)


def test_equal_bytes_in_another_shape_are_another_picture(tmp_path: Path):
    raw = np.random.default_rng(1).bytes(13500)
    for name, size in (("a.png", (30, 150)), ("b.png", (150, 30))):
        Image.frombytes("RGB", size, raw).save(tmp_path / name)
    a, b = pixels(tmp_path / "a.png"), pixels(tmp_path / "b.png")
    assert a.tobytes() == b.tobytes() == raw
    assert (a.shape, b.shape) == ((150, 30, 3), (30, 150, 3))


def test_equal_indices_under_another_palette_are_another_picture(tmp_path: Path):
    for name, colour in (("a.png", (255, 0, 0)), ("b.png", (0, 0, 255))):
        image = Image.frombytes("P", (8, 8), bytes(64))
        image.putpalette(colour)
        image.save(tmp_path / name)
    assert pixels(tmp_path / "a.png")[0, 0].tolist() == [255, 0, 0]
    assert pixels(tmp_path / "b.png")[0, 0].tolist() == [0, 0, 255]


def test_trailing_bytes_change_the_identity_of_the_file(tmp_path: Path):
    data = io.BytesIO()
    Image.new("RGB", (16, 16), "red").save(data, "JPEG")
    (tmp_path / "a.jpg").write_bytes(data.getvalue())
    (tmp_path / "b.jpg").write_bytes(data.getvalue() + b"--max-pixels=1")
    a, b = inspect(tmp_path / "a.jpg"), inspect(tmp_path / "b.jpg")
    assert a.content_sha256 != b.content_sha256
    assert np.array_equal(pixels(tmp_path / "a.jpg"), pixels(tmp_path / "b.jpg"))


@pytest.mark.parametrize(
    ("mode", "colour", "wanted"),
    [
        ("1", 1, (255, 255, 255)),
        ("L", 77, (77, 77, 77)),
        ("LA", (0, 0), (255, 255, 255)),
        ("LA", (100, 255), (100, 100, 100)),
        ("RGBA", (200, 0, 0, 0), (255, 255, 255)),
        ("RGBA", (200, 0, 0, 128), (227, 127, 127)),
        ("I;16", 32896, (128, 128, 128)),
        ("I;16", 65535, (255, 255, 255)),
    ],
)
def test_modes_come_to_rgb_by_the_stated_rules(tmp_path: Path, mode: str, colour, wanted):
    path = tmp_path / "a.png"
    Image.new(mode, (4, 4), colour).save(path)
    assert pixels(path)[2, 2].tolist() == pytest.approx(list(wanted), abs=1)


def test_a_transparent_palette_and_a_transparent_colour_become_white(tmp_path: Path):
    image = Image.frombytes("P", (2, 1), b"\0\1")
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.save(tmp_path / "p.png", transparency=0)
    assert pixels(tmp_path / "p.png").tolist() == [[[255, 255, 255], [0, 255, 0]]]
    Image.new("RGB", (1, 1), (1, 2, 3)).save(tmp_path / "rgb.png", transparency=(1, 2, 3))
    assert pixels(tmp_path / "rgb.png").tolist() == [[[255, 255, 255]]]
    assert any("over white" in note for note in inspect(tmp_path / "p.png").notes)


def test_cmyk_is_converted(tmp_path: Path):
    Image.new("CMYK", (8, 8), (0, 0, 0, 255)).save(tmp_path / "a.tiff")
    assert pixels(tmp_path / "a.tiff").max() == 0


def test_floating_point_and_32_bit_grey_are_refused(tmp_path: Path):
    Image.fromarray(np.ones((4, 4), np.float32)).save(tmp_path / "f.tiff")
    Image.fromarray(np.full((4, 4), 70000, np.int32)).save(tmp_path / "i.tiff")
    for name in ("f.tiff", "i.tiff"):
        with pytest.raises(MediaError):
            read(tmp_path / name)


@pytest.mark.parametrize("form", ["gif", "webp", "png"])
def test_of_an_animation_the_first_picture_is_taken_and_named(tmp_path: Path, form: str):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    frames[0].save(tmp_path / "a", form, save_all=True, append_images=frames[1:])
    assert pixels(tmp_path / "a")[4, 4].tolist() == pytest.approx([255, 0, 0], abs=4)
    assert any("first of 3" in note for note in inspect(tmp_path / "a").notes)


def test_a_decompression_bomb_is_refused_before_it_is_unpacked(tmp_path: Path):
    for name, side in (("large.png", 9_500), ("huge.png", 20_000)):
        Image.new("1", (side, side)).save(tmp_path / name)
        with pytest.raises(MediaError, match="too large"):
            inspect(tmp_path / name)


@pytest.mark.parametrize("form", ["png", "jpeg", "webp", "gif", "tiff", "bmp"])
def test_a_picture_cut_short_is_one_line(tmp_path: Path, scene: np.ndarray, form: str):
    path = tmp_path / "a"
    Image.fromarray(np.kron(scene, np.ones((8, 8, 1), np.uint8))).save(path, form)
    data = path.read_bytes()
    for size in (len(data) // 2, 40, 20, 9):
        path.write_bytes(data[:size])
        with pytest.raises(MediaError) as caught:
            read(path)
        assert "\n" not in str(caught.value)


def test_text_is_one_chunk_without_its_byte_order_mark(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_bytes(b"\xef\xbb\xbf" + "naïve\r\n日本\n".encode())
    chunk = read(path)
    assert (chunk.kind, chunk.name, chunk.text, chunk.frames) == (
        "text",
        "notes.txt",
        "naïve\r\n日本\n",
        None,
    )
    assert source_parameters(chunk_tokens=64) != source_parameters()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"caf\xe9", "no UTF-8"),
        (b"a\0b", "null byte"),
        ("text".encode("utf-16"), "UTF-16"),
        (b" \n\t", "no text"),
        (b"\xef\xbb\xbf", "no text"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, data: bytes, reason: str):
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(MediaError, match=reason):
        read(tmp_path / "a.txt")


def test_text_that_begins_like_a_picture_stays_text(tmp_path: Path):
    for text in ("BM is short for bitmap", "RIFFs are fun", "GIF is a format", "Ghosts" * 100):
        (tmp_path / "a.txt").write_text(text)
        assert read(tmp_path / "a.txt").text == text
