"""Oracle tokens: the tokens with the largest true Δ get the KV of the conditioned prefill.

No selector knows Δ before it recomputes, and recomputed tokens are seldom exact, so this is about the best that a
choice of whole tokens, the same at every layer, can do.
"""

from __future__ import annotations

import torch

from kamera_cli.bench.arrangement import Arrangement
from kamera_cli.bench.rivals import SHARES
from kamera_cli.model.compat import DynamicCache, fill_cache


def arms(arrangement: Arrangement) -> dict[float, DynamicCache]:
    """A cache for each share of tokens.

    Returns
    -------
    dict of float to DynamicCache
        By share of the context's chunk tokens.
    """
    ranking = arrangement.delta_energy().argsort(descending=True)
    return {share: _replaced(arrangement, ranking[: arrangement.num_selected(share)]) for share in SHARES}


def _replaced(arrangement: Arrangement, chosen: torch.Tensor) -> DynamicCache:
    layers = []
    for stale, exact in zip(arrangement.blind.layers, arrangement.exact.layers, strict=True):
        keys, values = stale.keys.clone(), stale.values.clone()
        keys[:, :, chosen] = exact.keys[:, :, chosen]
        values[:, :, chosen] = exact.values[:, :, chosen]
        layers.append((keys, values))
    return fill_cache(layers)
