"""Measure the embedded model: re-prefill, blind reuse and low-rank patches on fresh episodes, in fp32.

Run: ``python examples/tiny_model/evaluate.py --episodes 1000 --first-seed 1000 --out evaluation.json``
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from bank import decode
from reader import KV, Reader

from kamera_cli.tiny import model_path
from kamera_cli.tiny.render import render_chunk, write_video
from kamera_cli.tiny.vocabulary import UNKNOWN
from kamera_cli.tiny.world import ChunkSpec, Episode, Question, episode


def chunk_frames(spec: ChunkSpec, seed: int, source: str) -> np.ndarray:
    """Return 2 fps frames of a chunk, (16, 224, 224, 3) uint8, drawn directly or after a pass through H.264."""
    if source == "render":
        return render_chunk(spec, fps=2, seed=seed)
    crf = int(np.random.default_rng([seed, 5]).integers(20, 33))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chunk.mp4"
        write_video(path, [spec], fps=2, crf=crf, size=224, seed=seed)
        return decode(path.read_bytes(), every=1)


def join(head: KV, chunks: list[KV]) -> KV:
    """Concatenate the preamble's and the chunks' keys and values, layer by layer."""
    return [
        tuple(torch.cat([head[layer][i], *(chunk[layer][i] for chunk in chunks)]) for i in (0, 1))
        for layer in range(len(head))
    ]


def patched(
    canonical: list[KV], full: KV, bounds: list[tuple[int, int]], ranks: list[int]
) -> dict[int, list[KV]]:
    """Add the truncated difference to canonical keys and values, for each rank."""
    result: dict[int, list[KV]] = {rank: [] for rank in ranks}
    for kv, (start, end) in zip(canonical, bounds, strict=True):
        layers: dict[int, KV] = {rank: [] for rank in ranks}
        for layer, pair in enumerate(kv):
            factors = [
                torch.linalg.svd(full[layer][i][start:end] - pair[i], full_matrices=False) for i in (0, 1)
            ]
            for rank in ranks:
                layers[rank].append(
                    tuple(
                        pair[i] + (u[:, :rank] * s[:rank]) @ v[:rank] for i, (u, s, v) in enumerate(factors)
                    )
                )
        for rank in ranks:
            result[rank].append(layers[rank])
    return result


def interval(right: int, count: int) -> dict[str, float | int]:
    """Accuracy with its 95 % Wilson interval."""
    if count == 0:
        return {"count": 0}
    z, p = 1.96, right / count
    centre = (p + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return {
        "accuracy": round(p, 4),
        "low": round(centre - half, 4),
        "high": round(centre + half, 4),
        "count": count,
    }


def sort_of(question: Question) -> str:
    """Name the group in which a question is counted."""
    if question.answer == UNKNOWN:
        return f"unknown_{question.hops}_hop" if question.chunks else "unknown_absent"
    return "two_hop" if question.hops == 2 else "one_hop"


def answer_with_generate(reader: Reader, videos: list[np.ndarray], question: str) -> str:
    """Answer one question by ``model.generate`` on the processor's output."""
    inputs = reader.inputs(videos, question)
    output = reader.model.generate(**inputs, do_sample=False, max_new_tokens=8)
    return reader.processor.tokenizer.decode(
        output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )


def evaluate(
    reader: Reader, seeds: range, ranks: list[int], source: str, generate: int, patch_every: int
) -> dict:
    """Run all arms.

    Parameters
    ----------
    reader : Reader
        The model.
    seeds : range
        Seeds of the episodes; the number of chunks is 3 to 6.
    ranks : list of int
        Ranks of the patched arms.
    source : {"h264", "render"}
        Where frames come from.
    generate : int
        Number of episodes for which ``model.generate`` is compared with the re-prefill arm.
    patch_every : int
        The patched arms and bare capture run on each ``patch_every``-th episode.
    """
    right: dict[tuple[str, str], list[int]] = defaultdict(list)
    divergence: dict[tuple[str, str], list[float]] = defaultdict(list)
    differ = compared = 0
    for seed in seeds:
        item: Episode = episode(seed, num_chunks=3 + seed % 4, split="eval")
        videos = [chunk_frames(spec, 100 * seed + i, source) for i, spec in enumerate(item.chunks)]
        prompt = reader.prompt(videos)
        full = [(k[0], v[0]) for k, v in reader.capture(prompt.embeddings[None], prompt.positions[:, None])]
        head = [(k[: prompt.preamble], v[: prompt.preamble]) for k, v in full]
        canonical = reader.canonical(prompt, bare=False)
        arms = {"reprefill": full, "blind": join(head, canonical)}
        if seed % patch_every == 0:
            bare = reader.canonical(prompt, bare=True)
            arms["blind_bare"] = join(head, bare)
            for name, base in (("patch", canonical), ("patch_bare", bare)):
                for rank, chunks in patched(base, full, prompt.bounds, ranks).items():
                    arms[f"{name}_{rank}"] = join(head, chunks)
        reference = torch.empty(0)
        for arm, kv in arms.items():
            texts, first = reader.answers(prompt, kv, item.questions)
            reference = first if arm == "reprefill" else reference
            kl = (reference.exp() * (reference - first)).sum(-1).tolist()
            for question, text, value in zip(item.questions, texts, kl, strict=True):
                right[arm, sort_of(question)].append(text == question.answer)
                divergence[arm, sort_of(question)].append(value)
            if arm == "reprefill" and seed - seeds.start < generate:
                for question, text in zip(item.questions, texts, strict=True):
                    compared += 1
                    differ += text != answer_with_generate(reader, videos, question.text)
    table: dict[str, dict] = {}
    for (arm, sort), marks in sorted(right.items()):
        entry = interval(sum(marks), len(marks))
        table.setdefault(arm, {})[sort] = entry | {"kl": round(float(np.mean(divergence[arm, sort])), 6)}
    return {"arms": table, "generate_compared": compared, "generate_differs": differ}


def main() -> None:
    """Print and optionally save the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=model_path())
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--source", choices=["h264", "render"], default="h264")
    parser.add_argument("--generate", type=int, default=5)
    parser.add_argument("--patch-every", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.monotonic()
    seeds = range(args.first_seed, args.first_seed + args.episodes)
    with torch.inference_mode():
        result = evaluate(Reader(args.model), seeds, args.ranks, args.source, args.generate, args.patch_every)
    result |= {"episodes": args.episodes, "first_seed": args.first_seed, "source": args.source}
    result["seconds"] = round(time.monotonic() - begun, 1)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
