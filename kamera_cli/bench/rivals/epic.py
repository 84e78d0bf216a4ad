"""EPIC's LegoLink (arXiv 2410.15332): recompute the first tokens of every chunk, whatever they hold."""

from __future__ import annotations

import math

import torch

from kamera_cli.bench.arrangement import Arrangement
from kamera_cli.bench.rivals import SHARES
from kamera_cli.model.compat import DynamicCache
from kamera_cli.model.scoring import recompute


def arms(arrangement: Arrangement) -> dict[float, DynamicCache]:
    """A cache for each share: that part of every chunk after the first, from its start."""
    made = {}
    for share in SHARES:
        chosen = torch.cat([
            torch.arange(start, start + math.ceil(share * (end - start))) for start, end in arrangement.bounds[1:]
        ])  # fmt: skip
        made[share] = recompute(
            arrangement.runner, arrangement.blind, arrangement.embeddings, arrangement.positions, chosen
        )
    return made
