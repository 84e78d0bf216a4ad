"""A fake engine with fixed answers, and what a run of the program left behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from kamera_cli.results import (
    ChunkReceipt,
    Comparison,
    CompileResult,
    EvictResult,
    FormedPatch,
    IngestedChunk,
    IngestedSource,
    IngestResult,
    QueryResult,
    RecallResult,
    Stages,
    WindowEntry,
    WindowView,
)

FIRST, SECOND = "aa" * 16, "bb" * 16


@dataclass(frozen=True)
class Ran:
    """What a run left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Stdout as exactly one strict JSON object."""

        def refuse(token: str) -> None:
            raise AssertionError(f"{token} is no strict JSON")

        document = json.loads(self.out, parse_constant=refuse)
        assert isinstance(document, dict)
        json.dumps(document).encode("utf-8")
        return document

    @property
    def error(self) -> str:
        """The one error line on stderr."""
        lines = [line for line in self.err.splitlines() if line.startswith("kamera: error:")]
        assert len(lines) == 1, self.err
        return lines[0].removeprefix("kamera: error: ")


@dataclass
class FakeEngine:
    """Stands in for the engine: answers from ``answers``, raises what is an exception, remembers its calls."""

    answers: dict[str, object] = field(default_factory=dict)
    calls: list[tuple[str, tuple[object, ...], dict[str, object]]] = field(default_factory=list)
    settings: object = None
    on_progress: Callable[[object], None] | None = None
    on_warning: Callable[[str], None] | None = None

    def __call__(
        self, settings: object, *, on_progress: object = None, on_warning: object = None
    ) -> FakeEngine:
        self.settings, self.on_progress, self.on_warning = settings, on_progress, on_warning
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def __getattr__(self, method: str) -> Callable[..., object]:
        def answer(*arguments: object, **options: object) -> object:
            self.calls.append((method, arguments, options))
            value = self.answers[method]
            if isinstance(value, BaseException):
                raise value
            return value() if callable(value) else value

        return answer


def default_answers() -> dict[str, object]:
    return {
        "ingest": ingest_result(),
        "compile_patches": compile_result(),
        "query": query_result(),
        "evict": EvictResult(window_view(), (entry(1, FIRST),)),
        "recall": RecallResult(window_view(), (entry(1, FIRST),), (FIRST,), (SECOND,), 0, 12.0),
    }


def entry(number: int, chunk: str, name: str = "clip.mp4") -> WindowEntry:
    return WindowEntry(number, chunk, "0" * 64, name, 120)


def window_view() -> WindowView:
    return WindowView("default", "default", "f" * 64, (entry(2, SECOND),), (entry(1, FIRST),))


def ingest_result(*, name: str = "clip.mp4", failures: Sequence[object] = ()) -> IngestResult:
    chunk = IngestedChunk(FIRST, name, 1, "encoded", 120, 2048, 1024, 0.0, 8.0)
    return IngestResult("default", (IngestedSource(name, "video", (chunk,), False),), tuple(failures), 12.5)


def compile_result() -> CompileResult:
    patch = FormedPatch("cc" * 16, SECOND, 2, (FIRST,), "formed", (4, 8), 0.991, 1e-5, 0.4, 512, 4096, 3.0)
    return CompileResult("default", "exact", (patch,), 20.0, 25.0)


def query_result(
    *,
    answer: str = "The number is seven.",
    kl: float | None = 1.2e-5,
    name: str = "clip.mp4",
    compare: bool = False,
) -> QueryResult:
    chunks = (
        ChunkReceipt(FIRST, 1, name, "canonical", 120, 5, bytes_read=4096),
        ChunkReceipt(SECOND, 2, name, "exact", 130, 125, "cc" * 16, 8, 0.99, kl, 5120),
        ChunkReceipt("dd" * 16, 3, name, "prefilled", 130, 255, why_not="no_patch"),
    )
    other = Comparison(310.0, 200.0, 110.0, 40.0, True, 1.2e-5, True, answer) if compare else None
    return QueryResult(
        question="Which number?",
        answer=answer,
        window="default",
        reuse="auto",
        attention="sdpa",
        device="cpu",
        dtype="fp32",
        model="kamera-tiny",
        fallback=None,
        ttft_ms=12.4,
        stages=Stages(0.3, 2.0, 3.0, 0.0, 1.1, 6.0),
        chunks=chunks,
        reused_tokens=250,
        prefilled_tokens=148,
        new_tokens=5,
        total_ms=30.0,
        tpot_ms=3.0,
        compare=other,
    )
