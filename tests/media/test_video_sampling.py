"""Which frame stands for which second."""

from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media_files import number_of, picture, source_parameters, write_video

from kamera_cli.media.chunk import Timeline
from kamera_cli.media.source import Sampling, SamplingError, chunks, inspect, num_chunks


def read(path, sampling: Sampling) -> list:
    return list(chunks(path, inspect(path), sampling))


def numbers(found: list) -> list[int]:
    return [number_of(frame) for chunk in found for frame in chunk.frames]


def test_uneven_times_take_the_frame_nearest_to_each_second(uneven: Path):
    (chunk,) = read(uneven, Sampling(fps=1, chunk_seconds=60, frame_multiple=1))
    # Frames 0-3 lie at 0 to 0.3 s, 4-7 at 5 to 5.3 s, 8 at 12 s, 9 at 20 s; 16 s is as near to 12 as to 20.
    assert numbers([chunk]) == [0, 3, 3, 4, 4, 4, 7, 7, 7, 8, 8, 8, 8, 8, 8, 8, 8, 9, 9, 9, 9]
    assert chunk.fps == 1.0


def test_a_header_that_lies_about_its_length_does_not_cut_the_clip(uneven: Path):
    info = inspect(uneven)
    assert info.num_frames == 10
    assert 20.0 < info.duration_s < 21.0
    sampling = Sampling(fps=1, chunk_seconds=4)
    assert len(read(uneven, sampling)) == num_chunks(info, sampling) == 6


def test_a_stream_that_starts_late_counts_from_its_first_frame(tmp_path: Path):
    late = write_video(tmp_path / "late.mkv", [picture(i) for i in range(10)], pts=range(50, 60))
    info = inspect(late)
    assert (info.num_frames, info.duration_s) == (10, 1.0)
    (chunk,) = read(late, Sampling(fps=5))
    assert numbers([chunk])[:5] == [0, 2, 4, 6, 8]
    assert (chunk.start_s, chunk.end_s) == (0.0, 1.0)


def test_a_trimmed_clip_starts_where_its_edit_list_says(tmp_path: Path):
    path = write_video(tmp_path / "trimmed.mp4", [picture(i) for i in range(20)], options={"bf": "0"})
    data = bytearray(path.read_bytes())
    entry = (
        data.index(b"elst") + 12
    )  # after version, flags and the number of entries: duration, media time, rate
    duration, media_time = struct.unpack(">Ii", data[entry : entry + 8])
    with av.open(str(path)) as container:
        frame_ticks = next(container.demux(video=0)).duration
    data[entry : entry + 8] = struct.pack(">Ii", duration * 15 // 20, media_time + 5 * frame_ticks)
    path.write_bytes(data)
    info = inspect(path)
    assert (info.num_frames, info.duration_s) == (15, 1.5)
    (chunk,) = read(path, Sampling(fps=10, frame_multiple=1))
    assert numbers([chunk]) == list(range(5, 20))
    assert chunk.start_s == 0.0


def test_chunks_meet_without_gap_or_overlap(tmp_path: Path):
    path = write_video(tmp_path / "long.mp4", [picture(i) for i in range(25)])
    found = read(path, Sampling(fps=10, chunk_seconds=1, frame_multiple=1))
    assert [len(chunk.frames) for chunk in found] == [10, 10, 5]
    assert numbers(found) == list(range(25))
    assert [(chunk.start_s, chunk.end_s) for chunk in found] == [(0, 1), (1, 2), (2, 2.5)]
    assert [chunk.name for chunk in found] == ["long.mp4#0", "long.mp4#1", "long.mp4#2"]


def test_a_chunk_length_that_is_no_whole_number_of_samples_loses_none(tmp_path: Path):
    path = write_video(tmp_path / "long.mp4", [picture(i) for i in range(25)])
    sampling = Sampling(fps=10, chunk_seconds=0.75, frame_multiple=1)
    found = read(path, sampling)
    assert [len(chunk.frames) for chunk in found] == [8, 7, 8, 2]
    assert numbers(found) == list(range(25))
    assert num_chunks(inspect(path), sampling) == 4


def test_the_frame_count_is_filled_up_by_the_last_frame(clip: Path):
    (chunk,) = read(clip, Sampling(fps=5, frame_multiple=4))
    assert chunk.frames.shape == (8, 48, 64, 3)
    assert numbers([chunk]) == [0, 2, 4, 6, 8, 8, 8, 8]
    assert all(np.array_equal(chunk.frames[4], frame) for frame in chunk.frames[5:])
    assert chunk.end_s == 1.0


def test_a_rate_above_the_clips_own_repeats_frames(clip: Path):
    (chunk,) = read(clip, Sampling(fps=20, frame_multiple=1))
    assert numbers([chunk]) == [i // 2 for i in range(20)]


@pytest.mark.parametrize("count", [1, 2])
def test_a_clip_shorter_than_one_sample_gives_one_frame(tmp_path: Path, count: int):
    path = write_video(tmp_path / "short.mp4", [picture(i) for i in range(count)])
    (chunk,) = read(path, Sampling(fps=1, frame_multiple=2))
    assert numbers([chunk]) == [0, 0]


def test_decoding_twice_gives_the_same_bytes(clip: Path):
    a, b = (read(clip, Sampling(fps=10)) for _ in range(2))
    assert np.array_equal(a[0].frames, b[0].frames)


def test_another_rate_is_another_parameter_set_and_another_rate_in_the_chunk(clip: Path):
    seen = [source_parameters(fps=fps) for fps in (1, 2, 4, 8)]
    assert len({tuple(sorted(p.items())) for p in seen}) == 4
    assert [read(clip, Sampling(fps=fps))[0].fps for fps in (1, 2, 4, 8)] == [1.0, 2.0, 4.0, 8.0]


def test_a_sampling_that_cuts_nothing_is_refused():
    for wrong in ({"fps": 0}, {"fps": float("nan")}, {"chunk_seconds": -1}, {"frame_multiple": 1.5}):
        with pytest.raises(SamplingError):
            Sampling(**wrong)
    with pytest.raises(SamplingError, match="less than one sample"):
        Sampling(fps=0.5, chunk_seconds=1)


@settings(deadline=None)
@given(
    gaps=st.lists(st.integers(1, 400), min_size=0, max_size=30),
    last=st.integers(1, 400),
    rate=st.fractions(Fraction(1, 10), 60, max_denominator=20),
)
def test_the_rule_equals_a_search_over_all_frames(gaps: list[int], last: int, rate: Fraction):
    times = [Fraction(0)]
    for gap in gaps:
        times.append(times[-1] + Fraction(gap, 90))
    end = times[-1] + Fraction(last, 90)
    timeline, served = Timeline(rate), []
    timeline.until(times[0])
    for number, time in enumerate(times[1:]):
        served += [number] * (timeline.until(time) - len(served))
    served += [len(times) - 1] * (timeline.finish(end) - len(served))

    num_samples = max(1, -(-end * rate // 1))
    wanted = [
        min(range(len(times)), key=lambda i, k=k: (abs(times[i] - k / rate), i)) for k in range(num_samples)
    ]
    assert served == wanted
