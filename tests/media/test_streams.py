"""Of several streams one is chosen by a stated rule."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import pytest
from av.stream import Disposition
from media_files import RATE, number_of, picture, source_parameters, write_video

from kamera_cli.media import container, frames
from kamera_cli.media.source import MediaError, Sampling, chunks, inspect


def write_two(path: Path, default: int | None) -> Path:
    """A 64x48 and a 128x96 stream; `default` is the index that is marked, None for neither."""
    with av.open(str(path), "w", options={"default_mode": "passthrough"}) as container:
        streams = []
        for index, (width, height) in enumerate(((64, 48), (128, 96))):
            stream = container.add_stream("libx264", rate=10)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            stream.disposition = Disposition.default if index == default else Disposition(0)
            streams.append(stream)
        for number in range(5):
            for stream in streams:
                frame = av.VideoFrame.from_ndarray(
                    picture(number, stream.width, stream.height), format="rgb24"
                )
                frame.pts, frame.time_base = number, Fraction(1, 10)
                container.mux(stream.encode(frame))
        for stream in streams:
            container.mux(stream.encode())
    return path


@pytest.mark.parametrize(("default", "chosen"), [(0, 0), (1, 1), (None, 1)])
def test_the_marked_stream_wins_and_then_the_larger_one(tmp_path: Path, default, chosen: int):
    path = write_two(tmp_path / "two.mkv", default)
    info = inspect(path)
    assert info.stream_index == chosen
    assert any(f"stream {chosen} of 2" in note for note in info.notes)
    (chunk,) = chunks(path, info, Sampling())
    assert chunk.frames.shape[1:3] == ((48, 64), (96, 128))[chosen]


def test_the_decoder_is_named_with_its_versions(clip: Path):
    info = inspect(clip)
    assert info.decoder.startswith(f"pyav {av.__version__} libavcodec ")
    assert f"av {av.__version__}" in source_parameters()["decoders"]
    assert info.codec == "h264" and info.kind == "video"


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        *(("a.mkv", "libx264"), ("a.mov", "libx264"), ("a.ts", "libx264"), ("a.flv", "libx264")),
        *(("a.avi", "mpeg4"), ("a.mpg", "mpeg1video"), ("a.webm", "libvpx-vp9")),
        *(("a.mp4", "libsvtav1"), ("a.mp4", "libx265"), ("a.y4m", "wrapped_avframe")),
    ],
)
def test_containers_and_codecs_in_common_use(tmp_path: Path, monkeypatch, name: str, codec: str):
    monkeypatch.setenv("SVT_LOG", "0")
    rate = 25 if codec == "mpeg1video" else 10
    quiet = {"libx265": {"x265-params": "log-level=none"}}.get(codec, {})
    path = write_video(
        tmp_path / name, [picture(i) for i in range(rate)], codec=codec, rate=rate, options=quiet
    )
    info = inspect(path)
    assert info.num_frames == rate
    assert info.duration_s == pytest.approx(1.0, abs=0.11)
    (chunk,) = chunks(path, info, Sampling(fps=2))
    assert chunk.frames.shape == (2, 48, 64, 3)
    assert chunk.frames[0][8, 8].tolist() == pytest.approx([255, 0, 0], abs=12)
    assert [number_of(frame) / rate for frame in chunk.frames] == pytest.approx([0.0, 0.5], abs=0.05)


@pytest.mark.parametrize("name", ["a.avi", "a.h264", "a.ts", "a.flv", "a.mkv"])
def test_reordered_frames_keep_their_order_in_every_container(tmp_path: Path, name: str):
    pictures = [picture(i) for i in range(25)]
    path = write_video(tmp_path / name, pictures, rate=25, options={"bf": "3", "b_strategy": "0"})
    (chunk,) = chunks(path, inspect(path), Sampling(fps=25, chunk_seconds=2, frame_multiple=1))
    assert [number_of(frame) for frame in chunk.frames] == list(range(25))


def cut_in_front(path: Path, target: Path, seconds: Fraction) -> Path:
    """As players and editors cut without encoding again: packets from the keyframe before on, those hidden that no
    frame is shown of."""
    options = {"avoid_negative_ts": "disabled"}
    with av.open(str(path)) as source, av.open(str(target), "w", options=options) as container:
        stream = source.streams.video[0]
        copy = container.add_stream_from_template(stream)
        packets = [packet for packet in source.demux(stream) if packet.size]
        start = int(seconds / stream.time_base)
        first = max(at for at, each in enumerate(packets) if each.is_keyframe and each.pts <= start)
        for packet in packets[first:]:
            packet.stream, packet.pts, packet.dts = copy, packet.pts - start, packet.dts - start
            container.mux(packet)
    return target


OPEN_GOP = {"x264-params": "keyint=80:open-gop=1:bframes=3:scenecut=0"}


@pytest.mark.parametrize(
    ("codec", "pix_fmt", "options", "number"),
    [("libx264", "yuv420p", OPEN_GOP, 200), ("qtrle", "rgb24", {}, 40)],
)
def test_a_sound_video_that_was_cut_in_front_is_no_damaged_one(
    tmp_path: Path, codec: str, pix_fmt: str, options: dict, number: int
):
    pictures = [picture(shown % 32) for shown in range(number)]
    whole = write_video(tmp_path / "whole.mov", pictures, codec=codec, pix_fmt=pix_fmt, options=options)
    path = cut_in_front(whole, tmp_path / "cut.mov", Fraction(7, 4))
    info = inspect(path)
    found = [each for chunk in chunks(path, info, Sampling(fps=RATE)) for each in chunk.frames]
    assert len(found) == number - 18
    assert [number_of(frame) for frame in found] == [(18 + at) % 32 for at in range(len(found))]


@pytest.mark.parametrize("least", [1, 64])
@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [("a.ts", "libx264", OPEN_GOP), ("a.avi", "huffyuv", {}), ("a.asf", "wmv2", {}), ("a.mkv", "ffv1", {})],
)
def test_a_second_look_at_the_last_packets_finds_no_damage_in_a_sound_video(
    tmp_path: Path, monkeypatch, name: str, codec: str, options: dict, least: int
):
    monkeypatch.setattr(frames, "_MOST_THREADS", least)
    pictures = [picture(number % 32) for number in range(200)]
    pix_fmt = "yuv422p" if codec == "huffyuv" else "yuv420p"
    path = write_video(tmp_path / name, pictures, codec=codec, pix_fmt=pix_fmt, options=options)
    with path.open("rb") as file, container.opened(str(path), file) as opened:
        stream, _ = container.choose_stream(str(path), opened)
        ending = frames._Ending(stream)
        for packet in opened.demux(stream):
            ending.add(packet, 0)
        ending.require_whole()


def test_a_raw_stream_says_that_its_times_are_assumed(tmp_path: Path):
    path = write_video(tmp_path / "a.h264", [picture(i) for i in range(25)])
    info = inspect(path)
    assert (info.num_frames, info.duration_s) == (25, 1.0)
    assert any("25 frames per second assumed" in note for note in info.notes)


def test_a_stream_that_changes_size_keeps_the_first_one(tmp_path: Path):
    small = write_video(tmp_path / "a.h264", [picture(i) for i in range(10)])
    large = write_video(tmp_path / "b.h264", [picture(i, 128, 96) for i in range(10)])
    path = tmp_path / "grown.h264"
    path.write_bytes(small.read_bytes() + large.read_bytes())
    found = list(chunks(path, inspect(path), Sampling(fps=5)))
    assert all(chunk.frames.shape[1:] == (48, 64, 3) for chunk in found)


def test_a_chunk_that_would_fill_the_memory_is_refused(clip: Path, monkeypatch):
    monkeypatch.setattr("kamera_cli.media.collect.MAX_CHUNK_BYTES", 5 * 48 * 64 * 3)
    with pytest.raises(MediaError, match="shorter chunks"):
        list(chunks(clip, inspect(clip), Sampling(fps=10)))
    assert len(list(chunks(clip, inspect(clip), Sampling(fps=10, chunk_seconds=0.4)))) == 3


def test_memory_grows_with_a_chunk_and_not_with_the_clip(tmp_path: Path):
    path = write_video(tmp_path / "long.mp4", [picture(i % 32) for i in range(300)])
    held = [
        chunk.frames.base if chunk.frames.base is not None else chunk.frames
        for chunk in chunks(path, inspect(path), Sampling(fps=10, chunk_seconds=1))
    ]
    assert len(held) == 30 and all(array.nbytes == 10 * 48 * 64 * 3 for array in held)
    assert not any(np.shares_memory(a, b) for a, b in pairwise(held))
