"""Measure the embedded model: re-prefill, blind reuse and low-rank patches on fresh episodes, in fp32.

This is an implementation of its own, apart from `kamera_cli`: pre-RoPE keys and values are taken by hooks
from the plain Hugging Face model, rotated to their place in the window, patched, and handed to the model as a
cache.
Run: ``python examples/tiny_model/evaluate.py --episodes 1000 --out evaluation.json``
"""

from __future__ import annotations

import argparse
import inspect
import io
import json
import math
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import torch
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor, DynamicCache
from transformers.video_utils import VideoMetadata

from kamera_cli.tiny import model_path
from kamera_cli.tiny.render import render_chunk, write_video
from kamera_cli.tiny.vocabulary import UNKNOWN
from kamera_cli.tiny.world import Episode, Question, episode

MAX_ANSWER_TOKENS = 4
KV = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Prompt:
    """One episode as the model receives it.

    Attributes
    ----------
    embeddings : torch.Tensor
        (P, hidden) of preamble and chunks.
    positions : torch.Tensor
        (3, P).
    preamble : int
        Tokens before the first chunk.
    bounds : list of tuple
        Start and end of each chunk in the prefix.
    next_position : int
        Where the question starts.
    """

    embeddings: torch.Tensor
    positions: torch.Tensor
    preamble: int
    bounds: list[tuple[int, int]]
    next_position: int


def chunk_frames(spec, seed: int, source: str) -> np.ndarray:
    """Return 2 fps frames of a chunk, drawn directly or after a pass through H.264."""
    if source == "render":
        return render_chunk(spec, fps=2, seed=seed)
    rng = np.random.default_rng([seed, 5])
    buffer = (
        Path(f"/dev/shm/kamera-evaluate-{seed}.mp4") if Path("/dev/shm").is_dir() else Path(f"{seed}.mp4")
    )
    write_video(buffer, [spec], fps=2, crf=int(rng.integers(20, 33)), size=224, seed=seed)
    data = buffer.read_bytes()
    buffer.unlink()
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


class Reader:
    """The plain model with its processor, and what is needed to look inside."""

    def __init__(self, folder: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.text = self.model.model.language_model
        names = inspect.signature(type(self.text.layers[0].self_attn).forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"
        self.end = self.processor.tokenizer.convert_tokens_to_ids("<|im_end|>")

    def prompt_text(self, num_chunks: int, question: str) -> str:
        """Return the chat template's text for a window of videos."""
        content = [{"type": "video"}] * num_chunks + [{"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        return self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    def inputs(self, videos: list[np.ndarray], question: str):
        """Return the processor's output for a window and one question."""
        metadata = [
            VideoMetadata(
                total_num_frames=len(v), fps=2.0, duration=len(v) / 2, frames_indices=list(range(len(v)))
            )
            for v in videos
        ]
        return self.processor(
            text=[self.prompt_text(len(videos), question)],
            videos=videos,
            video_metadata=metadata,
            do_sample_frames=False,
            return_tensors="pt",
        )

    def prompt(self, videos: list[np.ndarray]) -> Prompt:
        """Encode a window; the question is cut off."""
        inputs = self.inputs(videos, "x")
        model, tokens = self.model.model, self.processor.tokenizer
        ids = inputs["input_ids"][0]
        positions, _ = model.get_rope_index(
            inputs["input_ids"],
            mm_token_type_ids=inputs["mm_token_type_ids"],
            video_grid_thw=inputs["video_grid_thw"],
            second_per_grid_ts=inputs["second_per_grid_ts"],
        )
        starts = (ids == tokens.convert_tokens_to_ids("<|vision_start|>")).nonzero()[:, 0].tolist()
        ends = ((ids == tokens.convert_tokens_to_ids("<|vision_end|>")).nonzero()[:, 0] + 1).tolist()
        embeddings = self.text.embed_tokens(ids)
        features = model.get_video_features(
            inputs["pixel_values_videos"], inputs["video_grid_thw"]
        ).pooler_output
        embeddings[ids == self.processor.video_token_id] = torch.cat(list(features))
        last = ends[-1]
        return Prompt(
            embeddings[:last],
            positions[:, 0, :last],
            starts[0],
            list(zip(starts, ends, strict=True)),
            int(positions[0, 0, last]),
        )

    def capture(self, embeddings: torch.Tensor, positions: torch.Tensor) -> KV:
        """Run a plain causal forward and return the pre-RoPE keys and values of each layer.

        Parameters
        ----------
        embeddings : torch.Tensor
            (B, T, hidden).
        positions : torch.Tensor
            (3, B, T).

        Returns
        -------
        list of tuple
            Keys and values, (B, T, width), for each layer.
        """
        found: dict[tuple[int, str], torch.Tensor] = {}
        handles = []
        for number, layer in enumerate(self.text.layers):
            for name in ("k_proj", "v_proj"):

                def keep(module: nn.Module, args, output, key=(number, name)) -> None:
                    found[key] = output

                handles.append(getattr(layer.self_attn, name).register_forward_hook(keep))
        try:
            self.text(inputs_embeds=embeddings, position_ids=positions, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return [(found[number, "k_proj"], found[number, "v_proj"]) for number in range(len(self.text.layers))]

    def _rotated_cache(self, kv: KV, positions: torch.Tensor) -> DynamicCache:
        """Rotate (P, width) keys to their positions (3, P) and build a cache of batch 1."""
        cos, sin = self.text.rotary_emb(kv[0][0], positions[:, None])
        cache = DynamicCache()
        dim = self.text.layers[0].self_attn.head_dim
        for number, (keys, values) in enumerate(kv):
            k = keys.unflatten(-1, (-1, dim)).transpose(0, 1)[None]
            v = values.unflatten(-1, (-1, dim)).transpose(0, 1)[None]
            low, high = k.chunk(2, dim=-1)
            k = k * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]
            cache.update(k, v, number)
        return cache

    def answers(
        self, prompt: Prompt, kv: KV, questions: tuple[Question, ...]
    ) -> tuple[list[str], torch.Tensor]:
        """Greedily answer every question from given keys and values of the prefix.

        Returns
        -------
        texts : list of str
            One for each question.
        first : torch.Tensor
            (Q, vocabulary), log-probabilities of the first answer token.
        """
        tokenizer, size = self.processor.tokenizer, len(prompt.embeddings)
        suffixes = [
            tokenizer(self.prompt_text(0, question.text).split("user\n", 1)[1])["input_ids"]
            for question in questions
        ]
        width = max(map(len, suffixes)) + MAX_ANSWER_TOKENS
        lengths = torch.tensor([len(s) for s in suffixes])
        ids = torch.full((len(suffixes), width), tokenizer.pad_token_id)
        for row, suffix in enumerate(suffixes):
            ids[row, : len(suffix)] = torch.tensor(suffix)
        rows = torch.arange(len(suffixes))
        total = len(suffixes) * width
        place = torch.arange(width).repeat(len(suffixes))
        owner = rows.repeat_interleave(width)
        allowed = torch.cat(
            [
                torch.ones(total, size, dtype=torch.bool),
                (owner[:, None] == owner[None]) & (place[:, None] >= place[None]),
            ],
            dim=1,
        )
        mask = torch.zeros(1, 1, *allowed.shape).masked_fill_(~allowed, torch.finfo(torch.float32).min)
        positions = (place + prompt.next_position).expand(3, 1, -1)
        done = torch.zeros(len(suffixes), dtype=torch.bool)
        words: list[list[int]] = [[] for _ in suffixes]
        first = torch.empty(0)
        for step in range(MAX_ANSWER_TOKENS):
            hidden = self.text(
                inputs_embeds=self.text.embed_tokens(ids.view(1, -1)),
                position_ids=positions,
                attention_mask={"full_attention": mask},
                use_cache=True,
                **{self.cache_name: self._rotated_cache(kv, prompt.positions)},
            ).last_hidden_state[0]
            logits = self.model.lm_head(hidden.view(len(suffixes), width, -1)[rows, lengths - 1])
            first = logits.log_softmax(-1) if step == 0 else first
            best = logits.argmax(-1)
            done |= best == self.end
            for row in rows[~done].tolist():
                words[row].append(int(best[row]))
                ids[row, lengths[row]] = best[row]
                lengths[row] += 1
            if bool(done.all()):
                break
        return [tokenizer.decode(w) for w in words], first

    def canonical(self, prompt: Prompt, *, bare: bool) -> list[KV]:
        """Pre-RoPE keys and values of each chunk computed alone, behind the preamble or bare."""
        result = []
        lead = 0 if bare else prompt.preamble
        for start, end in prompt.bounds:
            shift = prompt.positions[0, start] - lead
            body = prompt.positions[:, start:end] - shift
            positions = torch.cat([prompt.positions[:, :lead], body], dim=1)
            embeddings = torch.cat([prompt.embeddings[:lead], prompt.embeddings[start:end]])
            kv = self.capture(embeddings[None], positions[:, None])
            result.append([(k[0, lead:], v[0, lead:]) for k, v in kv])
        return result


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
