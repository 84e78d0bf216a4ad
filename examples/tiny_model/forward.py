"""The model's own modules, called in batch with explicit masks and positions.

The saved weights are those of the plain Hugging Face model; `tests/model/test_tiny_world.py` holds that these functions
compute what it computes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import nn

STEP_PATCHES = 64
MAX_PLAIN_TOKENS = 400


def patches_of(frames: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Cut grid steps into patches in the order of ``Qwen2VLVideoProcessor``.

    Parameters
    ----------
    frames : torch.Tensor
        uint8, (N, 2, 3, 112, 112).
    mean, std : torch.Tensor
        (3,), of pixel values between 0 and 1.

    Returns
    -------
    torch.Tensor
        fp32, (N, 64, 1176).
    """
    scaled = (frames.float() - 255 * mean[:, None, None]) / (255 * std[:, None, None])
    cut = scaled.view(-1, 2, 3, 4, 2, 14, 4, 2, 14).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return cut.reshape(len(frames), STEP_PATCHES, 1176)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def _norm(x: torch.Tensor, module: nn.Module) -> torch.Tensor:
    return nnf.rms_norm(x, (x.shape[-1],), module.weight.to(x.dtype), module.variance_epsilon)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Attention of short sequences by plain products, which beats the fused kernel's backward pass on a CPU."""
    if q.shape[2] > MAX_PLAIN_TOKENS:
        return nnf.scaled_dot_product_attention(q, k, v, is_causal=causal)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if causal:
        size = q.shape[2]
        scores = scores + torch.full((size, size), torch.finfo(scores.dtype).min, dtype=scores.dtype).triu(1)
    return scores.softmax(-1).to(v.dtype) @ v


def see(visual: nn.Module, patches: torch.Tensor) -> torch.Tensor:
    """Run the vision tower on grid steps of 8 by 8 patches, one window each.

    Parameters
    ----------
    visual : torch.nn.Module
        The tower of a ``Qwen2_5_VLForConditionalGeneration``.
    patches : torch.Tensor
        (N, 64, 1176).

    Returns
    -------
    torch.Tensor
        (N, 16, hidden of the language model).
    """
    count = len(patches)
    x = patches @ visual.patch_embed.proj.weight.flatten(1).t()
    grid = torch.arange(8)
    rows, columns = torch.meshgrid(grid, grid, indexing="ij")
    order = [v.view(4, 2, 4, 2).permute(0, 2, 1, 3).reshape(-1) for v in (rows, columns)]
    cos, sin = visual.rotary_pos_emb(x, torch.stack(order, dim=1))
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    for layer in visual.blocks:
        attention = layer.attn
        qkv = attention.qkv(_norm(x, layer.norm1)).view(count, STEP_PATCHES, 3, attention.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = _attend(_rotate(q, cos, sin), _rotate(k, cos, sin), v, causal=False)
        x = x + attention.proj(mixed.transpose(1, 2).reshape(count, STEP_PATCHES, -1))
        x = x + layer.mlp(_norm(x, layer.norm2))
    merged = _norm(x, visual.merger.ln_q).view(count, STEP_PATCHES // 4, -1)
    return visual.merger.mlp(merged)


def _attend_apart(q, k, v, preamble: int, num_chunks: int) -> torch.Tensor:
    """Causal attention of each chunk over the preamble and itself; (B, H, P, D) in and out."""
    size = (q.shape[2] - preamble) // num_chunks
    parts = []
    for x in (q, k, v):
        head = x[:, :, None, :preamble].expand(-1, -1, num_chunks, -1, -1)
        body = x[:, :, preamble:].unflatten(2, (num_chunks, size))
        parts.append(torch.cat([head, body], dim=3).transpose(1, 2).flatten(0, 1))
    mixed = _attend(*parts, causal=True).unflatten(0, (-1, num_chunks))
    head = mixed[:, 0, :, :preamble]
    body = mixed[:, :, :, preamble:].transpose(1, 2).flatten(2, 3)
    return torch.cat([head, body], dim=2)


def read(
    text: nn.Module,
    embeddings: torch.Tensor,
    positions: torch.Tensor,
    prefix: int,
    bias: torch.Tensor | None,
    *,
    apart: int = 0,
    preamble: int = 2,
    middle: int = 0,
    watch: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Run the language model over a prefix of chunks and questions behind it.

    Parameters
    ----------
    text : torch.nn.Module
        ``model.model.language_model``.
    embeddings : torch.Tensor
        (B, T, hidden).
    positions : torch.Tensor
        (3, B, T).
    prefix : int
        Tokens of preamble and chunks, which see each other causally, unless ``apart``.
    bias : torch.Tensor or None
        Additive mask of the rows behind the prefix, (B, 1, T - prefix, T); None where there are none.
    apart : int
        Number of equally long chunks that see the preamble and themselves alone; 0 for plain causal attention.
    preamble : int
        Tokens of the preamble.
    middle : int
        Number of layers after which the hidden state is also returned; 0 for none.
    watch : int
        Number of layers before the one whose attention is also returned; 0 for none.

    Returns
    -------
    last, mid : torch.Tensor
        (B, T, hidden), both after the final norm; ``mid`` is None without ``middle``.
    scores : torch.Tensor or None
        (B, num_heads / 2, T - prefix, T), log attention of the first half of the heads in the layer that follows the
        first ``watch`` layers, for the rows behind the prefix.
    """
    x, mid, scores = embeddings, None, None
    cos, sin = text.rotary_emb(x, positions)
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    cos, sin = cos[:, None].to(dtype), sin[:, None].to(dtype)
    for number, layer in enumerate(text.layers, start=1):
        attention = layer.self_attn
        h = _norm(x, layer.input_layernorm)
        shape = (*h.shape[:2], -1, attention.head_dim)
        q = _rotate(attention.q_proj(h).view(shape).transpose(1, 2), cos, sin)
        k = _rotate(attention.k_proj(h).view(shape).transpose(1, 2), cos, sin)
        v = attention.v_proj(h).view(shape).transpose(1, 2)
        groups = attention.num_key_value_groups
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        if number == watch + 1 and watch:
            half = attention.num_heads // 2
            raw = (q[:, :half, prefix:] * attention.scaling) @ k[:, :half].transpose(-1, -2) + bias
            scores = raw.float().log_softmax(-1)
        front = [t[:, :, :prefix] for t in (q, k, v)]
        mixed = _attend_apart(*front, preamble, apart) if apart else _attend(*front, causal=True)
        if bias is not None:
            behind = nnf.scaled_dot_product_attention(q[:, :, prefix:], k, v, attn_mask=bias)
            mixed = torch.cat([mixed, behind], dim=2)
        x = x + attention.o_proj(mixed.transpose(1, 2).reshape(h.shape))
        x = x + layer.mlp(_norm(x, layer.post_attention_layernorm))
        if number == middle:
            mid = _norm(x, text.norm)
    return _norm(x, text.norm), mid, scores
