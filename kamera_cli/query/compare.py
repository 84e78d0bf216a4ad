"""The same question without reuse: a re-encode from the sources, or a re-prefill where they are gone."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kamera_cli.ingest.encode import model_inputs
from kamera_cli.media.errors import MediaError
from kamera_cli.media.source import inspect
from kamera_cli.model.generate import Answer, Chooser, decode, next_token_kl
from kamera_cli.model.inputs import ChunkInputs
from kamera_cli.options import IngestOptions
from kamera_cli.results import Comparison
from kamera_store.format.records import Record

if TYPE_CHECKING:
    from kamera_cli.context import Context


def compare(
    context: Context,
    records: Sequence[Record],
    question_ids: torch.Tensor,
    logits: torch.Tensor,
    answer: Answer,
    max_new_tokens: int,
) -> Comparison:
    """Answer greedily from a cold run over the same chunks in the same order.

    Parameters
    ----------
    logits : torch.Tensor
        (vocab,) that the compared answer started from.
    answer : Answer
        The compared answer.
    """
    runner = context.runner
    started = time.perf_counter()
    inputs = reopen(context, records)
    decode_ms = 1e3 * (time.perf_counter() - started)
    choose = Chooser(0.0, 0)
    started = time.perf_counter()
    if inputs is not None:
        run = runner.reencode(inputs, question_ids)
        cache, cold, end = run.cache, run.logits, run.next_position
        vision_ms, prefill_ms = run.vision_ms, run.prefill_ms
    else:
        segments = [context.library.segment(record) for record in records]
        whole = [runner.preamble, *segments, runner.text_segment(question_ids)]
        started = time.perf_counter()
        cache, cold, _, end = runner.prefill(whole)
        runner.synchronize()
        vision_ms, prefill_ms = 0.0, 1e3 * (time.perf_counter() - started)
    first = choose(cold)
    ttft_ms = 1e3 * (time.perf_counter() - started)
    again = decode(runner, cache, first, end, choose=choose, max_new_tokens=max_new_tokens)
    return Comparison(
        ttft_ms=ttft_ms,
        vision_ms=vision_ms,
        prefill_ms=prefill_ms,
        decode_ms=decode_ms if inputs is not None else 0.0,
        full_reencode=inputs is not None,
        kl=next_token_kl(cold, logits),
        same_answer=again.token_ids == answer.token_ids,
        answer=again.text,
    )


def reopen(context: Context, records: Sequence[Record]) -> list[ChunkInputs] | None:
    """Model inputs of stored chunks, decoded again from their sources.

    Returns
    -------
    list of ChunkInputs or None
        None, with a warning, when a source is gone or no longer gives the same model inputs.
    """
    found: dict[bytes, ChunkInputs] = {}
    by_source: dict[tuple, set[bytes]] = {}
    for record in records:
        ingest = record.meta["ingest"]
        by_source.setdefault((record.meta["source"]["path"], *sorted(ingest.items())), set()).add(record.key)
    for (path, *items), keys in by_source.items():
        options = IngestOptions(**dict(items))
        try:
            for _, inputs in model_inputs(context.runner, path, inspect(path), options):
                key = context.library.chunk_identity(inputs).key
                if key in keys:
                    found[key] = inputs
                if keys <= found.keys():
                    break
        except MediaError as error:
            context.warn(f"compared with a re-prefill without the vision tower: {error}")
            return None
        if not keys <= found.keys():
            name = os.path.basename(path)
            context.warn(
                f"compared with a re-prefill without the vision tower: {name} is not what was ingested"
            )
            return None
    return [found[record.key] for record in records]
