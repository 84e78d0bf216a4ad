"""A chat template that rewrites or reorders its items: chunks placed one by one would not be the template's prompt."""

from __future__ import annotations

import pytest
import torch
from plain_model import whole_prompt
from tiny_models import passage
from vision_inputs import clip, picture

from kamera_cli.errors import RefusedError
from kamera_cli.model.prompt import prompt_format


class Template:
    """A renderer whose template is a Python function of the user's content."""

    chat_template = "yes"

    def __init__(self, render) -> None:
        self._render = render

    def apply_chat_template(self, messages, add_generation_prompt, tokenize, date_string):
        assert add_generation_prompt and not tokenize
        return self._render(messages[0]["content"])


def texts(content) -> str:
    return "".join(item.get("text", f"<{item['type']}>") for item in content)


def test_the_prompt_is_read_off_the_template():
    rendered = prompt_format(
        Template(lambda content: f"<s>system\nuser: {texts(content)}</s>assistant:"),
        media=("video", "image"),
        bos="x",
    )
    assert (rendered.preamble, rendered.before_question, rendered.suffix) == (
        "<s>system\nuser: ",
        "",
        "</s>assistant:",
    )
    assert rendered.blocks == {"video": "<video>", "image": "<image>"}


def test_text_models_get_plain_content_with_the_question_in_a_paragraph_of_its_own():
    rendered = prompt_format(Template(lambda content: f"[{content}]"), media=("text",), bos="x")
    assert (rendered.preamble, rendered.blocks, rendered.suffix) == ("[", {}, "]")
    assert rendered.before_question == "\n\n"


@pytest.mark.parametrize(
    "render",
    [
        lambda content: texts(content).lower(),
        lambda content: texts(content[::-1]),
        lambda content: texts(content[:1]),
        lambda content: texts(content) + texts(content),
    ],
    ids=["rewrites", "reorders", "drops", "repeats"],
)
def test_a_template_that_does_not_leave_its_items_alone_is_refused(render):
    with pytest.raises(RefusedError, match="template"):
        prompt_format(Template(render), media=("video", "image"), bos="")


@pytest.mark.parametrize("count_pictures", [lambda n: f"Picture {n}: ", lambda n: "|" * n])
def test_a_template_that_changes_its_text_with_the_media_is_refused(count_pictures):
    def render(content) -> str:
        media = [item for item in content if item["type"] != "text"]
        return count_pictures(len(media)) + texts(content)

    with pytest.raises(RefusedError, match=r"block of its own|otherwise after"):
        prompt_format(Template(render), media=("video", "image"), bos="")


def test_chunks_side_by_side_are_the_prompt_that_the_processor_makes(runners):
    """Token by token what ``apply_chat_template`` and the processor give for the whole conversation."""
    runner = runners("qwen2_5_vl")
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(256, (56, 84, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    frames = torch.randint(256, (8, 56, 56, 3), generator=generator, dtype=torch.uint8)
    chunks = [picture(runner, 1), clip(runner, 1)]
    question = passage(6, 4)
    items = [{"type": "image"}, {"type": "video"}, {"type": "text", "text": question}]
    text = runner.processor.apply_chat_template(
        [{"role": "user", "content": items}], add_generation_prompt=True
    )
    output = runner.processor(
        text=[text],
        images=[pixels.permute(2, 0, 1)],
        videos=[frames.permute(0, 3, 1, 2)],
        return_tensors="pt",
        videos_kwargs={"do_sample_frames": False},
    )
    ids, inputs = whole_prompt(runner, chunks, question)
    assert ids.tolist() == output["input_ids"][0].tolist()
    assert torch.equal(inputs["pixel_values"], output["pixel_values"])
    assert torch.equal(inputs["pixel_values_videos"], output["pixel_values_videos"])
    assert torch.equal(inputs["mm_token_type_ids"], output["mm_token_type_ids"][0])
