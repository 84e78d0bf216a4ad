"""What the model sees of a chunk: token ids, the processor's tensors, and the positions that the model gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kamera_cli.errors import RefusedError, UsageError
from kamera_cli.model.compat import Module, VideoMetadata, counts_whole_clip, picture_for
from kamera_cli.model.positions import RelativePositions, media_positions, text_positions

TYPES = {"image": 1, "video": 2}
"""Token types of placeholders; text is 0."""

_NOT_TENSORS = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "num_chunks_per_video"}


@dataclass(frozen=True)
class ChunkInputs:
    """What the model sees of a chunk.

    Attributes
    ----------
    token_ids : torch.Tensor
        (T,) int64.
    token_types : torch.Tensor
        (T,) 0, 1, 2 for text, image and video tokens.
    tensors : dict
        The processor's output tensors (pixels, grids, seconds per grid step); empty for text.
    positions : RelativePositions
        As the installed model gives them for this chunk alone.
    """

    kind: str
    token_ids: torch.Tensor
    token_types: torch.Tensor
    tensors: dict[str, torch.Tensor]
    positions: RelativePositions

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()


@dataclass(frozen=True)
class Deepstack:
    """Visual features that the first decoder layers add to their outputs (Qwen3-VL).

    Attributes
    ----------
    at : torch.Tensor
        (N,) int64, ascending: the tokens of the segment that receive them.
    features : torch.Tensor
        (L_d, N, hidden): one set for each of the first L_d layers.
    """

    at: torch.Tensor
    features: torch.Tensor


@dataclass(frozen=True)
class Segment:
    """A span of a prompt that is to be prefilled: embeddings (T, hidden) and positions relative to its own start."""

    embeddings: torch.Tensor
    positions: RelativePositions
    deepstack: Deepstack | None = None

    @property
    def num_tokens(self) -> int:
        return self.embeddings.shape[0]


@dataclass(frozen=True)
class Frames:
    """Decoded pixels of one image or video chunk.

    Attributes
    ----------
    pixels : torch.Tensor
        uint8 RGB, (N, H, W, 3) for a video, (H, W, 3) for an image.
    fps : float or None
        The rate at which the frames really were sampled.
    start_s : float
        Where the chunk begins in its video; models that write time stamps read it.
    """

    pixels: torch.Tensor
    fps: float | None = None
    start_s: float = 0.0


def media_inputs(
    model: Module,
    processor: Any,
    block: str,
    kind: str,
    frames: Frames,
    *,
    placeholders: Mapping[str, int],
    mrope: bool,
    max_pixels: int | None,
) -> ChunkInputs:
    """Run a checkpoint's processor on one image or video chunk.

    Parameters
    ----------
    block : str
        The chat template's text of one such item, with a single placeholder token.
    placeholders : mapping
        Token id that stands for pixels, by kind.
    max_pixels : int or None
        Upper bound of pixels per frame after resizing; None keeps the checkpoint's own.

    Raises
    ------
    UsageError
        ``max_pixels`` for a processor that has no such bound.
    RefusedError
        The processor gave placeholders without pixels: their chunk would be the same for every picture.
    """
    options: dict = {"return_tensors": "pt", "text_kwargs": {"add_special_tokens": False}}
    part = processor.image_processor if kind == "image" else processor.video_processor
    num_frames = 1 if kind == "image" else frames.pixels.shape[0]
    sizing = {} if max_pixels is None else {"size": _size_within(part, max_pixels, num_frames)}
    if kind == "image":
        options |= {"images": [picture_for(part, frames.pixels)], "images_kwargs": sizing}
    else:
        options |= {
            "videos": [frames.pixels.permute(0, 3, 1, 2)],
            "videos_kwargs": {"do_sample_frames": False, "video_metadata": [_metadata(frames)], **sizing},
        }
    output = processor(text=[block], **options)
    token_ids = torch.as_tensor(output["input_ids"])[0]
    token_types = _token_types(output, token_ids, placeholders)
    tensors = {
        name: torch.as_tensor(value)
        for name, value in output.items()
        if name not in _NOT_TENSORS and isinstance(value, torch.Tensor | np.ndarray | list)
    }
    if not any("pixel_values" in name and tensor.numel() for name, tensor in tensors.items()):
        raise RefusedError(
            f"the model's processor gave no pixels for this {kind}, so nothing tells it from others"
        )
    if not mrope:
        return ChunkInputs(
            kind, token_ids, token_types, tensors, text_positions(token_ids.numel(), mrope=False)
        )
    positions = media_positions(
        model, token_ids, token_types,
        image_grid=tensors.get("image_grid_thw"), video_grid=tensors.get("video_grid_thw"),
        second_per_grid=tensors.get("second_per_grid_ts"),
    )  # fmt: skip
    return ChunkInputs(kind, token_ids, token_types, tensors, positions)


def joined_tensors(parts: list[ChunkInputs], accepted: frozenset[str]) -> dict[str, torch.Tensor] | None:
    """Media arguments of one forward over several chunks; None when their tensors cannot stand in one batch.

    Pictures that were cut into differing numbers of tiles, (1, tiles, ...), are filled up with zeros: the model reads
    from ``image_sizes`` how many tiles of each are real.
    """
    found: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in accepted:
                found.setdefault(name, []).append(tensor)
    joined = {}
    for name, tensors in found.items():
        if name == "pixel_values" and "image_sizes" in found:
            most = max(tensor.shape[1] for tensor in tensors)
            tensors = [_filled(tensor, most) for tensor in tensors]
        if len({tensor.shape[1:] for tensor in tensors}) > 1:
            return None
        joined[name] = torch.cat(tensors)
    return joined


def _filled(tensor: torch.Tensor, length: int) -> torch.Tensor:
    missing = tensor.new_zeros(tensor.shape[0], length - tensor.shape[1], *tensor.shape[2:])
    return torch.cat([tensor, missing], dim=1)


def _metadata(frames: Frames) -> VideoMetadata:
    """Real rate and place in the video: a processor otherwise assumes 24 fps and time zero."""
    num_frames = frames.pixels.shape[0]
    first = round(frames.start_s * (frames.fps or 0))
    # The total is that of the chunk: processors take the ratio of indices to it for a second sampling.
    indices = list(range(first, first + num_frames))
    return VideoMetadata(total_num_frames=num_frames, fps=frames.fps, frames_indices=indices)


def _token_types(output: Mapping, token_ids: torch.Tensor, placeholders: Mapping[str, int]) -> torch.Tensor:
    if "mm_token_type_ids" in output:
        return torch.as_tensor(output["mm_token_type_ids"])[0]
    types = torch.zeros_like(token_ids)
    for kind, token_id in placeholders.items():
        types[token_ids == token_id] = TYPES[kind]
    return types


def _size_within(part: Any, max_pixels: int, num_frames: int) -> dict[str, int]:
    bounds = dict(getattr(part, "size", None) or {})
    if not {"shortest_edge", "longest_edge"} <= {name for name, value in bounds.items() if value is not None}:
        raise UsageError("--max-pixels: this model's processor has no bound on pixels that could be set")
    most = max_pixels * (num_frames if counts_whole_clip(part) else 1)
    return {"shortest_edge": min(bounds["shortest_edge"], most), "longest_edge": most}
