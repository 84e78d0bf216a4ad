"""An agent looks back over a long video in a small window: chunks leave, come back and are asked about, in one process.

24 chunks of 8 s are encoded once; the window holds 6. For every question a given index says which chunks are wanted (a
retrieval would; finding them is not shown here). What the window lacks is recalled, what was asked about longest ago is
evicted. Two other agents see the same window at every question: one runs vision tower and prefill again, with the
frames already decoded and in memory, one prefills from stored embeddings. Every figure is measured in this run.

Run: python examples/agent_loop.py
"""

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from kamera_cli import Engine, Settings, Window
from kamera_cli.model.generate import Chooser, decode
from kamera_cli.model.inputs import ChunkInputs
from kamera_cli.query.compare import reopen
from kamera_cli.tiny.render import write_video
from kamera_cli.tiny.vocabulary import DIGITS, LETTERS
from kamera_cli.tiny.world import (
    NUM_ENTITIES,
    Card,
    ChunkSpec,
    Question,
    answerable,
    draw,
    entity_name,
    put_into_words,
)

NUM_CHUNKS, NUM_PAIRS, WINDOW_SIZE, NUM_VISITS = 24, 10, 6, 18
CHUNK_SECONDS = 8.0
Topic = tuple[int, ...]
"""Numbers of chunks that are asked about together: two that link, or one that stands alone."""


@dataclass
class Tally:
    """What one agent did: times in ms, one answer for each question, and bytes."""

    answers: list[str] = field(default_factory=list)
    ask_ms: list[float] = field(default_factory=list)
    move_ms: float = 0.0
    num_bytes: int = 0
    vision_chunks: int = 0
    vision_calls: int = 0
    prefilled_tokens: int = 0

    @property
    def total_s(self) -> float:
        """Everything after ingest, in seconds."""
        return (sum(self.ask_ms) + self.move_ms) / 1e3


def main() -> None:
    """Make the video, ingest it, and let three agents answer the same questions over the same windows."""
    rng = np.random.default_rng(11)
    chunks, topics = world(rng)
    visits = questions(rng, chunks, topics)
    with tempfile.TemporaryDirectory() as folder:
        video = Path(folder) / "long.mp4"
        write_video(video, chunks, fps=2, size=224, seed=5)
        with Engine(Settings(store=Path(folder) / "store", hot_bytes=64 << 20)) as engine:
            run(engine, video, topics, visits)


def run(engine: Engine, video: Path, topics: list[Topic], visits: list[tuple[Topic, list[Question]]]) -> None:
    """Ingest, then ask everything; print what it took."""
    window = engine.open_window("agent")
    started = time.perf_counter()
    window.ingest(video, chunk_seconds=CHUNK_SECONDS)
    ingest_ms = 1e3 * (time.perf_counter() - started)
    assert len(window.chunks) == NUM_CHUNKS
    started = time.perf_counter()
    inputs = decoded(engine, window)
    decode_ms = 1e3 * (time.perf_counter() - started)
    window.evict(oldest=NUM_CHUNKS)
    reusing, encoding, prefilling = Tally(), Tally(), Tally()
    expected: list[str] = []
    held: list[Topic] = []
    before, stored = engine.vision_calls, engine.store.stats().stored_bytes
    for topic, asked in visits:
        read = engine.store.bytes_read
        started = time.perf_counter()
        look_at(window, topic, held)
        reusing.move_ms += 1e3 * (time.perf_counter() - started)
        reusing.num_bytes += engine.store.bytes_read - read
        for question in asked:
            expected.append(question.answer)
            ask(window, question.text, "auto", reusing)
        reusing.vision_calls = engine.vision_calls - before - encoding.vision_calls
        for question in asked:
            ask(window, question.text, "none", prefilling)
            encode_again(engine, [inputs[entry.number] for entry in window.chunks], question.text, encoding)
    print(
        f"{len(expected)} questions in {len(visits)} visits to {len(topics)} topics; {NUM_CHUNKS} chunks, ",
        end="",
    )
    print(f"window of {WINDOW_SIZE}; ingest {ingest_ms / 1e3:.1f} s, shared by all")
    table(expected, {"reuse": reusing, "re-encode": encoding, "re-prefill": prefilling})
    print(
        f"patches added {(engine.store.stats().stored_bytes - stored) / 1e6:.1f} MB to the store; in memory ",
        end="",
    )
    print(
        f"{engine.context.hot.held_bytes / 1e6:.1f} of {engine.context.hot.limit_bytes / 1e6:.1f} MB at the end"
    )
    print(
        f"not counted for re-encode: decoding the file, {decode_ms:.0f} ms each time that frames are not in memory"
    )
    for index, answers in enumerate(zip(reusing.answers, encoding.answers, strict=True)):
        if answers[0] != answers[1]:
            print(
                f"question {index + 1}: {answers[0]!r}, re-encoded {answers[1]!r}, expected {expected[index]!r}"
            )


def world(rng: np.random.Generator) -> tuple[list[ChunkSpec], list[Topic]]:
    """A video in which every letter, shape and digit means one thing, so that chunks go together in any window.

    Returns
    -------
    list of ChunkSpec
        One card of 8 s in each.
    list of Topic
        The index: which chunks belong together, by number (from 1, as in a window).
    """
    letters = [LETTERS[index] for index in rng.permutation(len(LETTERS))]
    entities = [entity_name(index) for index in rng.permutation(NUM_ENTITIES)]
    digits = [DIGITS[index] for index in rng.permutation(len(DIGITS))]
    num_alone = NUM_CHUNKS - 2 * NUM_PAIRS
    cards = [
        Card(letters[i], entity=entities[i], seconds=CHUNK_SECONDS) for i in range(NUM_PAIRS + num_alone)
    ]
    cards += [Card(letters[i], digit=digits[i], seconds=CHUNK_SECONDS) for i in range(NUM_PAIRS)]
    order = [int(index) for index in rng.permutation(NUM_CHUNKS)]
    number = {card: place + 1 for place, card in enumerate(order)}
    topics = [
        (number[i], number[NUM_PAIRS + num_alone + i]) if i < NUM_PAIRS else (number[i],)
        for i in range(NUM_PAIRS + num_alone)
    ]
    return [ChunkSpec((cards[index],)) for index in order], topics


def questions(
    rng: np.random.Generator, chunks: list[ChunkSpec], topics: list[Topic]
) -> list[tuple[Topic, list[Question]]]:
    """Which topic the agent turns to, and what it asks there: two hops where chunks link, and one hop."""
    one_hop, two_hop = answerable(tuple(chunks))
    visits = []
    for _ in range(NUM_VISITS):
        topic = topics[int(rng.integers(len(topics)))]
        within = {number - 1 for number in topic}
        linked = draw(rng, [query for query in two_hop if within >= set(query.chunks)], 2)
        plain = draw(rng, [query for query in one_hop if within >= set(query.chunks)], 1)
        visits.append((topic, [put_into_words(rng, query) for query in linked + plain]))
    return visits


def look_at(window: Window, topic: Topic, held: list[Topic]) -> None:
    """Bring a topic's chunks into the window, in front; those asked about longest ago leave.

    In front a chunk is conditioned on its own topic alone, so its patch is the same at every return.
    """
    if topic in held:
        held.remove(topic)
    else:
        while sum(map(len, held)) + len(topic) > WINDOW_SIZE:
            window.evict(*held.pop(0))
        window.recall(*topic, at=1)
    held.append(topic)


def ask(window: Window, question: str, reuse: str, tally: Tally) -> None:
    """One question over the window as it is."""
    read = window.context.store.bytes_read
    result = window.query(question, reuse=reuse)
    tally.answers.append(result.answer)
    tally.ask_ms.append(result.total_ms)
    tally.prefilled_tokens += result.prefilled_tokens
    tally.num_bytes += window.context.store.bytes_read - read


def decoded(engine: Engine, window: Window) -> dict[int, ChunkInputs]:
    """What the model sees of every chunk, from the file, by number."""
    records = [engine.store.get(bytes.fromhex(entry.chunk)) for entry in window.chunks]
    return dict(zip([entry.number for entry in window.chunks], reopen(engine.context, records), strict=True))


def encode_again(engine: Engine, chunks: list[ChunkInputs], question: str, tally: Tally) -> None:
    """Vision tower, prefill and answer over the same window, as an engine without reuse does."""
    runner, calls = engine.runner, engine.vision_calls
    started = time.perf_counter()
    question_ids = runner.question_ids(question)
    again = runner.reencode(chunks, question_ids)
    choose = Chooser(0.0, 0)
    first = choose(again.logits)
    answer = decode(runner, again.cache, first, again.next_position, choose=choose, max_new_tokens=32)
    tally.ask_ms.append(1e3 * (time.perf_counter() - started))
    tally.answers.append(answer.text)
    tally.vision_calls += engine.vision_calls - calls
    tally.vision_chunks += len(chunks)
    tally.num_bytes += sum(tensor.nbytes for chunk in chunks for tensor in chunk.tensors.values())
    tally.prefilled_tokens += question_ids.numel() + sum(chunk.num_tokens for chunk in chunks)


def table(expected: list[str], agents: dict[str, Tally]) -> None:
    """One column for each agent."""
    reference, count = agents["re-encode"], len(expected)

    def share(answers: list[str], wanted: list[str]) -> str:
        return f"{sum(map(str.__eq__, answers, wanted))} of {count}"

    rows = [
        ("right answers", lambda each: share(each.answers, expected)),
        ("same as re-encode", lambda each: share(each.answers, reference.answers)),
        ("total time", lambda each: f"{each.total_s:.2f} s"),
        ("of it evict and recall", lambda each: f"{each.move_ms / 1e3:.2f} s"),
        ("one question, median", lambda each: f"{median(each.ask_ms):.0f} ms"),
        ("tokens prefilled to answer", lambda each: f"{each.prefilled_tokens:,}"),
        ("vision tower, forwards", lambda each: f"{each.vision_calls}"),
        ("vision tower, chunks", lambda each: f"{each.vision_chunks}"),
        (
            "read from the store",
            lambda each: f"{each.num_bytes / 1e6:.1f} MB" if each is not reference else "–",
        ),
        (
            "pixels through the tower",
            lambda each: f"{each.num_bytes / 1e6:.1f} MB" if each is reference else "–",
        ),
    ]
    print(f"{'':<28}" + "".join(f"{name:>14}" for name in agents))
    for label, show in rows:
        print(f"{label:<28}" + "".join(f"{show(tally):>14}" for tally in agents.values()))


if __name__ == "__main__":
    main()
