"""One file per attention family: what is captured, what is rotated, how it goes back into the model's cache."""

from __future__ import annotations

from typing import Any

from kamera_cli.errors import RefusedError
from kamera_cli.model.compat import Module
from kamera_cli.model.families.family import AttentionFamily
from kamera_cli.model.families.gqa import GQA
from kamera_cli.model.families.mla import MLA

TENSOR_NAMES = {"GQA/MHA": GQA.names, "MLA": MLA.names}
"""What each family of `kamera_cli.model.architectures` calls its two tensors, known before a model is loaded."""


def family_of(decoder: Module, own_cache: Any) -> AttentionFamily:
    """The family of a decoder, told by its projections.

    Parameters
    ----------
    own_cache : DynamicCache
        What the decoder itself wrote for at least one token.

    Raises
    ------
    RefusedError
        Its attention has other projections, or a cache layout that is not known.
    """
    attention = decoder.layers[0].self_attn
    if hasattr(attention, "kv_a_proj_with_mqa"):
        held = own_cache.layers[0]
        return MLA(decoder, tuple((part.shape[1], part.shape[3]) for part in (held.keys, held.values)))
    if hasattr(attention, "k_proj") and hasattr(attention, "v_proj"):
        return GQA(decoder)
    raise RefusedError(
        f"attention {type(attention).__name__} has neither k_proj and v_proj nor kv_a_proj_with_mqa"
    )
