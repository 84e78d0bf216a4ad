"""State left on the model, a mask of the new tokens only, hooks that hear another thread: silent wrong answers."""

from __future__ import annotations

import threading

import pytest
import torch
from plain_model import greedy, next_logits, whole_prompt
from tiny_models import FAMILIES, passage
from vision_inputs import clip, picture

from kamera_cli.model.compat import DynamicCache, decoder_of
from kamera_cli.model.generate import Chooser, decode


def chunks_of(runner) -> list:
    text = runner.text_inputs(runner.tokenize(passage(12, 1)))
    if runner.processor is None:
        return [text, runner.text_inputs(runner.tokenize(passage(17, 2)))]
    return [picture(runner, 1), text, clip(runner, 2, fps=4.0)]


def segments_of(runner, chunks) -> list:

    return [runner.preamble, *(runner.encode(chunk).segment for chunk in chunks)]


@pytest.mark.parametrize("family", FAMILIES)
def test_answer_from_kept_embeddings_is_the_plain_models(runners, family):
    runner = runners(family)
    chunks = chunks_of(runner)
    ids, inputs = whole_prompt(runner, chunks, "which shape?")
    question = runner.text_segment(runner.question_ids("which shape?"))
    cache, logits, _, end = runner.prefill([*segments_of(runner, chunks), question])
    torch.testing.assert_close(logits, next_logits(runner.model, ids, **inputs), rtol=1e-5, atol=1e-5)
    choose = Chooser(0.0, 0)
    answer = decode(runner, cache, choose(logits), end, choose=choose, max_new_tokens=12)
    assert answer.token_ids == greedy(runner.model, ids, 12, **inputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_reencoding_answers_like_the_plain_model(runners, family):
    runner = runners(family)
    chunks = chunks_of(runner)
    ids, inputs = whole_prompt(runner, chunks, "which shape?")
    run = runner.reencode(chunks, runner.question_ids("which shape?"))
    torch.testing.assert_close(run.logits, next_logits(runner.model, ids, **inputs), rtol=1e-5, atol=1e-5)
    choose = Chooser(0.0, 0)
    answer = decode(
        runner, run.cache, choose(run.logits), run.next_position, choose=choose, max_new_tokens=12
    )
    assert answer.token_ids == greedy(runner.model, ids, 12, **inputs)


def test_a_rope_delta_of_an_earlier_call_changes_nothing(runners):
    """TF-1: Qwen-VL models remember the delta of their last ordinary call."""
    runner = runners("qwen2_5_vl")
    model = runner.model.model
    chunk = clip(runner, 3)
    question = runner.question_ids("which letter?")

    def everything() -> list[torch.Tensor]:
        encoded = runner.encode(chunk)
        run = runner.reencode([chunk], question)
        more = runner.extend(
            run.cache, runner.embed(question), runner.positions_from(run.next_position, len(question))
        )
        return [encoded.segment.embeddings, *(layer.rotary for layer in encoded.layers), run.logits, more]

    results = []
    for delta in (None, torch.tensor([[-7]]), torch.tensor([[500]])):
        model.rope_deltas = delta
        results.append(everything())
        assert model.rope_deltas is delta
    model.rope_deltas = None
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_forward_has_a_mask_over_cached_and_new_tokens(runners, family):
    """TF-5: a shorter mask is accepted without an error and shifts everything."""
    runner = runners(family)
    seen = []

    def note(_module, _args, given: dict) -> None:
        cache = given.get("cache", given.get("past_key_values"))
        cached = 0 if cache is None else cache.get_seq_length()
        mask = given["attention_mask"]
        length = mask.shape[-1] if torch.is_tensor(mask) else None
        seen.append((cached, given["inputs_embeds"].shape[1], length, given["position_ids"].shape[-1]))
        assert mask.bool().all()

    handle = decoder_of(runner.model).register_forward_pre_hook(note, with_kwargs=True)
    try:
        chunks = chunks_of(runner)
        segments = segments_of(runner, chunks)
        runner.reencode(chunks, runner.question_ids("which?"))
        runner.prefill_captured(segments)
        cache, logits, _, end = runner.prefill(segments)
        decode(runner, cache, int(logits.argmax()), end, choose=Chooser(0.0, 0), max_new_tokens=5)
        runner.extend(DynamicCache(), runner.embed(torch.tensor([9, 10, 11])), runner.positions_from(0, 3))
    finally:
        handle.remove()
    assert any(cached and new == 1 for cached, new, _, _ in seen)
    assert all(length == cached + new and positions == new for cached, new, length, positions in seen)


def test_nothing_is_left_hooked_or_changed_on_the_model(runners):
    runner = runners("qwen2_5_vl")
    before = {name: tensor.clone() for name, tensor in runner.model.state_dict().items()}
    with pytest.raises(RuntimeError, match="stop"), runner.family.capture():
        raise RuntimeError("stop")
    runner.encode(picture(runner))
    for module in runner.model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and not module.training
    assert all(torch.equal(before[name], tensor) for name, tensor in runner.model.state_dict().items())


def test_a_capture_does_not_hear_another_threads_forward(runners):
    runner = runners("llama")
    texts = [runner.text_segment(runner.tokenize(passage(30 + 3 * seed, seed))) for seed in range(4)]
    expected = [runner.prefill_captured([runner.preamble, text]) for text in texts]
    wrong: list[int] = []
    start = threading.Barrier(len(texts))

    finished: list[int] = []

    def work(index: int) -> None:
        start.wait()
        for _ in range(15):
            found = runner.prefill_captured([runner.preamble, texts[index]])
            for ours, theirs in zip(found[1], expected[index][1], strict=True):
                if not (torch.equal(ours.rotary, theirs.rotary) and torch.equal(ours.plain, theirs.plain)):
                    wrong.append(index)
        finished.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and sorted(finished) == [0, 1, 2, 3]


def test_one_thread_at_a_time_reads_a_checkpoint(checkpoints, monkeypatch):
    """transformers changes process-wide state meanwhile, and two engines have no lock in common."""
    from kamera_cli.model import loading
    from kamera_cli.model.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(str(checkpoints("llama")), trust_remote_code=False)
    real, inside, most = loading._read, threading.Semaphore(0), []
    started = threading.Barrier(3)

    def counted(*arguments):
        inside.release()
        try:
            most.append(inside._value)
            return real(*arguments)
        finally:
            inside.acquire()

    def load():
        started.wait()
        loading.load(checkpoint, device="cpu", dtype="fp32", attention="auto", trust_remote_code=False)

    monkeypatch.setattr(loading, "_read", counted)
    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]
