"""Query: plan, read, assemble, prefill only the question, answer, and account for every step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch

from kamera_cli.errors import NotFoundError
from kamera_cli.model.generate import Chooser, decode
from kamera_cli.operator.plan import AUTO_MAX_KL, Action, Plan
from kamera_cli.options import QueryOptions, checked_question
from kamera_cli.query.arrange import Arranged, Found, arrange
from kamera_cli.query.compare import compare
from kamera_cli.query.keep import keep_patches, keep_worst
from kamera_cli.query.read import Reading, Ready, read_and_assemble
from kamera_cli.query.receipt import receipts_of, remembered, warnings_of
from kamera_cli.results import QueryResult, Stages
from kamera_cli.trust import WhyNot
from kamera_cli.window import load_window, ordered, update_window
from kamera_cli.window_changes import reconditioned
from kamera_cli.words import advice, chunks_words, compile_command, misses_words
from kamera_store.errors import DamagedError, MissingRecordError
from kamera_store.format.records import Record

if TYPE_CHECKING:
    from kamera_cli.context import Context


def query(context: Context, question: str, options: QueryOptions) -> QueryResult:
    """Answer a question from stored chunks; see ``Engine.query``."""
    checked_question(question)
    asked = time.perf_counter()
    view = load_window(context.store, context.tenant, options.window)
    ordered(view, options.names)  # a request that names what is not there fails before a model is loaded
    loading = time.perf_counter()
    context.refuse_other_model(view)
    runner = context.runner
    # TTFT counts from the request, without the time of a model that was not in memory yet.
    started = asked + time.perf_counter() - loading
    choose = Chooser(options.temperature, options.seed)
    question_ids = runner.question_ids(question)
    runner.refuse_placeholders(question_ids, "the question")
    arranged = arrange(context.library, view, options)
    _require_fit(context, arranged.records, question_ids.numel() + options.max_new_tokens)
    _require_hits(arranged, options)
    lookup_ms = 1e3 * (time.perf_counter() - started)

    arranged, ready = _prepare(context, arranged, question_ids, options)
    fallback, records = arranged.plan.fallback, arranged.records
    prefilling = time.perf_counter()
    first = choose(ready.logits)
    ttft_ms = 1e3 * (time.perf_counter() - started)
    stages = replace(ready.reading.stages, lookup=lookup_ms)
    stages = replace(stages, prefill=stages.prefill + 1e3 * (time.perf_counter() - prefilling))

    answer = decode(
        runner, ready.cache, first, ready.next_position,
        choose=choose, max_new_tokens=options.max_new_tokens, on_token=options.on_token,
    )  # fmt: skip
    finished = time.perf_counter()
    num_new = len(answer.token_ids)
    tpot_ms = 1e3 * (finished - started) / (num_new - 1) - ttft_ms / (num_new - 1) if num_new > 1 else None

    kept: tuple[str, ...] = ()
    if fallback is not None and options.reuse == "auto":
        kept = keep_patches(
            context, records, ready, question_ids, AUTO_MAX_KL if options.max_kl is None else options.max_kl
        )
        if not options.gives_order:
            update_window(context.store, context.tenant, options.window, reconditioned)
    context.store.touch(record.key for record in chain(records, *arranged.patches))
    total_ms = 1e3 * (time.perf_counter() - started)
    compared = None
    if options.compare:
        compared = compare(context, records, question_ids, ready.logits, answer, options.max_new_tokens)
        if options.rank is None:
            keep_worst(context, arranged, compared.kl)
    receipts = receipts_of(arranged, ready.reading, runner.preamble.positions.span, options.rank)
    num_chunk_tokens = sum(receipt.num_tokens for receipt in receipts)
    reused = 0 if fallback is not None else num_chunk_tokens
    return QueryResult(
        question=question,
        answer=answer.text,
        window=options.window,
        reuse=options.reuse,
        attention=runner.loaded.attention,
        device=str(runner.device),
        dtype=context.dtype_name,
        model=context.checkpoint.label,
        fallback=fallback,
        ttft_ms=ttft_ms,
        stages=stages,
        chunks=receipts,
        reused_tokens=reused,
        prefilled_tokens=num_chunk_tokens - reused + question_ids.numel(),
        new_tokens=num_new,
        total_ms=total_ms,
        tpot_ms=tpot_ms,
        patches_kept=kept,
        placed=arranged.placed,
        remembered=remembered(view, arranged),
        warnings=warnings_of(receipts, is_routed=runner.routes_tokens and not options.compare),
        compare=compared,
    )


def _require_fit(context: Context, records: Sequence[Record], num_more: int) -> None:
    length = (
        context.runner.preamble.positions.span + sum(record.meta["span"] for record in records) + num_more
    )
    context.require_context(length, "chunks, question and answer together")


def _require_hits(arranged: Arranged, options: QueryOptions) -> None:
    """Refuse what would not be reused, under ``--require-hit`` and ``--reuse patched``."""
    found, fallback = arranged.found, arranged.plan.fallback
    order = [chunk.wanted.entry.number for chunk in found]
    misses = [
        (chunk.wanted.entry.number, action.why_not)
        for chunk, action in arranged.chosen
        if action.why_not is not None
    ]
    asked = (
        "--require-hit" if options.require_hit else "--reuse patched" if options.reuse == "patched" else None
    )
    if asked is None or not (misses or fallback is not None):
        return
    if not misses:
        raise NotFoundError(f"{asked}: not everything can be reused ({fallback})")
    orphaned = [chunk.wanted.entry.number for chunk in found if chunk.wanted.antecedents is None]
    what = (
        f"{chunks_words(orphaned)} took something in from a purged chunk; "
        f"take it out with: {compile_command(options.window, None)} --kind removal"
        if orphaned
        else advice(misses, options.window, order if options.gives_order else None)
    )
    raise NotFoundError(f"{asked}: not everything can be reused ({misses_words(misses)}); {what}")


def _prepare(
    context: Context, arranged: Arranged, question_ids: torch.Tensor, options: QueryOptions
) -> tuple[Arranged, Ready]:
    """Assemble as planned, or prefill; what cannot be read after all turns ``auto`` into a prefill."""
    if arranged.plan.fallback is None:
        try:
            return arranged, _reused(context, arranged, question_ids, options.rank)
        except (DamagedError, MissingRecordError) as error:
            if options.reuse != "auto" or options.require_hit:
                raise
            context.warn(f"{error}; answering from a prefill instead")
            arranged = replace(arranged, plan=_without(arranged.found, error))
    return arranged, _prefilled(context, arranged.records, question_ids)


def _without(found: Sequence[Found], error: DamagedError | MissingRecordError) -> Plan:
    """A prefill, because a stored chunk or patch is damaged or was evicted meanwhile; the receipt says which."""
    why: WhyNot = "damaged" if isinstance(error, DamagedError) else "no_patch"
    fallback = "a stored chunk or patch is damaged" if why == "damaged" else "a patch was evicted meanwhile"
    blamed = [
        any(error.key in stored.offer.keys for stored in chunk.patches) or error.key == chunk.record.key
        for chunk in found
    ]
    return Plan(tuple(Action("prefilled", why_not=why if blame else None) for blame in blamed), fallback)


def _reused(context: Context, arranged: Arranged, question_ids: torch.Tensor, rank: int | None) -> Ready:
    """Stored KV and patches become a cache (`read_and_assemble`); the model runs over the question alone."""
    runner = context.runner
    cache, end, reading = read_and_assemble(runner, context.library, arranged.records, arranged.patches, rank)
    started = time.perf_counter()
    logits = runner.extend(
        cache, runner.embed(question_ids), runner.positions_from(end, question_ids.numel())
    )
    runner.synchronize()
    stages = replace(reading.stages, prefill=1e3 * (time.perf_counter() - started))
    return Ready(cache, logits, end + question_ids.numel(), replace(reading, stages=stages))


def _prefilled(context: Context, records: Sequence[Record], question_ids: torch.Tensor) -> Ready:
    """The language model runs over everything, from stored embeddings; the vision tower does not run."""
    runner, library = context.runner, context.library
    started = time.perf_counter()
    sizes = [library.segment_bytes(record) for record in records]
    segments = [library.segment(record) for record in records]
    runner.synchronize()
    read = time.perf_counter()
    whole = [runner.preamble, *segments, runner.text_segment(question_ids)]
    cache, logits, captured, end = runner.prefill(whole)
    runner.synchronize()
    stages = Stages(read=1e3 * (read - started), prefill=1e3 * (time.perf_counter() - read))
    reading = Reading(stages, *zip(*sizes, strict=True))
    return Ready(cache, logits, end, reading, tuple(segments), tuple(captured[1:-1]))
