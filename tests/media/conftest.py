"""The clips that most tests of media input start from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from media_files import picture, with_display_matrix, write_video


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """F1: ten frames at ten per second."""
    return write_video(tmp_path / "clip.mp4", [picture(i) for i in range(10)])


@pytest.fixture
def turned(tmp_path: Path, clip: Path) -> Callable[[int | str], Path]:
    """F2: F1 with a display matrix."""
    return lambda turn: with_display_matrix(clip, tmp_path / f"turned-{turn}.mp4", turn)


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """F3: frames at 0, 0.1, 0.2, 0.3, 5, 5.1, 5.2, 5.3, 12 and 20 seconds."""
    times = [0, 1, 2, 3, 50, 51, 52, 53, 120, 200]
    return write_video(tmp_path / "uneven.mp4", [picture(i) for i in range(10)], pts=times)
