"""What a ``config.json`` may say: kinds of model whose KV cannot be moved, RoPE variants, fields that contradict.

Pure functions from parsed JSON to a refusal; every function returns None or raises `RefusedError` in one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

from kamera_cli.errors import RefusedError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
"""Accepted variants. ``dynamic`` holds up to ``max_position_embeddings``, where its table is the default one."""

SLIDING = "it has sliding-window layers, whose cache does not hold every token of a chunk"
STATE = "it has linear-attention or state-space layers, whose state is no KV that could be moved"
SPARSE = "it picks keys by a sparse indexer, whose own cache is not captured"
ALIBI = "it adds ALiBi distances to the scores, so there is no rotation by which KV could be moved"
LEARNED = "it adds learned positions to the embeddings, so KV cannot be moved"
ENCODER = "it is an encoder-decoder, whose decoder reads the input through cross attention"
CROSS = "it reads pictures through cross-attention layers, which hold no KV of the prompt's tokens"
UNROTATED = "it has layers without RoPE among rotated ones, which was never verified"

_KINDS: tuple[tuple[str, frozenset[str]], ...] = (
    (STATE, frozenset({
        "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
        "lfm2_moe", "lfm2_vl", "lfm3", "lfm3_vl", "mamba", "mamba2", "minimax", "nemotron_h", "nemotron_h_omni",
        "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next",
        "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
    })),
    (SPARSE, frozenset({"deepseek_v32", "deepseek_v4", "glm5_next", "glm_moe_dsa", "minimax_m3_vl"})),
    (ALIBI, frozenset({"bloom", "mpt"})),
    (LEARNED, frozenset({
        "bert", "biogpt", "distilbert", "gpt2", "gpt_bigcode", "gpt_neo", "imagegpt", "openai-gpt", "opt",
        "roberta", "xglm",
    })),
    (CROSS, frozenset({"mllama", "mllama_text_model", "idefics", "git"})),
    (ENCODER, frozenset({
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "florence2", "fsmt", "led",
        "longt5", "m2m_100", "marian", "mbart", "mt5", "nllb-moe", "pegasus", "pegasus_x", "pix2struct", "plbart",
        "prophetnet", "seamless_m4t", "seamless_m4t_v2", "speech-encoder-decoder", "speech_to_text",
        "switch_transformers", "t5", "t5gemma", "t5gemma2", "udop", "umt5", "vision-encoder-decoder", "whisper",
    })),
    (UNROTATED, frozenset({"cohere2", "llama4", "llama4_text", "smollm3"})),
    (SLIDING, frozenset({
        "cohere2_vision", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text",
        "gpt_oss", "ministral", "modernbert-decoder", "olmo3", "vaultgemma",
    })),
)  # fmt: skip
_LAYER_KINDS = {
    "sliding_attention": SLIDING,
    "chunked_attention": SLIDING,
    "linear_attention": STATE,
    "mamba": STATE,
    "mamba2": STATE,
    "conv": STATE,
    "recurrent": STATE,
    "hybrid": STATE,
}
_ALWAYS_SLIDING = {"mistral": 4096}
"""Model types that slide wherever ``sliding_window`` is not null, and the window they take when it is not given."""

_FLAT = ("qwen2_vl", "qwen2_5_vl")
"""Vision models whose older checkpoints keep the language model's fields at the top level."""

OWN_HEAD_DIM = ("glm4", "qwen3", "qwen3_vl_text")
"""Model types whose class has a head_dim of its own where ``config.json`` names none."""

_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_LATENT_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings", "vocab_size")
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "q_lora_rank")
_NESTED = ("text_config", "language_config")


def require_object(config: object) -> None:
    """Refuse a ``config.json`` that is no JSON object."""
    if not isinstance(config, Mapping):
        raise RefusedError(f"config.json holds {_kind(config)} where an object belongs")


def refuse_by_kind(config: Mapping) -> None:
    """Refuse a model for the kind it is, where the reason is known; other unknown models pass."""
    parts = [config, *(config[key] for key in _NESTED if isinstance(config.get(key), Mapping))]
    model_type = config.get("model_type")
    for part in parts:
        found = part.get("model_type")
        reason = next(
            (reason for reason, kinds in _KINDS if isinstance(found, str) and found in kinds), None
        ) or _kind_by_field(part)
        if reason:
            raise RefusedError(f"architecture {model_type!r} is refused: {reason}")


def _kind_by_field(part: Mapping) -> str | None:
    layers = part.get("layer_types")
    kinds = [_LAYER_KINDS.get(kind) for kind in layers if isinstance(kind, str)] if _is_list(layers) else []
    unrotated = part.get("no_rope_layers")
    found = {
        ENCODER: part.get("is_encoder_decoder") is True,
        SPARSE: bool(part.get("index_topk")),
        ALIBI: part.get("alibi") is True or part.get("use_alibi") is True,
        CROSS: bool(part.get("cross_attention_layers")),
        UNROTATED: _is_list(unrotated) and any(entry != 1 for entry in unrotated),
        STATE: STATE in kinds,
        SLIDING: SLIDING in kinds,
    }
    return next((reason for reason, holds in found.items() if holds), None)


def text_fields(config: Mapping, accepted: tuple[str, ...]) -> Mapping:
    """Fields of the language model: ``text_config``, ``language_config``, or the top level.

    Parameters
    ----------
    accepted : tuple of str
        Model types that the language model may have; empty where the checkpoint is a language model.
    """
    model_type = config["model_type"]
    if not accepted:
        return config
    for key in _NESTED:
        nested = config.get(key)
        if nested is None:
            continue
        if not isinstance(nested, Mapping):
            raise RefusedError(f"config.json: {key} holds {_kind(nested)} where an object belongs")
        # The model's own class takes its default language model, the first one here, where none is named.
        inner = nested.get("model_type", accepted[0])
        if inner not in accepted and not (model_type in _FLAT and inner == model_type):
            refuse_by_kind({**nested, "model_type": inner})
            raise RefusedError(
                f"architecture {model_type!r} with the language model {inner!r} is not supported "
                f"(supported: {', '.join(accepted)})"
            )
        return nested
    if model_type in _FLAT:
        return config
    raise RefusedError(f"config.json of a {model_type!r} model has no text_config")


def refuse_layers(config: Mapping, text: Mapping) -> None:
    """Refuse a supported architecture whose layers are not all plain full attention."""
    model_type = config["model_type"]
    if text.get("use_sliding_window"):
        raise RefusedError(
            f"architecture {model_type!r} is refused: sliding-window attention, use_sliding_window is true in "
            "config.json"
        )
    inner = text.get("model_type", model_type)
    window = text.get("sliding_window", _ALWAYS_SLIDING.get(inner)) if inner in _ALWAYS_SLIDING else None
    if window is not None:
        given = f"sliding_window is {window!r}" if "sliding_window" in text else f"by default {window} tokens"
        raise RefusedError(f"architecture {model_type!r} is refused: sliding-window attention, {given}")
    for part in (config, text):
        layers = part.get("layer_types")
        if layers is not None and not (_is_list(layers) and all(isinstance(kind, str) for kind in layers)):
            raise RefusedError(
                f"config.json: layer_types holds {_kind(layers)} where a list of names belongs"
            )
        for kind in sorted(set(layers or ()) - {"full_attention"}):
            reason = _LAYER_KINDS.get(kind, "every layer must be 'full_attention'")
            raise RefusedError(f"layer kind {kind!r} of {model_type!r} is not supported: {reason}")
        refused = _kind_by_field(part)
        if refused:
            raise RefusedError(f"architecture {model_type!r} is refused: {refused}")


def refuse_rope(text: Mapping, accepted: tuple[str, ...], layout: str) -> None:
    """Refuse a RoPE variant that was never verified, or one whose fields are missing.

    Parameters
    ----------
    accepted : tuple of str
        Values of ``rope_type``.
    layout : str
        ``M-RoPE in blocks``, ``M-RoPE interleaved``, ``partial rotary`` or nothing.
    """
    sections = None
    for key in ("rope_scaling", "rope_parameters"):
        rope = text.get(key)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise RefusedError(f"config.json: {key} holds {_kind(rope)} where an object belongs")
        layered = sorted(str(name) for name, value in rope.items() if isinstance(value, Mapping))
        if layered:
            raise RefusedError(f"RoPE that differs by layer kind is not supported: {key} has {layered[0]!r}")
        name = rope.get("rope_type", rope.get("type", "default"))
        # The name older Qwen-VL configs use for the default frequencies in M-RoPE blocks.
        variant = "default" if name == "mrope" and layout.startswith("M-RoPE") else name
        if variant not in accepted:
            raise RefusedError(f"RoPE variant {name!r} is not supported (supported: {', '.join(accepted)})")
        for field in _NEEDED.get(variant, ()):
            if not _is_number(rope.get(field)):
                raise RefusedError(f"config.json: RoPE variant {name!r} needs the number {field}")
        sections = rope.get("mrope_section", sections)
        if rope.get("mrope_interleaved") and layout != "M-RoPE interleaved":
            raise RefusedError("RoPE variant 'interleaved M-RoPE' is not supported for this architecture")
        _refuse_partial(rope, layout)
    _refuse_partial(text, layout)
    _refuse_sections(text, sections, layout)


def _refuse_partial(fields: Mapping, layout: str) -> None:
    share = fields.get("partial_rotary_factor", 1.0)
    if layout == "partial rotary":
        if not _is_number(share) or not 0 < share <= 1:
            raise RefusedError(f"config.json: partial_rotary_factor {share!r} is no number in (0, 1]")
    elif share not in (None, 1):
        raise RefusedError(
            f"RoPE variant 'partial rotary' ({share!r}) is not supported for this architecture"
        )


def _refuse_sections(text: Mapping, sections: object, layout: str) -> None:
    if not layout.startswith("M-RoPE"):
        if sections is not None:
            raise RefusedError("RoPE variant 'M-RoPE' is not supported for this architecture")
        return
    if not (_is_list(sections) and len(sections) == 3 and all(_is_size(size, 0) for size in sections)):
        raise RefusedError(f"config.json: mrope_section {sections!r} is not a list of three token counts")
    width = head_dim(text)
    if width and 2 * sum(sections) != width:
        raise RefusedError(
            f"config.json contradicts itself: mrope_section {sections} sums to {sum(sections)}, half the rotary "
            f"width is {width // 2}"
        )


def refuse_contradictions(text: Mapping, family: str) -> None:
    """Refuse sizes of the wrong kind and sizes that cannot hold together."""
    for name in (*_SIZES, *_OPTIONAL_SIZES):
        value = text.get(name)
        may_lack = name not in text or (value is None and name in _OPTIONAL_SIZES)
        if not may_lack and not _is_size(value, 1):
            raise RefusedError(f"config.json: {name} is {value!r} where a whole number above 0 belongs")
    heads, groups = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if heads and groups and heads % groups:
        raise RefusedError(
            f"config.json contradicts itself: num_attention_heads {heads} is no multiple of num_key_value_heads "
            f"{groups}"
        )
    width, name = _latent_width(text) if family == "MLA" else _head_width(text)
    if width and width % 2:
        raise RefusedError(f"config.json contradicts itself: {name} {width} is odd, RoPE turns pairs")


def _latent_width(text: Mapping) -> tuple[int, str]:
    """Width of what RoPE turns in latent attention, and the field that says it; all its sizes have to be there."""
    for name in _LATENT_SIZES:
        if not _is_size(text.get(name), 1):
            raise RefusedError(
                f"config.json contradicts itself: a model with latent attention needs {name}, which is "
                f"{text.get(name)!r}"
            )
    return text["qk_rope_head_dim"], "qk_rope_head_dim"


def _head_width(text: Mapping) -> tuple[int | None, str]:
    """Width of a head, and the field that says it; without that field heads share the hidden size evenly."""
    hidden, heads, width = text.get("hidden_size"), text.get("num_attention_heads"), head_dim(text)
    if hidden and heads and width and not text.get("head_dim") and hidden % heads:
        raise RefusedError(
            f"config.json contradicts itself: hidden_size {hidden} is no multiple of num_attention_heads "
            f"{heads}, and there is no head_dim"
        )
    return width, "head_dim"


def head_dim(text: Mapping) -> int | None:
    """Width of a head where ``config.json`` says it; some classes have one of their own where it names none."""
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    if _is_size(text.get("head_dim"), 1):
        return text["head_dim"]
    own = text.get("head_dim") is None and text.get("model_type") in OWN_HEAD_DIM
    return hidden // heads if not own and _is_size(hidden, 1) and _is_size(heads, 1) else None


def _is_list(value: object) -> TypeGuard[list | tuple]:
    return isinstance(value, (list, tuple))


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_size(value: object, least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
