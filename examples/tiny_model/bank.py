"""A bank of card frames that went through H.264, resized as the processor does it.

The bank holds chunks of four cards that last two seconds each, sampled at 2 fps, so each card gives two grid steps.
Run: ``python examples/tiny_model/bank.py OUT.npz``
"""

from __future__ import annotations

import argparse
import io
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import torch
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tvf

from kamera_cli.tiny.render import render_chunk, write_video
from kamera_cli.tiny.vocabulary import COLOURS, DIGITS, LETTERS, SHAPES
from kamera_cli.tiny.world import NUM_ENTITIES, Card, ChunkSpec, entity_name

SIDE = 112
CARDS_PER_CHUNK = 4
LABELS = (*COLOURS, *SHAPES, *LETTERS, *DIGITS)
# 10 renderings of each of the 640 kind-1 cards, 16 of each of the 200 kind-2 cards.
ROUNDS_ENTITY, ROUNDS_DIGIT = 10, 16


@dataclass(frozen=True)
class Bank:
    """Pixels and labels of card clips.

    Attributes
    ----------
    frames : numpy.ndarray
        uint8, (num_cards, 2, 2, 3, 112, 112): card, grid step, frame of the step, RGB.
    labels : numpy.ndarray
        int64, (num_cards, 3): indexes into ``LABELS`` of colour, shape, letter (kind 1) or digit, -1, letter (kind 2).
    """

    frames: np.ndarray
    labels: np.ndarray


def resize_frames(frames: np.ndarray) -> torch.Tensor:
    """Resize (N, H, W, 3) uint8 to (N, 3, 112, 112) uint8, as ``Qwen2VLVideoProcessor`` does."""
    pixels = torch.from_numpy(frames).permute(0, 3, 1, 2)
    return tvf.resize(pixels, [SIDE, SIDE], interpolation=InterpolationMode.BICUBIC, antialias=True)


def decode(data: bytes, every: int) -> np.ndarray:
    """Decode every ``every``-th frame of a video file in memory to (N, H, W, 3) uint8."""
    with av.open(io.BytesIO(data)) as container:
        frames = [
            f.to_ndarray(format="rgb24") for i, f in enumerate(container.decode(video=0)) if i % every == 0
        ]
    return np.stack(frames)


def _draw_specs(rng: np.random.Generator) -> list[ChunkSpec]:
    """Cover all cards of both kinds evenly, in random company, in random order."""
    num_letters, num_digits = len(LETTERS), len(DIGITS)
    cards = [
        Card(LETTERS[i % num_letters], entity=entity_name(i // num_letters))
        for _ in range(ROUNDS_ENTITY)
        for i in rng.permutation(NUM_ENTITIES * num_letters)
    ]
    digits = [
        Card(LETTERS[i % num_letters], digit=DIGITS[i // num_letters])
        for _ in range(ROUNDS_DIGIT)
        for i in rng.permutation(num_digits * num_letters)
    ]
    groups = [
        ChunkSpec(tuple(group[i : i + CARDS_PER_CHUNK]))
        for group in (cards, digits)
        for i in range(0, len(group), CARDS_PER_CHUNK)
    ]
    return [groups[i] for i in rng.permutation(len(groups))]


def _label(card: Card) -> list[int]:
    letter = LABELS.index(card.letter)
    if card.kind == 2:
        return [LABELS.index(card.digit), -1, letter]
    colour, shape = card.entity.split()
    return [LABELS.index(colour), LABELS.index(shape), letter]


def build_bank(seed: int, scratch: Path, limit: int | None = None) -> Bank:
    """Render, encode, decode and resize the bank.

    Parameters
    ----------
    seed : int
        Seed of every choice.
    scratch : pathlib.Path
        A file name that may be overwritten, ``.mp4``.
    limit : int, optional
        Number of chunks, for a quick look.
    """
    rng = np.random.default_rng(seed)
    specs = _draw_specs(rng)[:limit]
    frames = np.empty((len(specs), CARDS_PER_CHUNK, 2, 2, 3, SIDE, SIDE), dtype=np.uint8)
    for index, spec in enumerate(specs):
        size = int(rng.choice([224, 224, 224, 336, 448]))
        look = int(rng.integers(1 << 40))
        if rng.random() < 0.15:
            pixels = render_chunk(spec, fps=2, size=size, seed=look)
        else:
            every = int(rng.choice([1, 1, 1, 4]))
            write_video(scratch, [spec], fps=2 * every, crf=int(rng.integers(18, 36)), size=size, seed=look)
            pixels = decode(scratch.read_bytes(), every)
        frames[index] = resize_frames(pixels).reshape(frames.shape[1:]).numpy()
    labels = np.array([_label(card) for spec in specs for card in spec.cards])
    return Bank(frames.reshape(-1, *frames.shape[2:]), labels)


def main() -> None:
    """Write the bank as an uncompressed ``.npz``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()
    bank = build_bank(args.seed, args.out.with_suffix(".mp4"), args.limit)
    np.savez(args.out, frames=bank.frames, labels=bank.labels)


if __name__ == "__main__":
    main()
