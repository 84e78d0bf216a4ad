"""What is supported is said by config.json alone; any other kind of model, layer or RoPE is refused for its reason."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tiny_backbones import BACKBONES, save_backbone

from kamera_cli.errors import RefusedError
from kamera_cli.model.architectures import ARCHITECTURES, architecture_of

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 100, "max_position_embeddings": 512,
}  # fmt: skip
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": None}
LATENT = {
    **LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}  # fmt: skip
BLOCKS = {"rope_type": "default", "mrope_section": [2, 3, 3]}
QWEN_VL = {**LLAMA, "model_type": "qwen2_5_vl", "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}


def nested(model_type: str, text_type: str, **fields: object) -> dict:
    return {"model_type": model_type, "text_config": {**LLAMA, "model_type": text_type, **fields}}


@pytest.mark.parametrize("name", BACKBONES)
def test_a_config_as_transformers_writes_it_is_accepted(name, tmp_path):
    config = json.loads((save_backbone(name, tmp_path / name) / "config.json").read_text())
    assert architecture_of(config).model_type == name


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        {**LLAMA, "num_key_value_heads": None, "head_dim": None},
        {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {**LLAMA, "model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
        MISTRAL,
        LATENT,
        QWEN_VL,
        nested("qwen2_5_vl", "qwen2_5_vl_text", rope_parameters=BLOCKS),
        nested("qwen2_5_vl", "qwen2_5_vl", rope_parameters=BLOCKS),
        nested("internvl", "qwen3"),
        {"model_type": "kimi_k25", "text_config": {**LATENT, "model_type": "kimi_k2"}},
        {"model_type": "kimi_vl", "text_config": LATENT},
        {"model_type": "deepseek_vl", "language_config": LLAMA},
    ],
)  # fmt: skip
def test_configs_of_older_and_newer_checkpoints_are_accepted(config):
    assert architecture_of(config).model_type == config["model_type"]


KINDS = {
    "learned positions": ["gpt2", "opt", "gpt_neo", "gpt_bigcode", "xglm"],
    "ALiBi": ["bloom", "mpt"],
    "state-space": ["mamba", "jamba", "bamba", "falcon_h1", "zamba2", "recurrent_gemma", "rwkv", "lfm2", "qwen3_next",
                    "kimi_linear", "granitemoehybrid", "nemotron_h"],
    "sparse indexer": ["deepseek_v32", "glm_moe_dsa"],
    "encoder-decoder": ["t5", "bart", "whisper", "t5gemma"],
    "cross-attention": ["mllama"],
    "without RoPE": ["smollm3", "llama4"],
    "sliding-window": ["gemma2", "gemma3", "gpt_oss", "olmo3"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "model_type"), [(reason, name) for reason, names in KINDS.items() for name in names]
)
def test_a_kind_whose_kv_cannot_be_moved_is_refused_with_its_reason(reason, model_type):
    with pytest.raises(RefusedError, match=rf"^architecture '{model_type}' is refused: .*{reason}"):
        architecture_of({"model_type": model_type})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        ({"model_type": "falcon", "alibi": False}, "'falcon' is not supported.*llama"),
        ({"model_type": "gptj"}, "'gptj' is not supported"),
        ({"model_type": "new", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "new", "index_topk": 2048}, "sparse indexer"),
        ({"model_type": "new", "text_config": {"model_type": "gemma3_text"}}, "sliding-window"),
        ({"model_type": "new", "text_config": {"layer_types": ["mamba"]}}, "state-space"),
        ({**LATENT, "index_topk": 2048}, "sparse indexer"),
        ({**LLAMA, "is_encoder_decoder": True}, "encoder-decoder"),
        ({**LLAMA, "no_rope_layers": [1, 0]}, "without RoPE"),
        ({**LLAMA, "use_sliding_window": True}, "sliding-window.*use_sliding_window"),
        ({**LLAMA, "layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'.*sliding-window"),
        ({**LLAMA, "layer_types": ["linear_attention"]}, "'linear_attention'.*state-space"),
        ({**LLAMA, "layer_types": ["compressed"]}, "'compressed'.*'full_attention'"),
        ({**MISTRAL, "sliding_window": 4096}, "sliding-window.*4096"),
        ({key: value for key, value in MISTRAL.items() if key != "sliding_window"}, "sliding-window.*default 4096"),
        (nested("internvl", "internlm3"), "language model 'internlm3'.*qwen2, qwen3, llama"),
        (nested("deepseek_vl", "gpt2"), "learned positions"),
        (nested("llava_onevision", "qwen2", use_sliding_window=True), "sliding-window"),
    ],
)  # fmt: skip
def test_layers_that_were_never_verified_are_refused_by_name(fields, reason):
    with pytest.raises(RefusedError, match=reason):
        architecture_of(fields)


@pytest.mark.parametrize(
    ("base", "rope", "reason"),
    [
        *((LLAMA, {"rope_type": name}, f"'{name}'") for name in ("longrope", "proportional", "axial", "su", "mrope")),
        (LLAMA, {"rope_type": "default", "mrope_section": [2, 3, 3]}, "'M-RoPE'"),
        (LLAMA, {"rope_type": "linear"}, "needs the number factor"),
        (LLAMA, {"rope_type": "yarn", "factor": "4"}, "needs the number factor"),
        (LLAMA, {"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        (LLAMA, {"rope_type": "default", "partial_rotary_factor": 0.5}, "'partial rotary'"),
        (LLAMA, {"full_attention": {"rope_type": "default"}}, "differs by layer kind.*'full_attention'"),
        (LLAMA, {"rope_type": ["default"]}, "is not supported"),
        (LLAMA, {"rope_type": None}, "is not supported"),
        (LLAMA, "default", "holds a text"),
        (QWEN_VL, {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True}, "interleaved"),
        (QWEN_VL, {"rope_type": "default", "mrope_section": [2, 3, 4]}, "sums to 9, half the rotary width is 8"),
        (QWEN_VL, {"rope_type": "default", "mrope_section": [8, 8]}, "list of three"),
        (QWEN_VL, {"rope_type": "default", "mrope_section": "2,3,3"}, "list of three"),
    ],
)  # fmt: skip
def test_a_rope_variant_that_was_never_verified_is_refused_by_name(base, rope, reason):
    config = {key: value for key, value in base.items() if not key.startswith("rope")}
    for key in ("rope_parameters", "rope_scaling"):
        with pytest.raises(RefusedError, match=reason):
            architecture_of({**config, key: rope})


def test_a_second_rope_table_cannot_hide_behind_the_first():
    """Which of the two a class reads depends on the release."""
    with pytest.raises(RefusedError, match="'longrope'"):
        architecture_of(
            {**LLAMA, "rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "longrope"}}
        )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**LLAMA, "num_key_value_heads": 3}, "contradicts itself.*num_key_value_heads 3"),
        ({**LLAMA, "hidden_size": 66}, "contradicts itself.*hidden_size 66"),
        ({**LLAMA, "head_dim": 15}, "contradicts itself.*odd"),
        ({**LATENT, "kv_lora_rank": None}, "contradicts itself.*kv_lora_rank"),
        ({key: value for key, value in LATENT.items() if key != "qk_rope_head_dim"}, "qk_rope_head_dim"),
        ({"model_type": "internvl"}, "no text_config"),
        ({"model_type": "internvl", "text_config": "qwen2"}, "text_config holds a text"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(config, reason):
    with pytest.raises(RefusedError, match=reason):
        architecture_of(config)


WRONG = (None, [], {}, "x", 1.5, -1, True, [None], {"a": []}, 10**30)


@pytest.mark.parametrize("base", [LLAMA, MISTRAL, LATENT, QWEN_VL, nested("internvl", "qwen2")], ids=str)
def test_a_field_of_the_wrong_kind_ends_in_one_line(base):
    """Whatever stands in a field, the answer is an architecture or a refusal, never another exception."""
    more = ("rope_parameters", "rope_scaling", "layer_types", "sliding_window", "use_sliding_window", "head_dim",
            "no_rope_layers", "index_topk", "text_config", "partial_rotary_factor", "is_encoder_decoder")  # fmt: skip
    part = base.get("text_config", base)
    for name in {*part, *more}:
        for value in WRONG:
            changed = {**part, name: value}
            try:
                architecture_of(changed if part is base else {**base, "text_config": changed})
            except RefusedError as error:
                assert "\n" not in str(error)


@pytest.mark.parametrize("config", [None, [], "llama", 3, {}, {"model_type": ["llama"]}, {"model_type": {}}])
def test_a_config_that_is_no_model_is_refused(config):
    with pytest.raises(RefusedError):
        architecture_of(config)


def test_every_row_says_what_was_verified_and_is_there_once():
    names = [entry.model_type for entry in ARCHITECTURES]
    assert len(set(names)) == len(names)
    for entry in ARCHITECTURES:
        assert entry.verified and entry.rope
        assert entry.auto == "image-text" or not entry.has_vision or entry.remote_code
        assert bool(entry.text) == entry.has_vision


def test_every_row_has_a_tiny_checkpoint():
    assert {entry.model_type for entry in ARCHITECTURES if not entry.remote_code} >= set(BACKBONES)


def test_judging_a_checkpoint_loads_neither_torch_nor_transformers():
    code = (
        "import sys, kamera_cli.model.checkpoint as c; c.open_checkpoint('kamera-tiny');"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
