"""Card episodes as the model meets them: through a video file, and the product's own decoder, processor and encode."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kamera_cli.bench.arrangement import Arrangement
from kamera_cli.bench.cards import CHUNK_SECONDS, FPS, MAX_CHUNKS, MIN_CHUNKS, bench_episode, write_episode
from kamera_cli.errors import RefusedError
from kamera_cli.ingest.encode import model_inputs
from kamera_cli.media.source import inspect
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.inputs import Segment
from kamera_cli.model.runner import ModelRunner
from kamera_cli.model.scoring import Forced
from kamera_cli.options import IngestOptions
from kamera_cli.tiny.vocabulary import UNKNOWN
from kamera_cli.tiny.world import Episode, Question

GROUPS = ("two_hop", "one_hop", "unknown")

_INGEST = IngestOptions(fps=FPS, chunk_seconds=CHUNK_SECONDS)


@dataclass(frozen=True)
class Task:
    """One episode in an order that is not the order of ingest, with its questions.

    Attributes
    ----------
    order : tuple of int
        Index in the file of each chunk in prompt order.
    groups : tuple of str
        For each question one of `GROUPS`.
    """

    arrangement: Arrangement
    order: tuple[int, ...]
    prompts: tuple[Forced, ...]
    groups: tuple[str, ...]


@dataclass(frozen=True)
class Encoded:
    """One episode after its only encode: per chunk of the file, what is kept of it.

    Attributes
    ----------
    seed : int
        Of choices that are made for this episode.
    """

    runner: ModelRunner
    episode: Episode
    segments: list[Segment]
    canonical: list[list[LayerKV]]
    seed: int

    def arranged(self, order: Sequence[int]) -> Arrangement:
        """Some of the chunks, by index in the file, in prompt order."""
        return Arrangement(self.runner, [self.segments[i] for i in order], [self.canonical[i] for i in order])


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
        segments, canonical = _encoded(runner, path, found)
        path.unlink()
        yield Encoded(runner, found, segments, canonical, 1_000_000 * seed + index)


def tasks(runner: ModelRunner, count: int, seed: int, work: Path) -> Iterator[Task]:
    """Episodes in a shuffled order with all their questions; see `encoded_episodes`."""
    for encoded in encoded_episodes(runner, count, seed, work):
        questions = encoded.episode.questions
        order = shuffled(len(encoded.segments), encoded.seed)
        prompts = tuple(forced(runner, question) for question in questions)
        yield Task(encoded.arranged(order), order, prompts, tuple(map(group_of, questions)))


def shuffled(count: int, seed: int) -> tuple[int, ...]:
    """A seeded order of ``count`` (at least 2) chunks that is not the ascending one."""
    generator = random.Random(seed)
    order = list(range(count))
    while order == sorted(order):
        generator.shuffle(order)
    return tuple(order)


def group_of(question: Question) -> str:
    """The group in which a question is counted."""
    if question.answer == UNKNOWN:
        return "unknown"
    return "two_hop" if question.hops == 2 else "one_hop"


def forced(runner: ModelRunner, question: Question) -> Forced:
    """A question with its answer closed by the model's first end token."""
    end = torch.tensor(runner.eos_ids[:1])
    return Forced(runner.question_ids(question.text), torch.cat([runner.tokenize(question.answer), end]))


def _encoded(runner: ModelRunner, path: Path, expected: Episode) -> tuple[list[Segment], list[list[LayerKV]]]:
    if runner.num_deepstack_layers:
        raise RefusedError(
            "this suite recomputes chosen tokens of a cache, which was not proven for models with deepstack features"
        )
    segments, canonical = [], []
    for _, inputs in model_inputs(runner, str(path), inspect(str(path)), _INGEST):
        encoded = runner.encode(inputs)
        segments.append(encoded.segment)
        canonical.append(encoded.layers)
    assert len(segments) == len(expected.chunks), (
        f"{len(segments)} chunks decoded of {len(expected.chunks)} written"
    )
    return segments, canonical
