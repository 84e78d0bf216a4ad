"""The plain Hugging Face model with hooks for its keys and values, apart from `kamera_cli`.

Pre-RoPE keys and values are taken from the key and value projections, rotated to their place in a window, and
handed back to the model as a cache.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor, DynamicCache
from transformers.video_utils import VideoMetadata

from kamera_cli.tiny.world import Question

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
