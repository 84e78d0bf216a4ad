"""The model runner: every forward call of kamera, with explicit positions and a full mask.

Nothing is left to state on the model object (design §2, "Positions"): Qwen-VL models remember the last rope delta, and
a mask that covers only the new tokens is accepted without an error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kamera_cli.errors import UsageError
from kamera_cli.model.compat import (
    DynamicCache,
    body_of,
    broken_input,
    cache_argument,
    decoder_of,
    keyword_names,
    uses_mrope,
)
from kamera_cli.model.families import family_of
from kamera_cli.model.families.family import Capture, LayerKV
from kamera_cli.model.inputs import (
    ChunkInputs,
    Deepstack,
    Frames,
    Segment,
    joined_tensors,
    media_inputs,
)
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


@dataclass(frozen=True)
class _Received:
    """What reached the decoder of a whole prompt: embeddings (T, hidden) and deepstack features, if any."""

    embeddings: torch.Tensor
    deepstack: Deepstack | None


@dataclass(frozen=True)
class _Run:
    received: _Received
    hidden: torch.Tensor
    vision_ms: float
    prefill_ms: float


class _ReachedDecoder(Exception):
    """Ends a forward that was wanted for its vision part alone."""


class ModelRunner:
    """A loaded checkpoint with its prompt format, family and preamble.

    Attributes
    ----------
    family : AttentionFamily
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
        self.vision_calls = 0
        self._decoder, self._body = decoder_of(self.model), body_of(self.model)
        self._cache_argument = cache_argument(self._decoder)
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
    def max_tokens(self) -> int:
        """Longest prompt of the model, in positions."""
        return self._decoder.config.max_position_embeddings

    @property
    def num_deepstack_layers(self) -> int:
        """Decoder layers that add visual features to their outputs."""
        vision = getattr(self.model.config, "vision_config", None)
        return len(getattr(vision, "deepstack_visual_indexes", None) or ())

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
        for kind, token_id in self.placeholders.items():
            if bool((token_ids == token_id).any()):
                raise UsageError(
                    f"{what} holds {self.tokenizer.decode([token_id])}, which stands for {kind} input"
                )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings (T, hidden) of text tokens."""
        return self.model.get_input_embeddings()(token_ids.to(self.device))

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
        """One forward over [preamble, chunk] from model inputs: embeddings and canonical KV of the chunk (design §2).

        The vision tower runs here, and again only when a comparison asks for a full re-encode.
        """
        with self.family.capture() as seen:
            run = self._from_inputs([chunk], cache=None)
        start = self.preamble.num_tokens
        layers = seen.layers(start, start + chunk.num_tokens)
        segment = _segment(run.received, start, chunk)
        return EncodedChunk(segment, layers, run.vision_ms, run.prefill_ms)

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
        self.synchronize()
        started = time.perf_counter()
        if not any(part.tensors for part in parts):
            embeddings = self.embed(ids)
            hidden = self._forward(embeddings, joined, cache)
            self.synchronize()
            return _Run(_Received(embeddings, None), hidden, 0.0, 1e3 * (time.perf_counter() - started))
        media = joined_tensors(parts, keyword_names(self._body))
        if media is None:
            return self._piecewise(parts, joined, cache)
        reached: dict = {}
        with self._at_decoder(reached):
            self._run_body(parts, ids, joined, media, cache)
        self.synchronize()
        finished = time.perf_counter()
        vision_ms, prefill_ms = 1e3 * (reached["at"] - started), 1e3 * (finished - reached["at"])
        return _Run(reached["received"], reached["hidden"], vision_ms, prefill_ms)

    def _piecewise(
        self, parts: list[ChunkInputs], positions: torch.Tensor, cache: DynamicCache | None
    ) -> _Run:
        """Vision tower chunk by chunk, for pixels that cannot stand in one batch; then one prefill of everything."""
        started = time.perf_counter()
        segments = [self._seen(part) for part in parts]
        self.synchronize()
        encoded = time.perf_counter()
        embeddings, deepstack = _joined_inputs(segments)
        hidden = self._forward(embeddings, positions, cache, deepstack)
        self.synchronize()
        vision_ms, prefill_ms = 1e3 * (encoded - started), 1e3 * (time.perf_counter() - encoded)
        return _Run(_Received(embeddings, deepstack), hidden, vision_ms, prefill_ms)

    def _seen(self, part: ChunkInputs) -> Segment:
        """A chunk as the decoder would receive it; the decoder itself does not run."""
        if not part.tensors:
            return Segment(self.embed(part.token_ids), part.positions)
        reached: dict = {}
        ids, positions = part.token_ids.to(self.device), part.positions.at(0).to(self.device)
        try:
            with self._at_decoder(reached, stop=True):
                self._run_body(
                    [part], ids, positions, joined_tensors([part], keyword_names(self._body)), None
                )
        except _ReachedDecoder:
            return _segment(reached["received"], 0, part)
        raise AssertionError("the model's body never called its decoder")

    def _run_body(
        self,
        parts: list[ChunkInputs],
        ids: torch.Tensor,
        positions: torch.Tensor,
        media: dict[str, torch.Tensor],
        cache: DynamicCache | None,
    ) -> None:
        self.vision_calls += 1
        # Not every vision tower brings its pixels to its own dtype.
        options: dict = {
            name: tensor.to(self.device, self.dtype if "pixel_values" in name else None)
            for name, tensor in media.items()
        }
        if "mm_token_type_ids" in keyword_names(self._body):
            options["mm_token_type_ids"] = torch.cat([part.token_types for part in parts])[None].to(
                self.device
            )
        self._body(
            input_ids=ids[None],
            attention_mask=torch.ones_like(ids)[None],
            position_ids=_batched(positions),
            use_cache=cache is not None,
            **options,
            **{self._cache_argument: cache},
        )

    @contextmanager
    def _at_decoder(self, reached: dict, *, stop: bool = False) -> Iterator[None]:
        """Note what this thread's forward hands to the decoder and what it gets back; ``stop`` ends it there."""
        owner = threading.get_ident()

        def before(_module: torch.nn.Module, _args: tuple, kwargs: dict) -> None:
            if threading.get_ident() != owner:
                return
            self.synchronize()
            reached.update(received=_received(kwargs), at=time.perf_counter())
            if stop:
                raise _ReachedDecoder

        def after(_module: torch.nn.Module, _args: tuple, output: object) -> None:
            if threading.get_ident() == owner:
                reached["hidden"] = output[0][0]

        handles = (
            self._decoder.register_forward_pre_hook(before, with_kwargs=True),
            self._decoder.register_forward_hook(after),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

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
            self._prefill(segments, cache, start)
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
            hidden, next_position = self._prefill(segments, cache)
        return cache, self._head(hidden[-1]), self._cut(seen, segments), next_position

    @torch.inference_mode()
    def extend(self, cache: DynamicCache, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Append tokens to a cache; logits (vocab,) of the last one. The cache object grows: hand over a fresh one."""
        return self._head(self._forward(embeddings, positions, cache=cache)[-1])

    def positions_from(self, start: int, num_tokens: int) -> torch.Tensor:
        """Positions of ``num_tokens`` text tokens from ``start``: (3, n) for M-RoPE, (n,) for RoPE."""
        return text_positions(num_tokens, mrope=self.mrope).at(start)

    def _forward(
        self,
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        cache: DynamicCache | None,
        deepstack: Deepstack | None = None,
    ) -> torch.Tensor:
        """Last hidden states (T, hidden) of T new tokens after the cached ones."""
        num_cached = 0 if cache is None else cache.get_seq_length()
        mask = torch.ones(1, num_cached + embeddings.shape[0], dtype=torch.int64, device=self.device)
        output = self._decoder(
            inputs_embeds=embeddings[None],
            position_ids=_batched(positions).to(self.device),
            attention_mask=mask,
            use_cache=cache is not None,
            **{self._cache_argument: cache},
            **_deepstack_arguments(deepstack, embeddings),
        )
        return output.last_hidden_state[0]

    def _prefill(
        self, segments: list[Segment], cache: DynamicCache | None, start: int = 0
    ) -> tuple[torch.Tensor, int]:
        """Last hidden states (T, hidden) over segments in order, and the position of the token that follows."""
        positions, offset = [], start
        for segment in segments:
            positions.append(segment.positions.at(offset))
            offset += segment.positions.span
        embeddings, deepstack = _joined_inputs(segments)
        return self._forward(embeddings, torch.cat(positions, dim=-1), cache, deepstack), offset

    def _own_cache(self) -> DynamicCache:
        """What the decoder itself writes for one token."""
        cache = DynamicCache()
        one = text_positions(1, mrope=self.mrope)
        with torch.inference_mode():
            self._forward(self.embed(torch.zeros(1, dtype=torch.int64)), one.ids, cache)
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


def _batched(positions: torch.Tensor) -> torch.Tensor:
    """(3, 1, T) of (3, T), or (1, T) of (T,)."""
    return positions[:, None] if positions.ndim == 2 else positions[None]


def _received(kwargs: dict) -> _Received:
    """From the keyword arguments with which a body calls its decoder."""
    features = kwargs.get("deepstack_visual_embeds")
    if features is None:
        return _Received(kwargs["inputs_embeds"][0], None)
    at = kwargs["visual_pos_masks"][0].nonzero().flatten()
    return _Received(kwargs["inputs_embeds"][0], Deepstack(at, torch.stack(list(features))))


def _segment(received: _Received, start: int, chunk: ChunkInputs) -> Segment:
    """The part of a prompt from token ``start`` on, copied; every visual token of the prompt lies in it."""
    found = received.deepstack
    deepstack = None if found is None else Deepstack(found.at - start, found.features.clone())
    return Segment(received.embeddings[start:].clone(), chunk.positions, deepstack)


def _joined_inputs(segments: list[Segment]) -> tuple[torch.Tensor, Deepstack | None]:
    """Embeddings and deepstack features of segments that follow one another."""
    found, start = [], 0
    for segment in segments:
        if segment.deepstack is not None:
            found.append(Deepstack(segment.deepstack.at + start, segment.deepstack.features))
        start += segment.num_tokens
    embeddings = torch.cat([segment.embeddings for segment in segments])
    if not found:
        return embeddings, None
    at, features = torch.cat([one.at for one in found]), torch.cat([one.features for one in found], dim=1)
    return embeddings, Deepstack(at, features)


def _deepstack_arguments(deepstack: Deepstack | None, embeddings: torch.Tensor) -> dict:
    if deepstack is None:
        return {}
    mask = torch.zeros(1, embeddings.shape[0], dtype=torch.bool, device=embeddings.device)
    mask[0, deepstack.at.to(mask.device)] = True
    return {"visual_pos_masks": mask, "deepstack_visual_embeds": list(deepstack.features)}
