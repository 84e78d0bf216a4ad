"""Tiny random checkpoints built from configs, with the embedded model's tokenizer and processor: no download.

Weights are drawn so that nothing is trivially zero or one: biases, norms and key norms too, since a fault in a tensor
that multiplies by one or adds zero cannot be seen.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kamera_cli.tiny import model_path
from kamera_cli.tiny.vocabulary import COLOURS, DIGITS, SHAPES

FAMILIES = ("qwen2_5_vl", "llama", "qwen2", "qwen3")
TEXT_FAMILIES = FAMILIES[1:]
MAX_TOKENS = 2048
EOS = 2

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_TOKENS,
    "tie_word_embeddings": False,
}
"""Of every tiny text model, unless it says otherwise."""
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
PAD = 7
TOKEN_IDS = {"bos_token_id": 0, "eos_token_id": EOS, "pad_token_id": PAD}
_PIXELS = {"shortest_edge": 28 * 28, "longest_edge": 84 * 84}


def randomise(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Unit-scale weights, biases that are not zero, norm weights from uniform(0.2, 2.0)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.ndim == 1 and name.endswith("weight"):
                parameter.uniform_(0.2, 2.0, generator=generator)
            elif parameter.ndim == 1:
                parameter.normal_(0.0, 0.3, generator=generator)
            elif "embed" in name:
                parameter.normal_(0.0, 1.0, generator=generator)
            else:
                fan_in = parameter[0].numel()
                parameter.normal_(0.0, 1.2 * fan_in**-0.5, generator=generator)
        # Never answer with a placeholder or a mark: a plain forward would look for its pixels.
        head = model.get_output_embeddings().weight
        head[[token for token in range(9) if token != EOS]] = 0.0
    return model.eval()


def save(family: str, folder: Path, *, seed: int = 0, **fields: object) -> Path:
    """A complete checkpoint folder of a family; ``fields`` of a text model's config may be given.

    The text families take the three ways a prompt can begin: Llama has a BOS and no template, Qwen2 a chat template,
    Qwen3 neither, so that its preamble is empty.
    """
    if family == "qwen2_5_vl":
        return _save_vision(folder, seed)
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    tokenizer.chat_template = tokenizer.chat_template if family == "qwen2" else None
    tokenizer.bos_token = "<|endoftext|>" if family == "llama" else None
    sizes = {**SIZES, "vocab_size": len(tokenizer), "rope_parameters": ROPE, **TOKEN_IDS, **fields}
    model = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(attention_bias=True, mlp_bias=True, **sizes)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**sizes)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(head_dim=24, **sizes)),
    }[family]()
    randomise(model, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _save_vision(folder: Path, seed: int) -> Path:
    own = json.loads((model_path() / "config.json").read_text(encoding="utf-8"))
    processor = AutoProcessor.from_pretrained(model_path())
    for part in (processor.image_processor, processor.video_processor):
        part.size = _PIXELS
    rope = {**ROPE, "mrope_section": [2, 3, 3]}
    text = {**SIZES, "vocab_size": len(processor.tokenizer), "rope_parameters": rope, **TOKEN_IDS}
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
        "fullatt_block_indexes": [0], "tokens_per_second": 2,
    }  # fmt: skip
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **{name: own[name] for name in names})
    model = randomise(Qwen2_5_VLForConditionalGeneration(config), seed)
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


WORDS = COLOURS + SHAPES + DIGITS


def passage(num_words: int, seed: int) -> str:
    """Words that the embedded tokenizer knows, one token each; Qwen2's own tokenizer class spells them."""
    return " ".join(np.random.default_rng(seed).choice(WORDS, num_words))


def write_passage(path: Path, num_words: int, seed: int) -> Path:
    """A text file of random words."""
    path.write_text(passage(num_words, seed), encoding="utf-8")
    return path


def write_noise_image(path: Path, seed: int, *, width: int = 56, height: int = 56) -> Path:
    """A PNG of coarse random colours."""
    from PIL import Image

    cells = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(cells).resize((width, height), Image.Resampling.NEAREST).save(path)
    return path


def write_noise_video(path: Path, seed: int, *, seconds: float = 4, fps: int = 8, size: int = 56) -> Path:
    """An H.264 clip whose coarse colours change with every frame, a quarter of the picture at a time."""
    import av

    rng = np.random.default_rng(seed)
    cells = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.width = stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "18", "preset": "ultrafast"}
        stream.codec_context.thread_count = 1
        for _ in range(round(seconds * fps)):
            cells[rng.integers(4)] = rng.integers(0, 256, (4, 3), dtype=np.uint8)
            pixels = np.kron(cells, np.ones((size // 4, size // 4, 1), dtype=np.uint8))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path
