"""Files that are no video end in one line each; the rest of a batch is not touched."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import av
import numpy as np
import pytest
from media_files import RATE, number_of, picture, write_sound, write_video

from kamera_cli.media.errors import printable
from kamera_cli.media.source import MediaError, Sampling, chunks, inspect


def refused(path) -> str:
    with pytest.raises(MediaError) as caught:
        list(chunks(path, inspect(path), Sampling()))
    line = str(caught.value)
    assert "\n" not in line and line.startswith(printable(path))
    line.encode("utf-8")
    assert caught.value.reason
    return line


def write_noise(path: Path) -> Path:
    """A clip of 12 s whose frames outweigh its headers; MP4 with the index in front, as a download has it."""
    rng = np.random.default_rng(0)
    front = {"movflags": "faststart"} if path.suffix == ".mp4" else {}
    pictures = [rng.integers(0, 256, (48, 64, 3), np.uint8) for _ in range(120)]
    return write_video(path, pictures, options={"g": "10"}, container_options=front)


def test_a_clip_without_its_index(clip: Path):
    data = clip.read_bytes()
    clip.write_bytes(data[: data.index(b"moov") - 4])
    assert "index" in refused(clip)


def test_an_empty_file(tmp_path: Path):
    (tmp_path / "empty.mp4").touch()
    assert "empty" in refused(tmp_path / "empty.mp4")


def test_text_under_the_name_of_a_video(tmp_path: Path):
    (tmp_path / "text.mp4").write_text("no film at all\n")
    assert "neither video" in refused(tmp_path / "text.mp4")


def test_a_folder_a_missing_file_and_a_pipe(tmp_path: Path):
    assert "folder" in refused(tmp_path)
    assert "No such file" in refused(tmp_path / "nothing.mp4")
    os.mkfifo(tmp_path / "pipe.mp4")
    assert "regular file" in refused(tmp_path / "pipe.mp4")
    assert "null character" in refused("a\0b.mp4")


def test_sound_only(tmp_path: Path):
    assert "sound but no video" in refused(write_sound(tmp_path / "song.m4a"))


def test_a_cover_picture_is_no_video(tmp_path: Path):
    assert "cover picture" in refused(write_sound(tmp_path / "song.m4a", cover=True))


def test_a_file_closed_without_a_frame(tmp_path: Path):
    line = refused(write_sound(tmp_path / "nothing.mp4", video_without_frames=True))
    assert "no frame" in line or "no video" in line


def test_bytes_of_no_kind_and_a_cut_signature(tmp_path: Path):
    rng = np.random.default_rng(0)
    (tmp_path / "noise.bin").write_bytes(b"\x07" + rng.bytes(5000))
    assert "no known kind" in refused(tmp_path / "noise.bin")
    for name, start in (
        ("a.mkv", b"\x1aE\xdf\xa3"),
        ("b.mp4", b"\0\0\0\x18ftypmp42"),
        ("c.avi", b"RIFF\xff\xff"),
    ):
        (tmp_path / name).write_bytes(start + rng.bytes(300))
        refused(tmp_path / name)


def test_a_pdf_says_what_to_do(tmp_path: Path):
    (tmp_path / "paper.pdf").write_bytes(b"%PDF-1.7\n%\xe2\xe3\n")
    assert "pdftoppm" in refused(tmp_path / "paper.pdf")


@pytest.mark.parametrize(
    "script", ["#EXTM3U\n#EXTINF:1,\nsecret.mp4\n", "ffconcat version 1.0\nfile secret.mp4\n"]
)
def test_a_playlist_never_opens_another_file(tmp_path: Path, clip: Path, script: str):
    clip.rename(tmp_path / "secret.mp4")
    (tmp_path / "list.m3u8").write_text(script)
    (chunk,) = chunks(tmp_path / "list.m3u8", inspect(tmp_path / "list.m3u8"), Sampling())
    assert (chunk.kind, chunk.text) == ("text", script)


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("suffix", ["mp4", "mkv", "avi", "ts"])
def test_a_clip_cut_short_gives_its_readable_chunks_and_then_an_error(
    tmp_path: Path, suffix: str, keep: float
):
    path = write_noise(tmp_path / f"whole.{suffix}")
    sampling = Sampling(fps=2, chunk_seconds=1)
    whole = list(chunks(path, inspect(path), sampling))
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    found = []
    try:
        found.extend(chunks(path, inspect(path), sampling))
    except MediaError as error:
        assert "\n" not in str(error)
    else:
        assert suffix == "ts"  # a transport stream names no length and may end anywhere
    assert 0 < len(found) < len(whole)
    for before, after in zip(whole, found[:-1], strict=False):
        assert np.array_equal(before.frames, after.frames)


def test_a_recording_in_fragments_that_was_cut_off(tmp_path: Path):
    pictures = [picture(i % 32) for i in range(100)]
    flags = {"movflags": "frag_keyframe+empty_moov"}
    options = {"g": "10", "sc_threshold": "0"}
    path = write_video(tmp_path / "f.mp4", pictures, options=options, container_options=flags)
    sampling = Sampling(fps=2, chunk_seconds=1)
    whole = list(chunks(path, inspect(path), sampling))
    assert len(whole) == 10
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b"moof") - 4])  # the last fragment is missing altogether
    found = list(chunks(path, inspect(path), sampling))
    assert len(found) == 9
    assert all(np.array_equal(a.frames, b.frames) for a, b in zip(whole, found, strict=False))
    path.write_bytes(data[: data.rindex(b"mdat") + 60])  # and here it is begun
    refused(path)


def test_a_run_that_is_given_up_leaves_no_file_open(clip: Path):
    before = len(os.listdir("/proc/self/fd"))
    run = chunks(clip, inspect(clip), Sampling(fps=10, chunk_seconds=0.2))
    next(run)
    run.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_damage_in_the_middle_is_no_silent_change(tmp_path: Path):
    path = write_noise(tmp_path / "clip.mp4")
    whole = list(chunks(path, inspect(path), Sampling(fps=2, chunk_seconds=1)))
    with av.open(str(path)) as container:
        middle = [packet.pos for packet in container.demux(video=0) if packet.size][60]
    data = bytearray(path.read_bytes())
    data[middle : middle + 4] = b"\xff" * 4  # the length of the packet's first unit
    path.write_bytes(data)
    found = []
    with pytest.raises(MediaError, match="damaged after"):
        found.extend(chunks(path, inspect(path), Sampling(fps=2, chunk_seconds=1)))
    assert 0 < len(found) < len(whole)
    assert all(np.array_equal(a.frames, b.frames) for a, b in zip(whole, found[:-1], strict=False))


def test_time_stamps_that_jump_back_are_an_error(tmp_path: Path):
    parts = b""
    for name in ("a.ts", "b.ts"):
        parts += write_video(tmp_path / name, [picture(i) for i in range(30)]).read_bytes()
    (tmp_path / "joined.ts").write_bytes(parts)
    assert "jump" in refused(tmp_path / "joined.ts")


def test_a_gap_of_hours_does_not_fill_a_store(tmp_path: Path):
    path = write_video(tmp_path / "gap.mkv", [picture(0), picture(1)], pts=[0, 5 * 3600 * RATE])
    assert "jump" in refused(path)


@pytest.mark.parametrize(
    "name",
    [
        "12:30 clip.mp4",
        "naïve 日本.mp4",
        "two\nlines.mp4",
        "-dash.mp4",
        "a'b\"c.mp4",
        "%d.mp4",
        b"bad-\xff.mp4",
    ],
)
def test_every_file_name_works(tmp_path: Path, clip: Path, monkeypatch, name):
    data = clip.read_bytes()
    monkeypatch.chdir(tmp_path)
    with open(name, "wb") as file:
        file.write(data)
    info = inspect(name)
    (chunk,) = chunks(name, info, Sampling())
    assert number_of(chunk.frames[0]) == 0
    for shown in (info.path, chunk.name):
        assert "\n" not in shown
        shown.encode("utf-8")


def test_a_file_that_changes_after_inspection_is_not_read(clip: Path):
    info = inspect(clip)
    write_video(clip, [picture(9)] * 10)
    with pytest.raises(MediaError, match="changed"):
        list(chunks(clip, info, Sampling()))


def test_nothing_is_printed(tmp_path: Path, clip: Path, capfd):
    data = clip.read_bytes()
    clip.write_bytes(data[: len(data) // 2])
    refused(clip)
    refused(write_sound(tmp_path / "song.m4a"))
    assert capfd.readouterr() == ("", "")


def test_an_error_survives_a_process_boundary():
    error = MediaError(b"bad-\xff\n.mp4", "a\nb", "c")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "bad-\\xff\\n.mp4: a b; c"
