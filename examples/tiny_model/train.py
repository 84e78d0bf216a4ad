"""Train `kamera-tiny` on one CPU core: first the eye, then the mind.

The *eye* stage teaches the vision tower to name what is on a card. Its outputs for the whole bank are then
computed once, and the *mind* stage trains the language model on them. Needs a bank (``bank.py``) and an
untrained model (``build_processor.py``)::

    python bank.py bank.npz
    python build_processor.py start
    python train.py eye --bank bank.npz --model start --out run
    python train.py mind --bank bank.npz --model start --out run --minutes 75

``mind --ideal`` can warm up while the eye still trains; run it with the same ``--out`` and go on without the flag.
The mind stage can be stopped and started again; ``run/model`` is a complete checkpoint folder at any time.
"""

from __future__ import annotations

import argparse
import logging
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as nnf
from bank import LABELS
from batches import IGNORE, QUESTION_TOKENS, STEP_TOKENS, Batch, Maker, Shape, label_sets, question_bias
from forward import patches_of, read, see
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor

log = logging.getLogger("tiny")

EYE_STEPS, EYE_BATCH, EYE_LR, TEMPERATURE = 1500, 64, 1e-2, 0.07
MAX_SHIFT = 5
FEATURE_NORM = 1.7
MIND_LR, WARM_UP = 5e-3, 60
BIND_LAYERS, BIND_WEIGHT, LOOK_WEIGHT = 4, 0.5, 0.3
TOKENS_PER_BATCH = 11_000
LATEST_START = (0.5, 0.6, 0.72, 9.0)
SAVE_SECONDS = 120
Optimizers = tuple[torch.optim.Optimizer, torch.optim.Optimizer]


def load_cards(labels: np.ndarray) -> dict[tuple[str, str], np.ndarray]:
    """Group the clips of a bank by what is on the card."""
    groups: dict[tuple[str, str], list[int]] = {}
    for number, (first, shape, letter) in enumerate(labels.tolist()):
        thing = LABELS[first] if shape < 0 else f"{LABELS[first]} {LABELS[shape]}"
        groups.setdefault((LABELS[letter], thing), []).append(number)
    return {key: np.array(numbers) for key, numbers in groups.items()}


def save_model(model: nn.Module, source: Path, target: Path) -> None:
    """Write weights with the processor's files beside them; the folder changes at once."""
    staging = target.with_name(target.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    shutil.copytree(source, staging, ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(staging)
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)


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


def make_optimizers(
    parameters: list[nn.Parameter], embeddings: list[nn.Parameter], rate: float
) -> Optimizers:
    """Muon for the matrices, which halves the number of steps here, and AdamW for everything else."""
    matrices = [p for p in parameters if p.ndim == 2]
    others = [p for p in parameters if p.ndim != 2] + embeddings
    return (
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate / 4, betas=(0.9, 0.98), weight_decay=0.05),
    )


def load_banks(paths: list[Path]) -> tuple[torch.Tensor, np.ndarray]:
    """Read banks one behind the other: frames (num_cards * 2, 2, 3, 112, 112) and labels (num_cards, 3)."""
    frames, labels = [], []
    for path in paths:
        with np.load(path) as bank:
            frames.append(torch.from_numpy(bank["frames"]).flatten(0, 1))
            labels.append(bank["labels"])
    return torch.cat(frames), np.concatenate(labels)


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
    held = 1024
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


def ideal_features(table: torch.Tensor, labels: np.ndarray) -> torch.Tensor:
    """Stand-in for the features of a bank before the eye is trained: label embeddings with noise.

    Returns
    -------
    torch.Tensor
        fp16, (num_cards * 2, 16, hidden), of mean norm ``FEATURE_NORM``.
    """
    rows = torch.cat([table, torch.zeros(1, table.shape[1])])[torch.from_numpy(labels)].sum(1)
    features = rows[:, None, None].expand(-1, 2, STEP_TOKENS, -1).flatten(0, 1)
    features = features + 0.5 / table.shape[1] ** 0.5 * torch.randn(features.shape)
    return (features * FEATURE_NORM / features.norm(dim=-1).mean()).half()


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


def train_mind(args: argparse.Namespace) -> None:
    """Train the language model on the features of the bank within a budget of wall time."""
    state_path, budget = args.out / "mind.pt", 60 * args.minutes
    processor = AutoProcessor.from_pretrained(args.model)
    model = AutoModelForImageTextToText.from_pretrained(args.model if args.ideal else args.out / "eye")
    vocabulary = processor.tokenizer.vocab
    if args.ideal:
        _, labels = load_banks(args.bank)
        words = torch.tensor([vocabulary[word] for word in LABELS])
        features = ideal_features(model.model.language_model.embed_tokens.weight.detach()[words], labels)
    else:
        features, labels = torch.load(args.out / "features.pt")
        labels = labels.numpy()
    maker = Maker(vocabulary, load_cards(labels))
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


def main() -> None:
    """Run one stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=["eye", "mind"])
    parser.add_argument("--bank", type=Path, nargs="+", required=True)
    parser.add_argument("--model", type=Path, required=True, help="untrained model with its processor")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--minutes", type=float, default=75, help="wall time of the mind stage, over all restarts"
    )
    parser.add_argument(
        "--ideal", action="store_true", help="warm the mind up on ideal features, without an eye"
    )
    parser.add_argument("--steps", type=int, default=EYE_STEPS, help="steps of the eye stage")
    parser.add_argument("--lr", type=float, help=f"peak rate of Muon; eye {EYE_LR}, mind {MIND_LR}")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(1)
    {"eye": train_eye, "mind": train_mind}[args.stage](args)


if __name__ == "__main__":
    main()
