"""Scoring many questions at once must be greedy decoding one by one, and recomputed tokens must be the model's own."""

from __future__ import annotations

import pytest
import torch

from kamera_cli.bench import rivals
from kamera_cli.bench.prompt import Prompt
from kamera_cli.engine import Engine
from kamera_cli.model.compat import DynamicCache
from kamera_cli.model.generate import Chooser, decode
from kamera_cli.model.scoring import Forced, is_greedy_match, recompute, score
from kamera_cli.options import CompileOptions
from kamera_cli.patches.chunk import Chunk

QUESTIONS = (
    "Which digit goes with the red circle?",
    "What letter matches the number 4?",
    "Which shape is it?",
)


@pytest.fixture(scope="module")
def window(engine: Engine) -> Prompt:
    runner = engine.runner
    generator = torch.Generator().manual_seed(3)
    segments = [
        runner.text_segment(torch.randint(9, 100, (length,), generator=generator)) for length in (20, 31, 17)
    ]
    captured = [runner.prefill_captured([runner.preamble, segment])[1] for segment in segments]
    return Prompt(runner, tuple(map(Chunk, segments, captured)))


def assert_same(one: DynamicCache, other: DynamicCache, tolerance: float = 2e-4) -> None:
    for ours, theirs in zip(one.layers, other.layers, strict=True):
        assert torch.allclose(ours.keys, theirs.keys, atol=tolerance)
        assert torch.allclose(ours.values, theirs.values, atol=tolerance)


def greedy(window: Prompt, question: str, limit: int):
    runner = window.runner
    ids = runner.question_ids(question)
    cache = window.holding([chunk.canonical for chunk in window.chunks])
    logits = runner.extend(cache, runner.embed(ids), runner.positions_from(window.end, ids.numel()))
    choose = Chooser(0.0, 0)
    end = window.end + ids.numel()
    return logits, decode(runner, cache, choose(logits), end, choose=choose, max_new_tokens=limit)


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_forced_answer_is_right_exactly_when_greedy_decoding_gives_it(
    window: Prompt, question: str
) -> None:
    runner = window.runner
    first, answer = greedy(window, question, 3)
    told = torch.tensor(answer.token_ids)
    wrong = told.clone()
    wrong[-1] = (wrong[-1] + 1) % 90 + 9
    ids = runner.question_ids(question)
    # The random model may not stop by itself: what it would say next stands for the end token here.
    longer = greedy(window, question, 4)[1]
    follows = longer.token_ids[3] if len(longer.token_ids) > 3 else runner.eos_ids[0]
    end = torch.tensor([follows])
    right, not_right = (Forced(ids, torch.cat([part, end])) for part in (told, wrong))
    scored = score(runner, [window.blind], window.end, [right, not_right])[0]
    assert torch.allclose(scored[0][0], first, atol=1e-4)
    assert is_greedy_match(scored[0], right.answer_ids, (follows,))
    assert not is_greedy_match(scored[1], not_right.answer_ids, (follows,))
    assert not is_greedy_match(scored[0], right.answer_ids, (follows + 1,))


def test_questions_side_by_side_do_not_see_each_other(window: Prompt) -> None:
    runner = window.runner
    answer = torch.tensor([20, 30, runner.eos_ids[0]])
    prompts = [Forced(runner.question_ids(question), answer) for question in QUESTIONS]
    together = score(runner, [window.exact, window.blind], window.end, prompts, group=1)
    stacked = score(runner, [window.exact, window.blind], window.end, prompts)
    for number, prompt in enumerate(prompts):
        for arm, cache in enumerate((window.exact, window.blind)):
            alone = score(runner, [cache], window.end, [prompt])[0][0]
            assert torch.allclose(together[arm][number], alone, atol=1e-4)
            assert torch.allclose(stacked[arm][number], alone, atol=1e-4)


def test_scoring_leaves_the_caches_as_they_were(window: Prompt) -> None:
    before = [layer.keys.clone() for layer in window.exact.layers]
    prompt = Forced(window.runner.question_ids(QUESTIONS[0]), torch.tensor([20, 2]))
    score(window.runner, [window.exact], window.end, [prompt])
    assert all(torch.equal(old, layer.keys) for old, layer in zip(before, window.exact.layers, strict=True))


def test_the_exact_arm_is_the_models_own_prefill(window: Prompt) -> None:
    runner = window.runner
    own, *_ = runner.prefill([runner.preamble, *(chunk.segment for chunk in window.chunks)])
    assert_same(window.exact, own)


def test_recomputing_every_token_is_a_prefill_and_none_is_blind(window: Prompt) -> None:
    everything = torch.arange(window.embeddings.shape[0])
    parts = (window.embeddings, window.positions)
    assert_same(recompute(window.runner, window.blind, *parts, everything), window.exact)
    kept = [layer.keys.clone() for layer in window.blind.layers]
    changed = recompute(window.runner, window.blind, *parts, torch.tensor([30, 31, 40]))
    assert all(torch.equal(old, layer.keys) for old, layer in zip(kept, window.blind.layers, strict=True))
    untouched = [index for index in everything.tolist() if index not in (30, 31, 40)]
    for new, old in zip(changed.layers, window.blind.layers, strict=True):
        assert torch.equal(new.keys[:, :, untouched], old.keys[:, :, untouched])


def test_full_rank_patches_give_the_re_prefill_before_and_after_rope(window: Prompt) -> None:
    most = max(chunk.segment.num_tokens for chunk in window.chunks)
    made = (
        window.patched(window.patches(CompileOptions(rank=most))),
        rivals.patched_after_rotation(window, (most,))[most],
    )
    for cache in made:
        for ours, exact in zip(cache.layers, window.exact.layers, strict=True):
            for mine, theirs in ((ours.keys, exact.keys), (ours.values, exact.values)):
                assert float((mine - theirs).norm() / theirs.norm()) < 1e-2  # factors are rounded to 8 bits


def test_rivals_spend_the_tokens_they_are_given(window: Prompt) -> None:
    def changed(cache: DynamicCache) -> int:
        last, blind = cache.layers[-1].values, window.blind.layers[-1].values
        return int((last != blind).any(dim=-1).any(dim=1).sum())

    for share, cache in rivals.oracle(window).items():
        assert changed(cache) == window.num_selected(share)
    for rival in (rivals.cacheblend, rivals.epic):
        counts = [changed(cache) for cache in rival(window).values()]
        assert counts == sorted(counts)
        assert counts[-1] <= window.num_selected(0.5) + len(window.chunks)


def test_an_oracle_with_all_tokens_is_the_re_prefill(window: Prompt) -> None:
    assert_same(rivals.oracle(window, (1.0,))[1.0], window.exact)
