"""Config classes of a stand-in for Kimi-VL: a vision tower and a DeepSeek-V3 style language model."""

from __future__ import annotations

from typing import ClassVar

from transformers import PretrainedConfig


class MoonViTConfig(PretrainedConfig):
    """Vision tower: patches of ``patch_size`` pixels, merged by ``merge_kernel_size`` into one token each."""

    model_type = "moonvit"

    def __init__(
        self,
        patch_size: int = 14,
        init_pos_emb_height: int = 8,
        init_pos_emb_width: int = 8,
        num_attention_heads: int = 2,
        num_hidden_layers: int = 1,
        hidden_size: int = 32,
        intermediate_size: int = 48,
        merge_kernel_size: tuple[int, int] = (2, 2),
        **kwargs: object,
    ) -> None:
        super().__init__(**kwargs)
        self.patch_size = patch_size
        self.init_pos_emb_height = init_pos_emb_height
        self.init_pos_emb_width = init_pos_emb_width
        self.num_attention_heads = num_attention_heads
        self.num_hidden_layers = num_hidden_layers
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.merge_kernel_size = tuple(merge_kernel_size)


class DeepseekV3Config(PretrainedConfig):
    """Language model: MLA, a few dense layers, then routed experts beside a shared one."""

    model_type = "deepseek_v3"

    def __init__(
        self,
        vocab_size: int = 128,
        hidden_size: int = 64,
        intermediate_size: int = 96,
        moe_intermediate_size: int = 32,
        num_hidden_layers: int = 3,
        num_attention_heads: int = 4,
        n_shared_experts: int = 1,
        n_routed_experts: int = 4,
        num_experts_per_tok: int = 2,
        routed_scaling_factor: float = 1.0,
        norm_topk_prob: bool = True,
        n_group: int = 1,
        topk_group: int = 1,
        first_k_dense_replace: int = 1,
        q_lora_rank: int | None = 16,
        kv_lora_rank: int = 24,
        qk_rope_head_dim: int = 8,
        qk_nope_head_dim: int = 16,
        v_head_dim: int = 12,
        max_position_embeddings: int = 2048,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 10000.0,
        rope_scaling: dict | None = None,
        tie_word_embeddings: bool = False,
        **kwargs: object,
    ) -> None:
        if rope_scaling is not None:
            raise ValueError(f"rope_scaling {rope_scaling} is not part of this model; it takes none")
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.moe_intermediate_size = moe_intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.n_shared_experts = n_shared_experts
        self.n_routed_experts = n_routed_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.routed_scaling_factor = routed_scaling_factor
        self.norm_topk_prob = norm_topk_prob
        self.n_group = n_group
        self.topk_group = topk_group
        self.first_k_dense_replace = first_k_dense_replace
        self.q_lora_rank = q_lora_rank
        self.kv_lora_rank = kv_lora_rank
        self.qk_rope_head_dim = qk_rope_head_dim
        self.qk_nope_head_dim = qk_nope_head_dim
        self.v_head_dim = v_head_dim
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta


class KimiVLConfig(PretrainedConfig):
    """Both parts, and the id of the token that stands for pixels."""

    model_type = "kimi_vl"
    sub_configs: ClassVar[dict] = {"vision_config": MoonViTConfig, "text_config": DeepseekV3Config}

    def __init__(
        self,
        vision_config: dict | MoonViTConfig | None = None,
        text_config: dict | DeepseekV3Config | None = None,
        media_placeholder_token_id: int = 0,
        **kwargs: object,
    ) -> None:
        self.vision_config = _made(MoonViTConfig, vision_config)
        self.text_config = _made(DeepseekV3Config, text_config)
        self.media_placeholder_token_id = media_placeholder_token_id
        super().__init__(**kwargs)


def _made(kind: type[PretrainedConfig], given: dict | PretrainedConfig | None) -> PretrainedConfig:
    return given if isinstance(given, kind) else kind(**(given or {}))
