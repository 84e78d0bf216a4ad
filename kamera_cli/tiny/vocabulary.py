"""Every word of the card world: attributes on cards, phrasings of questions, and the model's word list."""

from __future__ import annotations

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "black")
SHAPES = ("circle", "square", "triangle", "star")
LETTERS = tuple("bcdefghjklmnprstvxyz")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NUMERALS = tuple("0123456789")
UNKNOWN = "unknown"

_ASK = {
    "letter": ("which letter", "what letter"),
    "digit": ("which digit", "what digit", "which number", "what number"),
    "entity": ("which shape", "what shape", "which figure", "what figure"),
}
_LINK = ("belongs to", "goes with", "is paired with", "matches")
_LINK_ON_ONE_CARD = ("is next to", "stands beside")
_GIVEN = {
    "letter": ("the letter {}", "letter {}"),
    "digit": ("the digit {}", "the number {}", "number {}"),
    "entity": ("the {}", "the {} card"),
}
_FRAMES = ("{ask} {link} {given}?", "tell me {ask} {link} {given}.", "{given}: {ask} {link} it?")

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|pad|>",
    "<|unk|>",
)


def phrasings(asked: str, given: str) -> tuple[str, ...]:
    """List the templates of one kind of question; each has one ``{}`` for the given thing.

    Parameters
    ----------
    asked, given : {"letter", "digit", "entity"}
        What the answer names, and what the question names.

    Returns
    -------
    tuple of str
        In a fixed order, starting with an upper-case letter.

    Raises
    ------
    KeyError
        When either name is not one of the three.
    """
    links = _LINK + _LINK_ON_ONE_CARD if "letter" in (asked, given) else _LINK
    texts = []
    for frame in _FRAMES:
        for ask in _ASK[asked]:
            for link in links:
                for thing in _GIVEN[given]:
                    text = frame.format(ask=ask, link=link, given=thing)
                    texts.append(text[0].upper() + text[1:])
    return tuple(texts)


def word_list() -> tuple[str, ...]:
    """Return all lower-case words and marks that the tokenizer knows, without the special tokens.

    Returns
    -------
    tuple of str
        Sorted, without repeats; the position in this list plus the number of special tokens is the token id.
    """
    text = " ".join(
        (
            *_FRAMES,
            *_LINK,
            *_LINK_ON_ONE_CARD,
            *(t for group in (_ASK, _GIVEN) for ts in group.values() for t in ts),
        )
    )
    for name in ("ask", "link", "given"):
        text = text.replace("{" + name + "}", " ")
    words = set(text.replace("{}", " ").replace("?", " ").replace(".", " ").replace(":", " ").split())
    words |= {*COLOURS, *SHAPES, *LETTERS, *DIGITS, *NUMERALS, UNKNOWN, "?", ".", ":", ",", "!"}
    words |= {"user", "assistant", "system", "in", "on", "of", "and", "video", "shown", "see", "do", "you"}
    return tuple(sorted(words))
