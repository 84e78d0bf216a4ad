"""The model runner: every forward call of kamera, with explicit positions and a full mask.

Nothing is left to state on the model object (design §2, "Positions"): Qwen-VL models remember the last rope delta, and
a mask that covers only the new tokens is accepted without an error.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch

from kamera_cli.errors import UsageError
from kamera_cli.model.compat import DynamicCache, cache_argument, decoder_of
from kamera_cli.model.families.gqa import GQA, Capture, LayerKV
from kamera_cli.model.inputs import ChunkInputs, Segment, media_inputs
from kamera_cli.model.loading import LoadedModel
from kamera_cli.model.positions import probe, text_positions
from kamera_cli.model.prompt import prompt_format


@dataclass(frozen=True)
class EncodedChunk:
    """Embeddings as the decoder receives them, (T, hidden), and canonical KV per layer."""

    embeddings: torch.Tensor
    layers: list[LayerKV]
    vision_ms: float
    prefill_ms: float


@dataclass(frozen=True)
class Reencoded:
    """A prompt that was encoded and prefilled from its model inputs: cache, logits (vocab,) and where it ends."""

    cache: DynamicCache
    logits: torch.Tensor
    next_position: int
    vision_ms: float
    prefill_ms: float


@dataclass(frozen=True)
class _Run:
    embeddings: torch.Tensor
    hidden: torch.Tensor
    vision_ms: float
    prefill_ms: float


class ModelRunner:
    """A loaded checkpoint with its prompt format, family and preamble.

    Attributes
    ----------
    family : GQA
    preamble : Segment
        Stands at position 0 of every prompt, exactly once.
    preamble_layers : list of LayerKV
        Its KV, computed once at load; it depends on nothing.
    vision_calls : int
        Forwards of the vision tower so far.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.model, self.tokenizer, self.processor = loaded.model, loaded.tokenizer, loaded.processor
        self.device, self.dtype = loaded.device, loaded.dtype
        self.architecture = loaded.checkpoint.architecture
        self.family = GQA(self.model)
        self.vision_calls = 0
        self._decoder = decoder_of(self.model)
        self._cache_argument = cache_argument(self._decoder)
        self._head = self.model.get_output_embeddings()
        self._mrope = self.architecture.has_vision
        self.prompt = prompt_format(
            self.processor or self.tokenizer,
            media=self.architecture.media,
            bos=self.tokenizer.bos_token or "",
        )
        preamble = self.tokenize(self.prompt.preamble)
        self.preamble_ids = preamble
        self.preamble = self.text_segment(preamble)
        self.preamble_layers = self._preamble_layers()

    @property
    def max_tokens(self) -> int:
        """Longest prompt of the model, in positions."""
        return self._decoder.config.max_position_embeddings

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end an answer."""
        eos = self.model.generation_config.eos_token_id
        eos = self.tokenizer.eos_token_id if eos is None else eos
        return tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,))

    def probe_positions(self) -> str:
        """Digest of what the installed model's position function answers (`kamera_cli.model.positions.probe`)."""
        return probe(self.model, mrope=self._mrope, token_ids=self._placeholders)

    @property
    def _placeholders(self) -> dict[str, int]:
        """Token ids that stand for media, by kind."""
        config, names = self.model.config, {"image": "image_token_id", "video": "video_token_id"}
        return {kind: getattr(config, name) for kind, name in names.items() if hasattr(config, name)}

    def synchronize(self) -> None:
        """Wait for the device, so that a clock read next counts finished work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def tokenize(self, text: str) -> torch.Tensor:
        """Token ids (n,) of ``text`` without special tokens added around it."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64)

    def question_ids(self, question: str) -> torch.Tensor:
        """Ids of everything that follows the last chunk: the question and the template's closing tokens."""
        return self.tokenize(self.prompt.before_question + question + self.prompt.suffix)

    def refuse_placeholders(self, token_ids: torch.Tensor, what: str) -> None:
        """Refuse text that holds the token that stands for pixels: the model would look for a picture there.

        Raises
        ------
        UsageError
        """
        for kind, token_id in self._placeholders.items():
            if bool((token_ids == token_id).any()):
                raise UsageError(
                    f"{what} holds {self.tokenizer.decode([token_id])}, which stands for {kind} input"
                )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings (T, hidden) of text tokens."""
        return self.model.get_input_embeddings()(token_ids.to(self.device))

    def text_segment(self, token_ids: torch.Tensor) -> Segment:
        """A prefillable span of plain text."""
        return Segment(self.embed(token_ids), text_positions(token_ids.numel(), mrope=self._mrope))

    def text_inputs(self, token_ids: torch.Tensor) -> ChunkInputs:
        """Model inputs of a text chunk."""
        positions = text_positions(token_ids.numel(), mrope=self._mrope)
        return ChunkInputs("text", token_ids, torch.zeros_like(token_ids), {}, positions)

    def media_inputs(
        self, kind: str, frames: torch.Tensor, *, fps: float | None, max_pixels: int | None
    ) -> ChunkInputs:
        """Run the checkpoint's processor on one image or video chunk; see `kamera_cli.model.inputs.media_inputs`.

        Raises
        ------
        UsageError
            The checkpoint has no processor part for this kind.
        """
        if self.processor is None or kind not in self.prompt.blocks:
            raise UsageError(f"model {self.loaded.checkpoint.label} does not take {kind} input")
        block = self.prompt.blocks[kind]
        return media_inputs(self.model, self.processor, block, kind, frames, fps=fps, max_pixels=max_pixels)

    @torch.inference_mode()
    def encode(self, chunk: ChunkInputs) -> EncodedChunk:
        """One forward over [preamble, chunk] from model inputs: embeddings and canonical KV of the chunk (design §2).

        The vision tower runs here, and again only when a comparison asks for a full re-encode.
        """
        with self.family.capture() as seen:
            run = self._from_inputs([chunk], cache=None)
        start = self.preamble.num_tokens
        layers = seen.layers(start, start + chunk.num_tokens)
        return EncodedChunk(run.embeddings[start:].clone(), layers, run.vision_ms, run.prefill_ms)

    @torch.inference_mode()
    def reencode(self, chunks: list[ChunkInputs], question_ids: torch.Tensor) -> Reencoded:
        """What an engine without reuse does: vision tower and prefill of the whole prompt from its model inputs."""
        cache = DynamicCache()
        closing = self.text_inputs(question_ids)
        run = self._from_inputs([*chunks, closing], cache=cache)
        started = time.perf_counter()
        logits = self._head(run.hidden[-1])
        self.synchronize()
        head_ms = 1e3 * (time.perf_counter() - started)
        next_position = (
            sum(chunk.positions.span for chunk in [*chunks, closing]) + self.preamble.positions.span
        )
        return Reencoded(cache, logits, next_position, run.vision_ms, run.prefill_ms + head_ms)

    def _from_inputs(self, chunks: list[ChunkInputs], cache: DynamicCache | None) -> _Run:
        """The model's ordinary forward over [preamble, chunks], positions explicit; stops before the output head."""
        parts = [self.text_inputs(self.preamble_ids), *chunks]
        positions, offset = [], 0
        for part in parts:
            positions.append(part.positions.at(offset))
            offset += part.positions.span
        ids = torch.cat([part.token_ids for part in parts]).to(self.device)
        joined = torch.cat(positions, dim=-1).to(self.device)
        media: dict[str, list[torch.Tensor]] = {}
        for part in parts:
            for name, tensor in part.tensors.items():
                media.setdefault(name, []).append(tensor)
        self.synchronize()
        started = time.perf_counter()
        if not media:
            embeddings = self.embed(ids)
            hidden = self._forward(embeddings, joined, cache)
            self.synchronize()
            return _Run(embeddings, hidden, 0.0, 1e3 * (time.perf_counter() - started))
        reached: dict = {}

        owner = threading.get_ident()

        def keep(_module: torch.nn.Module, _args: tuple, kwargs: dict) -> None:
            if threading.get_ident() != owner:
                return
            self.synchronize()
            reached.update(embeddings=kwargs["inputs_embeds"][0], at=time.perf_counter())

        self.vision_calls += 1
        handle = self._decoder.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            output = self.model.model(
                input_ids=ids[None],
                attention_mask=torch.ones_like(ids)[None],
                position_ids=joined[:, None],
                mm_token_type_ids=torch.cat([part.token_types for part in parts])[None].to(self.device),
                use_cache=cache is not None,
                **{name: torch.cat(tensors).to(self.device) for name, tensors in media.items()},
                **{self._cache_argument: cache},
            )
        finally:
            handle.remove()
        self.synchronize()
        finished = time.perf_counter()
        vision_ms, prefill_ms = 1e3 * (reached["at"] - started), 1e3 * (finished - reached["at"])
        return _Run(reached["embeddings"], output.last_hidden_state[0], vision_ms, prefill_ms)

    @torch.inference_mode()
    def prefill_captured(self, segments: list[Segment]) -> list[list[LayerKV]]:
        """One cold prefill over the segments in order; position-free KV of each, as it was conditioned there."""
        with self.family.capture() as seen:
            self._forward(*self._joined(segments), cache=None)
        return self._cut(seen, segments)

    @torch.inference_mode()
    def prefill(self, segments: list[Segment]) -> tuple[DynamicCache, torch.Tensor, list[list[LayerKV]], int]:
        """Cold prefill of a whole prompt.

        Returns
        -------
        cache : DynamicCache
            The model's own cache of all tokens.
        logits : torch.Tensor
            (vocab,) of the last token.
        captured : list of list of LayerKV
            Position-free KV per segment and layer.
        next_position : int
        """
        embeddings, positions, next_position = self._joined_with_end(segments)
        cache = DynamicCache()
        with self.family.capture() as seen:
            logits = self._head(self._forward(embeddings, positions, cache=cache)[-1])
        return cache, logits, self._cut(seen, segments), next_position

    @torch.inference_mode()
    def extend(self, cache: DynamicCache, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Append tokens to a cache; logits (vocab,) of the last one. The cache object grows: hand over a fresh one."""
        return self._head(self._forward(embeddings, positions, cache=cache)[-1])

    def positions_from(self, start: int, num_tokens: int) -> torch.Tensor:
        """Positions of ``num_tokens`` text tokens from ``start``: (3, n) for M-RoPE, (n,) for RoPE."""
        return text_positions(num_tokens, mrope=self._mrope).at(start)

    def _forward(
        self, embeddings: torch.Tensor, positions: torch.Tensor, cache: DynamicCache | None
    ) -> torch.Tensor:
        """Last hidden states (T, hidden) of T new tokens after the cached ones."""
        num_cached = 0 if cache is None else cache.get_seq_length()
        mask = torch.ones(1, num_cached + embeddings.shape[0], dtype=torch.int64, device=self.device)
        batched = positions[:, None] if positions.ndim == 2 else positions[None]
        output = self._decoder(
            inputs_embeds=embeddings[None],
            position_ids=batched.to(self.device),
            attention_mask=mask,
            use_cache=cache is not None,
            **{self._cache_argument: cache},
        )
        return output.last_hidden_state[0]

    def _joined(self, segments: list[Segment]) -> tuple[torch.Tensor, torch.Tensor]:
        return self._joined_with_end(segments)[:2]

    def _joined_with_end(self, segments: list[Segment]) -> tuple[torch.Tensor, torch.Tensor, int]:
        positions, offset = [], 0
        for segment in segments:
            positions.append(segment.positions.at(offset))
            offset += segment.positions.span
        return torch.cat([segment.embeddings for segment in segments]), torch.cat(positions, dim=-1), offset

    def _cut(self, seen: Capture, segments: list[Segment]) -> list[list[LayerKV]]:
        cut, start = [], 0
        for segment in segments:
            cut.append(seen.layers(start, start + segment.num_tokens))
            start += segment.num_tokens
        return cut

    def _preamble_layers(self) -> list[LayerKV]:
        if self.preamble.num_tokens:
            return self.prefill_captured([self.preamble])[0]
        nothing = self.preamble.embeddings.new_empty(0, self.family.num_kv_heads, self.family.head_dim)
        return [LayerKV(nothing, nothing)] * self.family.num_layers
