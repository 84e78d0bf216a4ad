"""The eye stage: the vision tower learns to point to the embeddings of the words on a card."""

from __future__ import annotations

import argparse
import logging
import math

import torch
import torch.nn.functional as nnf
from bank import LABELS
from batches import STEP_TOKENS
from forward import patches_of, see
from training import load_banks, make_optimizers, save_model
from transformers import AutoModelForImageTextToText, AutoProcessor

log = logging.getLogger("tiny")

EYE_STEPS, EYE_BATCH, EYE_LR, TEMPERATURE = 1500, 64, 1e-2, 0.07
MAX_SHIFT = 5
FEATURE_NORM = 1.7


def name_loss(
    features: torch.Tensor, words: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Cosine loss of picture tokens against the embeddings of the words on their card.

    Parameters
    ----------
    features : torch.Tensor
        (N, 16, hidden).
    words : torch.Tensor
        (len(LABELS), hidden), text embeddings.
    labels : torch.Tensor
        int64, (N, 3), -1 where there is none.

    Returns
    -------
    loss : torch.Tensor
        Mean over tokens and labels; the other labels of the card are left out of the softmax.
    accuracy : float
        Share of cards whose mean token names all of its labels.
    """
    scores = nnf.normalize(features.float(), dim=-1) @ nnf.normalize(words, dim=-1).t() / TEMPERATURE
    true = torch.zeros(len(labels), words.shape[0], dtype=torch.bool)
    rows = torch.arange(len(labels))
    for column in labels.t():
        true[rows[column >= 0], column[column >= 0]] = True
    losses = []
    for column in labels.t():
        keep = column >= 0
        others = true[keep].clone()
        others[torch.arange(len(others)), column[keep]] = False
        masked = scores[keep].masked_fill(others[:, None], -1e4)
        losses.append(nnf.cross_entropy(masked.flatten(0, 1), column[keep].repeat_interleave(STEP_TOKENS)))
    means = scores.mean(1)
    lowest_true = means.masked_fill(~true, math.inf).amin(1)
    highest_false = means.masked_fill(true, -math.inf).amax(1)
    return torch.stack(losses).mean(), float((lowest_true > highest_false).float().mean())


def shift_frames(frames: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Move each grid step by up to ``MAX_SHIFT`` pixels in both directions; what leaves comes in on the other side."""
    moves = torch.randint(-MAX_SHIFT, MAX_SHIFT + 1, (len(frames), 2), generator=generator).tolist()
    return torch.stack([torch.roll(f, move, dims=(-2, -1)) for f, move in zip(frames, moves, strict=True)])


def train_eye(args: argparse.Namespace) -> None:
    """Train the vision tower towards the untrained label embeddings; save the model and the features of the bank.

    Goes on from ``eye-raw`` in the output folder when it is there.
    """
    processor = AutoProcessor.from_pretrained(args.model)
    begun = args.out / "eye-raw"
    model = AutoModelForImageTextToText.from_pretrained(begun if begun.exists() else args.model)
    visual, table = model.model.visual, model.model.language_model.embed_tokens.weight.detach()
    mean, std = (
        torch.tensor(v) for v in (processor.video_processor.image_mean, processor.video_processor.image_std)
    )
    words = table[torch.tensor([processor.tokenizer.vocab[word] for word in LABELS])]
    frames, card_labels = load_banks(args.bank)
    labels = torch.from_numpy(card_labels).repeat_interleave(2, dim=0)
    held = min(1024, len(frames) // 10)
    optimizers = make_optimizers(list(visual.parameters()), [], args.lr or EYE_LR)
    total = args.steps
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1, (s + 1) / 30, max(0.01, 1.4 * (1 - s / total))))
        for o in optimizers
    ]
    generator = torch.Generator().manual_seed(args.seed)
    for step in range(total + 1):
        if step % 100 == 0:
            with torch.no_grad():
                seen = torch.cat([see(visual, patches_of(f, mean, std)) for f in frames[:held].split(128)])
                loss, accuracy = name_loss(seen, words, labels[:held])
            log.info("eye step %d held-out loss %.4f named %.4f", step, float(loss), accuracy)
            save_model(model, args.model, begun)
        pick = held + torch.randint(len(frames) - held, (EYE_BATCH,), generator=generator)
        patches = patches_of(shift_frames(frames[pick], generator), mean, std).bfloat16()
        gain = 1 + 0.1 * torch.randn(EYE_BATCH, 1, 1, generator=generator).bfloat16()
        shift = 0.1 * torch.randn(EYE_BATCH, 1, 1, generator=generator).bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            features = see(visual, patches * gain + shift)
        loss, _ = name_loss(features, words, labels[pick])
        visual.zero_grad()
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        features = torch.cat([see(visual, patches_of(f, mean, std)).half() for f in frames.split(256)])
        scale = FEATURE_NORM / features.float().norm(dim=-1).mean()
        visual.merger.mlp[2].weight.mul_(scale)
        visual.merger.mlp[2].bias.mul_(scale)
    save_model(model, args.model, args.out / "eye")
    torch.save(((features * scale.half()), torch.from_numpy(card_labels)), args.out / "features.pt")
    log.info("features %s", tuple(features.shape))
