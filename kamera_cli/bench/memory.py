"""Suite ``memory``: bytes of patches against what they restore, every patch formed and written as the product does it.

All arms answer the same questions over the same chunks in the same order; a chunk's Δ is factored once for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kamera_cli.bench.episodes import GROUPS, Task, tasks
from kamera_cli.bench.forming import Learner, Residual
from kamera_cli.bench.memory_report import BLIND, REFERENCE, Arm, report
from kamera_cli.bench.results import SuiteResult
from kamera_cli.bench.scratch import scratch_engine
from kamera_cli.bench.sizes import Size
from kamera_cli.model.compat import DynamicCache
from kamera_cli.model.generate import next_token_kl
from kamera_cli.model.scoring import is_greedy_match, score
from kamera_cli.patches.request import PatchOptions
from kamera_cli.results import Progress
from kamera_cli.settings import DEFAULT_ENERGY, Settings

if TYPE_CHECKING:
    from kamera_cli.bench import BenchOptions

RANKS = (1, 2, 4, 8, 16)
EPISODES = 100
ENERGIES = (0.95, 0.99, 0.995, DEFAULT_ENERGY)
INT8_RANK = 4
"""The fixed rank that is also measured in 8-bit integers; the largest one where it is not measured."""


def arms_of(ranks: tuple[int, ...]) -> dict[str, Arm]:
    """The ways to spend bytes, by name, in the order in which they are shown."""
    rank = INT8_RANK if INT8_RANK in ranks else max(ranks)
    arms = [Arm("fixed, fp16", each, PatchOptions(rank=each, factor_dtype="fp16")) for each in ranks]
    arms.append(Arm("fixed, int8", rank, PatchOptions(rank=rank, factor_dtype="int8")))
    arms.append(Arm("energy of each tensor, fp16", 0.99, PatchOptions(energy=0.99, factor_dtype="fp16")))
    for dtype, energies in (("int8", ENERGIES), ("int6", ENERGIES)):
        arms += [
            Arm(f"auto, {dtype}", energy, PatchOptions(energy=energy, factor_dtype=dtype), by_worth=True)
            for energy in energies
        ]
    arms += [
        Arm(
            "budget, int8",
            float(budget[:-1]),
            PatchOptions(budget=budget, factor_dtype="int8"),
            by_worth=True,
        )
        for budget in ("1%", "3%")
    ]
    return {arm.name: arm for arm in arms}


def measure(
    settings: Settings, options: BenchOptions, on_progress: Callable[[Progress], None]
) -> SuiteResult:
    """Run all arms over episodes of the card world.

    Returns
    -------
    SuiteResult
        One table, two charts.
    """
    count = options.episodes or EPISODES
    arms = {
        REFERENCE: Arm(REFERENCE),
        BLIND: Arm(BLIND),
        **arms_of(tuple(sorted(set(options.ranks))) or RANKS),
    }
    learner, kv = Learner(), Size()
    with scratch_engine(settings, on_progress) as (engine, work):
        started = time.perf_counter()
        for done, task in enumerate(tasks(engine.runner, count, options.seed, work)):
            on_progress(Progress("answering", done, count, "episodes"))
            kv += _episode(task, learner, arms)
        on_progress(Progress("answering", count, count, "episodes"))
        described = {
            "model": engine.context.checkpoint.label,
            "fingerprint": engine.fingerprint,
            "device": str(engine.runner.device),
            "dtype": engine.context.dtype_name,
            "num_episodes": count,
            "num_questions": {group: len(arms[REFERENCE].right[group]) for group in GROUPS},
            "num_windows_learned_from": learner.num_windows,
            "seconds_per_episode": (time.perf_counter() - started) / count,
        }
    return report(arms, kv, described)


def _episode(task: Task, learner: Learner, arms: dict[str, Arm]) -> Size:
    """Answer one episode with every arm; bytes of the KV that its patches serve."""
    arrangement = task.arrangement
    known = learner.worth(arrangement)
    residuals = [
        Residual(after, alone)
        for after, alone in zip(arrangement.conditioned[1:], arrangement.canonical[1:], strict=True)
    ]
    caches: dict[str, DynamicCache] = {REFERENCE: arrangement.exact, BLIND: arrangement.blind}
    for name, arm in arms.items():
        if arm.options is None:
            continue
        formed = [of_chunk.cut(arm.options, known if arm.by_worth else None) for of_chunk in residuals]
        arm.size += sum((size for _, size in formed), Size())
        caches[name] = arrangement.patched([None, *(layers for layers, _ in formed)], None)
    scored = score(arrangement.runner, list(caches.values()), arrangement.end, task.prompts)
    for name, answers in zip(caches, scored, strict=True):
        for prompt, group, logits, expected in zip(
            task.prompts, task.groups, answers, scored[0], strict=True
        ):
            arms[name].right[group].append(
                is_greedy_match(logits, prompt.answer_ids, arrangement.runner.eos_ids)
            )
            arms[name].kl.append(next_token_kl(expected[0], logits[0]))
    return sum((of_chunk.kv for of_chunk in residuals), Size())
