"""A tiny random checkpoint for every backbone, each built from its own config class: no download.

Weights are drawn by `tiny_models.randomise`, with routers wide enough that no token sits between two experts and
expert weights scaled as the others. Text width 64; own head_dim where the config allows one.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from tiny_models import EOS, PAD, ROPE, SIZES, TOKEN_IDS, randomise
from tiny_processors import LLAVA_PATCH, PATCH, PINPOINTS, SIDE, marks_of, processor_of, tokenizer_of
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

_BOTH, _IMAGE = ("image", "video"), ("image",)
_RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])
MEDIA: dict[str, tuple[str, ...]] = {
    "qwen2_vl": _BOTH,
    "qwen2_5_vl": _BOTH,
    "qwen3_vl": _BOTH,
    "qwen3_vl_moe": _BOTH,
    "deepseek_vl": _IMAGE,
    "deepseek_vl_hybrid": _IMAGE,
    "internvl": _BOTH,
    "llava_onevision": _BOTH,
    # transformers 5.17 cuts Kimi's pooled video features by their unpooled length, and fails.
    "kimi_k25": _BOTH if _RELEASE >= (5, 24) else _IMAGE,
    **dict.fromkeys(
        ("llama", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3", "mistral", "glm4", "olmo2"), ()
    ),
}
"""Kinds of media that each backbone takes."""
if find_spec("transformers.models.kimi_k25") is None:
    del MEDIA["kimi_k25"]
BACKBONES: tuple[str, ...] = tuple(MEDIA)

_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_MLA_V3 = {**_MLA, "q_lora_rank": 16, "num_nextn_predict_layers": 0}
_QWEN3_VL = {"num_hidden_layers": 4, "head_dim": 24}
_TEXT: dict[str, tuple[str, dict]] = {
    "qwen2_vl": ("qwen2_vl_text", {}),
    "qwen2_5_vl": ("qwen2_5_vl_text", {}),
    "qwen3_vl": ("qwen3_vl_text", _QWEN3_VL),
    "qwen3_vl_moe": (
        "qwen3_vl_moe_text",
        {**_QWEN3_VL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "deepseek_vl": ("llama", {"num_key_value_heads": 4}),
    "deepseek_vl_hybrid": ("llama", {"num_key_value_heads": 4}),
    "internvl": ("qwen2", {}),
    "llava_onevision": ("qwen2", {}),
    "kimi_k25": ("deepseek_v3", _MLA_V3),
    "llama": ("llama", {"head_dim": 24, "attention_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "deepseek_v2": ("deepseek_v2", _MLA),
    "deepseek_v3": ("deepseek_v3", _MLA_V3),
    "mistral": ("mistral", {"head_dim": 24, "sliding_window": None}),
    "glm4": ("glm4", {"head_dim": 24}),
    "olmo2": ("olmo2", {}),
}
"""Model type of the text model and its config fields beside the common sizes."""
_OWN_ROPE = {
    "qwen2_vl": {"mrope_section": [2, 3, 3]},
    "qwen2_5_vl": {"mrope_section": [2, 3, 3]},
    "qwen3_vl": {"mrope_section": [6, 3, 3], "mrope_interleaved": True},
    "qwen3_vl_moe": {"mrope_section": [6, 3, 3], "mrope_interleaved": True},
    "glm4": {"partial_rotary_factor": 0.5},
}
_QWEN_TOWER = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN3_TOWER = {
    **_QWEN_TOWER,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
}
_VISION: dict[str, dict] = {
    "qwen2_vl": {**_QWEN_TOWER, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {
        **_QWEN_TOWER,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    },
    "qwen3_vl": _QWEN3_TOWER,
    "qwen3_vl_moe": _QWEN3_TOWER,
    "deepseek_vl": _SIGLIP,
    "deepseek_vl_hybrid": _SIGLIP,
    "internvl": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": [SIDE, SIDE],
        "patch_size": [PATCH, PATCH],
    },
    "llava_onevision": {**_SIGLIP, "patch_size": LLAVA_PATCH, "vision_use_head": False},
    "kimi_k25": {
        "patch_size": PATCH,
        "pos_emb_height": 8,
        "pos_emb_width": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
    },
}
_SAM = {
    "hidden_size": 32,
    "output_channels": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 16,
    "window_size": 2,
    "global_attn_indexes": [1],
    "num_pos_feats": 8,
    "mlp_dim": 48,
}
_TOP: dict[str, dict] = {
    "deepseek_vl_hybrid": {"high_res_vision_config": _SAM},
    "internvl": {"image_seq_length": (SIDE // PATCH // 2) ** 2},
    "llava_onevision": {"image_grid_pinpoints": PINPOINTS},
    "kimi_k25": {"projection_hidden_size": 32},
}
_TOKENS = {
    "deepseek_vl": {"image_token_id": "<image_placeholder>"},
    "deepseek_vl_hybrid": {"image_token_id": "<image_placeholder>"},
    "internvl": {"image_token_id": "<IMG_CONTEXT>"},
    "llava_onevision": {"image_token_index": "<image>", "video_token_index": "<video>"},
    "kimi_k25": {
        "image_token_id": "<|media_pad|>",
        "video_token_id": "<|kimi_k25_video_placeholder|>",
        "vision_start_token_id": "<|media_begin|>",
        "vision_end_token_id": "<|media_end|>",
    },
}
_QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_ROUTER_STD = 3.0 * SIZES["hidden_size"] ** -0.5


def save_backbone(
    name: str,
    folder: Path,
    *,
    seed: int = 0,
    rope: dict | None = None,
    text: str | None = None,
    **fields: object,
) -> Path:
    """Write a complete checkpoint folder: config, weights, tokenizer, processor, generation config.

    Parameters
    ----------
    name : str
        One of `BACKBONES`.
    rope : dict, optional
        Overrides entries of the text model's ``rope_parameters``; M-RoPE sections stay.
    text : {"qwen2", "qwen3", "llama"}, optional
        Text model of InternVL; Qwen2 by default.
    **fields
        Overrides fields of the text model's config.
    """
    tokenizer = tokenizer_of(name)
    config = _config(name, tokenizer, rope, text, fields)
    auto = AutoModelForImageTextToText if MEDIA[name] else AutoModelForCausalLM
    torch.manual_seed(seed)
    model = draw(auto.from_config(config), seed)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head[tokenizer.convert_tokens_to_ids(list(marks_of(name)))] = 0.0
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = PAD
    model.save_pretrained(folder)
    (processor_of(name, tokenizer) if MEDIA[name] else tokenizer).save_pretrained(folder)
    return folder


def draw(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """`randomise`, then what it scales wrongly: experts, routers and patch embeddings."""
    randomise(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "experts" in path and parameter.ndim == 3:
                parameter.normal_(0.0, 1.2 * parameter.shape[-1] ** -0.5, generator=generator)
            elif path.endswith("mlp.gate.weight"):
                parameter.normal_(0.0, _ROUTER_STD, generator=generator)
            elif parameter.ndim > 3 and "embed" in path:
                parameter.normal_(0.0, parameter[0].numel() ** -0.5, generator=generator)
        for path, buffer in model.named_buffers():
            if path.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1, generator=generator)
    return model.eval()


def _config(
    name: str, tokenizer: object, rope: dict | None, text: str | None, fields: dict
) -> PreTrainedConfig:
    model_type, own = _TEXT[name]
    if text is not None:
        if name != "internvl":
            raise ValueError(f"text={text!r} is for internvl, not for {name}")
        model_type = text
    bos = tokenizer.bos_token_id
    sizes = {
        **SIZES,
        **TOKEN_IDS,
        **({} if bos is None else {"bos_token_id": bos}),
        "vocab_size": len(tokenizer),
        "rope_parameters": {**ROPE, **_OWN_ROPE.get(name, {}), **(rope or {})},
        **own,
        **fields,
    }
    if not MEDIA[name]:
        return AutoConfig.for_model(model_type, **sizes)
    tokens = _TOKENS.get(name, _QWEN_TOKENS)
    return AutoConfig.for_model(
        name,
        text_config={"model_type": model_type, **sizes},
        vision_config=dict(_VISION[name]),
        tie_word_embeddings=False,
        **_TOP.get(name, {}),
        **{field: tokenizer.convert_tokens_to_ids(token) for field, token in tokens.items()},
    )
