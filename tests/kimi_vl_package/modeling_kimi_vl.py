"""A stand-in for Kimi-VL: MoonViT, a projector and a DeepSeek-V3 style language model in one file of remote code.

What other code relies on is as in the public model: module and argument names, a cache of expanded heads, one rotary
module per attention layer that gives tables of all positions, and a rotation that takes interleaved pairs apart.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_kimi_vl import DeepseekV3Config, KimiVLConfig, MoonViTConfig


class Learnable2DInterpPosEmb(nn.Module):
    """One learned vector per place of a grid, interpolated to each picture's own grid."""

    def __init__(self, height: int, width: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(height, width, dim))

    def forward(self, height: int, width: int) -> torch.Tensor:
        grid = self.weight.permute(2, 0, 1)[None].float()
        fitted = F.interpolate(grid, size=(height, width), mode="bicubic")[0]
        return fitted.permute(1, 2, 0).flatten(0, 1).to(self.weight.dtype)


class MoonVisionPatchEmbed(nn.Module):
    """Patches (N, 3, p, p) of one picture to (N, D) with their places."""

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        size = config.patch_size
        self.proj = nn.Conv2d(3, config.hidden_size, kernel_size=size, stride=size)
        self.pos_emb = Learnable2DInterpPosEmb(
            config.init_pos_emb_height, config.init_pos_emb_width, config.hidden_size
        )

    def forward(self, patches: torch.Tensor, height: int, width: int) -> torch.Tensor:
        return self.proj(patches).flatten(1) + self.pos_emb(height, width)


def rope_2d(height: int, width: int, dim: int, device: torch.device) -> torch.Tensor:
    """Unit complex numbers (H * W, dim / 2) that turn pairs by column and by row in alternation."""
    frequencies = 10000.0 ** (-torch.arange(0, dim, 4, device=device).float() / dim)
    rows, columns = (torch.arange(side, device=device).float() for side in (height, width))
    by_row = torch.outer(rows.repeat_interleave(width), frequencies)
    by_column = torch.outer(columns.repeat(height), frequencies)
    angles = torch.stack([by_column, by_row], dim=-1).flatten(1)
    return torch.polar(torch.ones_like(angles), angles)


class MoonVitEncoderLayer(nn.Module):
    """Attention over all patches of one picture, then an MLP."""

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.norm0 = nn.LayerNorm(config.hidden_size)
        self.norm1 = nn.LayerNorm(config.hidden_size)
        self.wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size)
        self.fc0 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc1 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        query, key, value = self.wqkv(self.norm0(hidden)).view(len(hidden), 3, self.num_heads, -1).unbind(1)
        query, key = (_turned(part, turns) for part in (query, key))
        heads = F.scaled_dot_product_attention(*(part.transpose(0, 1)[None] for part in (query, key, value)))
        hidden = hidden + self.wo(heads[0].transpose(0, 1).flatten(1))
        return hidden + self.fc1(F.gelu(self.fc0(self.norm1(hidden)), approximate="tanh"))


def _turned(heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2).to(heads.dtype)


class KimiVLPreTrainedModel(PreTrainedModel):
    """What both models share; scaled dot product attention is not offered, as in the public code."""

    config_class = KimiVLConfig
    base_model_prefix = "model"
    _no_split_modules: ClassVar[list[str]] = ["MoonVitEncoderLayer", "DeepseekV3DecoderLayer"]
    _supports_sdpa = False


class MoonVitPretrainedModel(KimiVLPreTrainedModel):
    """Pictures to one tensor (tokens, kh * kw, D) each: the patches of a token stand side by side."""

    config_class = MoonViTConfig

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__(config)
        self.patch_embed = MoonVisionPatchEmbed(config)
        self.blocks = nn.ModuleList(MoonVitEncoderLayer(config) for _ in range(config.num_hidden_layers))
        self.final_layernorm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def forward(self, pixel_values: torch.Tensor, image_grid_hws: torch.Tensor) -> list[torch.Tensor]:
        sizes = [tuple(map(int, grid)) for grid in image_grid_hws]
        pictures = pixel_values.split([height * width for height, width in sizes])
        return [self._picture(patches, *size) for patches, size in zip(pictures, sizes, strict=True)]

    def _picture(self, patches: torch.Tensor, height: int, width: int) -> torch.Tensor:
        hidden = self.patch_embed(patches, height, width)
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        turns = rope_2d(height, width, head_dim, hidden.device)
        for block in self.blocks:
            hidden = block(hidden, turns)
        rows, columns = self.config.merge_kernel_size
        tiles = self.final_layernorm(hidden).view(height // rows, rows, width // columns, columns, -1)
        return tiles.transpose(1, 2).flatten(2, 3).flatten(0, 1)


class KimiVLMultiModalProjector(nn.Module):
    """Merged patches to the width of the language model."""

    def __init__(self, config: KimiVLConfig) -> None:
        super().__init__()
        vision = config.vision_config
        width = vision.hidden_size * vision.merge_kernel_size[0] * vision.merge_kernel_size[1]
        self.pre_norm = nn.LayerNorm(vision.hidden_size, eps=1e-5)
        self.linear_1 = nn.Linear(width, width)
        self.linear_2 = nn.Linear(width, config.text_config.hidden_size)

    def forward(self, pictures: list[torch.Tensor]) -> torch.Tensor:
        merged = self.pre_norm(torch.cat(pictures)).flatten(1)
        return self.linear_2(F.gelu(self.linear_1(merged)))


class DeepseekV3RMSNorm(nn.Module):
    """Root mean square norm, in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(hidden.dtype)


class DeepseekV3RotaryEmbedding(nn.Module):
    """Tables (seq_len, D) of cosines and sines, kept and lengthened when a longer one is asked for."""

    def __init__(self, dim: int, base: float) -> None:
        super().__init__()
        self.dim, self.base = dim, base
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        kept = self._kept
        if kept is None or len(kept[0]) < seq_len or kept[0].device != x.device:
            kept = self._kept = self._tables(seq_len, x.device)
        return kept[0][:seq_len].to(x.dtype), kept[1][:seq_len].to(x.dtype)

    def _tables(self, seq_len: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies = self.base ** (-torch.arange(0, self.dim, 2, device=device).float() / self.dim)
        angles = torch.outer(torch.arange(seq_len, device=device).float(), frequencies)
        doubled = torch.cat([angles, angles], dim=-1)
        return doubled.cos(), doubled.sin()


def apply_rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn (B, H, T, D) whose pairs stand side by side; the result holds first halves, then second halves."""
    cos, sin = (table[position_ids].unsqueeze(unsqueeze_dim) for table in (cos, sin))
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads[..., 0::2], heads[..., 1::2]
    return torch.cat([first, second], dim=-1) * cos + torch.cat([-second, first], dim=-1) * sin


class DeepseekV3Attention(nn.Module):
    """Multi-head latent attention that caches what the latent expands to: every head's keys and values."""

    def __init__(self, config: DeepseekV3Config, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.num_heads, self.kv_lora_rank = config.num_attention_heads, config.kv_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.q_head_dim, self.v_head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim, config.v_head_dim
        hidden, queries = config.hidden_size, self.num_heads * self.q_head_dim
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=False)
            self.q_a_layernorm = DeepseekV3RMSNorm(config.q_lora_rank, config.rms_norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.kv_lora_rank + self.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = DeepseekV3RMSNorm(self.kv_lora_rank, config.rms_norm_eps)
        expanded = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        self.kv_b_proj = nn.Linear(self.kv_lora_rank, expanded, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.v_head_dim, hidden, bias=False)
        self.rotary_emb = DeepseekV3RotaryEmbedding(self.qk_rope_head_dim, config.rope_theta)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_value: DynamicCache | None = None,
    ) -> torch.Tensor:
        q_nope, q_pe = self._queries(hidden_states).split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        compressed = self.kv_a_proj_with_mqa(hidden_states)
        latent, k_pe = compressed.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        expanded = self._heads(self.kv_b_proj(self.kv_a_layernorm(latent)))
        k_nope, value_states = expanded.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        kv_seq_len = value_states.shape[-2]
        if past_key_value is not None:
            kv_seq_len += past_key_value.get_seq_length(self.layer_idx)
        cos, sin = self.rotary_emb(value_states, seq_len=kv_seq_len)
        q_pe, k_pe = apply_rotary_pos_emb(q_pe, k_pe[:, None], cos, sin, position_ids)
        query_states = torch.cat([q_nope, q_pe], dim=-1)
        key_states = torch.cat([k_nope, k_pe.expand(-1, self.num_heads, -1, -1)], dim=-1)
        if past_key_value is not None:
            key_states, value_states = past_key_value.update(key_states, value_states, self.layer_idx)
        scores = query_states @ key_states.transpose(-1, -2) * self.q_head_dim**-0.5 + attention_mask
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(query_states.dtype)
        return self.o_proj((weights @ value_states).transpose(1, 2).flatten(2))

    def _queries(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.config.q_lora_rank is None:
            return self._heads(self.q_proj(hidden))
        return self._heads(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden))))

    def _heads(self, joined: torch.Tensor) -> torch.Tensor:
        return joined.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class DeepseekV3MLP(nn.Module):
    """Gated MLP."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class MoEGate(nn.Module):
    """Sigmoid scores; a learned correction chooses groups and experts, the bare scores weigh them."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.n_routed_experts))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        scores = F.linear(tokens.float(), self.weight.float()).sigmoid()
        grouped = (scores + self.e_score_correction_bias.float()).unflatten(-1, (config.n_group, -1))
        best_groups = grouped.topk(2, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1).indices
        closed = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=tokens.device)
        closed = closed.scatter(-1, best_groups, False)
        choice = grouped.masked_fill(closed[..., None], float("-inf")).flatten(1)
        chosen = choice.topk(config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * config.routed_scaling_factor


class DeepseekV3MoE(nn.Module):
    """Routed experts beside shared ones that see every token."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self.experts = nn.ModuleList(DeepseekV3MLP(hidden, width) for _ in range(config.n_routed_experts))
        self.gate = MoEGate(config)
        self.shared_experts = DeepseekV3MLP(hidden, width * config.n_shared_experts)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.flatten(0, -2)
        chosen, weights = self.gate(tokens)
        routed = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            row, slot = (chosen == index).nonzero(as_tuple=True)
            routed[row] += (expert(tokens[row]) * weights[row, slot, None]).to(tokens.dtype)
        return routed.view_as(hidden) + self.shared_experts(hidden)


class DeepseekV3DecoderLayer(nn.Module):
    """Attention, then a dense MLP or experts."""

    def __init__(self, config: DeepseekV3Config, layer_idx: int) -> None:
        super().__init__()
        dense = layer_idx < config.first_k_dense_replace
        self.self_attn = DeepseekV3Attention(config, layer_idx)
        self.mlp = (
            DeepseekV3MLP(config.hidden_size, config.intermediate_size) if dense else DeepseekV3MoE(config)
        )
        self.input_layernorm = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, **attention: object) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), **attention)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DeepseekV3PreTrainedModel(KimiVLPreTrainedModel):
    """What the language model's classes share."""

    config_class = DeepseekV3Config


class DeepseekV3Model(DeepseekV3PreTrainedModel):
    """Embeddings in, last hidden state out."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DeepseekV3DecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
    ) -> BaseModelOutputWithPast:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        fresh = use_cache and past_key_values is None
        cache = DynamicCache() if fresh else past_key_values if use_cache else None
        num_cached = 0 if cache is None else cache.get_seq_length()
        if position_ids is None:
            position_ids = torch.arange(num_cached, num_cached + hidden.shape[1], device=hidden.device)[None]
        mask = _causal_mask(hidden, num_cached, attention_mask)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask, position_ids=position_ids, past_key_value=cache)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), past_key_values=cache)


def _causal_mask(hidden: torch.Tensor, num_cached: int, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """(B, 1, new, cached + new): zero where a new token looks, the lowest number where it must not."""
    num_new = hidden.shape[1]
    index = torch.arange(num_cached + num_new, device=hidden.device)
    hidden_from = index[None] > index[num_cached:, None]
    if attention_mask is not None:
        hidden_from = hidden_from | (attention_mask[:, None, None] == 0)
    mask = torch.zeros(hidden_from.shape, dtype=hidden.dtype, device=hidden.device)
    return mask.masked_fill(hidden_from, torch.finfo(hidden.dtype).min)


class DeepseekV3ForCausalLM(DeepseekV3PreTrainedModel, GenerationMixin):
    """The language model with its head."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__(config)
        self.model = DeepseekV3Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
    ) -> CausalLMOutputWithPast:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
        )
        logits = self.lm_head(outputs.last_hidden_state).float()
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)


class KimiVLForConditionalGeneration(KimiVLPreTrainedModel, GenerationMixin):
    """Pictures and text to logits."""

    def __init__(self, config: KimiVLConfig) -> None:
        super().__init__(config)
        self.vision_tower = MoonVitPretrainedModel(config.vision_config)
        self.multi_modal_projector = KimiVLMultiModalProjector(config)
        self.language_model = DeepseekV3ForCausalLM(config.text_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.get_output_embeddings()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_hws: torch.Tensor | None = None,
    ) -> CausalLMOutputWithPast:
        if labels is not None:
            raise ValueError("this model is for inference; it takes no labels")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if pixel_values is not None and len(pixel_values):
            seen = self.vision_tower(pixel_values.to(self.vision_tower.dtype), image_grid_hws)
            inputs_embeds = self._merged(inputs_embeds, input_ids, self.multi_modal_projector(seen))
        return self.language_model(
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
        )

    def _merged(
        self, embeddings: torch.Tensor, input_ids: torch.Tensor, features: torch.Tensor
    ) -> torch.Tensor:
        at = input_ids == self.config.media_placeholder_token_id
        if int(at.sum()) != len(features):
            raise ValueError(f"{int(at.sum())} placeholder tokens for {len(features)} image tokens")
        merged = embeddings.clone()
        merged[at] = features.to(embeddings.dtype)
        return merged
