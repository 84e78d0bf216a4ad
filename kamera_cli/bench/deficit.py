"""Suite ``deficit``: what blind reuse loses. In which layers it lies, over how many tokens, in how many directions.

Also whether canonical KV is better captured behind the preamble or bare, on the same episodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from kamera_cli.bench.deficit_report import CAPTURE_RANKS, Findings, report
from kamera_cli.bench.episodes import Task, tasks
from kamera_cli.bench.results import SuiteResult
from kamera_cli.bench.scratch import scratch_engine
from kamera_cli.model.compat import DynamicCache
from kamera_cli.model.generate import next_token_kl
from kamera_cli.model.scoring import score
from kamera_cli.operator.factorise import residual
from kamera_cli.results import Progress
from kamera_cli.settings import Settings

if TYPE_CHECKING:
    from kamera_cli.bench import BenchOptions

EPISODES = 40
MAX_CUTS = 7


def measure(
    settings: Settings, options: BenchOptions, on_progress: Callable[[Progress], None]
) -> SuiteResult:
    """Look at Δ itself and put it back layer by layer.

    Returns
    -------
    SuiteResult
        Tables of layers, tokens and capture; two charts.
    """
    count = options.episodes or EPISODES
    found = Findings()
    with scratch_engine(settings, on_progress) as (engine, work):
        runner = engine.runner
        cuts = layer_cuts(runner.family.num_layers)
        for done, task in enumerate(tasks(runner, count, options.seed, work)):
            on_progress(Progress("looking at Δ", done, count, "episodes"))
            _episode(task, cuts, found)
        described = {
            "model": engine.context.checkpoint.label,
            "device": str(runner.device),
            "dtype": engine.context.dtype_name,
            "num_episodes": count,
            "num_layers": runner.family.num_layers,
        }
    return report(found, cuts, described)


def layer_cuts(num_layers: int) -> list[int]:
    """Layers at which the stack is cut in two, evenly spread, never more than `MAX_CUTS`."""
    step = max(1, -(-(num_layers - 1) // MAX_CUTS))
    return list(range(1, num_layers, step))


def _episode(task: Task, cuts: list[int], found: Findings) -> None:
    arrangement = task.arrangement
    num_layers = arrangement.runner.family.num_layers
    caches: dict[str, DynamicCache] = {"re-prefill": arrangement.exact, "blind": arrangement.blind}
    for cut in cuts:
        caches[f"below {cut}"] = arrangement.with_exact_layers(range(cut))
        caches[f"from {cut}"] = arrangement.with_exact_layers(range(cut, num_layers))
    bare = arrangement.bare()
    caches["blind, bare"] = bare.blind
    patches, bare_patches = (
        arrangement.patches(max(CAPTURE_RANKS)),
        bare.patches(max(CAPTURE_RANKS), of_first=True),
    )
    for rank in CAPTURE_RANKS:
        caches[f"rank {rank}"] = arrangement.patched(patches, rank)
        caches[f"rank {rank}, bare"] = bare.patched(bare_patches, rank)
    scored = dict(
        zip(
            caches,
            score(arrangement.runner, list(caches.values()), arrangement.end, task.prompts),
            strict=True,
        )
    )
    for name, answers in scored.items():
        found.kl.setdefault(name, []).extend(
            next_token_kl(expected[0], logits[0])
            for expected, logits in zip(scored["re-prefill"], answers, strict=True)
        )
    _spectra(task, found)


def _spectra(task: Task, found: Findings) -> None:
    arrangement = task.arrangement
    per_token = arrangement.delta_energy()
    for (start, end), conditioned, canonical in zip(
        arrangement.bounds[1:], arrangement.conditioned[1:], arrangement.canonical[1:], strict=True
    ):
        found.shares.append(_cumulative(per_token[start:end].sort(descending=True).values))
        for layer, (after, alone) in enumerate(zip(conditioned, canonical, strict=True)):
            for name, part in (("keys", "rotary"), ("values", "plain")):
                delta = residual(getattr(after, part), getattr(alone, part))
                found.energy[layer] = found.energy.get(layer, 0.0) + float(delta.square().sum())
                if layer:
                    squares = torch.linalg.svdvals(delta.cpu()).square()
                    found.spectra.setdefault((layer, name), []).append(_cumulative(squares))


def _cumulative(descending: torch.Tensor) -> torch.Tensor:
    sums = descending.double().cpu().cumsum(0)
    return sums / sums[-1].clamp_min(torch.finfo(torch.float64).tiny)
