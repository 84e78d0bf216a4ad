"""The model's ordinary forward from model inputs: vision tower, then decoder, with what passed between them kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kamera_cli.model.compat import DynamicCache, Module, body_of, keyword_names
from kamera_cli.model.decoder import DecoderForward, batched, joined_segments
from kamera_cli.model.inputs import ChunkInputs, Deepstack, Segment, joined_tensors


@dataclass(frozen=True)
class Received:
    """What reached the decoder of a whole prompt: embeddings (T, hidden) and deepstack features, if any."""

    embeddings: torch.Tensor
    deepstack: Deepstack | None

    def segment(self, start: int, chunk: ChunkInputs) -> Segment:
        """The part from token ``start`` on, copied; every visual token of the prompt lies in it."""
        found = self.deepstack
        deepstack = None if found is None else Deepstack(found.at - start, found.features.clone())
        return Segment(self.embeddings[start:].clone(), chunk.positions, deepstack)


@dataclass(frozen=True)
class Run:
    """One forward: what reached the decoder, its last hidden states (T, hidden), and the time of each half."""

    received: Received
    hidden: torch.Tensor
    vision_ms: float
    prefill_ms: float


class _ReachedDecoder(Exception):
    """Ends a forward that was wanted for its vision part alone."""


class InputForward:
    """Runs a model's body on token ids and pixels.

    Attributes
    ----------
    vision_calls : int
        Forwards of the vision tower so far.
    """

    def __init__(
        self, model: Module, decoder: DecoderForward, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.vision_calls = 0
        self._body, self._decoder = body_of(model), decoder
        self._device, self._dtype = device, dtype

    def run(self, parts: list[ChunkInputs], cache: DynamicCache | None) -> Run:
        """One forward over parts in order, positions explicit; stops before the output head.

        Parameters
        ----------
        parts : list of ChunkInputs
            The whole prompt, its preamble included; the first part stands at position 0.
        cache : DynamicCache or None
            Receives the KV of all tokens.
        """
        positions, offset = [], 0
        for part in parts:
            positions.append(part.positions.at(offset))
            offset += part.positions.span
        ids = torch.cat([part.token_ids for part in parts]).to(self._device)
        joined = torch.cat(positions, dim=-1).to(self._device)
        self._decoder.synchronize()
        started = time.perf_counter()
        if not any(part.tensors for part in parts):
            embeddings = self._decoder.embed(ids)
            hidden = self._decoder.over_tokens(embeddings, joined, cache)
            self._decoder.synchronize()
            return Run(Received(embeddings, None), hidden, 0.0, 1e3 * (time.perf_counter() - started))
        media = joined_tensors(parts, keyword_names(self._body))
        if media is None:
            return self._piecewise(parts, joined, cache)
        reached: dict = {}
        with self._at_decoder(reached):
            self._run_body(parts, ids, joined, media, cache)
        self._decoder.synchronize()
        finished = time.perf_counter()
        vision_ms, prefill_ms = 1e3 * (reached["at"] - started), 1e3 * (finished - reached["at"])
        return Run(reached["received"], reached["hidden"], vision_ms, prefill_ms)

    def _piecewise(
        self, parts: list[ChunkInputs], positions: torch.Tensor, cache: DynamicCache | None
    ) -> Run:
        """Vision tower chunk by chunk, for pixels that cannot stand in one batch; then one prefill of everything."""
        started = time.perf_counter()
        segments = [self._seen(part) for part in parts]
        self._decoder.synchronize()
        encoded = time.perf_counter()
        embeddings, deepstack = joined_segments(segments)
        hidden = self._decoder.over_tokens(embeddings, positions, cache, deepstack)
        self._decoder.synchronize()
        vision_ms, prefill_ms = 1e3 * (encoded - started), 1e3 * (time.perf_counter() - encoded)
        return Run(Received(embeddings, deepstack), hidden, vision_ms, prefill_ms)

    def _seen(self, part: ChunkInputs) -> Segment:
        """A chunk as the decoder would receive it; the decoder itself does not run."""
        if not part.tensors:
            return Segment(self._decoder.embed(part.token_ids), part.positions)
        reached: dict = {}
        ids, positions = part.token_ids.to(self._device), part.positions.at(0).to(self._device)
        media = joined_tensors([part], keyword_names(self._body))
        assert media is not None  # tensors of one chunk stand in one batch
        try:
            with self._at_decoder(reached, stop=True):
                self._run_body([part], ids, positions, media, None)
        except _ReachedDecoder:
            return reached["received"].segment(0, part)
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
            name: tensor.to(self._device, self._dtype if "pixel_values" in name else None)
            for name, tensor in media.items()
        }
        if "mm_token_type_ids" in keyword_names(self._body):
            types = torch.cat([part.token_types for part in parts])
            options["mm_token_type_ids"] = types[None].to(self._device)
        self._body(
            input_ids=ids[None],
            attention_mask=torch.ones_like(ids)[None],
            position_ids=batched(positions),
            use_cache=cache is not None,
            **options,
            **{self._decoder.cache_argument: cache},
        )

    @contextmanager
    def _at_decoder(self, reached: dict, *, stop: bool = False) -> Iterator[None]:
        """Note what this thread's forward hands to the decoder and what it gets back; ``stop`` ends it there."""
        owner = threading.get_ident()

        def before(_module: Module, _args: tuple, kwargs: dict) -> None:
            if threading.get_ident() != owner:
                return
            self._decoder.synchronize()
            reached.update(received=_received(kwargs), at=time.perf_counter())
            if stop:
                raise _ReachedDecoder

        def after(_module: Module, _args: tuple, output: Any) -> None:
            if threading.get_ident() == owner:
                reached["hidden"] = output[0][0]

        handles = (
            self._decoder.module.register_forward_pre_hook(before, with_kwargs=True),
            self._decoder.module.register_forward_hook(after),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _received(kwargs: dict) -> Received:
    """From the keyword arguments with which a body calls its decoder."""
    features = kwargs.get("deepstack_visual_embeds")
    if features is None:
        return Received(kwargs["inputs_embeds"][0], None)
    at = kwargs["visual_pos_masks"][0].nonzero().flatten()
    return Received(kwargs["inputs_embeds"][0], Deepstack(at, torch.stack(list(features))))
