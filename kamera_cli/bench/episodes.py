"""Card episodes as the model meets them: through a video file, and the product's own decoder, processor and encode.

They are drawn from a split of their own, so that nothing was trained on them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kamera_cli.bench.prompt import Prompt
from kamera_cli.errors import RefusedError
from kamera_cli.ingest.encode import model_inputs
from kamera_cli.media.source import inspect
from kamera_cli.model.runner import ModelRunner
from kamera_cli.model.scoring import Forced
from kamera_cli.options import IngestOptions
from kamera_cli.patches.chunk import Chunk
from kamera_cli.tiny.render import write_video
from kamera_cli.tiny.vocabulary import UNKNOWN
from kamera_cli.tiny.world import ChunkSpec, Episode, Question, episode

SPLIT = "bench"
FPS = 2.0
"""Frames per second of the files and of their sampling, so that each frame of the file is seen once."""
SIDE = 224
CHUNK_SECONDS = 8.0
MIN_CHUNKS, MAX_CHUNKS = 3, 6

_INGEST = IngestOptions(fps=FPS, chunk_seconds=CHUNK_SECONDS)

Asked = tuple[str, Forced]
"""The group in which a question is counted, and the question with its expected answer."""


def bench_episode(index: int, seed: int) -> Episode:
    """Episode ``index`` of a run: 3 to 6 chunks in turn."""
    num_chunks = MIN_CHUNKS + index % (MAX_CHUNKS - MIN_CHUNKS + 1)
    return episode(episode_seed(index, seed), num_chunks=num_chunks, split=SPLIT)


def episode_seed(index: int, seed: int) -> int:
    """Seed of one episode of a run and of the choices that are made for it."""
    return 1_000_000 * seed + index


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
    episodes: list[Episode] = []
    while sum(len(part.chunks) for part in episodes) < num_chunks:
        episodes.append(bench_episode(len(episodes), seed))
    specs = tuple(spec for part in episodes for spec in part.chunks)[:num_chunks]
    write_episode(path, specs, seed)
    return tuple(sorted(episodes[0].questions, key=lambda question: -question.hops))


@dataclass(frozen=True)
class Encoded:
    """One episode after its only encode.

    Attributes
    ----------
    chunks : tuple of Chunk
        In the order of the file.
    seed : int
        Of choices that are made for this episode.
    """

    runner: ModelRunner
    episode: Episode
    chunks: tuple[Chunk, ...]
    seed: int

    def arranged(self, order: Sequence[int]) -> Prompt:
        """Some of the chunks, by index in the file, in prompt order."""
        return Prompt(self.runner, tuple(self.chunks[index] for index in order))

    def shuffled(self) -> Prompt:
        """All chunks in an order that is not the order of ingest."""
        return self.arranged(shuffled(len(self.chunks), self.seed))

    @property
    def asked(self) -> list[Asked]:
        """All questions about the episode."""
        return asked(self.runner, self.episode.questions)


def encoded_episodes(
    runner: ModelRunner, count: int, seed: int, work: Path, *, num_chunks: int | None = None
) -> Iterator[Encoded]:
    """The first ``count`` episodes of a seed, made one at a time.

    Parameters
    ----------
    num_chunks : int or None
        Take only episodes of so many chunks.
    work : Path
        Folder for the video file, which is removed again.
    """
    indices = (
        itertools.count()
        if num_chunks is None
        else itertools.count(num_chunks - MIN_CHUNKS, MAX_CHUNKS - MIN_CHUNKS + 1)
    )
    for index in itertools.islice(indices, count):
        found = bench_episode(index, seed)
        path = work / f"{index}.mp4"
        write_episode(path, found, 100_000 * seed + index)
        chunks = _encoded(runner, path, found)
        path.unlink()
        yield Encoded(runner, found, chunks, episode_seed(index, seed))


def shuffled(count: int, seed: int) -> tuple[int, ...]:
    """A seeded order of ``count`` (at least 2) chunks that is not the ascending one."""
    generator = random.Random(seed)
    order = list(range(count))
    while order == sorted(order):
        generator.shuffle(order)
    return tuple(order)


def group_of(question: Question) -> str:
    """The group in which a question is counted, one of `kamera_cli.bench.figures.GROUPS`."""
    if question.answer == UNKNOWN:
        return "unknown"
    return "two_hop" if question.hops == 2 else "one_hop"


def asked(runner: ModelRunner, questions: Sequence[Question]) -> list[Asked]:
    """Questions with their answers closed by the model's first end token."""
    end = torch.tensor(runner.eos_ids[:1])
    return [
        (
            group_of(question),
            Forced(runner.question_ids(question.text), torch.cat([runner.tokenize(question.answer), end])),
        )
        for question in questions
    ]


def _encoded(runner: ModelRunner, path: Path, expected: Episode) -> tuple[Chunk, ...]:
    if runner.num_deepstack_layers:
        raise RefusedError(
            "this suite recomputes chosen tokens of a cache, which was not proven for models with deepstack features"
        )
    read = (
        runner.encode(inputs) for _, inputs in model_inputs(runner, str(path), inspect(str(path)), _INGEST)
    )
    chunks = tuple(Chunk(encoded.segment, encoded.layers) for encoded in read)
    assert len(chunks) == len(expected.chunks), (
        f"{len(chunks)} chunks decoded of {len(expected.chunks)} written"
    )
    return chunks
