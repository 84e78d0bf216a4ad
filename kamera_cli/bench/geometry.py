"""Models of other shapes with random weights, for timing alone: Qwen2.5-VL, embedded processor and tokenizer."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Geometry:
    """Shape of a language model and its vision tower, with the sizes that ``config.json`` of Qwen2.5-VL has."""

    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vision_hidden: int
    vision_intermediate: int
    vision_depth: int
    vision_heads: int
    full_attention: tuple[int, ...]
    mrope_section: tuple[int, int, int]
    dtype: str = "float32"


GEOMETRIES: dict[str, Geometry | None] = {
    "tiny": None,
    "small": Geometry(512, 1408, 8, 8, 2, 256, 704, 4, 4, (3,), (8, 12, 12)),
    "base": Geometry(768, 2816, 12, 12, 4, 384, 1056, 6, 6, (5,), (8, 12, 12)),
    "3b": Geometry(
        2048, 11008, 36, 16, 2, 1280, 3420, 32, 16, (7, 15, 23, 31), (16, 24, 24), dtype="bfloat16"
    ),
}
"""``tiny`` is the model of the settings as it is; ``3b`` has the shape of Qwen2.5-VL-3B and takes 7 GB on disk."""

_PROCESSOR_FILES = ("chat_template.jinja", "processor_config.json", "tokenizer.json", "tokenizer_config.json")
_MAX_POSITIONS = 32768


def write_checkpoint(geometry: Geometry, folder: Path, seed: int) -> int:
    """Save a checkpoint with random weights.

    Parameters
    ----------
    folder : Path
        Created; must not exist.

    Returns
    -------
    int
        Number of parameters.
    """
    import torch

    from kamera_cli.model.checkpoint import EMBEDDED, open_checkpoint
    from kamera_cli.model.loading import load

    embedded = open_checkpoint(EMBEDDED)
    like: Any = load(embedded, device="cpu", dtype="fp32", attention="sdpa", trust_remote_code=False).model
    config = type(like.config).from_dict(_config(json.loads(json.dumps(embedded.config)), geometry))
    previous = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, geometry.dtype))
    try:
        torch.manual_seed(seed)
        model = type(like)(config)
    finally:
        torch.set_default_dtype(previous)
    model.generation_config = like.generation_config
    model.save_pretrained(folder)
    for name in _PROCESSOR_FILES:
        shutil.copyfile(embedded.path / name, folder / name)
    return sum(weight.numel() for weight in model.parameters())


def _config(config: dict[str, Any], geometry: Geometry) -> dict[str, Any]:
    config["dtype"] = geometry.dtype
    text, vision = config["text_config"], config["vision_config"]
    text |= {
        "hidden_size": geometry.hidden,
        "intermediate_size": geometry.intermediate,
        "num_hidden_layers": geometry.num_layers,
        "num_attention_heads": geometry.num_heads,
        "num_key_value_heads": geometry.num_kv_heads,
        "layer_types": ["full_attention"] * geometry.num_layers,
        "max_position_embeddings": _MAX_POSITIONS,
        "rope_parameters": {**text["rope_parameters"], "mrope_section": list(geometry.mrope_section)},
    }
    vision |= {
        "hidden_size": geometry.vision_hidden,
        "intermediate_size": geometry.vision_intermediate,
        "depth": geometry.vision_depth,
        "num_heads": geometry.vision_heads,
        "out_hidden_size": geometry.hidden,
        "fullatt_block_indexes": list(geometry.full_attention),
    }
    return config
