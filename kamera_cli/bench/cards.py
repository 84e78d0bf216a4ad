"""Card videos and episodes to measure on, drawn from a split of their own so that nothing was trained on them."""

from __future__ import annotations

from pathlib import Path

from kamera_cli.tiny.render import write_video
from kamera_cli.tiny.world import ChunkSpec, Episode, Question, episode

SPLIT = "bench"
FPS = 2.0
"""Frames per second of the files and of their sampling, so that each frame of the file is seen once."""
SIDE = 224
CHUNK_SECONDS = 8.0
MIN_CHUNKS, MAX_CHUNKS = 3, 6


def bench_episode(index: int, seed: int) -> Episode:
    """Episode ``index`` of a run: 3 to 6 chunks in turn."""
    num_chunks = MIN_CHUNKS + index % (MAX_CHUNKS - MIN_CHUNKS + 1)
    return episode(1_000_000 * seed + index, num_chunks=num_chunks, split=SPLIT)


def write_episode(path: Path, chunks: Episode | tuple[ChunkSpec, ...], seed: int) -> None:
    """Write chunks as one H.264 file at `FPS` frames per second."""
    write_video(path, chunks, fps=FPS, size=SIDE, seed=seed)


def long_video(path: Path, num_chunks: int, seed: int) -> tuple[Question, ...]:
    """Write a video of ``num_chunks`` chunks of 8 s, one episode after the other.

    Returns
    -------
    tuple of Question
        Of the first episode, two-hop ones first.
    """
    episodes = []
    while sum(len(part.chunks) for part in episodes) < num_chunks:
        episodes.append(bench_episode(len(episodes), seed))
    specs = tuple(spec for part in episodes for spec in part.chunks)[:num_chunks]
    write_episode(path, specs, seed)
    return tuple(sorted(episodes[0].questions, key=lambda question: -question.hops))
