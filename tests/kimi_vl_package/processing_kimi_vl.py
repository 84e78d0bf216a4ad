"""Text and pictures to model inputs: every placeholder becomes as many tokens as its picture has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from transformers import BatchFeature
from transformers.processing_utils import ProcessingKwargs, ProcessorMixin


class KimiVLProcessorKwargs(ProcessingKwargs, total=False):
    """Defaults of tokenizer and image processor."""

    # The library takes every annotated name here for a part of the processor.
    _defaults = {"text_kwargs": {"padding": False}, "images_kwargs": {}}  # noqa: RUF012


class KimiVLProcessor(ProcessorMixin):
    """An image processor and a tokenizer."""

    attributes: ClassVar[list[str]] = ["image_processor", "tokenizer"]
    valid_kwargs: ClassVar[list[str]] = ["chat_template"]
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(
        self,
        image_processor: object = None,
        tokenizer: object = None,
        chat_template: str | None = None,
        **_unused: object,
    ) -> None:
        self.image_token = "<|media_pad|>"
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(self, images: list | None = None, text: list[str] | str = "", **kwargs) -> BatchFeature:
        """Token ids with ``pixel_values`` and ``image_grid_hws`` of the pictures, in their order."""
        options = self._merge_kwargs(
            KimiVLProcessorKwargs, tokenizer_init_kwargs=self.tokenizer.init_kwargs, **kwargs
        )
        texts = [text] if isinstance(text, str) else list(text)
        pictures = {}
        if images is not None:
            pictures = self.image_processor(images, **options["images_kwargs"])
            per_token = self.image_processor.merge_kernel_size[0] * self.image_processor.merge_kernel_size[1]
            counts = iter(int(grid.prod()) // per_token for grid in pictures["image_grid_hws"])
            texts = [self._filled(one, counts) for one in texts]
        return BatchFeature(data={**self.tokenizer(texts, **options["text_kwargs"]), **pictures})

    def _filled(self, text: str, counts: Iterator[int]) -> str:
        first, *rest = text.split(self.image_token)
        return first + "".join(self.image_token * next(counts) + part for part in rest)
