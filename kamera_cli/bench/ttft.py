"""Suite ``ttft``: time to first token of four ways to answer over the same chunks, and where the time goes.

The arms take turns in one process. TTFT runs from the request in hand to the first token id on the host. Full re-encode
starts from model inputs that are decoded already; reading and decoding the file again is reported apart.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from kamera_cli.bench.cards import CHUNK_SECONDS, FPS, long_video
from kamera_cli.bench.floor import measure_floor
from kamera_cli.bench.geometry import GEOMETRIES, write_checkpoint
from kamera_cli.bench.results import SuiteResult
from kamera_cli.bench.timing import take_turns, timed
from kamera_cli.bench.ttft_forming import Payback, measure_payback
from kamera_cli.bench.ttft_points import STAGES, Point
from kamera_cli.bench.ttft_report import report
from kamera_cli.engine import Engine
from kamera_cli.query.compare import reopen
from kamera_cli.results import Progress, Stages
from kamera_cli.settings import Settings

if TYPE_CHECKING:
    import torch

    from kamera_cli.bench import BenchOptions
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


@dataclass
class _Queries:
    """Stages of one reusing arm, collected over its runs."""

    stages: list[Stages] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        """Median of each stage in ms, without the first run."""
        counted = self.stages[1:] or self.stages
        return {name: statistics.median(asdict(stages)[name] for stages in counted) for name in STAGES}


def measure(
    settings: Settings, options: BenchOptions, on_progress: Callable[[Progress], None]
) -> SuiteResult:
    """Write a card video, ingest it, form patches for a shuffled order, and time every arm.

    Returns
    -------
    SuiteResult
        Tables of TTFT, stages, the floor and the sweep; two charts.
    """
    name = options.geometry or "tiny"
    geometry = GEOMETRIES[name]
    counts = COUNTS if geometry is None else COUNTS_RANDOM
    with tempfile.TemporaryDirectory(prefix="kamera-bench-") as folder:
        work = Path(folder)
        own = replace(settings, store=work / "store", quota_bytes=None, rehash=False)
        if geometry is not None:
            write_checkpoint(geometry, work / "model", options.seed)
            own = replace(own, model=str(work / "model"))
        questions = long_video(work / "cards.mp4", max(counts), options.seed)
        with Engine(own, on_progress=on_progress) as engine:
            texts = [question.text for question in questions[: NUM_QUESTIONS if geometry is None else 1]]
            order = _order(max(counts), options.seed)
            engine.ingest([work / "cards.mp4"], fps=FPS, chunk_seconds=CHUNK_SECONDS)
            rank = max(options.ranks, default="auto")
            compiled = engine.compile_patches(order, rank=rank, probe=texts[0])
            prompts = [
                *_short(engine, work, options.seed),
                *(Prompt("default", order[:count]) for count in counts),
            ]
            points = [_point(engine, prompt, texts, on_progress) for prompt in prompts]
            headline = next(point for point in points if point.num_chunks == HEADLINE)
            floor = measure_floor(engine.runner, headline)
            timed_at = [count for count in counts if count in PAYBACK_COUNTS] or [max(counts)]
            paybacks = [
                _payback(engine, Prompt("default", order[:count]), texts[0], rank, on_progress)
                for count in timed_at
            ]
            described = _describe(engine, name, settings.model)
    return report(points, headline, compiled, floor, described, paybacks)


@dataclass(frozen=True)
class Prompt:
    """Chunks of a window in the order in which they are asked about."""

    window: str
    order: list[str]

    @property
    def is_headline(self) -> bool:
        return len(self.order) == HEADLINE

    @property
    def num_leading(self) -> int:
        """Chunks at the start that stand where they were ingested: what a prefix cache would have."""
        pairs = zip(self.order, map(str, range(1, len(self.order) + 1)), strict=True)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _short(engine: Engine, work: Path, seed: int) -> list[Prompt]:
    """Prompts of a few tokens over a clip of their own."""
    long_video(work / "short.mp4", 1, seed + 1)
    engine.ingest([work / "short.mp4"], window="short", fps=FPS, chunk_seconds=SHORT_SECONDS)
    order = _order(max(SHORT_COUNTS), seed)
    engine.compile_patches(order, window="short")
    return [Prompt("short", order[:count]) for count in SHORT_COUNTS]


def _order(num_chunks: int, seed: int) -> list[str]:
    """A seeded order of the window's chunks that is not the order of ingest."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [str(int(index) + 1) for index in torch.randperm(num_chunks, generator=generator)]


def _describe(engine: Engine, geometry: str, model: str) -> dict:
    runner = engine.runner
    parameters = sum(weight.numel() for weight in runner.model.parameters())
    return {
        "geometry": geometry,
        "model": model if geometry == "tiny" else f"random weights, geometry {geometry}",
        "weights": "as shipped" if geometry == "tiny" else "random",
        "num_parameters": parameters,
        "device": str(runner.device),
        "dtype": engine.context.dtype_name,
        "attention": runner.loaded.attention,
    }


def _point(
    engine: Engine, prompt: Prompt, questions: Sequence[str], on_progress: Callable[[Progress], None]
) -> Point:
    on_progress(Progress("timing", len(prompt.order), None, "chunks in the prompt"))
    runner, library = engine.runner, engine.library
    entries = {str(entry.number): entry for entry in engine.window(prompt.window).entries}
    records = [library.find_chunk(entries[number]) for number in prompt.order]
    question_ids = runner.question_ids(questions[0])
    started = time.perf_counter()
    inputs = reopen(engine.context, records)
    decode_ms = 1e3 * (time.perf_counter() - started)
    vision: list[float] = []

    def full() -> None:
        run = runner.reencode(inputs, question_ids)
        vision.append(run.vision_ms)
        int(run.logits.argmax())

    queries = {arm: _Queries() for arm in REUSE}
    samples = take_turns(
        {
            "full": lambda: timed(full, runner.synchronize),
            **{arm: _query_arm(engine, questions[0], prompt, arm, seen) for arm, seen in queries.items()},
        },
        num_runs=NUM_RUNS if prompt.is_headline else NUM_SWEEP_RUNS,
    )
    kl, same = _agreement(engine, questions if prompt.is_headline else questions[:1], prompt)
    return Point(
        num_chunks=len(prompt.order),
        num_tokens=sum(record.meta["num_tokens"] for record in records),
        num_prefix_tokens=sum(record.meta["num_tokens"] for record in records[: prompt.num_leading]),
        num_visual_tokens=sum(_num_visual(chunk.token_types) for chunk in inputs),
        question_tokens=question_ids.numel(),
        samples=samples,
        stages={arm: seen.medians() for arm, seen in queries.items()},
        decode_ms=decode_ms,
        vision_ms=statistics.median(vision[1:]),
        kl=kl,
        same_answer=same,
        raw_bytes=sum(_layer_bytes(record)[0] for record in records),
        stored_bytes=sum(_layer_bytes(record)[1] for record in records),
    )


def _payback(
    engine: Engine,
    prompt: Prompt,
    question: str,
    rank: int | str,
    on_progress: Callable[[Progress], None],
) -> Payback:
    on_progress(Progress("timing", len(prompt.order), None, "chunks formed again"))
    entries = {str(entry.number): entry for entry in engine.window(prompt.window).entries}
    inputs = reopen(engine.context, [engine.library.find_chunk(entries[number]) for number in prompt.order])
    question_ids = engine.runner.question_ids(question)

    def full() -> float:
        return timed(lambda: int(engine.runner.reencode(inputs, question_ids).logits.argmax()), lambda: None)

    use = {arm: _query_arm(engine, question, prompt, arm, _Queries()) for arm in ("reprefill", "patched")}
    return measure_payback(engine, prompt.window, prompt.order, question, {"full": full, **use}, rank)


def _num_visual(token_types: torch.Tensor) -> int:
    return int((token_types != 0).sum())


def _layer_bytes(record: Record) -> tuple[int, int]:
    layers = [tensor for tensor in record.tensors if tensor.layer >= 0]
    return sum(tensor.raw_bytes for tensor in layers), sum(tensor.stored_bytes for tensor in layers)


def _query_arm(
    engine: Engine, question: str, prompt: Prompt, arm: str, seen: _Queries
) -> Callable[[], float]:
    reuse = REUSE[arm]

    def run() -> float:
        started = time.perf_counter()
        result = engine.query(
            question,
            window=prompt.window,
            chunks=prompt.order,
            reuse=reuse,
            require_hit=reuse == "patched",
            max_new_tokens=1,
        )
        whole_ms = 1e3 * (time.perf_counter() - started)
        seen.stages.append(result.stages)
        # The engine's clock starts when the window is loaded: all but what follows the first token is counted here.
        return whole_ms - (result.total_ms - result.ttft_ms)

    return run


def _agreement(
    engine: Engine, questions: Sequence[str], prompt: Prompt
) -> tuple[dict[str, list[float]], dict[str, list[bool]]]:
    """KL to, and agreement with, a full re-encode of the same prompt, per question; not timed."""
    kl: dict[str, list[float]] = {}
    same: dict[str, list[bool]] = {}
    for arm, reuse in REUSE.items():
        for question in questions[:1] if arm == "reprefill" else questions:
            result = engine.query(
                question,
                window=prompt.window,
                chunks=prompt.order,
                reuse=reuse,
                compare=True,
                max_new_tokens=4,
            )
            kl.setdefault(arm, []).append(result.compare.kl)
            same.setdefault(arm, []).append(result.compare.same_answer)
    return kl, same
