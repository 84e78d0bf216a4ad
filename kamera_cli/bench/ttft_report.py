"""Figures, tables and charts of the suite ``ttft`` (pure)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kamera_cli.bench.figures import Chart, Series, SuiteResult, Table, percent
from kamera_cli.bench.payback import Payback, payback_table
from kamera_cli.bench.timing import Samples
from kamera_cli.results import CompileResult
from kamera_cli.words import format_bytes, format_ms, format_number

ARMS = {
    "full": "full re-encode",
    "reprefill": "re-prefill from stored embeddings",
    "patched": "patched reuse from the store",
    "blind": "blind reuse from the store",
}
STAGES = ("lookup", "read", "decompress", "transfer", "assemble", "prefill")


@dataclass(frozen=True)
class Point:
    """What was measured over one number of chunks.

    Attributes
    ----------
    num_prefix_tokens : int
        Context tokens that stand where they were ingested: what a prefix cache would have found.
    """

    num_chunks: int
    num_tokens: int
    num_prefix_tokens: int
    num_visual_tokens: int
    question_tokens: int
    samples: dict[str, Samples]
    stages: dict[str, dict[str, float]]
    decode_ms: float
    vision_ms: float
    kl: dict[str, list[float]]
    same_answer: dict[str, list[bool]]
    raw_bytes: int
    stored_bytes: int

    def ratio(self, arm: str) -> float:
        """Median of full re-encode over the median of an arm."""
        return self.samples["full"].median_ms / self.samples[arm].median_ms

    def cpu_ratio(self, arm: str) -> float | None:
        """The same by processor time, which other work on the machine hardly stretches."""
        own, full = self.samples[arm].median_cpu_ms, self.samples["full"].median_cpu_ms
        return full / own if own and full else None

    def to_json(self) -> dict[str, Any]:
        return {
            "num_chunks": self.num_chunks,
            "num_tokens": self.num_tokens,
            "num_prefix_tokens": self.num_prefix_tokens,
            "num_visual_tokens": self.num_visual_tokens,
            "question_tokens": self.question_tokens,
            "ttft": {name: samples.to_json() for name, samples in self.samples.items()},
            "ratio_to_full": {name: self.ratio(name) for name in self.samples},
            "cpu_ratio_to_full": {name: self.cpu_ratio(name) for name in self.samples},
            "stages_ms": self.stages,
            "decode_ms": self.decode_ms,
            "vision_ms": self.vision_ms,
            "kl": self.kl,
            "same_answer": self.same_answer,
            "chunk_raw_bytes": self.raw_bytes,
            "read_bytes": self.stored_bytes,
        }


def break_even(points: Sequence[Point], slower: str, faster: str) -> float | None:
    """Context tokens from which on ``faster`` wins, between the last point where it does not and the next one.

    Returns
    -------
    float or None
        0.0 when it wins at every measured length, None when it does not win at the longest one.
    """
    gains = [
        (point.num_tokens, point.samples[slower].median_ms - point.samples[faster].median_ms)
        for point in points
    ]
    if gains[-1][1] <= 0:
        return None
    behind = [index for index, (_, gain) in enumerate(gains) if gain <= 0]
    if not behind:
        return 0.0
    (x0, y0), (x1, y1) = gains[behind[-1]], gains[behind[-1] + 1]
    return x0 + (x1 - x0) * -y0 / (y1 - y0)


def report(
    points: list[Point],
    headline: Point,
    compiled: CompileResult,
    floor: dict[str, Any],
    described: dict[str, Any],
    paybacks: Sequence[Payback],
) -> SuiteResult:
    """All that the suite hands back.

    Parameters
    ----------
    points : list of Point
        By ascending length.
    headline : Point
        The one that the first tables and the headline are about.
    compiled : CompileResult
        The patches that were used.
    floor : dict
        From `kamera_cli.bench.timing.measure_floor`.
    described : dict
        Geometry, model and device; goes into the data as it is.
    paybacks : sequence of Payback
        What forming cost, by ascending number of chunks.
    """
    ranks = [max(patch.ranks, default=0) for patch in compiled.patches]
    patches = {
        "num_patches": len(compiled.patches),
        "median_rank": statistics.median(ranks),
        "patch_bytes": sum(patch.patch_bytes for patch in compiled.patches),
        "chunk_kv_bytes": sum(patch.chunk_kv_bytes for patch in compiled.patches),
        "prefill_ms": compiled.prefill_ms,
        "form_ms": sum(patch.form_ms for patch in compiled.patches),
        "total_ms": compiled.total_ms,
        "payback": [payback.to_json() for payback in paybacks],
    }
    floor = _against_measured(floor, headline)
    even = {arm: break_even(points, arm, "patched") for arm in ("full", "reprefill")}
    ratio = headline.ratio("patched")
    medians = [format_ms(headline.samples[arm].median_ms) for arm in ("patched", "full")]
    by_cpu = headline.cpu_ratio("patched") if described["device"] == "cpu" else None
    sentence = (
        f"{headline.num_visual_tokens:,} visual tokens, {described['model']}, {described['device']} "
        f"{described['dtype']}: patched {medians[0]} against full re-encode {medians[1]}, {ratio:.1f}× "
        f"(median of {_num_runs(headline)}{'' if by_cpu is None else f'; by CPU time {by_cpu:.1f}×'})"
    )
    data = {
        **described,
        "headline_chunks": headline.num_chunks,
        "break_even_tokens": even,
        "points": [point.to_json() for point in points],
        "patches": patches,
        "floor": floor,
    }
    tables = (
        _ttft_table(headline, described, patches),
        _stage_table(headline),
        _floor_table(floor),
        _sweep_table(points, even),
        payback_table(paybacks, on_cpu=described["device"] == "cpu"),
    )
    return SuiteResult("ttft", sentence, data, tables, _charts(points, headline, described))


def _against_measured(floor: dict[str, Any], point: Point) -> dict[str, Any]:
    """The floor with the measured median beside each least time."""
    patched, reprefill = point.stages["patched"], point.stages["reprefill"]
    measured_ms = {
        "read": patched["read"] + patched["decompress"],
        "assemble": patched["assemble"],
        "prefill": patched["prefill"],
        "re-prefill, language model": reprefill["prefill"],
    }
    stages = {
        name: {"floor_ms": floor["floor_ms"][name], "measured_ms": measured}
        for name, measured in measured_ms.items()
    }
    return {"speeds": floor["speeds"], "work": floor["work"], "stages": stages}


def _num_runs(point: Point) -> int:
    return len(point.samples["full"].times_ms)


def _ttft_table(point: Point, described: dict[str, Any], patches: dict[str, Any]) -> Table:
    rows = []
    for arm, label in ARMS.items():
        samples = point.samples[arm]
        kl = point.kl.get(arm)
        same = point.same_answer.get(arm)
        rows.append((
            label,
            format_ms(samples.median_ms),
            f"{format_ms(samples.min_ms)} – {format_ms(samples.max_ms)}",
            format_ms(samples.warm_up_ms),
            f"{point.ratio(arm):.1f}×",
            format_ms(samples.median_cpu_ms),
            "–" if same is None else f"{sum(same)} of {len(same)}",
            "–" if kl is None else format_number(max(kl)),
        ))  # fmt: skip
    share = patches["patch_bytes"] / patches["chunk_kv_bytes"] if patches["chunk_kv_bytes"] else 0.0
    notes = [
        f"{described['model']}: {described['num_parameters'] / 1e6:.1f} M parameters, {described['device']}, "
        f"{described['dtype']}, {described['attention']}.",
        f"{point.num_chunks} chunks of 8 s, {point.num_visual_tokens:,} visual of {point.num_tokens:,} context tokens, "
        f"question of {point.question_tokens} tokens with the template's closing.",
        f"Full re-encode: vision tower {format_ms(point.vision_ms)} of it; reading and decoding the file again, "
        f"{format_ms(point.decode_ms)}, is not counted.",
        f"A prefix cache would have found {point.num_prefix_tokens:,} of the context tokens: the order is not that "
        "of ingest.",
        f"Patches: median rank {patches['median_rank']:g}, {percent(share, 0)} of the chunks' raw KV bytes.",
        "CPU time: processor time of the whole call, which other work on the machine hardly stretches.",
        "KL in nats, next token, against the full re-encode; the worst of the questions.",
    ]
    if described["weights"] == "random":
        notes.append("Weights are random here: times mean something, answers do not.")
    columns = (
        "arm", ">TTFT median", ">min – max", ">warm-up run", ">faster than full", ">CPU time", ">same answer", ">KL"
    )  # fmt: skip
    return Table(f"Time to first token, {_num_runs(point)} runs in turn", columns, tuple(rows), tuple(notes))


def _stage_table(point: Point) -> Table:
    rows = []
    for arm in ("reprefill", "patched", "blind"):
        stages = point.stages[arm]
        outside = max(0.0, point.samples[arm].median_ms - sum(stages.values()))
        rows.append((ARMS[arm], *(format_ms(stages[name]) for name in STAGES), format_ms(outside)))
    notes = (
        "Medians. read: copy out of LMDB; decompress: checksum, zstd and joining of planes; transfer: bytes to tensors "
        "on the device; assemble: patch, join and rotate; rest: window, first token and Python between the stages.",
    )
    return Table("Stages", ("arm", *(f">{name}" for name in STAGES), ">rest"), tuple(rows), notes)


def _floor_table(floor: dict[str, Any]) -> Table:
    """Measured against least time, per stage."""
    speeds, work = floor["speeds"], floor["work"]
    rows = tuple(
        (name, format_ms(stage["floor_ms"]), format_ms(stage["measured_ms"]),
         f"{stage['measured_ms'] / stage['floor_ms']:.1f}×" if stage["floor_ms"] else "–")
        for name, stage in floor["stages"].items()
    )  # fmt: skip
    notes = (
        f"Measured here, one after the other: copy {format_bytes(int(speeds['copy_bytes_per_s']))}/s, checksum "
        f"{format_bytes(int(speeds['checksum_bytes_per_s']))}/s, decompress and merge planes "
        f"{format_bytes(int(speeds['decode_bytes_per_s']))}/s of raw KV, matrix product "
        f"{format_number(speeds['matmul_operations_per_s'] / 1e9, 3)} GFLOP/s.",
        f"read: copy and checksum {format_bytes(work['stored_bytes'])}, restore {format_bytes(work['raw_bytes'])}; "
        "assemble: write the KV once joined and once rotated; prefill: the question's matrix products and attention.",
    )
    return Table("Against the floor", ("stage", ">least", ">measured", ">measured : least"), rows, notes)


def _sweep_table(points: Sequence[Point], even: dict[str, float | None]) -> Table:
    rows = []
    for point in points:
        medians = [format_ms(point.samples[arm].median_ms) for arm in ARMS]
        rows.append((
            str(point.num_chunks), f"{point.num_tokens:,}", *medians, f"{point.ratio('patched'):.1f}×",
            format_bytes(point.stored_bytes), format_ms(point.decode_ms),
        ))  # fmt: skip
    shortest = points[0].num_tokens
    notes = tuple(
        f"Break-even of patched reuse with {ARMS[arm]}: {_even_text(tokens, shortest)}."
        for arm, tokens in even.items()
    )
    notes += ("Chunks last 8 s, those of the shortest prompts 1 s.",)
    columns = (
        ">chunks", ">tokens", ">full", ">re-prefill", ">patched", ">blind", ">full : patched",
        ">chunk KV read", ">decode, apart",
    )  # fmt: skip
    return Table("TTFT over context length, medians", columns, tuple(rows), notes)


def _even_text(tokens: float | None, shortest: int) -> str:
    if tokens is None:
        return "never within the measured lengths"
    return f"below {shortest} tokens, the shortest measured" if tokens == 0 else f"{tokens:,.0f} tokens"


def _charts(points: Sequence[Point], headline: Point, described: dict[str, Any]) -> tuple[Chart, ...]:
    x = tuple(float(point.num_tokens) for point in points)
    lines = tuple(
        Series(
            label,
            x,
            tuple(point.samples[arm].median_ms for point in points),
            tuple(point.samples[arm].min_ms for point in points),
            tuple(point.samples[arm].max_ms for point in points),
        )
        for arm, label in ARMS.items()
    )
    ratio = (Series("full re-encode : patched", x, tuple(point.ratio("patched") for point in points)),)
    stages = tuple(
        Series(
            name,
            (0.0, 1.0, 2.0, 3.0),
            (
                headline.samples["full"].median_ms - headline.vision_ms if name == "prefill" else 0.0,
                *(headline.stages[arm][name] for arm in ("reprefill", "patched", "blind")),
            ),
        )
        for name in STAGES
    )
    stages += (Series("vision", (0.0, 1.0, 2.0, 3.0), (headline.vision_ms, 0.0, 0.0, 0.0)),)
    caption = (
        f"{described['model']}, {described['device']} {described['dtype']}. Bands: fastest and slowest run."
    )
    return (
        Chart(
            "ttft", "Time to first token", "context tokens", "ms", lines, caption, x_log=True, y_log=True
        ),
        Chart("ttft_ratio", "How much faster patched reuse is", "context tokens", "TTFT of full re-encode : patched",
              ratio, caption, x_log=True),
        Chart(
            "ttft_stages", f"Where the time goes, {headline.num_tokens:,} context tokens",
            "full re-encode, re-prefill, patched, blind", "ms", stages, "Medians of each stage.", kind="stack",
        ),
    )  # fmt: skip
