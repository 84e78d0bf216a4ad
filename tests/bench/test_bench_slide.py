"""A window whose arms hold another one's patches: answers alone do not tell a recalled chunk's patch from none."""

from __future__ import annotations

from pathlib import Path

import torch

from kamera_cli.bench import slide
from kamera_cli.bench.episodes import encoded_episodes
from kamera_cli.bench.prompt import AS_COMPILED
from kamera_cli.engine import Engine
from kamera_cli.model.compat import DynamicCache
from kamera_cli.patches.worth import Learned, learn


def _away(cache: DynamicCache, true: DynamicCache, start: int, end: int) -> float:
    return sum(
        float((one[:, :, start:end] - other[:, :, start:end]).square().sum())
        for ours, theirs in zip(cache.layers, true.layers, strict=True)
        for one, other in ((ours.keys, theirs.keys), (ours.values, theirs.values))
    )


def test_each_arm_stands_on_the_patches_that_its_name_says(engine: Engine, tmp_path: Path) -> None:
    encoded = next(encoded_episodes(engine.runner, 1, 5, tmp_path))
    before, after, back = (encoded.arranged(order) for order in ([0, 1, 2], [1, 2], [1, 2, 0]))
    ranks = (4, 32)
    known = learn(engine.runner, Learned(), before.chunks).worth
    (_, first), (after_end, left), (back_end, recalled) = slide.contexts(before, after, back, ranks, known)
    assert list(first) == ["before, re-prefill"] and (after_end, back_end) == (after.end, back.end)
    truths = {
        "left, others patched": (left, after, after.holding(before.conditioned[1:])),
        "left and removed": (left, after, after.exact),
        "recalled, patched": (recalled, back, back.holding([*before.conditioned[1:], back.conditioned[2]])),
    }
    for arm, (caches, window, true) in truths.items():
        for start, end in window.bounds[1:]:
            blind = _away(window.blind, true, start, end)
            small, large, compiled = (
                _away(caches[f"{arm}, {kind}"], true, start, end)
                for kind in ("rank 4", "rank 32", AS_COMPILED)
            )
            assert large < small < 0.7 * blind, arm
            assert large < compiled < 0.1 * blind, arm
    kept, true = (
        cache.layers[1].keys
        for cache in (left["left, others as they were"], truths["left, others patched"][2])
    )
    assert torch.equal(kept, true)
