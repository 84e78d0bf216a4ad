"""Everything that differs between the supported transformers releases (5.17 and later) stands here."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    DynamicCache,
)
from transformers.utils import logging as transformers_logging
from transformers.video_utils import VideoMetadata

__all__ = [
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoProcessor",
    "AutoTokenizer",
    "DynamicCache",
    "VideoMetadata",
    "apply_rotary",
    "cache_argument",
    "decoder_of",
    "fill_cache",
    "quiet_loading",
    "rope_index",
]


def quiet_loading() -> None:
    """Keep the library's bars and advice off stderr: kamera reports progress itself."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def decoder_of(model: torch.nn.Module) -> torch.nn.Module:
    """The language-model stack (embeddings in, last hidden state out) inside a vision-language or text model."""
    return getattr(model.model, "language_model", model.model)


def cache_argument(decoder: torch.nn.Module) -> str:
    """Name of the decoder's KV cache argument: ``past_key_values`` before 5.24, ``cache`` since."""
    return "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"


def apply_rotary(attention: torch.nn.Module) -> Callable:
    """The model's own ``apply_rotary_pos_emb(q, k, cos, sin)``, from the module that defines its attention."""
    return sys.modules[type(attention).__module__].apply_rotary_pos_emb


def fill_cache(layers: list[tuple[torch.Tensor, torch.Tensor]]) -> DynamicCache:
    """A fresh cache that holds the given rotated keys and values, each (1, H_kv, T, D), one pair per layer."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(layers):
        cache.update(keys, values, layer)
    return cache


def rope_index(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    token_types: torch.Tensor,
    image_grid: torch.Tensor | None,
    video_grid: torch.Tensor | None,
    second_per_grid: torch.Tensor | None,
) -> torch.Tensor:
    """Positions of a whole prompt, (3, T), by the installed model's own index function."""
    positions, _ = model.model.get_rope_index(
        input_ids=input_ids,
        mm_token_type_ids=token_types,
        image_grid_thw=image_grid,
        video_grid_thw=video_grid,
        second_per_grid_ts=second_per_grid,
        attention_mask=torch.ones_like(input_ids),
    )
    return positions[:, 0]
