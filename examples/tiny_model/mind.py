"""The mind stage: the language model learns to read cards, to bind them across chunks, and to answer."""

from __future__ import annotations

import argparse
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from batches import QUESTION_TOKENS, STEP_TOKENS, Maker, Shape, label_sets
from losses import mind_losses
from torch import nn
from training import Optimizers, load_cards, make_optimizers, save_model
from transformers import AutoModelForImageTextToText, AutoProcessor

log = logging.getLogger("tiny")

MIND_LR, WARM_UP = 3e-3, 60
BIND_WEIGHT, LOOK_WEIGHT = 0.5, 0.3
TOKENS_PER_BATCH = 11_000
# Stages start when the one before is learned, but at these shares of the time at the latest.
LATEST_START = (0.5, 0.6, 0.72, 9.0)
SAVE_SECONDS = 120


@dataclass
class Progress:
    """Where the mind stage stands; saved with its checkpoints."""

    step: int = 0
    seconds: float = 0.0
    stage: int = 0
    two_hop: float = 0.0


def choose_shape(rng: np.random.Generator, progress: Progress) -> Shape:
    """Choose what the next batch looks like; stages go from short pairs to full windows with all picture tokens."""
    kept = 4
    if progress.stage == 0:
        num_chunks, facts, slot = 2, int(rng.choice([2, 3, 4])), 1
    elif progress.stage == 1:
        num_chunks, facts, slot = (
            int(rng.choice([2, 3, 4])),
            int(rng.choice([2, 3, 4, 4])),
            int(rng.choice([1, 2])),
        )
    else:
        num_chunks = int(rng.choice([2, 3, 4, 5, 6]))
        facts, slot = int(rng.choice([1, 2, 3, 4, 4, 4, 4, 4])), int(rng.choice([1, 2, 2, 2]))
        kept = int(rng.choice([4, 8])) if progress.stage == 2 else STEP_TOKENS
    apart = progress.step % 4 == 3
    trial = Shape(num_chunks, facts, slot, apart, 1, kept=kept)
    tokens = trial.prefix_tokens + trial.questions * QUESTION_TOKENS
    return Shape(num_chunks, facts, slot, apart, max(8, min(64, TOKENS_PER_BATCH // tokens)), kept=kept)


def train_mind(args: argparse.Namespace) -> None:
    """Train the language model on the features of the bank within a budget of wall time."""
    state_path, budget = args.out / "mind.pt", 60 * args.minutes
    processor = AutoProcessor.from_pretrained(args.model)
    model = AutoModelForImageTextToText.from_pretrained(args.out / "eye")
    vocabulary = processor.tokenizer.vocab
    features, labels = torch.load(args.out / "features.pt")
    maker = Maker(vocabulary, load_cards(labels.numpy()))
    sets = label_sets(vocabulary)
    model.model.visual.requires_grad_(False)
    text, peak = model.model.language_model, args.lr or MIND_LR
    optimizers = make_optimizers(
        list(text.layers.parameters()), [text.embed_tokens.weight, text.norm.weight], peak
    )
    progress, rng = Progress(), np.random.default_rng(args.seed)
    if state_path.exists():
        state = torch.load(state_path, weights_only=False)
        text.load_state_dict(state["text"])
        for optimizer, saved_state in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved_state)
        progress, rng = (
            Progress(**state["progress"]),
            np.random.default_rng([args.seed, state["progress"]["step"]]),
        )
        log.info("resumed at %s", progress)
    saved, window = time.monotonic(), []
    while progress.seconds < budget:
        begun, done = time.monotonic(), progress.seconds / budget
        rate = min(1, (progress.step + 1) / WARM_UP, max(0.01, 1.4 * (1 - done)))
        for optimizer, full_rate in zip(optimizers, (peak, peak / 4), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = full_rate * rate
        shape = choose_shape(rng, progress)
        batch = maker.make(rng, shape)
        losses = mind_losses(model, features, batch, sets)
        text.zero_grad()
        (losses.answer + BIND_WEIGHT * losses.bind + LOOK_WEIGHT * losses.look).backward()
        nn.utils.clip_grad_norm_(text.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        right = losses.right.numpy()
        scores = [
            right[batch.kinds == kind].mean() if (batch.kinds == kind).any() else np.nan for kind in range(4)
        ]
        bind = np.nan if shape.apart else losses.bind.item()
        window.append([losses.answer.item(), bind, losses.look.item(), *scores, batch.ids.numel()])
        if not shape.apart:
            progress.two_hop = 0.95 * progress.two_hop + 0.05 * float(np.nanmean([scores[1], scores[2]]))
        if (progress.two_hop > 0.93 and progress.stage < 2) or done > LATEST_START[progress.stage]:
            progress.stage, progress.two_hop = progress.stage + 1, 0.0
        progress.step += 1
        progress.seconds += time.monotonic() - begun
        if progress.step % 20 == 0:
            _report(progress, window, rate)
            window = []
        if time.monotonic() - saved > SAVE_SECONDS or progress.seconds >= budget:
            _save_state(state_path, model, optimizers, progress)
            save_model(model, args.model, args.out / "model")
            saved = time.monotonic()


def _report(progress: Progress, window: list[list[float]], rate: float) -> None:
    means = [
        float(np.nanmean(column)) if np.isfinite(column).any() else math.nan for column in np.array(window).T
    ]
    log.info(
        "step %d stage %d %.0fs rate %.2f answer %.3f bind %.3f look %.3f "
        "| one %.3f two %.3f hidden %.3f unknown %.3f | %d tok",
        progress.step,
        progress.stage,
        progress.seconds,
        rate,
        *means,
    )


def _save_state(path: Path, model: nn.Module, optimizers: Optimizers, progress: Progress) -> None:
    staging = path.with_suffix(".partial")
    state = {
        "text": model.model.language_model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": vars(progress),
    }
    torch.save(state, staging)
    staging.replace(path)
