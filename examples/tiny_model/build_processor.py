"""Build the tokenizer, the processors and an untrained model of the final shape, and save them as one folder.

Run: ``python examples/tiny_model/build_processor.py OUT``
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from kamera_cli.tiny.vocabulary import SPECIAL_TOKENS, word_list

FRAME_PIXELS = 112 * 112
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif item['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a lower-casing word-level tokenizer that also splits at punctuation."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *word_list()))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|unk|>",
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        extra_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
        model_max_length=8192,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_processor() -> Qwen2_5_VLProcessor:
    """Return the processor; every square frame becomes 112 by 112 pixels, 16 tokens for each grid step."""
    size = {"shortest_edge": FRAME_PIXELS, "longest_edge": FRAME_PIXELS}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size),
        tokenizer=build_tokenizer(),
        video_processor=Qwen2VLVideoProcessor(
            size=size, do_sample_frames=False, cap_pixels_per_frame=False, fps=2, min_frames=2
        ),
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    """Return an untrained fp32 model of the shipped shape, seeded.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerFast
        Gives the vocabulary size and the ids of the special tokens.
    seed : int
        Seed of the initial weights.
    """
    token_id = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": -(-len(tokenizer) // 8) * 8,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 6, 6],
            },
            "bos_token_id": token_id("<|endoftext|>"),
            "eos_token_id": token_id("<|im_end|>"),
            "pad_token_id": token_id("<|pad|>"),
        },
        vision_config={
            "depth": 3,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 4,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "out_hidden_size": 256,
            "fullatt_block_indexes": [2],
            "tokens_per_second": 1,
        },
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=True,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config).float().eval()
    _scale_weights(model)
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=token_id("<|im_end|>"),
        bos_token_id=token_id("<|endoftext|>"),
        pad_token_id=token_id("<|pad|>"),
        max_new_tokens=8,
    )
    return model


def _scale_weights(model: torch.nn.Module) -> None:
    """Draw linear weights with unit gain; a narrow model learns slowly from the usual deviation of 0.02.

    Projections that write to the residual stream are scaled down by the number of their writers.
    """
    writers = {".attn.proj.": 6, ".self_attn.o_proj.": 12, ".mlp.down_proj.": 12}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                weight.normal_(0, 1 / weight.shape[1] ** 0.5)
            elif weight.ndim >= 2:
                count = next((n for part, n in writers.items() if part in name), 1)
                weight.normal_(0, 1 / (weight[0].numel() * count) ** 0.5)


def main() -> None:
    """Save processor and model beside the target folder first, then move both into place at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    processor = build_processor()
    model = build_model(processor.tokenizer)
    staging = out.with_name(out.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    processor.save_pretrained(staging)
    model.save_pretrained(staging)
    shutil.rmtree(out, ignore_errors=True)
    staging.rename(out)


if __name__ == "__main__":
    main()
