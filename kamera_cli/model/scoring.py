"""Batched forwards: many questions over many caches, one question after many places, recomputation of chosen tokens.

Questions of one prompt stand side by side behind the cached context; a mask keeps each to the context and itself, and
each starts at the same position, so the logits are those of as many separate prompts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kamera_cli.model.compat import (
    DynamicCache,
    Module,
    cache_argument,
    decoder_of,
    fill_cache,
    first_tokens,
    takes_masks,
)
from kamera_cli.model.runner import ModelRunner

_MASK_CELLS = 2**22
"""Most cells of one mask, new tokens times what they may look at: what a mask hides is computed all the same, so that
places far apart are better asked apart."""

_STACKED_TOKENS = 2**14
"""Most tokens of caches that share a forward; it needs a copy of them."""

_SWITCHING = threading.Lock()
"""Held while a decoder's attention is switched over."""


@dataclass(frozen=True)
class Forced:
    """A question with the answer that is fed to the model.

    Attributes
    ----------
    question_ids : torch.Tensor
        (n,) everything that follows the last chunk.
    answer_ids : torch.Tensor
        (m,) the expected answer, closed by an end token.
    """

    question_ids: torch.Tensor
    answer_ids: torch.Tensor

    @property
    def fed(self) -> torch.Tensor:
        """(n + m - 1,) ids that go into the model: the closing token is only predicted."""
        return torch.cat([self.question_ids, self.answer_ids[:-1]])


@torch.inference_mode()
def score(
    runner: ModelRunner,
    caches: Sequence[DynamicCache],
    start: int,
    prompts: Sequence[Forced],
    *,
    group: int = 8,
) -> list[list[torch.Tensor]]:
    """Logits at every answer position of every prompt over every cache, in one forward per ``group`` caches.

    Parameters
    ----------
    caches : sequence of DynamicCache
        Equally long contexts, batch of one each; not changed.
    start : int
        Position of the first question token on every axis.

    Returns
    -------
    list of list of torch.Tensor
        Per cache and prompt, (m, vocab) float32 on the CPU; row 0 predicts the first answer token.
    """
    lengths = [prompt.fed.numel() for prompt in prompts]
    embeddings = runner.embed(torch.cat([prompt.fed for prompt in prompts]))
    positions = torch.cat([runner.positions_from(start, length) for length in lengths], dim=-1)
    mask = _side_by_side(lengths, caches[0].get_seq_length()).to(runner.device)
    wanted: list[int] = []
    bounds: list[int] = []
    first = 0
    for prompt, length in zip(prompts, lengths, strict=True):
        answers = prompt.answer_ids.numel()
        wanted += range(first + length - answers, first + length)
        bounds.append(answers)
        first += length
    scored = []
    for at in range(0, len(caches), group):
        together = _stacked(caches[at : at + group])
        hidden = _forward(runner, together, embeddings, positions, mask)[:, wanted]
        logits = runner.model.get_output_embeddings()(hidden).float().cpu()
        scored += [list(row.split(bounds)) for row in logits]
    return scored


@dataclass(frozen=True)
class Place:
    """Where a question may follow: after the first tokens of a cache, at a position that is the same on every axis."""

    num_tokens: int
    position: int


def logits_after(
    runner: ModelRunner, cache: DynamicCache, places: Sequence[Place], token_ids: torch.Tensor
) -> torch.Tensor:
    """Next-token logits (n, vocab) after the same tokens behind each of n places; see `logits_after_each`."""
    return logits_after_each(runner, [cache], places, token_ids)[0]


@torch.inference_mode()
def logits_after_each(
    runner: ModelRunner, caches: Sequence[DynamicCache], places: Sequence[Place], token_ids: torch.Tensor
) -> torch.Tensor:
    """Next-token logits (A, n, vocab) after the same tokens behind each of n places of each of A caches.

    Each copy of the tokens sees what stands before its place and itself, so that the logits are those of n prompts. A
    decoder that takes no mask of one's own is asked n times.

    Parameters
    ----------
    caches : sequence of DynamicCache
        Of the same tokens at the same positions, batch of one each; not changed. Short ones share a forward.
    places : sequence of Place
        By ascending number of tokens.
    token_ids : torch.Tensor
        (m,) with m at least 1.
    """
    side_by_side = takes_masks(decoder_of(runner.model))
    together = len(caches) > 1 and side_by_side and len(caches) * places[-1].num_tokens <= _STACKED_TOKENS
    batches = [_stacked(caches)] if together else caches
    found = [_behind(runner, cache, places, token_ids, side_by_side) for cache in batches]
    return torch.cat(found)


def _behind(
    runner: ModelRunner,
    cache: DynamicCache,
    places: Sequence[Place],
    token_ids: torch.Tensor,
    side_by_side: bool,
) -> torch.Tensor:
    """Logits (A, n, vocab) over one cache whose batch are A contexts."""
    embeddings, num_new = runner.embed(token_ids), token_ids.numel()
    size, rows = cache.layers[0].keys.shape[0], []
    for some in _in_groups(places, num_new, side_by_side):
        held = first_tokens(cache, some[-1].num_tokens)
        positions = torch.cat([runner.positions_from(place.position, num_new) for place in some], dim=-1)
        if len(some) == size == 1:
            rows.append(runner.extend(held, embeddings, positions)[None, None])
            continue
        before = torch.tensor([place.num_tokens for place in some]).repeat_interleave(num_new)
        mask = _side_by_side([num_new] * len(some), some[-1].num_tokens)
        mask[..., : some[-1].num_tokens] = torch.arange(some[-1].num_tokens) < before[:, None]
        repeated = embeddings.repeat(len(some), 1)
        hidden = _forward(runner, held, repeated, positions, mask.to(runner.device))
        rows.append(runner.model.get_output_embeddings()(hidden[:, num_new - 1 :: num_new]))
    return torch.cat(rows, dim=1)


def _in_groups(places: Sequence[Place], num_new: int, side_by_side: bool) -> Iterator[list[Place]]:
    """Places that share a forward: as many as keep its mask below `_MASK_CELLS`."""
    group: list[Place] = []
    for place in places:
        rows = (len(group) + 1) * num_new
        if group and (not side_by_side or rows * (place.num_tokens + rows) > _MASK_CELLS):
            yield group
            group = []
        group.append(place)
    if group:
        yield group


def is_greedy_match(logits: torch.Tensor, answer_ids: torch.Tensor, ends: Sequence[int]) -> bool:
    """Whether greedy decoding would give exactly this answer and then end.

    Parameters
    ----------
    logits : torch.Tensor
        (m, vocab) from `score`.
    ends : sequence of int
        Token ids that end an answer.
    """
    best = logits.argmax(-1)
    return torch.equal(best[:-1], answer_ids[:-1]) and int(best[-1]) in ends


@torch.inference_mode()
def recompute(
    runner: ModelRunner,
    cache: DynamicCache,
    embeddings: torch.Tensor,
    positions: torch.Tensor,
    chosen: torch.Tensor,
) -> DynamicCache:
    """A copy of a cache in which some tokens were computed anew, layer by layer, over what the others hold.

    Parameters
    ----------
    cache : DynamicCache
        Context of P tokens, batch of one; not changed.
    embeddings : torch.Tensor
        (P, hidden) of the whole context.
    positions : torch.Tensor
        (3, P) or (P,).
    chosen : torch.Tensor
        (n,) ascending indices of the tokens.
    """
    fresh = _Overwriting(cache, chosen.to(runner.device))
    mask = chosen[:, None] >= torch.arange(embeddings.shape[0])[None]
    where = chosen.to(embeddings.device)
    _forward(runner, fresh, embeddings[where], positions[..., chosen], mask[None, None].to(runner.device))
    return fresh


class _Overwriting(DynamicCache):
    """New keys and values replace those at chosen places instead of being appended."""

    def __init__(self, cache: DynamicCache, chosen: torch.Tensor) -> None:
        super().__init__()
        self._chosen = chosen
        self.layers = fill_cache(
            [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        ).layers

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ):
        layer = self.layers[layer_idx]
        layer.keys[:, :, self._chosen] = keys
        layer.values[:, :, self._chosen] = values
        return layer.keys, layer.values


def _side_by_side(lengths: Sequence[int], num_cached: int) -> torch.Tensor:
    """(1, 1, N, P + N), true where a token may look: the whole context, and its own prompt up to itself."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    own = (owner[:, None] == owner[None]).tril()
    return torch.cat([torch.ones(len(owner), num_cached, dtype=torch.bool), own], dim=1)[None, None]


def _stacked(caches: Sequence[DynamicCache]) -> DynamicCache:
    """One cache whose batch are the given ones, in fresh memory."""
    return fill_cache([
        (torch.cat([layer.keys for layer in layers]), torch.cat([layer.values for layer in layers]))
        for layers in zip(*(cache.layers for cache in caches), strict=True)
    ])  # fmt: skip


def _forward(
    runner: ModelRunner,
    cache: DynamicCache,
    embeddings: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Last hidden states (A, N, hidden) of the same N tokens over the A contexts of a cache."""
    decoder = decoder_of(runner.model)
    size = cache.layers[0].keys.shape[0]
    batched = (
        positions[:, None].expand(-1, size, -1) if positions.ndim == 2 else positions[None].expand(size, -1)
    )
    with _dense_attention(decoder):
        output = decoder(
            inputs_embeds=embeddings[None].expand(size, -1, -1),
            position_ids=batched.to(runner.device),
            attention_mask=mask,
            use_cache=True,
            **{cache_argument(decoder): cache},
        )
    return output.last_hidden_state


@contextmanager
def _dense_attention(decoder: Module) -> Iterator[None]:
    """SDPA inside the block: flash-attn takes no mask of one's own."""
    config = decoder.config
    # One thread at a time: another would take this one's SDPA for what is to be restored.
    with _SWITCHING:
        before = config._attn_implementation
        config._attn_implementation = "sdpa"
        try:
            yield
        finally:
            config._attn_implementation = before
