"""Forwards of the language model alone, from embeddings, with explicit positions and a full mask.

Nothing is left to state on the model object (`docs/architecture.md`, "Positions"): Qwen-VL models remember the last
rope delta, and a mask that covers only the new tokens is accepted without an error.
"""

from __future__ import annotations

import torch

from kamera_cli.model.compat import DynamicCache, Module, cache_argument, decoder_of
from kamera_cli.model.inputs import Deepstack, Segment


class DecoderForward:
    """How the decoder of a loaded model is called; the only place that does so for a single prompt.

    Attributes
    ----------
    module : torch.nn.Module
        The decoder itself.
    cache_argument : str
        What it calls its cache.
    """

    def __init__(self, model: Module, device: torch.device) -> None:
        self.module = decoder_of(model)
        self.cache_argument = cache_argument(self.module)
        self._embeddings = model.get_input_embeddings()
        self._device = device

    def synchronize(self) -> None:
        """Wait for the device, so that a clock read next counts finished work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings (T, hidden) of text tokens."""
        return self._embeddings(token_ids.to(self._device))

    def over_tokens(
        self,
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        cache: DynamicCache | None,
        deepstack: Deepstack | None = None,
    ) -> torch.Tensor:
        """Last hidden states (T, hidden) of T new tokens after the cached ones.

        Parameters
        ----------
        embeddings : torch.Tensor
            (T, hidden).
        positions : torch.Tensor
            (3, T) for M-RoPE, (T,) for RoPE.
        cache : DynamicCache or None
            What stands before; it grows by T tokens. None for a cold forward that keeps nothing.
        """
        num_cached = 0 if cache is None else cache.get_seq_length()
        mask = torch.ones(1, num_cached + embeddings.shape[0], dtype=torch.int64, device=self._device)
        output = self.module(
            inputs_embeds=embeddings[None],
            position_ids=batched(positions).to(self._device),
            attention_mask=mask,
            use_cache=cache is not None,
            **{self.cache_argument: cache},
            **_deepstack_arguments(deepstack, embeddings),
        )
        return output.last_hidden_state[0]

    def over_segments(
        self, segments: list[Segment], cache: DynamicCache | None, start: int = 0
    ) -> tuple[torch.Tensor, int]:
        """Last hidden states (T, hidden) over segments in order, and the position of the token that follows."""
        positions, offset = [], start
        for segment in segments:
            positions.append(segment.positions.at(offset))
            offset += segment.positions.span
        embeddings, deepstack = joined_segments(segments)
        return self.over_tokens(embeddings, torch.cat(positions, dim=-1), cache, deepstack), offset


def batched(positions: torch.Tensor) -> torch.Tensor:
    """(3, 1, T) of (3, T), or (1, T) of (T,)."""
    return positions[:, None] if positions.ndim == 2 else positions[None]


def joined_segments(segments: list[Segment]) -> tuple[torch.Tensor, Deepstack | None]:
    """Embeddings (T, hidden) and deepstack features of segments that follow one another."""
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
