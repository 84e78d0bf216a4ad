"""Position ids of chunks, as the installed model's own index function gives them (see `docs/architecture.md`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kamera_cli.model.compat import Module, rope_index, steps_apart
from kamera_store.format.keys import fingerprint_digest


@dataclass(frozen=True)
class RelativePositions:
    """Positions of a chunk that starts at 0.

    Attributes
    ----------
    ids : torch.Tensor
        (3, T) for M-RoPE, (T,) for RoPE, int64.
    span : int
        How far the token after the chunk moves on; for an image the larger grid side, not the number of tokens.
    """

    ids: torch.Tensor
    span: int

    def at(self, offset: int) -> torch.Tensor:
        """The ids of the chunk when its first token stands at ``offset``: one scalar added to every axis."""
        return self.ids + offset


def text_positions(num_tokens: int, *, mrope: bool) -> RelativePositions:
    """Positions of plain text: 0..T-1 on every axis, span T."""
    ids = torch.arange(num_tokens)
    return RelativePositions(ids.expand(3, -1).clone() if mrope else ids, num_tokens)


def media_positions(
    model: Module,
    input_ids: torch.Tensor,
    token_types: torch.Tensor,
    *,
    image_grid: torch.Tensor | None = None,
    video_grid: torch.Tensor | None = None,
    second_per_grid: torch.Tensor | None = None,
) -> RelativePositions:
    """Positions of a media chunk; the span is where the model puts one more text token.

    Parameters
    ----------
    input_ids, token_types : torch.Tensor
        (T,) ids of the chunk and 0/1/2 for text/image/video tokens.
    image_grid, video_grid : torch.Tensor or None
        (n, 3) grids in patches (time, height, width).
    second_per_grid : torch.Tensor or None
        (n,) seconds per temporal grid step.
    """
    probe_ids = torch.cat([input_ids, input_ids.new_zeros(1)])[None]
    probe_types = torch.cat([token_types, token_types.new_zeros(1)])[None]
    ids = rope_index(model, probe_ids, probe_types, image_grid, video_grid, second_per_grid)
    return RelativePositions(ids[:, :-1].contiguous(), int(ids[0, -1]))


def probe(model: Module, *, mrope: bool, token_ids: dict[str, int]) -> str:
    """Digest of the installed model's positions for an image, a video, two videos and video + image.

    Position rules for video changed between releases; entries made under another rule must not be found. Part of the
    model fingerprint.
    """
    if not mrope:
        return "rope"
    grid_4x4, apart = torch.tensor([[4, 4, 4]]), steps_apart(model)
    cases = {}
    for name, kinds in {"image": [1], "video": [2], "videos": [2, 2], "video_image": [2, 1]}.items():
        types, ids = [0], [0]
        for kind in kinds:
            runs = [6] if kind == 1 else [4] * 4 if apart else [16]
            for num_tokens in runs:
                types += [kind] * num_tokens + [0]
                ids += [token_ids["image" if kind == 1 else "video"]] * num_tokens + [0]
        num_videos = kinds.count(2)
        positions = rope_index(
            model,
            torch.tensor([ids]),
            torch.tensor([types]),
            torch.tensor([[1, 4, 6]]) if 1 in kinds else None,
            grid_4x4.expand(num_videos, -1) if num_videos else None,
            torch.tensor([0.5, 2.0][:num_videos]) if num_videos else None,
        )
        cases[name] = [int(value) for value in positions.flatten()]
    return fingerprint_digest(cases)
