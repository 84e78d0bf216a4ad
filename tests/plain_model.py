"""The reference: a model's ordinary forward, with its own cache, positions and mask; nothing of kamera's runner."""

from __future__ import annotations

import inspect

import torch
from transformers import DynamicCache


@torch.no_grad()
def own_cache(model: torch.nn.Module, ids: torch.Tensor, **inputs: torch.Tensor) -> list:
    """Layers of the cache that a plain forward over token ids (T,) fills."""
    cache = DynamicCache()
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    model(input_ids=ids[None], use_cache=True, **{name: cache}, **inputs)
    return cache.layers


def own_positions(
    model: torch.nn.Module,
    ids: torch.Tensor,
    types: torch.Tensor,
    *,
    image_grid: torch.Tensor | None = None,
    video_grid: torch.Tensor | None = None,
    second_per_grid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Positions (3, T) that the installed model gives to a whole prompt of token ids (T,) and token types (T,)."""
    positions, _ = model.model.get_rope_index(
        ids[None],
        mm_token_type_ids=types[None],
        image_grid_thw=image_grid,
        video_grid_thw=video_grid,
        second_per_grid_ts=second_per_grid,
        attention_mask=torch.ones_like(ids[None]),
    )
    return positions[:, 0]


@torch.no_grad()
def next_logits(model: torch.nn.Module, ids: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    """Logits (vocab,) that follow token ids (T,); a media prompt brings its types, pixels and grids."""
    model_inputs = dict(inputs)
    if "mm_token_type_ids" in model_inputs:
        types = model_inputs["mm_token_type_ids"]
        more = ids.numel() - types.numel()
        model_inputs["mm_token_type_ids"] = torch.cat([types, types.new_zeros(more)])[None]
        # Without it the model continues with the rope delta of an earlier call (TF-1): positions of the whole prompt.
        model.model.rope_deltas = None
    return model(input_ids=ids[None], use_cache=False, **model_inputs).logits[0, -1]


def greedy(
    model: torch.nn.Module, ids: torch.Tensor, max_new_tokens: int, eos: int = 2, **inputs
) -> tuple[int, ...]:
    """Greedy answer by cold forwards over the whole prompt, one for each token."""
    produced: list[int] = []
    while len(produced) < max_new_tokens:
        logits = next_logits(model, torch.cat([ids, torch.tensor(produced, dtype=ids.dtype)]), **inputs)
        token = int(logits.argmax())
        if token == eos:
            break
        produced.append(token)
    return tuple(produced)


def whole_prompt(runner, chunks, question: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token ids and model inputs of preamble, chunks and question, as one prompt."""
    question_ids = runner.question_ids(question)
    ids = torch.cat([runner.preamble_ids, *(chunk.token_ids for chunk in chunks), question_ids])
    inputs: dict[str, list[torch.Tensor]] = {}
    for chunk in chunks:
        for name, tensor in chunk.tensors.items():
            inputs.setdefault(name, []).append(tensor)
    if "image_sizes" in inputs:
        inputs["pixel_values"] = _with_equal_tiles(inputs["pixel_values"])
    joined = {name: torch.cat(tensors) for name, tensors in inputs.items()}
    if "mm_token_type_ids" in inspect.signature(runner.model.forward).parameters and joined:
        zeros = torch.zeros_like
        types = [zeros(runner.preamble_ids), *(chunk.token_types for chunk in chunks), zeros(question_ids)]
        joined["mm_token_type_ids"] = torch.cat(types)
    return ids, joined


def _with_equal_tiles(pictures: list[torch.Tensor]) -> list[torch.Tensor]:
    """Pictures cut into tiles, each (1, tiles, ...), filled up with zeros that the model never looks at."""
    most = max(picture.shape[1] for picture in pictures)
    return [torch.cat([p, p.new_zeros(1, most - p.shape[1], *p.shape[2:])], dim=1) for p in pictures]


def kl(reference: torch.Tensor, other: torch.Tensor) -> float:
    """KL(reference ‖ other) in nats, in float64."""
    p, q = torch.softmax(reference.double(), -1), torch.softmax(other.double(), -1)
    return float((p * (p.log() - q.log())).sum())
