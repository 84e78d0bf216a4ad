"""An answer with its receipt, and the plan of one that was not asked yet, as people read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kamera_cli.results import ChunkReceipt, Placed, PlannedChunk, QueryPlan, QueryResult
from kamera_cli.words import (
    WHY_NOT_WORDS,
    advice,
    chunks_words,
    count,
    display,
    format_bytes,
    format_ms,
    format_number,
    misses_words,
    table,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

USED_WORDS = {
    "exact": "patched",
    "orbit": "patched for any order",
    "composed": "patched from pairs",
    "canonical": "as stored, nothing stands before it",
    "blind": "as stored, unpatched",
    "prefilled": "computed anew",
}


def plan_view(planned: QueryPlan, *, given_order: bool = False) -> Iterable[RenderableType]:
    """What people see of a plan that was not run."""
    yield table(
        (">#", "chunk", ">tokens", "would be used", ">patch rank", ">KL", ">to read"),
        (
            (
                chunk.number,
                chunk.name,
                chunk.num_tokens,
                _used_words(chunk),
                "–" if chunk.rank is None else chunk.rank,
                format_number(chunk.kl),
                format_bytes(chunk.bytes_to_read),
            )
            for chunk in planned.chunks
        ),
    )
    yield ""
    if planned.placed is not None:
        yield placed_line(planned.placed)
    total = format_bytes(sum(chunk.bytes_to_read for chunk in planned.chunks))
    misses = [(chunk.number, chunk.why_not) for chunk in planned.chunks if chunk.why_not is not None]
    order = [chunk.number for chunk in planned.chunks] if given_order else None
    if planned.reuse == "patched" and misses:
        what = advice(misses, planned.window, order)
        yield f"--reuse patched would refuse this ({misses_words(misses)}); {what}"
    elif planned.fallback is not None:
        because = misses_words(misses) or planned.fallback
        yield f"{total} to read; the language model would run over all {len(planned.chunks)} chunks ({because})"
    else:
        yield f"{total} to read; the language model would run over the question alone"


def placed_line(placed: Placed) -> str:
    """What the choice of an order saved."""
    order = ",".join(map(str, placed.order))
    if placed.patch_bytes is None:
        return f"placed {order} as given: in every order some chunk has no usable patch"
    misses = "" if not placed.given_misses else f" and misses {placed.given_misses}"
    return (
        f"placed {order}: {format_bytes(placed.patch_bytes)} of patches, none rebuilt; "
        f"the given order reads {format_bytes(placed.given_patch_bytes)}{misses}"
    )


def answer_view(result: QueryResult) -> Iterable[RenderableType]:
    """The answer first, then the receipt."""
    from rich.text import Text

    answer = "\n".join(display(line) for line in result.answer.splitlines())
    yield Text(answer, style="bold")
    yield ""
    yield table(
        (">#", "chunk", ">tokens", "used", ">patch rank", ">KL", ">read"),
        (
            (
                chunk.number or "–",
                chunk.name,
                chunk.num_tokens,
                _used_words(chunk),
                "–" if chunk.rank is None else chunk.rank,
                format_number(chunk.kl),
                format_bytes(chunk.bytes_read),
            )
            for chunk in result.chunks
        ),
    )
    yield ""
    if result.placed is not None:
        yield placed_line(result.placed)
    if result.remembered:
        them = "it" if len(result.remembered) == 1 else "them"
        yield (
            f"{chunks_words(result.remembered)} left the window, but what the others took in from {them} is kept: "
            "a re-prefill, as in --compare, would not know it"
        )
    yield _first_token_line(result)
    stages = " · ".join(f"{name} {format_ms(spent)}" for name, spent in vars(result.stages).items())
    yield Text(f"  {stages}", style="dim")
    yield Text(f"  {_made_of_line(result)}", style="dim")


def _first_token_line(result: QueryResult) -> str:
    ttft = f"{format_ms(result.ttft_ms)} to the first token"
    if result.compare is None:
        return ttft
    other = result.compare
    how = "re-encoding" if other.full_reencode else "a re-prefill"
    times = f" ({format_ratio(other.ttft_ms / result.ttft_ms)})" if result.ttft_ms > 0 else ""
    same = "same answer" if other.same_answer else f"another answer ({display(other.answer)})"
    return f"{ttft}, against {format_ms(other.ttft_ms)} {how}{times}, {same}, KL {format_number(other.kl)}"


def format_ratio(ratio: float) -> str:
    """``25x``, ``1.8x``, ``0.5x``."""
    return f"{ratio:.0f}x" if ratio >= 9.95 else f"{ratio:.1f}x"


def _made_of_line(result: QueryResult) -> str:
    kept = len(result.patches_kept)
    kept_words = f", {count(kept, 'patch')} kept for the next time" if kept else ""
    return (
        f"{result.reused_tokens} tokens reused, {result.prefilled_tokens} prefilled{kept_words} · "
        f"{display(result.model)}, {result.device}, {result.dtype}, {result.attention}"
    )


def _used_words(chunk: ChunkReceipt | PlannedChunk) -> str:
    words = USED_WORDS[chunk.used]
    return words if chunk.why_not is None else f"{words}: {WHY_NOT_WORDS[chunk.why_not]}"
