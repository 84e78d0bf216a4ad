"""What both training stages use: banks from disk, optimizers, checkpoint folders."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from bank import LABELS
from torch import nn

Optimizers = tuple[torch.optim.Optimizer, torch.optim.Optimizer]


def load_banks(paths: list[Path]) -> tuple[torch.Tensor, np.ndarray]:
    """Read banks one behind the other: frames (num_cards * 2, 2, 3, 112, 112) and labels (num_cards, 3)."""
    frames, labels = [], []
    for path in paths:
        with np.load(path) as bank:
            frames.append(torch.from_numpy(bank["frames"]).flatten(0, 1))
            labels.append(bank["labels"])
    return torch.cat(frames), np.concatenate(labels)


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
