"""What the model says after assembled chunks: the logits from which the KL of a patch is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kamera_cli.model.compat import DynamicCache
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.inputs import Segment
from kamera_cli.model.runner import ModelRunner
from kamera_cli.model.scoring import Place, logits_after
from kamera_cli.operator.assemble import assemble, joined_positions, place
from kamera_cli.operator.patch import LayerPatch
from kamera_cli.patches.chunk import Chunk


@dataclass(frozen=True)
class Part:
    """A span of an assembled prompt in memory: positions and, per layer, KV with an optional patch."""

    segment: Segment
    layers: Sequence[LayerKV]
    patch: Sequence[LayerPatch] | None = None

    @classmethod
    def of(cls, chunk: Chunk, patch: Sequence[LayerPatch] | None = None) -> Part:
        """The canonical KV of a chunk, with a patch or without."""
        return cls(chunk.segment, chunk.canonical, patch)


def front(runner: ModelRunner) -> Part:
    """The preamble, which stands first in every prompt."""
    return Part(runner.preamble, runner.preamble_layers)


def probe_logits(runner: ModelRunner, parts: Sequence[Part], probe: torch.Tensor) -> torch.Tensor:
    """Next-token logits (vocab,) after ``probe`` tokens that follow the assembled parts."""
    return logits_behind(runner, parts, [len(parts) - 1], probe)[0]


def logits_behind(
    runner: ModelRunner, parts: Sequence[Part], ends: Sequence[int], probe: torch.Tensor
) -> torch.Tensor:
    """The same behind some of the parts, each with those before it: one assembled cache serves them all.

    Parameters
    ----------
    parts : sequence of Part
        In prompt order, the preamble first.
    ends : sequence of int
        Ascending indices of parts.

    Returns
    -------
    torch.Tensor
        (n, vocab), one row for each of the n ends.
    """
    places = places_of([part.segment for part in parts], ends)
    return logits_after(runner, assembled(runner, parts), places, probe)


def assembled(runner: ModelRunner, parts: Sequence[Part], rank: int | None = None) -> DynamicCache:
    """A fresh cache of parts in prompt order, the preamble first.

    Parameters
    ----------
    rank : int or None
        Use only the first directions of each patch.
    """
    placed, _ = place([(part.segment.positions, part.segment.num_tokens) for part in parts])
    layers = (
        [(part.layers[layer], None if part.patch is None else part.patch[layer]) for part in parts]
        for layer in range(runner.family.num_layers)
    )
    return assemble(runner.family, layers, joined_positions(placed), rank)


def places_of(segments: Sequence[Segment], ends: Sequence[int]) -> list[Place]:
    """Where a question follows some of the segments of a prompt."""
    found, num_tokens, position = [], 0, 0
    for segment in segments:
        num_tokens, position = num_tokens + segment.num_tokens, position + segment.positions.span
        found.append(Place(num_tokens, position))
    return [found[end] for end in ends]
