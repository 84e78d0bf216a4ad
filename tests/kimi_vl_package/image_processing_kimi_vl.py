"""Pictures to patches: scaled down to a limit of patches, cut to whole merged patches, normalised."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor

_LONGEST_SIDE = 512
"""Patches along one side that the position embedding allows."""


class KimiVLImageProcessor(BaseImageProcessor):
    """PIL pictures, and nothing else, to ``pixel_values`` (N, 3, p, p) and ``image_grid_hws`` (n, 2) in patches."""

    model_input_names: ClassVar[list[str]] = ["pixel_values", "image_grid_hws"]

    def __init__(
        self,
        patch_size: int = 14,
        image_mean: tuple[float, ...] = (0.5, 0.5, 0.5),
        image_std: tuple[float, ...] = (0.5, 0.5, 0.5),
        in_token_limit: int = 64,
        merge_kernel_size: tuple[int, int] = (2, 2),
        **kwargs: object,
    ) -> None:
        super().__init__(**kwargs)
        self.patch_size = patch_size
        self.image_mean = image_mean
        self.image_std = image_std
        self.in_token_limit = in_token_limit
        self.merge_kernel_size = merge_kernel_size

    def preprocess(
        self, images: list[Image.Image] | Image.Image, return_tensors: str | None = None, **_unused: object
    ) -> BatchFeature:
        """See the class.

        Raises
        ------
        ValueError
            A picture is longer than the position embedding, or smaller than one merged patch.
        """
        pictures = images if isinstance(images, list) else [images]
        patches, grids = zip(*(self._patches(picture) for picture in pictures), strict=True)
        data = {"pixel_values": torch.cat(patches), "image_grid_hws": np.array(grids)}
        return BatchFeature(data=data, tensor_type=return_tensors)

    def __call__(self, images: list[Image.Image] | Image.Image, **kwargs: object) -> BatchFeature:
        """As `preprocess`."""
        return self.preprocess(images, **kwargs)

    def _patches(self, picture: Image.Image) -> tuple[torch.Tensor, tuple[int, int]]:
        fitted = self._fitted(picture)
        pixels = torch.from_numpy(np.array(fitted.convert("RGB"))).permute(2, 0, 1).float() / 255
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.image_mean, self.image_std))
        size, (_, height, width) = self.patch_size, pixels.shape
        cut = ((pixels - mean) / std).unfold(1, size, size).unfold(2, size, size)
        return cut.permute(1, 2, 0, 3, 4).flatten(0, 1), (height // size, width // size)

    def _fitted(self, picture: Image.Image) -> Image.Image:
        width, height = picture.size
        num_patches = (width // self.patch_size) * (height // self.patch_size)
        if num_patches > self.in_token_limit:
            scale = math.sqrt(self.in_token_limit / num_patches)
            width, height = int(width * scale), int(height * scale)
            picture = picture.resize((width, height), Image.Resampling.BICUBIC)
        step_y, step_x = (self.patch_size * merged for merged in self.merge_kernel_size)
        cut_width, cut_height = width - width % step_x, height - height % step_y
        if not cut_width or not cut_height:
            raise ValueError(
                f"picture of {width}x{height} is smaller than one token of {step_x}x{step_y} pixels"
            )
        if max(cut_width, cut_height) >= _LONGEST_SIDE * self.patch_size:
            raise ValueError(f"picture of {width}x{height} has a side of {_LONGEST_SIDE} patches or more")
        left, top = (width - cut_width) // 2, (height - cut_height) // 2
        return picture.crop((left, top, left + cut_width, top + cut_height))
