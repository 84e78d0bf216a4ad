"""A window that has slid: survivors keep what they took in, at other positions. The reference is one masked forward."""

from __future__ import annotations

import inspect

import pytest
import torch
from engine_setups import QUESTION, first_logits, ingest
from plain_model import kl


@pytest.fixture
def engine(open_engine, tmp_path):
    """Qwen3 without a template: an empty preamble, so only distances between chunks and question count."""
    made = open_engine("qwen3")
    ingest(made, "qwen3", tmp_path)
    assert made.runner.preamble.num_tokens == 0
    made.compile_patches(rank=20, factor_dtype="fp32")
    return made


@torch.no_grad()
def masked_logits(engine, hidden: tuple[int, ...]) -> torch.Tensor:
    """Chunks 1, 2, 3 and the question in one plain forward, in which the question cannot see some of the chunks."""
    runner = engine.runner
    parts = [
        torch.frombuffer(
            bytearray(engine.store.read(record, [("token_ids", -1)])["token_ids", -1].view()),
            dtype=torch.int64,
        )
        for record in (engine.store.get(bytes.fromhex(entry.chunk)) for entry in everything(engine))
    ]
    question = runner.question_ids(QUESTION)
    ids = torch.cat([*parts, question])
    mask = torch.full((ids.numel(), ids.numel()), torch.finfo(torch.float32).min).triu(1)
    start = 0
    for index, part in enumerate(parts):
        if index in hidden:
            mask[-question.numel() :, start : start + part.numel()] = torch.finfo(torch.float32).min
        start += part.numel()
    assert "attention_mask" in inspect.signature(runner.model.forward).parameters
    return runner.model(input_ids=ids[None], attention_mask=mask[None, None], use_cache=False).logits[0, -1]


def everything(engine):
    window = engine.window()
    return sorted([*window.entries, *window.evicted], key=lambda entry: entry.number)


@pytest.mark.parametrize("gone", [(0,), (0, 1), ()])
def test_survivors_answer_as_if_the_question_could_not_see_what_left(engine, gone):
    if gone:
        engine.evict([str(index + 1) for index in gone])
    with first_logits(engine) as seen:
        result = engine.query(QUESTION, require_hit=True)
    assert [chunk.number for chunk in result.chunks] == [index + 1 for index in range(3) if index not in gone]
    assert result.chunks[0].position == 0
    assert kl(masked_logits(engine, gone), seen[0]) <= 1e-6
    if gone:
        assert kl(masked_logits(engine, ()), seen[0]) > 1e-3


def test_a_middle_chunk_that_left_closes_the_gap(engine):
    """Chunk 3 moves nearer to chunk 1, so no masked forward is equal; it must still hold what it took in from both."""
    engine.evict(["2"])
    with first_logits(engine) as seen:
        engine.query(QUESTION, require_hit=True)
        engine.query(QUESTION, reuse="blind")
    reference = masked_logits(engine, (1,))
    assert kl(reference, seen[0]) < kl(reference, seen[1])


def test_a_recalled_chunk_has_what_a_prefill_after_the_survivors_gives(engine):
    engine.evict(["1"])
    engine.recall(["1"])
    kept = engine.window().entries
    assert [entry.number for entry in kept] == [2, 3, 1]
    engine.compile_patches(["2", "3", "1"], rank=20, factor_dtype="fp32")
    runner, library = engine.runner, engine.library
    records = [engine.store.get(bytes.fromhex(entry.chunk)) for entry in kept]
    conditioned = runner.prefill_captured([library.segment(record) for record in records])[2]
    patch = library.patch_layers(engine.store.get(engine.store.patches_of(records[2].key)[0].key))
    for after, alone, layer in zip(conditioned, library.layers(records[2]), patch, strict=True):
        restored = alone.rotary.flatten(1) + layer.rotary.u.T @ layer.rotary.v
        torch.testing.assert_close(restored, after.rotary.flatten(1), rtol=1e-4, atol=1e-4)


def test_the_receipt_says_what_a_window_still_knows(open_engine, tmp_path):
    from rich.console import Console

    from kamera_cli.output.receipt import answer_view
    from kamera_cli.words import to_json

    engine = open_engine("llama")
    ingest(engine, "llama", tmp_path)
    engine.compile_patches()
    assert engine.query(QUESTION, reuse="patched", max_new_tokens=1).remembered == ()
    engine.evict(["1"])
    slid = engine.query(QUESTION, reuse="patched", max_new_tokens=1)
    assert slid.remembered == (1,) and to_json(slid)["remembered"] == (1,)
    console = Console(width=200)
    with console.capture() as shown:
        console.print(*answer_view(slid), sep="\n")
    assert "chunk 1 left the window, but what the others took in from it is kept" in shown.get()
    assert engine.query(QUESTION, chunks=["2", "3"], max_new_tokens=1).remembered == ()
    engine.compile_patches(kind="removal")
    assert engine.query(QUESTION, reuse="patched", max_new_tokens=1).remembered == ()
