"""The decode loop: greedy or sampled, with explicit positions, over a cache that is thrown away afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kamera_cli.errors import NotFiniteError
from kamera_cli.model.compat import DynamicCache
from kamera_cli.model.runner import ModelRunner


@dataclass(frozen=True)
class Answer:
    """Generated text, its token ids (without the closing one) and whether the model ended it itself."""

    text: str
    token_ids: tuple[int, ...]
    ended: bool


class Chooser:
    """Greedy for temperature 0, otherwise sampled from softmax(logits / temperature) with a seeded generator."""

    def __init__(self, temperature: float, seed: int) -> None:
        self._temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits: torch.Tensor) -> int:
        """Token id on the host for logits (vocab,): reading it waits for the device.

        Raises
        ------
        NotFiniteError
            A logit is NaN or infinite.
        """
        best = int(logits.argmax())  # a NaN counts as the largest
        if not math.isfinite(float(logits[best])):
            raise NotFiniteError("the model's output")
        if self._temperature == 0:
            return best
        probabilities = torch.softmax(logits.float().cpu() / self._temperature, dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


@torch.inference_mode()
def decode(
    runner: ModelRunner,
    cache: DynamicCache,
    first: int,
    position: int,
    *,
    choose: Chooser,
    max_new_tokens: int,
    on_token: Callable[[str], None] | None = None,
) -> Answer:
    """Continue from the first chosen token.

    Parameters
    ----------
    cache : DynamicCache
        Holds the whole prompt; it grows here.
    first : int
        Token id that followed the prompt.
    position : int
        Position of ``first`` on every axis.
    on_token : callable, optional
        Receives the text of the answer in pieces, as soon as each is complete.
    """
    ended, told = runner.eos_ids, ""
    produced: list[int] = []
    token = first
    while token not in ended and len(produced) < max_new_tokens:
        produced.append(token)
        if on_token is not None:
            # Decoded as a whole: a token alone loses its spaces, and may be part of a character.
            text = runner.tokenizer.decode(produced, skip_special_tokens=True)
            if not text.endswith("\ufffd"):
                on_token(text[len(told) :])
                told = text
        if len(produced) == max_new_tokens:
            break
        positions = runner.positions_from(position + len(produced) - 1, 1)
        logits = runner.extend(cache, runner.embed(torch.tensor([token])), positions)
        token = choose(logits)
    text = runner.tokenizer.decode(produced, skip_special_tokens=True).strip()
    return Answer(text, tuple(produced), token in ended)


def next_token_kl(reference: torch.Tensor, other: torch.Tensor) -> float:
    """KL(reference ‖ other) of two next-token distributions from logits (vocab,), in nats, computed in float64.

    Raises
    ------
    NotFiniteError
        A logit is NaN or infinite.
    """
    expected = torch.log_softmax(reference.double().cpu(), dim=-1)
    actual = torch.log_softmax(other.double().cpu(), dim=-1)
    kl = float((expected.exp() * (expected - actual)).sum())
    if not math.isfinite(kl):
        raise NotFiniteError("the model's output")
    return max(0.0, kl)
