"""Sources of a window for each family, and what a query computed, seen from outside."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from plain_model import greedy, next_logits, whole_prompt
from tiny_models import write_noise_image, write_noise_video, write_passage

if TYPE_CHECKING:
    from kamera_cli.engine import Engine
    from kamera_cli.tiny.world import Episode

QUESTION = "which letter goes with the red circle?"
NUM_NEW = 8


def write_sources(family: str, folder: Path, *, num_words: int = 20) -> list[Path]:
    """Three sources of one chunk each; all three have equally many tokens, so that one rank is full for all."""
    if family != "qwen2_5_vl":
        return [write_passage(folder / f"{name}.txt", num_words, seed) for seed, name in enumerate("abc")]
    return [
        write_noise_video(folder / "a.mp4", 1, seconds=2),
        write_noise_image(folder / "b.png", 2, width=112),
        write_noise_image(folder / "c.png", 3, width=56, height=112),
    ]


def ingest(engine, family: str, folder: Path, **options) -> None:
    """Three chunks, numbered 1, 2 and 3, in the default window."""
    result = engine.ingest(write_sources(family, folder), **options)
    assert [chunk.number for chunk in result.chunks] == [1, 2, 3], result


def model_inputs(engine, numbers: list[str]) -> list:
    """What the model sees of some chunks, made again from their sources."""
    from kamera_cli.query.compare import reopen

    chunks = {str(entry.number): entry for entry in engine.window().entries}
    records = [engine.store.get(bytes.fromhex(chunks[number].chunk)) for number in numbers]
    return reopen(engine.context, records)


def reference(engine, numbers: list[str], question: str = QUESTION) -> tuple[torch.Tensor, str]:
    """Next-token logits and greedy answer of the plain model over the whole prompt."""
    runner = engine.runner
    ids, inputs = whole_prompt(runner, model_inputs(engine, numbers), question)
    tokens = greedy(runner.model, ids, NUM_NEW, **inputs)
    answer = runner.tokenizer.decode(tokens, skip_special_tokens=True).strip()
    return next_logits(runner.model, ids, **inputs), answer


def prefilled(engine, numbers: list[str] | None = None) -> torch.Tensor:
    """Logits (vocab,) after `QUESTION` by one cold prefill, from stored embeddings, of the window or of an order."""
    runner, library = engine.runner, engine.library
    entries = {str(entry.number): entry for entry in engine.window().entries}
    order = entries if numbers is None else numbers
    segments = [library.segment(library.find_chunk(entries[number])) for number in order]
    question = runner.text_segment(runner.question_ids(QUESTION))
    return runner.prefill([runner.preamble, *segments, question])[1]


def answered(engine, numbers: list[str] | None = None, **options):
    """Result of `QUESTION`, and the logits (vocab,) that an assembled cache gave; None where none was assembled."""
    with first_logits(engine) as seen:
        result = engine.query(QUESTION, chunks=numbers, **options)
    return result, seen[0] if seen else None


@contextmanager
def first_logits(engine) -> Iterator[list[torch.Tensor]]:
    """Collects the logits of each prompt's last token that assembled caches were extended by."""
    runner, seen = engine.runner, []
    extend = runner.extend

    def spy(cache, embeddings, positions):
        logits = extend(cache, embeddings, positions)
        if embeddings.shape[0] > 1:
            seen.append(logits.clone())
        return logits

    runner.extend = spy
    try:
        yield seen
    finally:
        del runner.extend


def content(store) -> dict[str, str]:
    """Digest of meta and tensor bytes of every record, by id; times of work and of day left out."""
    found = {}
    for record in store.iterate():
        proof = hashlib.sha256(repr((record.kind, sorted(record.meta.get("chunks", []), key=str))).encode())
        for (name, layer), tensor in sorted(store.read(record).items()):
            proof.update(repr((name, layer, tensor.dtype, tensor.shape)).encode())
            proof.update(bytes(tensor.view()))
        found[record.id] = f"{record.kind} {proof.hexdigest()}"
    return found


def write_cards(folder: Path, index: int) -> tuple[Path, Episode]:
    """A card video that the embedded model understands: 3 to 6 chunks, by ``index``, and its questions."""
    from kamera_cli.bench.episodes import bench_episode, write_episode

    found = bench_episode(index, 5)
    write_episode(folder / "cards.mp4", found, 1)
    return folder / "cards.mp4", found


def open_on_cards(open_engine: Callable[..., Engine], path: Path) -> Engine:
    """The embedded model, with the chunks of a card video in its window."""
    from kamera_cli.bench.episodes import CHUNK_SECONDS, FPS
    from kamera_cli.tiny import model_path

    engine = open_engine(model=str(model_path()))
    engine.ingest([path], fps=FPS, chunk_seconds=CHUNK_SECONDS)
    return engine
