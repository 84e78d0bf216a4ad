"""The prompt around the chunks: preamble, media blocks and suffix, read off the checkpoint's own chat template."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kamera_cli.errors import RefusedError

_FIRST, _SECOND = "KAMERAFIRST", "KAMERASECOND"
_DATE = "26 Jul 2024"
"""Given to templates that write a date: canonical KV has seen the preamble, so it must be the same every day."""


class Renderer(Protocol):
    """A processor or tokenizer: what writes a conversation as the checkpoint's chat template says."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """The conversation as one text."""


@dataclass(frozen=True)
class PromptFormat:
    """Text around the content items.

    Attributes
    ----------
    preamble : str
        What stands once before the first item (BOS, system turn, "user").
    blocks : mapping
        Text of one ``video`` or ``image`` item with a single placeholder token.
    before_question, suffix : str
        What stands between the last chunk and the question, and after the question.
    """

    preamble: str
    blocks: Mapping[str, str]
    before_question: str
    suffix: str


def prompt_format(renderer: Renderer, *, media: tuple[str, ...], bos: str) -> PromptFormat:
    """Split what the template renders around two sentinels.

    Parameters
    ----------
    renderer : processor or tokenizer
    media : tuple of str
        Kinds of the architecture; blocks are made for ``video`` and ``image``.
    bos : str
        Begin-of-sequence text, used alone when there is no template.

    Raises
    ------
    RefusedError
        The template rewrites, drops or reorders the items, so chunks cannot be placed one by one, or it writes
        today's date.
    """
    template = getattr(renderer, "chat_template", None)
    if template is not None and "strftime_now" in str(template) and "date_string" not in str(template):
        raise RefusedError(
            "the chat template writes today's date, so chunks of another day would not fit its preamble"
        )
    if template is None:
        return PromptFormat(bos, {}, "\n\nQuestion: ", "\nAnswer:")
    rich_content = "image" in media
    preamble, between, suffix = _split(renderer, [], rich_content)
    blocks: dict[str, str] = {}
    kinds: tuple[str, ...] = ("video", "image")
    for kind in kinds:
        if kind in media:
            before, middle, after = _split(renderer, [{"type": kind}], rich_content)
            if not before.startswith(preamble) or (middle, after) != (between, suffix):
                raise RefusedError(f"the chat template does not place a {kind} item as a block of its own")
            blocks[kind] = before[len(preamble) :]
    for pair in itertools.product(blocks, repeat=2):
        before, _, _ = _split(renderer, [{"type": kind} for kind in pair], rich_content)
        # Some templates sort the kinds; each item still is a block of its own, and chunks stand in the order asked for.
        if before not in {preamble + blocks[one] + blocks[other] for one, other in (pair, pair[::-1])}:
            raise RefusedError(f"the chat template writes a {pair[1]} item otherwise after a {pair[0]} item")
    return PromptFormat(preamble, blocks, between, suffix)


def _split(renderer: Renderer, items: list[dict[str, str]], rich_content: bool) -> tuple[str, str, str]:
    texts = [{"type": "text", "text": text} for text in (_FIRST, _SECOND)]
    content = [*items, *texts] if rich_content else f"{_FIRST}\n\n{_SECOND}"
    text = renderer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False, date_string=_DATE
    )
    if text.count(_FIRST) != 1 or text.count(_SECOND) != 1 or text.index(_FIRST) > text.index(_SECOND):
        raise RefusedError("the chat template rewrites its content items; chunks cannot be placed one by one")
    preamble, rest = text.split(_FIRST)
    between, suffix = rest.split(_SECOND)
    return preamble, between, suffix
