"""The model runner: a loaded checkpoint, what surrounds its chunks, and each kind of forward that kamera makes.

`decoder` runs the language model alone, from embeddings; `from_inputs` runs it behind the vision tower, from pixels;
`families` say what is captured of either, and how keys are rotated again (`operator.assemble` asks for that).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from kamera_cli.errors import UsageError
from kamera_cli.model.compat import DynamicCache, broken_input, uses_mrope
from kamera_cli.model.decoder import DecoderForward
from kamera_cli.model.families import family_of
from kamera_cli.model.families.family import Capture, LayerKV
from kamera_cli.model.from_inputs import InputForward
from kamera_cli.model.inputs import ChunkInputs, Frames, Segment, media_inputs
from kamera_cli.model.loading import LoadedModel
from kamera_cli.model.positions import probe, text_positions
from kamera_cli.model.prompt import prompt_format


@dataclass(frozen=True)
class EncodedChunk:
    """A chunk as the decoder receives it, and its canonical KV per layer."""

    segment: Segment
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


class ModelRunner:
    """A loaded checkpoint with its prompt format, family and preamble.

    Attributes
    ----------
    family : AttentionFamily
    preamble : Segment
        Stands at position 0 of every prompt, exactly once.
    preamble_layers : list of LayerKV
        Its KV, computed once at load; it depends on nothing.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.model, self.tokenizer, self.processor = loaded.model, loaded.tokenizer, loaded.processor
        self.device, self.dtype = loaded.device, loaded.dtype
        self.architecture = loaded.checkpoint.architecture
        self._forward = DecoderForward(self.model, self.device)
        self._from_inputs = InputForward(self.model, self._forward, self.device, self.dtype)
        self._decoder = self._forward.module
        self._head = self.model.get_output_embeddings()
        self.mrope = uses_mrope(self._decoder)
        self.family = family_of(self._decoder, self._own_cache())
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
    def vision_calls(self) -> int:
        """Forwards of the vision tower so far."""
        return self._from_inputs.vision_calls

    @property
    def max_tokens(self) -> int:
        """Longest prompt of the model, in positions."""
        return self._decoder.config.max_position_embeddings

    @property
    def num_deepstack_layers(self) -> int:
        """Decoder layers that add visual features to their outputs."""
        vision = getattr(self.model.config, "vision_config", None)
        return len(getattr(vision, "deepstack_visual_indexes", None) or ())

    @property
    def routes_tokens(self) -> bool:
        """Whether a layer sends each token to a few of its experts, so that a small change can take another way."""
        return any(hasattr(module, "experts") for module in self.model.modules())

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end an answer."""
        eos = getattr(self.model.generation_config, "eos_token_id", None)
        eos = self.tokenizer.eos_token_id if eos is None else eos
        return tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,))

    def probe_positions(self) -> str:
        """Digest of what the installed model's position function answers (`kamera_cli.model.positions.probe`)."""
        return probe(self.model, mrope=self.mrope, token_ids=self.placeholders)

    @property
    def placeholders(self) -> dict[str, int]:
        """Token ids that stand for media, by kind."""
        config = self.model.config
        names = {"image": ("image_token_id", "media_placeholder_token_id"), "video": ("video_token_id",)}
        found = {
            kind: next((name for name in known if hasattr(config, name)), None)
            for kind, known in names.items()
        }
        return {kind: getattr(config, name) for kind, name in found.items() if name is not None}

    def synchronize(self) -> None:
        """Wait for the device, so that a clock read next counts finished work."""
        self._forward.synchronize()

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
        for kind, token_id in self.placeholders.items():
            if bool((token_ids == token_id).any()):
                raise UsageError(
                    f"{what} holds {self.tokenizer.decode([token_id])}, which stands for {kind} input"
                )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings (T, hidden) of text tokens."""
        return self._forward.embed(token_ids)

    def text_segment(self, token_ids: torch.Tensor) -> Segment:
        """A prefillable span of plain text."""
        return Segment(self.embed(token_ids), text_positions(token_ids.numel(), mrope=self.mrope))

    def text_inputs(self, token_ids: torch.Tensor) -> ChunkInputs:
        """Model inputs of a text chunk."""
        positions = text_positions(token_ids.numel(), mrope=self.mrope)
        return ChunkInputs("text", token_ids, torch.zeros_like(token_ids), {}, positions)

    def takes(self, kind: str) -> bool:
        """Whether the checkpoint brings a processor part and a template block for a kind of media, and they work."""
        brought = (
            kind in self.prompt.blocks and getattr(self.processor, f"{kind}_processor", None) is not None
        )
        return brought and broken_input(self.model, kind) is None

    def media_inputs(
        self,
        kind: str,
        pixels: torch.Tensor,
        *,
        fps: float | None,
        max_pixels: int | None,
        start_s: float = 0.0,
    ) -> ChunkInputs:
        """Run the checkpoint's processor on one image or video chunk; see `kamera_cli.model.inputs.media_inputs`.

        Raises
        ------
        UsageError
            The checkpoint has no processor part for this kind, or the installed release fails on it.
        """
        if (why := broken_input(self.model, kind)) is not None:
            raise UsageError(f"model {self.loaded.checkpoint.label}: {why}")
        if not self.takes(kind):
            raise UsageError(f"model {self.loaded.checkpoint.label} has no processor for {kind} input")
        return media_inputs(
            self.model, self.processor, self.prompt.blocks[kind], kind, Frames(pixels, fps, start_s),
            placeholders=self.placeholders, mrope=self.mrope, max_pixels=max_pixels,
        )  # fmt: skip

    @torch.inference_mode()
    def encode(self, chunk: ChunkInputs) -> EncodedChunk:
        """One forward over [preamble, chunk] from model inputs: embeddings and canonical KV of the chunk.

        The vision tower runs here, and again only when a comparison asks for a full re-encode.
        """
        with self.family.capture() as seen:
            run = self._from_inputs.run(self._prompt([chunk]), cache=None)
        start = self.preamble.num_tokens
        layers = seen.layers(start, start + chunk.num_tokens)
        return EncodedChunk(run.received.segment(start, chunk), layers, run.vision_ms, run.prefill_ms)

    @torch.inference_mode()
    def reencode(self, chunks: list[ChunkInputs], question_ids: torch.Tensor) -> Reencoded:
        """What an engine without reuse does: vision tower and prefill of the whole prompt from its model inputs."""
        cache = DynamicCache()
        prompt = self._prompt([*chunks, self.text_inputs(question_ids)])
        run = self._from_inputs.run(prompt, cache)
        started = time.perf_counter()
        logits = self._head(run.hidden[-1])
        self.synchronize()
        head_ms = 1e3 * (time.perf_counter() - started)
        next_position = sum(part.positions.span for part in prompt)
        return Reencoded(cache, logits, next_position, run.vision_ms, run.prefill_ms + head_ms)

    def _prompt(self, chunks: list[ChunkInputs]) -> list[ChunkInputs]:
        return [self.text_inputs(self.preamble_ids), *chunks]

    @torch.inference_mode()
    def prefill_captured(
        self, segments: list[Segment], cache: DynamicCache | None = None, start: int = 0
    ) -> list[list[LayerKV]]:
        """One prefill over the segments in order; position-free KV of each, as it was conditioned there.

        Parameters
        ----------
        cache : DynamicCache, optional
            What already stands before the segments; it grows by their tokens. None for a cold prefill.
        start : int
            Position of the first token on every axis.
        """
        with self.family.capture() as seen:
            self._forward.over_segments(segments, cache, start)
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
        cache = DynamicCache()
        with self.family.capture() as seen:
            hidden, next_position = self._forward.over_segments(segments, cache)
        return cache, self._head(hidden[-1]), self._cut(seen, segments), next_position

    @torch.inference_mode()
    def extend(self, cache: DynamicCache, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Append tokens to a cache; logits (vocab,) of the last one. The cache object grows: hand over a fresh one."""
        return self._head(self._forward.over_tokens(embeddings, positions, cache)[-1])

    def positions_from(self, start: int, num_tokens: int) -> torch.Tensor:
        """Positions of ``num_tokens`` text tokens from ``start``: (3, n) for M-RoPE, (n,) for RoPE."""
        return text_positions(num_tokens, mrope=self.mrope).at(start)

    def _own_cache(self) -> DynamicCache:
        """What the decoder itself writes for one token."""
        cache = DynamicCache()
        one = text_positions(1, mrope=self.mrope)
        with torch.inference_mode():
            self._forward.over_tokens(self.embed(torch.zeros(1, dtype=torch.int64)), one.ids, cache)
        return cache

    def _cut(self, seen: Capture, segments: list[Segment]) -> list[list[LayerKV]]:
        cut, start = [], 0
        for segment in segments:
            cut.append(seen.layers(start, start + segment.num_tokens))
            start += segment.num_tokens
        return cut

    def _preamble_layers(self) -> list[LayerKV]:
        if self.preamble.num_tokens:
            return self.prefill_captured([self.preamble])[0]
        new = self.preamble.embeddings.new_empty
        return [LayerKV(new(0, *rotary), new(0, *plain)) for rotary, plain in self.family.layer_shapes]
