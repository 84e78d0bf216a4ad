"""Suite ``ttft``: time to first token of four ways to answer over the same chunks, and where the time goes.

The arms take turns in one process. TTFT runs from the request in hand to the first token id on the host. Full re-encode
starts from model inputs that are decoded already; reading and decoding the file again is reported apart.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import torch

from kamera_cli.bench.episodes import CHUNK_SECONDS, FPS, long_video
from kamera_cli.bench.figures import SuiteResult
from kamera_cli.bench.geometry import GEOMETRIES, write_checkpoint
from kamera_cli.bench.payback import Payback, measure_payback
from kamera_cli.bench.runner import Run, Task
from kamera_cli.bench.timing import measure_floor, take_turns, timed
from kamera_cli.bench.ttft_report import STAGES, Point, report
from kamera_cli.engine import Engine
from kamera_cli.model.inputs import ChunkInputs
from kamera_cli.query.compare import reopen
from kamera_cli.results import Progress, Stages
from kamera_store.format.records import Record

COUNTS = (1, 2, 4, 8, 16, 24)
"""Chunks per prompt; the one with `HEADLINE` chunks has more than 2,000 visual tokens."""
COUNTS_RANDOM = (1, 4, 16)
"""The same for larger models of random weights, which take longer and are there for the times alone."""
HEADLINE = 16
SHORT_SECONDS, SHORT_COUNTS = 1.0, (2, 4)
"""Length and number of the chunks of the shortest prompts, each chunk a single grid step."""
NUM_RUNS = 7
"""Counted runs at `HEADLINE` chunks; other lengths take `NUM_SWEEP_RUNS`."""
NUM_SWEEP_RUNS = 3
PAYBACK_COUNTS = (4, 8, 16, 24)
"""Chunks per prompt at which forming is timed, as far as the prompts go; the longest prompt otherwise."""
NUM_QUESTIONS = 4
"""Questions on which the arms are compared at `HEADLINE` chunks; elsewhere, and with random weights, one."""
REUSE = {"reprefill": "none", "patched": "patched", "blind": "blind"}
"""What ``--reuse`` is called for each arm that is a query."""


@dataclass(frozen=True)
class Order:
    """Numbers of a window's chunks in the order in which they are asked about."""

    window: str
    numbers: list[str]

    @property
    def is_headline(self) -> bool:
        return len(self.numbers) == HEADLINE

    @property
    def num_leading(self) -> int:
        """Chunks at the start that stand where they were ingested: what a prefix cache would have."""
        return len(list(takewhile(lambda at: self.numbers[at] == str(at + 1), range(len(self.numbers)))))

    def records(self, engine: Engine) -> list[Record]:
        """The stored chunks in this order."""
        entries = {str(entry.number): entry for entry in engine.window(self.window).entries}
        found = [engine.context.library.find_chunk(entries[number]) for number in self.numbers]
        return [record for record in found if record is not None]


def measure(task: Task) -> SuiteResult:
    """Write a card video, ingest it, form patches for a shuffled order, and time every arm.

    Returns
    -------
    SuiteResult
        Tables of TTFT, stages, the floor, the sweep and of what patches cost; three charts.
    """
    name = task.options.geometry or "tiny"
    geometry = GEOMETRIES[name]
    counts = COUNTS if geometry is None else COUNTS_RANDOM
    rank: int | Literal["auto"] = max(task.options.ranks, default="auto")
    with tempfile.TemporaryDirectory(prefix="kamera-bench-") as folder:
        model = None
        if geometry is not None:
            model = str(Path(folder) / "model")
            write_checkpoint(geometry, Path(folder) / "model", task.options.seed)
        with task.run(model=model) as run:
            engine = run.engine
            questions = long_video(run.work / "cards.mp4", max(counts), task.options.seed)
            texts = [question.text for question in questions[: NUM_QUESTIONS if geometry is None else 1]]
            numbers = _shuffled(max(counts), task.options.seed)
            engine.ingest([run.work / "cards.mp4"], fps=FPS, chunk_seconds=CHUNK_SECONDS)
            compiled = engine.compile_patches(numbers, rank=rank, probe=texts[0])
            orders = {count: Order("default", numbers[:count]) for count in counts}
            points = [_point(run, order, texts) for order in (*_short(run), *orders.values())]
            headline = next(point for point in points if point.num_chunks == HEADLINE)
            floor = measure_floor(
                engine.context.runner,
                num_tokens=headline.num_tokens,
                question_tokens=headline.question_tokens,
                raw_bytes=headline.raw_bytes,
                stored_bytes=headline.stored_bytes,
            )
            timed_at = [count for count in counts if count in PAYBACK_COUNTS] or [max(counts)]
            paybacks = [_payback(run, orders[count], texts[0], rank) for count in timed_at]
            described = run.described() | _model(run, name)
    return report(points, headline, compiled, floor, described, paybacks)


def _short(run: Run) -> list[Order]:
    """Prompts of a few tokens over a clip of their own."""
    seed = run.options.seed
    long_video(run.work / "short.mp4", 1, seed + 1)
    run.engine.ingest([run.work / "short.mp4"], window="short", fps=FPS, chunk_seconds=SHORT_SECONDS)
    numbers = _shuffled(max(SHORT_COUNTS), seed)
    run.engine.compile_patches(numbers, window="short")
    return [Order("short", numbers[:count]) for count in SHORT_COUNTS]


def _shuffled(num_chunks: int, seed: int) -> list[str]:
    """A seeded order of the numbers of a window's chunks."""
    generator = torch.Generator().manual_seed(seed)
    return [str(int(index) + 1) for index in torch.randperm(num_chunks, generator=generator)]


def _model(run: Run, geometry: str) -> dict[str, Any]:
    is_shipped = geometry == "tiny"
    model = run.engine.context.settings.model
    return {
        "geometry": geometry,
        "model": model if is_shipped else f"random weights, geometry {geometry}",
        "weights": "as shipped" if is_shipped else "random",
        "num_parameters": sum(weight.numel() for weight in run.engine.context.runner.model.parameters()),
    }


def _point(run: Run, order: Order, questions: Sequence[str]) -> Point:
    run.on_progress(Progress("timing", len(order.numbers), None, "chunks in the prompt"))
    engine, runner = run.engine, run.engine.context.runner
    records = order.records(engine)
    question_ids = runner.question_ids(questions[0])
    started = time.perf_counter()
    inputs = _reopened(engine, records)
    decode_ms = 1e3 * (time.perf_counter() - started)
    vision: list[float] = []

    def full() -> None:
        encoded = runner.reencode(inputs, question_ids)
        vision.append(encoded.vision_ms)
        int(encoded.logits.argmax())

    stages: dict[str, list[Stages]] = {arm: [] for arm in REUSE}
    samples = take_turns(
        {
            "full": lambda: timed(full, runner.synchronize),
            **{arm: query_arm(engine, questions[0], order, arm, seen) for arm, seen in stages.items()},
        },
        num_runs=NUM_RUNS if order.is_headline else NUM_SWEEP_RUNS,
    )
    kl, same = _agreement(engine, questions if order.is_headline else questions[:1], order)
    tensors = [tensor for record in records for tensor in record.tensors if tensor.layer >= 0]
    tokens = [record.meta["num_tokens"] for record in records]
    return Point(
        num_chunks=len(records),
        num_tokens=sum(tokens),
        num_prefix_tokens=sum(tokens[: order.num_leading]),
        num_visual_tokens=sum(int((chunk.token_types != 0).sum()) for chunk in inputs),
        question_tokens=question_ids.numel(),
        samples=samples,
        stages={arm: _medians(seen) for arm, seen in stages.items()},
        decode_ms=decode_ms,
        vision_ms=statistics.median(vision[1:]),
        kl=kl,
        same_answer=same,
        raw_bytes=sum(tensor.raw_bytes for tensor in tensors),
        stored_bytes=sum(tensor.stored_bytes for tensor in tensors),
    )


def _reopened(engine: Engine, records: Sequence[Record]) -> list[ChunkInputs]:
    """Model inputs of chunks whose file is there: the suite wrote it."""
    inputs = reopen(engine.context, records)
    assert inputs is not None, "a file of this run is gone"
    return inputs


def _medians(stages: Sequence[Stages]) -> dict[str, float]:
    """Median of each stage in ms, without the first run."""
    counted = stages[1:] or stages
    return {name: statistics.median(asdict(seen)[name] for seen in counted) for name in STAGES}


def query_arm(
    engine: Engine, question: str, order: Order, arm: str, seen: list[Stages]
) -> Callable[[], float]:
    """A call that asks once and returns TTFT in ms; the stages of each call are added to ``seen``."""
    reuse = REUSE[arm]

    def ask() -> float:
        started = time.perf_counter()
        result = engine.query(
            question,
            window=order.window,
            chunks=order.numbers,
            reuse=reuse,
            require_hit=reuse == "patched",
            max_new_tokens=1,
        )
        whole_ms = 1e3 * (time.perf_counter() - started)
        seen.append(result.stages)
        # The engine's clock starts when the window is loaded: all but what follows the first token is counted here.
        return whole_ms - (result.total_ms - result.ttft_ms)

    return ask


def _agreement(
    engine: Engine, questions: Sequence[str], order: Order
) -> tuple[dict[str, list[float]], dict[str, list[bool]]]:
    """KL to, and agreement with, a full re-encode of the same prompt, per question; not timed."""
    kl: dict[str, list[float]] = {}
    same: dict[str, list[bool]] = {}
    for arm, reuse in REUSE.items():
        for question in questions[:1] if arm == "reprefill" else questions:
            result = engine.query(
                question,
                window=order.window,
                chunks=order.numbers,
                reuse=reuse,
                compare=True,
                max_new_tokens=4,
            )
            assert result.compare is not None
            kl.setdefault(arm, []).append(result.compare.kl)
            same.setdefault(arm, []).append(result.compare.same_answer)
    return kl, same


def _payback(run: Run, order: Order, question: str, rank: int | Literal["auto"]) -> Payback:
    run.on_progress(Progress("timing", len(order.numbers), None, "chunks formed again"))
    engine, runner = run.engine, run.engine.context.runner
    inputs = _reopened(engine, order.records(engine))
    question_ids = runner.question_ids(question)

    def full() -> float:
        return timed(lambda: int(runner.reencode(inputs, question_ids).logits.argmax()), lambda: None)

    use = {arm: query_arm(engine, question, order, arm, []) for arm in ("reprefill", "patched")}
    return measure_payback(engine, order.window, order.numbers, question, {"full": full, **use}, rank)
