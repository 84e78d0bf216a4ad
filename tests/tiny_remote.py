"""A tiny random checkpoint that runs through Python files of its own, with the structure of Kimi-VL."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from kimi_vl_package.configuration_kimi_vl import KimiVLConfig
from kimi_vl_package.modeling_kimi_vl import KimiVLForConditionalGeneration
from safetensors.torch import save_file
from tiny_models import EOS, MAX_TOKENS, PAD, TOKEN_IDS, randomise
from transformers import AddedToken, AutoTokenizer

from kamera_cli.tiny import model_path

PACKAGE = Path(__file__).parent / "kimi_vl_package"

_MARKS = (
    "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>",
    "<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>",
)  # fmt: skip
_ROLES = ("system", "user", "assistant", "image")
_TEMPLATE = """\
{%- for message in messages -%}
<|im_{{ message['role'] }}|>{{ message['role'] }}<|im_middle|>
{%- if message['content'] is string -%}{{ message['content'] }}
{%- else -%}
{%- for item in message['content'] -%}
{%- if item['type'] == 'image' -%}<|media_start|>image<|media_content|><|media_pad|><|media_end|>
{%- else -%}{{ item['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""
_AUTO = {
    "AutoConfig": "configuration_kimi_vl.KimiVLConfig",
    "AutoModelForCausalLM": "modeling_kimi_vl.KimiVLForConditionalGeneration",
}
_AUTO_PROCESSOR = {
    "AutoProcessor": "processing_kimi_vl.KimiVLProcessor",
    "AutoImageProcessor": "image_processing_kimi_vl.KimiVLImageProcessor",
}


def save_kimi_vl(folder: Path, *, seed: int = 0) -> Path:
    """A complete checkpoint folder with code of its own; none of it is imported from there.

    Parameters
    ----------
    folder : Path
        Made if missing.
    seed : int
        Of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    tokenizer.add_tokens([AddedToken(word, normalized=False, single_word=True) for word in _ROLES])
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in _MARKS])
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)

    text = {
        "model_type": "deepseek_v3", "vocab_size": len(tokenizer), "hidden_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "max_position_embeddings": MAX_TOKENS,
        "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False,
        **TOKEN_IDS,
    }  # fmt: skip
    vision = {"model_type": "moonvit", "patch_size": 14, "hidden_size": 32, "merge_kernel_size": [2, 2]}
    placeholder = tokenizer.convert_tokens_to_ids("<|media_pad|>")
    fields = {
        "text_config": text, "vision_config": vision, "media_placeholder_token_id": placeholder,
        "tie_word_embeddings": False,
    }  # fmt: skip
    model = randomise(KimiVLForConditionalGeneration(KimiVLConfig(**fields)), seed)
    marks = tokenizer.convert_tokens_to_ids([*_MARKS, *_ROLES])
    model.get_output_embeddings().weight.data[marks] = 0.0
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})

    names = ["KimiVLForConditionalGeneration"]
    _write(
        folder / "config.json", {"model_type": "kimi_vl", "architectures": names, "auto_map": _AUTO, **fields}
    )
    _write(folder / "generation_config.json", {"eos_token_id": EOS, "pad_token_id": PAD})
    _write(
        folder / "preprocessor_config.json",
        {"auto_map": _AUTO_PROCESSOR, "patch_size": 14, "in_token_limit": 64, "merge_kernel_size": [2, 2]},
    )
    for file in sorted(PACKAGE.glob("*.py")):
        shutil.copy(file, folder)
    return folder


def _write(path: Path, fields: dict) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
