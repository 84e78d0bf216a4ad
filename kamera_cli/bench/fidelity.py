"""Suite ``fidelity``: what each way of reuse does to answers, on the same tokens, the same model, in the same run.

Every arm is a KV cache of the same context. All questions of an episode are scored in one forward per arm with the
answer fed in, which is right exactly when greedy decoding gives the answer and ends.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kamera_cli.bench.episodes import GROUPS, Task, tasks
from kamera_cli.bench.fidelity_report import BLIND, COMPILED, REFERENCE, Arm, Totals, patch_name, report
from kamera_cli.bench.forming import Learner
from kamera_cli.bench.results import SuiteResult
from kamera_cli.bench.rivals import chosen
from kamera_cli.bench.scratch import scratch_engine
from kamera_cli.bench.sizes import of_factors, of_layer
from kamera_cli.model.compat import DynamicCache
from kamera_cli.model.generate import next_token_kl
from kamera_cli.model.scoring import is_greedy_match, score
from kamera_cli.operator.factorise import residual
from kamera_cli.operator.patch import LayerPatch
from kamera_cli.results import Progress
from kamera_cli.settings import Settings

if TYPE_CHECKING:
    from kamera_cli.bench import BenchOptions

RANKS = (1, 2, 4, 8, 16, 32)
EPISODES = 100
_Patches = list[list[LayerPatch] | None]


def measure(
    settings: Settings, options: BenchOptions, on_progress: Callable[[Progress], None]
) -> SuiteResult:
    """Run all arms over episodes of the card world.

    Returns
    -------
    SuiteResult
        One table of all arms, one of bytes; two charts, and one of the rivals. Without any rival, keys factored after
        their rotation are left out too.
    """
    ranks = tuple(sorted(set(options.ranks))) or RANKS
    rivals = chosen(options.rivals)
    count = options.episodes or EPISODES
    arms: dict[str, Arm] = {}
    totals, learner = Totals(), Learner()
    with scratch_engine(settings, on_progress) as (engine, work):
        runner = engine.runner
        started = time.perf_counter()
        for done, task in enumerate(tasks(runner, count, options.seed, work)):
            on_progress(Progress("answering", done, count, "episodes"))
            _episode(task, ranks, rivals, learner, arms, totals)
        on_progress(Progress("answering", count, count, "episodes"))
        seconds = time.perf_counter() - started
        described = {
            "model": engine.context.checkpoint.label,
            "fingerprint": engine.fingerprint,
            "device": str(runner.device),
            "dtype": engine.context.dtype_name,
            "attention": runner.loaded.attention,
            "num_episodes": count,
            "num_questions": {group: len(arms[REFERENCE].right[group]) for group in GROUPS},
            "seconds_per_episode": seconds / count,
        }
    return report(arms, totals, ranks, described)


def _episode(
    task: Task,
    ranks: tuple[int, ...],
    rivals: tuple[str, ...],
    learner: Learner,
    arms: dict[str, Arm],
    totals: Totals,
) -> None:
    arrangement = task.arrangement
    patches = arrangement.patches(max(ranks))
    formed: dict[str, tuple[_Patches, int | None]] = {patch_name(rank): (patches, rank) for rank in ranks}
    formed[COMPILED] = arrangement.patches("auto", worth=learner.worth(arrangement)), None
    caches: dict[str, DynamicCache] = {REFERENCE: arrangement.exact, BLIND: arrangement.blind}
    kinds: dict[str, tuple[str, float | None]] = {REFERENCE: ("reprefill", None), BLIND: ("blind", None)}
    for name, (made, rank) in formed.items():
        caches[name] = arrangement.patched(made, rank)
        kinds[name] = ("patch_compiled" if rank is None else "patch", rank)
    if rivals:
        for rank, cache in arrangement.patched_after_rotation(ranks).items():
            name = f"patch after RoPE, rank {rank}"
            caches[name], kinds[name] = cache, ("patch_after_rope", rank)
    for rival in rivals:
        method = importlib.import_module(f"kamera_cli.bench.rivals.{rival}")
        for share, cache in method.arms(arrangement).items():
            name = f"{rival} {share:.0%}"
            caches[name], kinds[name] = cache, (rival, share)
    scored = dict(
        zip(
            caches,
            score(arrangement.runner, list(caches.values()), arrangement.end, task.prompts),
            strict=True,
        )
    )
    ends = arrangement.runner.eos_ids
    for name, answers in scored.items():
        arm = arms.setdefault(name, Arm(*kinds[name]))
        for prompt, group, logits, expected in zip(
            task.prompts, task.groups, answers, scored[REFERENCE], strict=True
        ):
            arm.right[group].append(is_greedy_match(logits, prompt.answer_ids, ends))
            arm.kl[group].append(next_token_kl(expected[0], logits[0]))
    _count(task, formed, arms, totals)


def _count(
    task: Task, formed: dict[str, tuple[_Patches, int | None]], arms: dict[str, Arm], totals: Totals
) -> None:
    """Add up bytes and captured energy of the chunks that have a patch."""
    arrangement = task.arrangement
    for canonical, conditioned in zip(arrangement.canonical[1:], arrangement.conditioned[1:], strict=True):
        totals.num_chunks += 1
        totals.num_tokens += canonical[0].rotary.shape[0]
        totals.width = canonical[0].rotary[0].numel()
        for alone, after in zip(canonical, conditioned, strict=True):
            size = of_layer(alone)
            totals.kv_raw_bytes += size.raw
            totals.kv_stored_bytes += size.stored
            totals.delta += float(residual(after.rotary, alone.rotary).square().sum())
            totals.delta += float(residual(after.plain, alone.plain).square().sum())
    for name, (patches, rank) in formed.items():
        arm = arms[name]
        for patch in (layer for layers in patches[1:] for layer in layers):
            for part in (patch.rotary.at_rank(rank), patch.plain.at_rank(rank)):
                size = of_factors(part)
                arm.raw_bytes += size.raw
                arm.stored_bytes += size.stored
                arm.captured += float(part.u.float().square().sum())
