"""Tokenizers, processors and chat templates of the tiny backbones, with the structure of the real ones.

The tokenizer is the embedded model's, with single digits and the words that processors write (time stamps, frame
numbers) in its vocabulary, so that two time stamps never fall on the same unknown token.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import transformers
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, ProcessorMixin

from kamera_cli.tiny import model_path

PATCH = 14
SIDE = 56
_WORDS = (
    *"<>[]/-_|'",
    *"aioquw",
    "seconds", "frame", "image", "helpful", "are", "question", "answer",
)  # fmt: skip

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "ITEMS"
    "{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_DEEPSEEK = (
    "{{ bos_token }}You are a helpful assistant.\n\n{% for message in messages %}"
    "{% if message['role'] == 'user' %}User: {% else %}Assistant: {% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<image_placeholder>{% elif item['type'] == 'text' %}{{ item['text'] }}"
    "{% endif %}{% endfor %}{% endif %}{{ '\n\n' }}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
_KIMI = (
    "{% for message in messages %}<|im_user|>{{ message['role'] }}<|im_middle|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
    "{% elif item['type'] == 'video' %}<|kimi_k25_video_placeholder|>"
    "{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)


def _chatml(image: str, video: str) -> str:
    items = "{% if item['type'] == 'image' %}IMAGE{% elif item['type'] == 'video' %}VIDEO"
    return _CHATML.replace("ITEMS", items).replace("IMAGE", image).replace("VIDEO", video)


def _turns(before: str, user: str, end: str, assistant: str) -> str:
    return (
        before
        + "{% for message in messages %}{% if message['role'] == 'user' %}"
        + user
        + "{{ message['content'] }}"
        + end
        + "{% else %}"
        + assistant
        + "{{ message['content'] }}"
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + assistant
        + "{% endif %}"
    )


_QWEN = _chatml("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>")
TEMPLATES = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "deepseek_vl": _DEEPSEEK,
    "deepseek_vl_hybrid": _DEEPSEEK,
    "internvl": _chatml("<IMG_CONTEXT>\n", "<video>\n"),
    "llava_onevision": _chatml("<image>", "<video>").replace(
        "{{ message['role'] }}\n", "{{ message['role'] }} "
    ),
    "kimi_k25": _KIMI,
    "qwen2": _chatml("", ""),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "mistral": _turns("{{ bos_token }}", "[INST] ", " [/INST]", ""),
    "glm4": _turns("[gMASK]<sop>", "<|user|>\n", "", "<|assistant|>\n"),
    "olmo2": _turns("{{ bos_token }}", "<|user|>\n", "\n", "<|assistant|>\n"),
}
"""Chat template by backbone; Llama has a BOS and none, Qwen3 neither."""

_MARKS = {
    "deepseek_vl": ("<|begin_of_sentence|>", "<image_placeholder>"),
    "deepseek_vl_hybrid": ("<|begin_of_sentence|>", "<image_placeholder>"),
    "internvl": ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    "llava_onevision": ("<image>", "<video>"),
    "kimi_k25": (
        "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|media_begin|>", "<|media_content|>",
        "<|media_pad|>", "<|media_end|>", "<|kimi_k25_video_placeholder|>",
    ),
    "deepseek_v2": ("<|begin_of_sentence|>",),
    "deepseek_v3": ("<|begin_of_sentence|>",),
    "mistral": ("[INST]", "[/INST]"),
    "glm4": ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>"),
    "olmo2": ("<|user|>", "<|assistant|>"),
}  # fmt: skip
_BOS = {
    **dict.fromkeys(("llama", "mistral", "olmo2"), "<|endoftext|>"),
    **dict.fromkeys(
        ("deepseek_vl", "deepseek_vl_hybrid", "deepseek_v2", "deepseek_v3"), "<|begin_of_sentence|>"
    ),
}
_NAMED = {
    "deepseek_vl": {"image_token": "<image_placeholder>"},
    "deepseek_vl_hybrid": {"image_token": "<image_placeholder>"},
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
}


def tokenizer_of(backbone: str) -> PreTrainedTokenizerBase:
    """The tokenizer of one backbone: word level, with that backbone's marks as special tokens."""
    base = json.loads((model_path() / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = base["model"]["vocab"]
    for word in _WORDS:
        vocabulary.setdefault(word, len(vocabulary))
    base["pre_tokenizer"]["pretokenizers"].append({"type": "Digits", "individual_digits": True})
    special = [token["content"] for token in base["added_tokens"]]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(base)),
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        bos_token=_BOS.get(backbone),
        padding_side="left",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        **_NAMED.get(backbone, {}),
    )
    tokenizer.add_special_tokens({"extra_special_tokens": [*special, *_MARKS.get(backbone, ())]})
    tokenizer.chat_template = TEMPLATES.get(backbone)
    return tokenizer


def marks_of(backbone: str) -> tuple[str, ...]:
    """Special tokens of one backbone beside those of the embedded tokenizer."""
    return _MARKS.get(backbone, ())


def processor_of(backbone: str, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Image and video parts that make 4 to 30 tokens of a picture of 56 x 56 or 84 x 56 pixels."""
    return _PROCESSORS[backbone](tokenizer)


def _qwen(prefix: str, video_part: str, clip_pixels: int) -> Callable:
    def build(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
        sizing = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
        smallest = 28 * 28
        return getattr(transformers, f"{prefix}Processor")(
            image_processor=transformers.Qwen2VLImageProcessor(
                size={"shortest_edge": smallest, "longest_edge": 84 * 84}, **sizing
            ),
            video_processor=getattr(transformers, video_part)(
                size={"shortest_edge": smallest, "longest_edge": clip_pixels},
                do_sample_frames=False,
                **sizing,
            ),
            tokenizer=tokenizer,
            chat_template=tokenizer.chat_template,
        )

    return build


def _deepseek_vl(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return transformers.DeepseekVLProcessor(
        image_processor=transformers.DeepseekVLImageProcessor(size={"height": SIDE, "width": SIDE}),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        num_image_tokens=(SIDE // PATCH) ** 2,
    )


def _deepseek_vl_hybrid(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return transformers.DeepseekVLHybridProcessor(
        image_processor=transformers.DeepseekVLHybridImageProcessor(
            size={"height": SIDE, "width": SIDE}, high_res_size={"height": 64, "width": 64}
        ),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        num_image_tokens=(SIDE // PATCH) ** 2,
    )


def _internvl(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    size = {"height": SIDE, "width": SIDE}
    return transformers.InternVLProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(size=size, max_patches=3),
        video_processor=transformers.InternVLVideoProcessor(size=size),
        tokenizer=tokenizer,
        image_seq_length=(SIDE // PATCH // 2) ** 2,
        chat_template=tokenizer.chat_template,
    )


def _llava_onevision(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    size = {"height": SIDE, "width": SIDE}
    return transformers.LlavaOnevisionProcessor(
        image_processor=transformers.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=PINPOINTS),
        video_processor=transformers.LlavaOnevisionVideoProcessor(size=size),
        tokenizer=tokenizer,
        num_image_tokens=(SIDE // LLAVA_PATCH) ** 2,
        vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template,
    )


def _kimi_k25(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor
    from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor
    from transformers.models.kimi_k25.video_processing_kimi_k25 import Kimi_K25VideoProcessor

    sizing = {"size": {"max_height": 6, "max_width": 6}, "patch_size": PATCH, "merge_size": 2}
    return Kimi_K25Processor(
        image_processor=Kimi_K25ImageProcessor(max_patches=36, **sizing),
        video_processor=Kimi_K25VideoProcessor(max_patches=36, do_sample_frames=False, **sizing),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )


LLAVA_PATCH = 28
PINPOINTS = [[56, 56], [56, 112], [112, 56]]
_PROCESSORS = {
    "qwen2_vl": _qwen("Qwen2VL", "Qwen2VLVideoProcessor", 84 * 84),
    "qwen2_5_vl": _qwen("Qwen2_5_VL", "Qwen2VLVideoProcessor", 84 * 84),
    "qwen3_vl": _qwen("Qwen3VL", "Qwen3VLVideoProcessor", 64 * 84 * 84),
    "qwen3_vl_moe": _qwen("Qwen3VL", "Qwen3VLVideoProcessor", 64 * 84 * 84),
    "deepseek_vl": _deepseek_vl,
    "deepseek_vl_hybrid": _deepseek_vl_hybrid,
    "internvl": _internvl,
    "llava_onevision": _llava_onevision,
    "kimi_k25": _kimi_k25,
}
