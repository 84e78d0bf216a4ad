"""The architectures that were verified against their own cold prefill; everything else is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kamera_cli.errors import RefusedError


@dataclass(frozen=True)
class Architecture:
    """One supported architecture.

    Attributes
    ----------
    model_type : str
        ``model_type`` of the checkpoint's ``config.json``.
    family : {"GQA/MHA"}
        Which tensors are stored, rotated and patched (design §2).
    media : tuple of {"video", "image", "text"}
        What can be ingested.
    verified : tuple of str
        What the test suite compares with a cold prefill of the same model.
    """

    model_type: str
    name: str
    family: str
    media: tuple[str, ...]
    verified: tuple[str, ...]
    note: str = ""

    @property
    def has_vision(self) -> bool:
        return "image" in self.media


_CHECKS = ("captured KV = own cache", "layer-0 keys", "positions", "full-rank patch")

ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        "qwen2_5_vl", "Qwen2.5-VL", "GQA/MHA", ("video", "image", "text"), _CHECKS, "M-RoPE in blocks"
    ),
    Architecture("llama", "Llama", "GQA/MHA", ("text",), _CHECKS),
    Architecture("qwen2", "Qwen2 / Qwen2.5", "GQA/MHA", ("text",), _CHECKS),
    Architecture(
        "qwen3", "Qwen3", "GQA/MHA", ("text",), _CHECKS, "keys are captured after the per-head key norm"
    ),
)

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def architecture_of(config: Mapping) -> Architecture:
    """Architecture of a ``config.json``.

    Parameters
    ----------
    config : mapping
        The parsed ``config.json``.

    Raises
    ------
    RefusedError
        The architecture, its RoPE variant or a layer kind was never verified; the message names it.
    """
    model_type = config.get("model_type")
    found = next((entry for entry in ARCHITECTURES if entry.model_type == model_type), None)
    if found is None:
        supported = ", ".join(entry.model_type for entry in ARCHITECTURES)
        raise RefusedError(f"architecture {model_type!r} is not supported (supported: {supported})")
    text = {**config, **(config.get("text_config") or {})}
    _refuse_unverified_layers(text)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if (
        rope_type == "mrope"
    ):  # the name older Qwen-VL configs use for the default frequencies in M-RoPE blocks
        rope_type = "default"
    if rope_type not in ROPE_TYPES:
        raise RefusedError(
            f"RoPE variant {rope_type!r} is not supported (supported: {', '.join(ROPE_TYPES)})"
        )
    return found


def _refuse_unverified_layers(text: Mapping) -> None:
    if text.get("use_sliding_window"):
        raise RefusedError(
            "sliding-window attention is not supported: use_sliding_window is true in config.json"
        )
    kinds = sorted({kind for kind in text.get("layer_types") or () if kind != "full_attention"})
    if kinds:
        raise RefusedError(f"layer kind {kinds[0]!r} is not supported: every layer must be 'full_attention'")
