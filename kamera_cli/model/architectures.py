"""The architectures that were verified against their own cold prefill; everything else is refused by name.

Decided from ``config.json`` alone: importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kamera_cli.errors import RefusedError
from kamera_cli.model import config_rules
from kamera_cli.model.config_rules import ROPE_TYPES


@dataclass(frozen=True)
class Architecture:
    """One supported architecture.

    Attributes
    ----------
    model_type : str
        ``model_type`` of the checkpoint's ``config.json``.
    name : str
        What its makers call it.
    family : {"GQA/MHA", "MLA"}
        Which tensors are stored, rotated and patched (`docs/architecture.md`, "The operator").
    media : tuple of {"video", "image", "text"}
        What can be ingested.
    verified : tuple of str
        What the test suite compares with a cold prefill of the same model.
    text : tuple of str
        ``model_type`` values accepted in ``text_config``; empty for a model whose only part is the language model.
    auto : {"image-text", "causal"}
        Auto class that loads it.
    rope : tuple of str
        RoPE variants that are accepted, by ``rope_type``.
    layout : str
        What more is special about the rotation: M-RoPE and its axis layout, or a partial rotary width.
    remote_code : bool
        It runs Python code that comes with the checkpoint, and is refused without ``--trust-remote-code``.
    note : str
        What a user should know besides.
    """

    model_type: str
    name: str
    family: Literal["GQA/MHA", "MLA"]
    media: tuple[str, ...]
    verified: tuple[str, ...]
    note: str = ""
    text: tuple[str, ...] = ()
    auto: Literal["image-text", "causal"] = "causal"
    rope: tuple[str, ...] = ROPE_TYPES
    layout: str = ""
    remote_code: bool = False

    @property
    def has_vision(self) -> bool:
        return "image" in self.media

    @property
    def suite(self) -> str:
        """Sign of `verified` in tables; `NOTES` says what each stands for."""
        return ("latent" if self.family == "MLA" else "keys") + (" + pixels" if self.has_vision else "")


_KEYS = ("captured keys and values = own cache", "layer-0 keys", "positions", "full-rank patch")
_LATENT = ("captured latents = own cache", "moved latents byte for byte", "positions", "full-rank patch")
_EMBEDDINGS = "forward from stored embeddings = from pixels"
_ALL, _STILL = ("video", "image", "text"), ("image", "text")
_BLOCKS, _INTERLEAVED = "M-RoPE in blocks", "M-RoPE interleaved"
_DEEPSTACK = "deepstack, key norm"


def _vision(
    model_type: str, name: str, text: tuple[str, ...], media: tuple[str, ...] = _ALL, **fields
) -> Architecture:
    checks = _LATENT if fields.get("family") == "MLA" else _KEYS
    return Architecture(
        model_type=model_type,
        name=name,
        media=media,
        verified=(*checks, _EMBEDDINGS),
        text=text,
        **{"family": "GQA/MHA", "auto": "image-text", **fields},
    )


def _text(
    model_type: str, name: str, family: Literal["GQA/MHA", "MLA"] = "GQA/MHA", **fields
) -> Architecture:
    return Architecture(model_type, name, family, ("text",), _LATENT if family == "MLA" else _KEYS, **fields)


ARCHITECTURES: tuple[Architecture, ...] = (
    _vision("qwen2_vl", "Qwen2-VL", ("qwen2_vl_text",), layout=_BLOCKS),
    _vision("qwen2_5_vl", "Qwen2.5-VL", ("qwen2_5_vl_text",), layout=_BLOCKS),
    _vision("qwen3_vl", "Qwen3-VL", ("qwen3_vl_text",), layout=_INTERLEAVED, note=_DEEPSTACK),
    _vision("qwen3_vl_moe", "Qwen3-VL-MoE", ("qwen3_vl_moe_text",), layout=_INTERLEAVED, note=_DEEPSTACK),
    _vision("deepseek_vl", "DeepSeek-VL", ("llama",), _STILL),
    _vision("deepseek_vl_hybrid", "DeepSeek-VL-hybrid", ("llama",), _STILL, note="two vision towers"),
    _vision("internvl", "InternVL", ("qwen2", "qwen3", "llama")),
    _vision("llava_onevision", "LLaVA-OneVision", ("qwen2",)),
    _vision("kimi_k25", "Kimi K2.5", ("deepseek_v3", "kimi_k2"), family="MLA"),
    _vision(
        "kimi_vl",
        "Kimi-VL",
        ("deepseek_v3",),
        _STILL,
        family="MLA",
        auto="causal",
        remote_code=True,
        note="own code, a stand-in verified",
    ),
    _text("llama", "Llama"),
    _text("mistral", "Mistral", note="no sliding window"),
    _text("qwen2", "Qwen2 / Qwen2.5"),
    _text("qwen3", "Qwen3", note="key norm"),
    _text("glm4", "GLM-4", layout="partial rotary"),
    _text("olmo2", "OLMo 2", note="key norm over all heads"),
    _text("deepseek_v2", "DeepSeek-V2", "MLA"),
    _text("deepseek_v3", "DeepSeek-V3", "MLA"),
)

NOTES = (
    f"keys: {', '.join(_KEYS)}, each against a cold prefill of the same model",
    f"latent: {', '.join(_LATENT)}",
    f"pixels: {_EMBEDDINGS}",
    f"RoPE variants: {', '.join(ROPE_TYPES)}; dynamic up to max_position_embeddings, where it equals default",
    "own code: Python files of the checkpoint, which run with --trust-remote-code alone",
    "key norm: keys are kept after it; deepstack: what the tower adds in later layers is kept with the chunk",
    "every other architecture is refused by name; `kamera models check DIR` tests a checkpoint",
)
"""What the signs of a table of architectures mean, one sentence a line."""


def architecture_of(config: Mapping) -> Architecture:
    """Architecture of a ``config.json``.

    Parameters
    ----------
    config : mapping
        The parsed ``config.json``.

    Raises
    ------
    RefusedError
        The architecture, its RoPE variant or a layer kind was never verified, or the config contradicts itself; the
        message names it.
    """
    config_rules.require_object(config)
    model_type = config.get("model_type")
    found = next((entry for entry in ARCHITECTURES if entry.model_type == model_type), None)
    if found is None:
        config_rules.refuse_by_kind(config)
        supported = ", ".join(entry.model_type for entry in ARCHITECTURES)
        raise RefusedError(f"architecture {model_type!r} is not supported (supported: {supported})")
    text = config_rules.text_fields(config, found.text)
    config_rules.refuse_layers(config, text)
    config_rules.refuse_rope(text, found.rope, found.layout)
    config_rules.refuse_contradictions(text, found.family)
    return found
