"""Model inputs of random pictures and clips for the tiny vision model."""

from __future__ import annotations

import torch


def picture(runner, seed: int = 0, *, height: int = 56, width: int = 84):
    """One image chunk."""
    pixels = _noise((height, width, 3), seed)
    return runner.media_inputs("image", pixels, fps=None, max_pixels=None)


def clip(runner, seed: int = 0, *, frames: int = 8, height: int = 56, width: int = 56, fps: float = 2.0):
    """One video chunk."""
    pixels = _noise((frames, height, width, 3), seed)
    return runner.media_inputs("video", pixels, fps=fps, max_pixels=None)


def _noise(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
