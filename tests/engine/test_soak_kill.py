"""``kill -9`` at any moment of an ingest or a compile: nothing committed is lost, a rerun ends in the same content."""

from __future__ import annotations

import pytest
from soak import soak
from tiny_models import write_noise_video


@pytest.mark.parametrize("num_kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_jobs_lose_nothing_and_end_in_the_same_content(checkpoints, tmp_path, num_kills):
    clip = write_noise_video(tmp_path / "clip.mp4", 3, seconds=8, fps=8)
    done = soak(tmp_path, checkpoints("qwen2_5_vl"), clip, num_kills)
    assert done.num_kills >= num_kills and done.num_completed >= 1
