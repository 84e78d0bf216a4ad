"""Everything that differs between the supported transformers releases (5.17 and later) stands here."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    DynamicCache,
)
from transformers import __version__ as installed_release
from transformers.utils import logging as transformers_logging
from transformers.video_utils import VideoMetadata

__all__ = [
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoProcessor",
    "AutoTokenizer",
    "DynamicCache",
    "VideoMetadata",
    "body_of",
    "broken_input",
    "cache_argument",
    "counts_whole_clip",
    "decoder_of",
    "dequantised",
    "fill_cache",
    "first_tokens",
    "gives_whole_tables",
    "keyword_names",
    "own_function",
    "picture_for",
    "quiet_loading",
    "rope_index",
    "rotary_table",
    "shorten",
    "steps_apart",
    "takes_masks",
    "uses_mrope",
]


def quiet_loading() -> None:
    """Keep the library's bars and advice off stderr: kamera reports progress itself."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def dequantised() -> dict[str, object]:
    """Options by which the weights of a GGUF file are unpacked: always before 5.24, on demand since."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


Module = Any
"""A part of a loaded checkpoint: a `torch.nn.Module` whose attributes only the model's own class knows."""


def decoder_of(model: Module) -> Module:
    """The language-model stack (embeddings in, last hidden state out) inside a vision-language or text model."""
    base = body_of(model)
    inner = getattr(base, "language_model", base)
    return getattr(inner, "model", inner)


def body_of(model: Module) -> Module:
    """What merges pixels into embeddings and runs the decoder: the model without its head, where it has such a part."""
    return getattr(model, "model", model)


def keyword_names(module: Module) -> frozenset[str]:
    """Arguments that a module's forward names; others would be handed on to who knows where."""
    return frozenset(inspect.signature(module.forward).parameters)


def steps_apart(model: Module) -> bool:
    """Whether the index function expects each temporal step of a video as an item of its own, after a time stamp."""
    return model.config.model_type.startswith("qwen3_vl")


def broken_input(model: Module, kind: str) -> str | None:
    """Why the installed release fails on a kind of media that the architecture takes; None where it works.

    Before 5.24 Kimi K2.5's pooled video features are cut by their length before pooling.
    """
    release = tuple(int(part) for part in installed_release.split(".")[:2])
    if model.config.model_type == "kimi_k25" and kind == "video" and release < (5, 24):
        return (
            f"video input of {model.config.model_type} needs transformers 5.24, here is {installed_release}"
        )
    return None


def counts_whole_clip(part: object) -> bool:
    """Whether a processor part's pixel bounds hold for all frames of a clip together, not for each."""
    return type(part).__name__.startswith("Qwen3VLVideo")


def uses_mrope(decoder: Module) -> bool:
    """Whether positions have three axes (time, height, width)."""
    return bool((getattr(decoder.config, "rope_parameters", None) or {}).get("mrope_section"))


def cache_argument(decoder: Module) -> str:
    """Name of the decoder's KV cache argument: ``past_key_values`` before 5.24, ``cache`` since."""
    return "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"


def own_function(attention: Module, name: str) -> Callable | None:
    """A function of the module that defines an attention layer, such as its ``apply_rotary_pos_emb``."""
    return getattr(sys.modules[type(attention).__module__], name, None)


def picture_for(image_processor: object, pixels: torch.Tensor) -> torch.Tensor | Image.Image:
    """A picture, uint8 (H, W, 3), as an image processor takes it.

    Those of the library take a tensor (3, H, W) and stay in torch; a checkpoint's own may know PIL pictures alone.
    """
    if type(image_processor).__module__.split(".")[0] == "transformers":
        return pixels.permute(2, 0, 1)
    return Image.fromarray(pixels.cpu().numpy())


def rotary_table(rotary: Module, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A rotary module's table at (1, T) or (3, 1, T) positions: what its rotation function takes after q and k.

    That is (cos, sin), or one complex tensor; code of the older convention indexes tables of all positions itself.
    """
    if gives_whole_tables(rotary):
        return *rotary(like, seq_len=int(positions.max()) + 1), positions
    table = rotary(like, positions)
    return table if isinstance(table, tuple) else (table,)


def gives_whole_tables(rotary: Module) -> bool:
    """Whether a rotary module follows the older convention: tables of the first so many positions.

    A layer then asks for as many as its cache will be long, so that no token can stand after a gap.
    """
    return "position_ids" not in inspect.signature(rotary.forward).parameters


def fill_cache(layers: list[tuple[torch.Tensor, torch.Tensor]]) -> DynamicCache:
    """A fresh cache that holds the given rotated keys and values, each (1, H_kv, T, D), one pair per layer."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(layers):
        cache.update(keys, values, layer)
    return cache


def first_tokens(cache: DynamicCache, num_tokens: int) -> DynamicCache:
    """The first tokens of a cache as one of its own, in the same memory: it can grow, and the other stays as it is."""
    view = DynamicCache()
    view.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in view.layers:
        layer.keys, layer.values = layer.keys[:, :, :num_tokens], layer.values[:, :, :num_tokens]
    return view


def takes_masks(decoder: Module) -> bool:
    """Whether a decoder takes a mask of one's own, (1, 1, N, P + N), instead of one number per token.

    Those of the library do; code that comes beside the weights reads such a mask in a way of its own, if at all.
    """
    return type(decoder).__module__.split(".")[0] == "transformers"


def shorten(cache: DynamicCache, num_tokens: int) -> None:
    """Leave the first tokens of a cache. Every release takes a negative count for how many to drop."""
    if (excess := cache.get_seq_length() - num_tokens) > 0:
        cache.crop(-excess)


def rope_index(
    model: Module,
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
