"""Suite ``slide``: what a window still knows of a chunk that has left it, and what it knows once the chunk is recalled.

A chunk that answers half of a two-hop question stands first and leaves; the survivors move up and keep what they took
in from it. Then it comes back at the end, conditioned on what now stands before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kamera_cli.bench.arrangement import Arrangement
from kamera_cli.bench.episodes import Encoded, encoded_episodes, forced, group_of, shuffled
from kamera_cli.bench.forming import AS_COMPILED, Learner
from kamera_cli.bench.results import SuiteResult
from kamera_cli.bench.scratch import scratch_engine
from kamera_cli.bench.slide_report import (
    GROUPS,
    LEFT_AS_BEFORE,
    LEFT_BLIND,
    LEFT_PATCHED,
    RECALLED,
    RECALLED_BLIND,
    Kls,
    Right,
    report,
)
from kamera_cli.model.compat import DynamicCache
from kamera_cli.model.generate import next_token_kl
from kamera_cli.model.scoring import is_greedy_match, score
from kamera_cli.operator.ranks import Worth
from kamera_cli.results import Progress
from kamera_cli.settings import Settings

if TYPE_CHECKING:
    from kamera_cli.bench import BenchOptions

EPISODES = 60
RANKS = (4, 16)


def measure(
    settings: Settings, options: BenchOptions, on_progress: Callable[[Progress], None]
) -> SuiteResult:
    """Answer before a chunk leaves, after it has left, and after it was recalled.

    Returns
    -------
    SuiteResult
        One table, one chart.
    """
    count = options.episodes or EPISODES
    ranks = tuple(sorted(set(options.ranks))) or RANKS
    right: Right = {}
    kls: Kls = {}
    learner = Learner()
    with scratch_engine(settings, on_progress) as (engine, work):
        runner = engine.runner
        started = time.perf_counter()
        for done, encoded in enumerate(encoded_episodes(runner, count, options.seed, work)):
            on_progress(Progress("sliding", done, count, "episodes"))
            _episode(encoded, ranks, learner, right, kls)
        described = {
            "model": engine.context.checkpoint.label,
            "device": str(runner.device),
            "dtype": engine.context.dtype_name,
            "num_episodes": count,
            "seconds_per_episode": (time.perf_counter() - started) / count,
        }
    return report(right, kls, described)


def _episode(encoded: Encoded, ranks: tuple[int, ...], learner: Learner, right: Right, kls: Kls) -> None:
    leaving = next((q.chunks[0] for q in encoded.episode.questions if group_of(q) == "two_hop"), None)
    if leaving is None:
        return
    others = [index for index in shuffled(len(encoded.segments), encoded.seed) if index != leaving]
    before = encoded.arranged([leaving, *others])
    after = encoded.arranged(others)
    back = encoded.arranged([*others, leaving])
    windows = contexts(before, after, back, ranks, learner.worth(before))
    asked = [
        (group, question)
        for question in encoded.episode.questions
        if (group := _group(group_of(question), question.chunks, leaving)) is not None
    ]
    prompts = [forced(encoded.runner, question) for _, question in asked]
    for end, caches in windows:
        scored = score(encoded.runner, list(caches.values()), end, prompts)
        for name, answers in zip(caches, scored, strict=True):
            kls.setdefault(name, []).extend(
                next_token_kl(expected[0], logits[0])
                for expected, logits in zip(scored[0], answers, strict=True)
            )
            for (group, _), prompt, logits in zip(asked, prompts, answers, strict=True):
                marks = right.setdefault(name, {each: [] for each in GROUPS})[group]
                marks.append(is_greedy_match(logits, prompt.answer_ids, encoded.runner.eos_ids))


def contexts(
    before: Arrangement, after: Arrangement, back: Arrangement, ranks: tuple[int, ...], known: Worth | None
) -> list[tuple[int, dict[str, DynamicCache]]]:
    """Caches of all arms, by window and name, each window with the position at which a question starts.

    Parameters
    ----------
    before, after, back : Arrangement
        The chunk that leaves and the others; the others alone; the others and the chunk once more, at the end.
    known : Worth or None
        What the layers are worth.

    Returns
    -------
    list of (int, dict)
        The first cache of each window is its re-prefill.
    """
    most = max(ranks)
    # What each chunk behind the first has before the slide, after the removal, and the recalled one on its return.
    fixed = before.patches(most)[1:], after.patches(most), back.patch(-1, most)
    compiled = (
        before.patches("auto", worth=known)[1:],
        after.patches("auto", worth=known),
        back.patch(-1, "auto", worth=known),
    )
    kinds = {f"rank {rank}": (fixed, rank) for rank in ranks} | {AS_COMPILED: (compiled, None)}
    return [
        (before.end, {"before, re-prefill": before.exact}),
        (
            after.end,
            {
                "left, re-prefill of the others": after.exact,
                LEFT_BLIND: after.blind,
                **{
                    f"{LEFT_PATCHED}, {kind}": after.patched(patches, rank)
                    for kind, ((patches, _, _), rank) in kinds.items()
                },
                **{
                    f"left and removed, {kind}": after.patched(removed, rank)
                    for kind, ((_, removed, _), rank) in kinds.items()
                },
                LEFT_AS_BEFORE: after.holding(before.conditioned[1:]),
            },
        ),
        (
            back.end,
            {
                "recalled, re-prefill": back.exact,
                RECALLED_BLIND: back.blind,
                **{
                    f"{RECALLED}, {kind}": back.patched([*patches, returning], rank)
                    for kind, ((patches, _, returning), rank) in kinds.items()
                },
            },
        ),
    ]


def _group(kind: str, chunks: tuple[int, ...], leaving: int) -> str | None:
    if kind == "two_hop":
        return "through" if leaving in chunks else None
    if kind == "one_hop":
        return "gone" if leaving in chunks else "other"
    return None
