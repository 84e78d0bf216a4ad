"""Other methods of reuse, run on the same tokens with the same model in the same run.

A method gives a cache for each of `SHARES`: the share of the context's chunk tokens that it computes anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from kamera_cli.bench import RIVALS
from kamera_cli.bench.prompt import Prompt, tensors_of
from kamera_cli.model.compat import DynamicCache, fill_cache
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.scoring import recompute
from kamera_cli.operator.assemble import patched_layer
from kamera_cli.operator.residual import form

SHARES = (0.15, 0.30, 0.50)
"""Shares of the context tokens that a token-selecting method may recompute."""
CHECKED_LAYER = 1
"""The layer at which CacheBlend chooses tokens; it and those before it are exact."""

Caches = dict[float, DynamicCache]


def chosen(names: tuple[str, ...]) -> tuple[str, ...]:
    """Rivals to run: all when none is named or with ``all``, none with ``none``."""
    if not names or "all" in names:
        return RIVALS
    return tuple(name for name in RIVALS if name in names)


def oracle(prompt: Prompt, shares: Sequence[float] = SHARES) -> Caches:
    """The tokens with the largest true Δ get the KV of the conditioned prefill.

    No selector knows Δ before it recomputes, and recomputed tokens are seldom exact, so this is about the best that a
    choice of whole tokens, the same at every layer, can do.
    """
    ranking = prompt.delta_energy().argsort(descending=True)
    return {share: _replaced(prompt, ranking[: prompt.num_selected(share)]) for share in shares}


def _replaced(prompt: Prompt, tokens: torch.Tensor) -> DynamicCache:
    layers = []
    for stale, exact in zip(tensors_of(prompt.blind), tensors_of(prompt.exact), strict=True):
        keys, values = (tensor.clone() for tensor in stale)
        keys[:, :, tokens], values[:, :, tokens] = (tensor[:, :, tokens] for tensor in exact)
        layers.append((keys, values))
    return fill_cache(layers)


def cacheblend(prompt: Prompt, shares: Sequence[float] = SHARES) -> Caches:
    """CacheBlend (arXiv 2405.16444): recompute the tokens whose values differ most after the first layer.

    Layers 0 and 1 are computed for every token; the tokens with the largest difference of values at layer 1 go on
    through the other layers, over the stale KV of the rest.
    """
    exact, blind = tensors_of(prompt.exact), tensors_of(prompt.blind)
    deepest = min(CHECKED_LAYER, len(blind) - 1)
    differing = exact[deepest][1] - blind[deepest][1]
    ranking = differing.float().square().sum(dim=(0, 1, 3)).argsort(descending=True)
    base = fill_cache([*exact[: deepest + 1], *blind[deepest + 1 :]])
    return {
        share: _recomputed(prompt, base, ranking[: prompt.num_selected(share)].sort().values.cpu())
        for share in shares
    }


def epic(prompt: Prompt, shares: Sequence[float] = SHARES) -> Caches:
    """EPIC's LegoLink (arXiv 2410.15332): recompute that share of every chunk after the first, from its start."""
    return {
        share: _recomputed(
            prompt,
            prompt.blind,
            torch.cat([
                torch.arange(start, start + math.ceil(share * (end - start))) for start, end in prompt.bounds[1:]
            ]),
        )
        for share in shares
    }  # fmt: skip


def _recomputed(prompt: Prompt, base: DynamicCache, tokens: torch.Tensor) -> DynamicCache:
    return recompute(prompt.runner, base, prompt.embeddings, prompt.positions, tokens)


METHODS: dict[str, Callable[[Prompt], Caches]] = {
    "oracle": oracle,
    "cacheblend": cacheblend,
    "epic": epic,
}


def patched_after_rotation(prompt: Prompt, ranks: Sequence[int]) -> dict[int, DynamicCache]:
    """Patches whose key part is factored from Δ of the rotated keys; values as ever.

    Such a patch serves one position only. It is here to show what position mixed into Δ costs in rank.
    """
    spans = [(0, prompt.bounds[0][1]), *prompt.bounds[1:]]
    exact, blind = (
        [[_rows(layer, *span) for layer in tensors_of(cache)] for span in spans]
        for cache in (prompt.exact, prompt.blind)
    )
    patches = [
        form(after, alone, rank=min(max(ranks), after[0].rotary.shape[0]), energy=1.0)
        for after, alone in zip(exact[1:], blind[1:], strict=True)
    ]
    made = {}
    for rank in ranks:
        by_layer = zip(*blind, strict=True), zip([None] * len(blind[0]), *patches, strict=True)
        layers = [
            patched_layer(list(zip(parts, of_parts, strict=True)), rank)
            for parts, of_parts in zip(*by_layer, strict=True)
        ]
        made[rank] = fill_cache([(_cached(layer.rotary), _cached(layer.plain)) for layer in layers])
    return made


def _rows(layer: tuple[torch.Tensor, torch.Tensor], start: int, end: int) -> LayerKV:
    """Some tokens of a cache's layer, keys as they are rotated: (1, H, P, D) as (T, H, D)."""
    keys, values = (cached[0, :, start:end].transpose(0, 1) for cached in layer)
    return LayerKV(keys, values)


def _cached(rows: torch.Tensor) -> torch.Tensor:
    """(T, H, D) as a cache has it, (1, H, T, D)."""
    return rows.transpose(0, 1)[None]
