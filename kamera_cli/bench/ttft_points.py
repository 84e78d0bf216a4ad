"""What the suite ``ttft`` measures over one number of chunks, and from which length one arm beats another (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kamera_cli.bench.timing import Samples

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

    def to_json(self) -> dict:
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
