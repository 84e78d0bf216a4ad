"""The three losses of the mind stage: answer, bind and look."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as nnf
from batches import IGNORE, QUESTION_TOKENS, Batch, question_bias
from forward import read
from torch import nn

BIND_LAYERS = 4


@dataclass(frozen=True)
class Losses:
    """What one batch costs, and for each question whether every answer token is right, (B, Q)."""

    answer: torch.Tensor
    bind: torch.Tensor
    look: torch.Tensor
    right: torch.Tensor


def mind_losses(
    model: nn.Module, features: torch.Tensor, batch: Batch, sets: dict[str, torch.Tensor]
) -> Losses:
    """Run one batch.

    Three losses: the answer words; *bind*, the hidden state in the middle of the stack at a card names what an earlier
    chunk says about its letter; *look*, where an answer word is due, half of the heads of the next layer attend to the
    card that holds the answer, or to the preamble when there is none.
    """
    text = model.model.language_model
    shape, prefix = batch.shape, batch.shape.prefix_tokens
    embeddings = text.embed_tokens(batch.ids)
    chunk, step = torch.arange(shape.num_chunks)[:, None, None], torch.arange(shape.num_steps)[:, None]
    pictures = features[batch.steps[:, chunk, step], batch.places].float().flatten(2, 3)
    start = torch.arange(shape.num_chunks)[:, None] * shape.chunk_tokens + 3
    places = (start + torch.arange(shape.chunk_tokens - 2)).flatten()
    embeddings = embeddings.index_copy(1, places, pictures.flatten(1, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        last, mid, scores = read(
            text,
            embeddings,
            batch.positions,
            prefix,
            question_bias(batch, torch.bfloat16),
            apart=shape.num_chunks if shape.apart else 0,
            middle=BIND_LAYERS,
            watch=BIND_LAYERS,
        )
        due = batch.targets != IGNORE
        logits = model.lm_head(last[:, prefix:][due]).float()
        bind = batch.bind.repeat_interleave(shape.kept, dim=2).flatten(1, 2)
        bound = bind[..., 0] != IGNORE
        bind_loss = torch.zeros(())
        if not shape.apart and bound.any():
            names = model.lm_head(mid[:, places][bound]).float()
            bind_loss = _bind_loss(names, bind[bound], sets)
    targets = batch.targets[due]
    right = torch.ones_like(batch.targets, dtype=torch.bool)
    right[due] = logits.argmax(-1) == targets
    return Losses(
        (nnf.cross_entropy(logits, targets, reduction="none") * sets["weight"][targets]).mean(),
        bind_loss,
        _look_loss(scores, batch, places, due & (batch.targets != model.config.text_config.eos_token_id)),
        right.unflatten(1, (shape.questions, -1)).all(-1),
    )


def _look_loss(scores: torch.Tensor, batch: Batch, places: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Negative log of the attention on the card of the answer, mean over heads and over ``rows`` (B, Q * L)."""
    shape = batch.shape
    wanted = torch.zeros(shape.batch, shape.questions, scores.shape[-1], dtype=torch.bool)
    wanted[:, :, places] = batch.look.repeat_interleave(shape.kept, dim=-1).flatten(2)
    wanted[:, :, :2] |= ~batch.look.flatten(2).any(-1, keepdim=True)
    owner = torch.arange(shape.questions).repeat_interleave(QUESTION_TOKENS).expand(shape.batch, -1)[rows]
    episode = torch.arange(shape.batch)[:, None].expand_as(rows)[rows]
    chosen = scores.transpose(1, 2)[rows].masked_fill(~wanted[episode, owner][:, None], -math.inf)
    return -chosen.logsumexp(-1).clamp_min(-30).mean()


def _bind_loss(names: torch.Tensor, labels: torch.Tensor, sets: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of the partner's words, each among the words of its own sort."""
    losses = []
    for column, sort in ((0, "colour"), (1, "shape"), (0, "digit")):
        match = labels[:, column, None] == sets[sort][None]
        keep = match.any(-1)
        if keep.any():
            losses.append(
                nnf.cross_entropy(names[keep][:, sets[sort]], match[keep].int().argmax(-1), reduction="sum")
                * (2 if sort == "digit" else 1)
            )
    return torch.stack(losses).sum() / (2 * len(labels))
