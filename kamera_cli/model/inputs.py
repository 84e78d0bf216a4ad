"""What the model sees of a chunk: token ids, the processor's tensors, and the positions that the model gives them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kamera_cli.model.compat import VideoMetadata
from kamera_cli.model.positions import RelativePositions, media_positions


@dataclass(frozen=True)
class ChunkInputs:
    """What the model sees of a chunk.

    Attributes
    ----------
    token_ids : torch.Tensor
        (T,) int64.
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
class Segment:
    """A span of a prompt that is to be prefilled: embeddings (T, hidden) and positions relative to its own start."""

    embeddings: torch.Tensor
    positions: RelativePositions

    @property
    def num_tokens(self) -> int:
        return self.embeddings.shape[0]


def media_inputs(
    model: torch.nn.Module,
    processor: object,
    block: str,
    kind: str,
    frames: torch.Tensor,
    *,
    fps: float | None,
    max_pixels: int | None,
) -> ChunkInputs:
    """Run a checkpoint's processor on one image or video chunk.

    Parameters
    ----------
    block : str
        The chat template's text of one such item, with a single placeholder token.
    frames : torch.Tensor
        uint8 RGB, (N, H, W, 3) for a video, (H, W, 3) for an image.
    fps : float or None
        The rate at which the frames really were sampled; handed on as metadata, since the processor otherwise
        assumes 24 fps.
    max_pixels : int or None
        Upper bound of pixels per frame after resizing; None keeps the checkpoint's own.
    """
    options: dict = {"return_tensors": "pt", "text_kwargs": {"add_special_tokens": False}}
    part = processor.image_processor if kind == "image" else processor.video_processor
    sizing = {} if max_pixels is None else {"size": _size_within(part.size, max_pixels)}
    if kind == "image":
        options |= {"images": [frames.permute(2, 0, 1)], "images_kwargs": sizing}
    else:
        num_frames = frames.shape[0]
        metadata = VideoMetadata(total_num_frames=num_frames, fps=fps, frames_indices=list(range(num_frames)))
        options |= {
            "videos": [frames.permute(0, 3, 1, 2)],
            "videos_kwargs": {"do_sample_frames": False, "video_metadata": [metadata], **sizing},
        }
    output = processor(text=[block], **options)
    token_ids, token_types = output["input_ids"][0], output["mm_token_type_ids"][0]
    skipped = {"input_ids", "attention_mask", "mm_token_type_ids"}
    tensors = {name: torch.as_tensor(value) for name, value in output.items() if name not in skipped}
    positions = media_positions(
        model, token_ids, token_types,
        image_grid=tensors.get("image_grid_thw"), video_grid=tensors.get("video_grid_thw"),
        second_per_grid=tensors.get("second_per_grid_ts"),
    )  # fmt: skip
    return ChunkInputs(kind, token_ids, token_types, tensors, positions)


def _size_within(size: object, max_pixels: int) -> dict[str, int]:
    bounds = dict(size)
    return {"shortest_edge": min(bounds["shortest_edge"], max_pixels), "longest_edge": max_pixels}
