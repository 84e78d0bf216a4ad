"""CacheBlend (arXiv 2405.16444): recompute the tokens whose values differ most after the first layer.

Layers 0 and 1 are computed for every token; the tokens with the largest difference of values at layer 1 go on through
the other layers, over the stale KV of the rest.
"""

from __future__ import annotations

from kamera_cli.bench.arrangement import Arrangement
from kamera_cli.bench.rivals import SHARES
from kamera_cli.model.compat import DynamicCache, fill_cache
from kamera_cli.model.scoring import recompute

CHECKED_LAYER = 1
"""The layer at which tokens are chosen; it and those before it are exact."""


def arms(arrangement: Arrangement) -> dict[float, DynamicCache]:
    """A cache for each share of the context's chunk tokens."""
    deepest = min(CHECKED_LAYER, len(arrangement.blind.layers) - 1)
    differing = arrangement.exact.layers[deepest].values - arrangement.blind.layers[deepest].values
    ranking = differing.float().square().sum(dim=(0, 1, 3)).argsort(descending=True)
    base = fill_cache([
        (source.keys, source.values)
        for source in (
            *arrangement.exact.layers[: deepest + 1],
            *arrangement.blind.layers[deepest + 1 :],
        )
    ])  # fmt: skip
    made = {}
    for share in SHARES:
        chosen = ranking[: arrangement.num_selected(share)].sort().values
        made[share] = recompute(
            arrangement.runner, base, arrangement.embeddings, arrangement.positions, chosen.cpu()
        )
    return made
