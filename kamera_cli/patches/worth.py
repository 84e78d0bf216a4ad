"""Which layers matter: next-token KL per unit of Δ that a tensor of a layer is left without, measured once per model.

There is no question yet when patches are compiled, so the probes are questions of random tokens, each closed as the
template closes a question, over the first chunks that are compiled. Everywhere else the prefill's own KV stands; one
tensor at a time loses a tenth of the energy of its Δ. Such a probe finds the layers at which later tokens look back. It
does not find the values behind keys that only a real question reads, which is why a layer counts as the more sensitive
of its two tensors (`kamera_cli.operator.ranks.weights`).

A window whose chunks have nothing to do with one another tells nothing: where no tensor cost `LEAST_FELT`, the layers
count the same for now, and the next window that is compiled is measured too, `MAX_TRIES` of them at most.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kamera_cli.model.compat import DynamicCache, decoder_of, takes_masks
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.generate import next_token_kl
from kamera_cli.model.inputs import Segment
from kamera_cli.model.runner import ModelRunner
from kamera_cli.model.scoring import Forced, Place, logits_after, score
from kamera_cli.operator.assemble import joined_positions, place
from kamera_cli.operator.factorise import absorbed
from kamera_cli.operator.ranks import Sensitivity, Worth, worth
from kamera_cli.patches.chunk import Chunk
from kamera_cli.results import Progress

if TYPE_CHECKING:
    from kamera_cli.context import Context

SENSITIVITY = "sensitivity"
"""State space of the store: by model fingerprint, what `measure` found."""

NUM_PROBES, PROBE_TOKENS = 32, 6
MISSING_SHARE = 0.1
"""Share of a tensor's ‖Δ‖² that it is left without."""

MAX_TOKENS = 2048
"""Chunks after the second are measured on as long as all of them stay below it."""

LEAST_FELT = 1e-3
"""Mean KL in nats that at least one tensor has to cost."""

MAX_TRIES = 4

_GROUP = 4
"""Caches that share a forward; memory of so many contexts is needed at once."""

Measured = list[tuple[Sensitivity, Sensitivity]]


@dataclass(frozen=True)
class Prompt:
    """A prompt in memory: preamble and chunks with their canonical KV and that of one prefill over all of them."""

    runner: ModelRunner
    segments: Sequence[Segment]
    canonical: Sequence[list[LayerKV]]
    conditioned: Sequence[list[LayerKV]]


@dataclass(frozen=True)
class Learned:
    """What is known of a model's sensitivity: sums over the windows that were measured, so that those in which more was
    felt count for more.

    Attributes
    ----------
    layers : list of (Sensitivity, Sensitivity)
        Rotary and plain per layer; empty before the first window.
    num_windows : int
        Windows that were measured.
    num_tokens : int
        Their conditioned tokens.
    """

    layers: Measured = field(default_factory=list)
    num_windows: int = 0
    num_tokens: int = 0

    @property
    def is_felt(self) -> bool:
        """Whether some tensor was found to matter."""
        highest = max((tensor.kl for layer in self.layers for tensor in layer), default=0.0)
        return self.num_windows > 0 and highest >= LEAST_FELT * self.num_windows

    @property
    def is_settled(self) -> bool:
        """Whether no further window is measured."""
        return self.is_felt or self.num_windows >= MAX_TRIES

    @property
    def worth(self) -> Worth | None:
        """What the tensors of each layer are worth; None where nothing was felt so far."""
        return worth(self.layers, self.num_tokens) if self.is_felt else None

    def with_window(self, found: Measured, num_tokens: int) -> Learned:
        """With one more window of so many conditioned tokens."""
        layers = found
        if self.layers:
            layers = [
                (_sum(rotary, more_rotary), _sum(plain, more_plain))
                for (rotary, plain), (more_rotary, more_plain) in zip(self.layers, found, strict=True)
            ]
        return Learned(layers, self.num_windows + 1, self.num_tokens + num_tokens)


def learn(
    runner: ModelRunner,
    known: Learned,
    chunks: Sequence[Chunk],
    after: Sequence[list[LayerKV]] | None = None,
) -> Learned:
    """Measure one more window, unless what is known is settled.

    Parameters
    ----------
    chunks : sequence of Chunk
        In prompt order; those of `measured_on` count.
    after : sequence of list of LayerKV, optional
        Position-free KV of each chunk out of one prefill of them all, where it is at hand.

    Returns
    -------
    Learned
        ``known`` itself where nothing was measured.
    """
    counted = measured_on(runner, chunks)
    if known.is_settled or not counted:
        return known
    segments = [runner.preamble, *(chunk.segment for chunk in counted)]
    canonical = [runner.preamble_layers, *(chunk.canonical for chunk in counted)]
    given = None if after is None else [runner.preamble_layers, *after[: len(counted)]]
    prefilled = given or runner.prefill_captured(segments)
    found = measure(Prompt(runner, segments, canonical, prefilled))
    return known.with_window(found, sum(chunk.segment.num_tokens for chunk in counted[1:]))


def measured_on(runner: ModelRunner, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    """The first two chunks of a window, and more as long as all stay within `MAX_TOKENS`; none of a single one, or
    where no probe fits behind two."""
    sizes = [chunk.segment.num_tokens for chunk in chunks]
    count = 2
    while count < len(sizes) and sum(sizes[: count + 1]) <= MAX_TOKENS:
        count += 1
    end = sum(part.positions.span for part in [runner.preamble, *(chunk.segment for chunk in chunks[:count])])
    fits = end + PROBE_TOKENS + runner.question_ids("").numel() <= runner.max_tokens
    return chunks[:count] if len(chunks) > 1 and fits else ()


def _sum(one: Sensitivity, other: Sensitivity) -> Sensitivity:
    return Sensitivity(one.kl + other.kl, one.missing + other.missing, one.total + other.total)


def known_worth(context: Context) -> Worth | None:
    """What the tensors of each layer are worth by what this store knows of the model; None where nothing was felt."""
    return _learned(_state(context)).worth


def learned_worth(context: Context, window: Sequence[Chunk]) -> Worth | None:
    """The same, after measuring a window of stored chunks while what this store knows is not settled."""
    state = _state(context)
    known = _learned(state)
    counted = () if known.is_settled else measured_on(context.runner, window)
    if not counted:
        return known.worth
    context.progress(Progress("measuring layers", 0, None, "layers"))
    started = time.perf_counter()
    more = learn(context.runner, known, counted)
    measured = {
        "chunks": [chunk.stored.id for chunk in counted],
        "num_tokens": more.num_tokens - known.num_tokens,
        "probes": f"{NUM_PROBES} questions of {PROBE_TOKENS} random tokens",
        "ms": 1e3 * (time.perf_counter() - started),
    }
    layers = [[list(astuple(tensor)) for tensor in layer] for layer in more.layers]
    state = {"layers": layers, "windows": [*state["windows"], measured]}
    context.store.put_state(SENSITIVITY, context.fingerprint, state, expect="any")
    return more.worth


def _state(context: Context) -> Mapping[str, Any]:
    """As the store keeps it: by layer the sums of both tensors, and each window that was measured."""
    state = context.store.get_state(SENSITIVITY, context.fingerprint)
    return {"layers": [], "windows": []} if state is None else state.value


def _learned(state: Mapping[str, Any]) -> Learned:
    layers = [(Sensitivity(*rotary), Sensitivity(*plain)) for rotary, plain in state["layers"]]
    windows = state["windows"]
    return Learned(layers, len(windows), sum(window["num_tokens"] for window in windows))


@torch.inference_mode()
def measure(prompt: Prompt) -> Measured:
    """Sensitivity of both tensors of every layer, averaged over the probes.

    Returns
    -------
    list of (Sensitivity, Sensitivity)
        Rotary and plain per layer; all zero where there is no Δ.
    """
    runner = prompt.runner
    placed, end = place([(part.positions, part.num_tokens) for part in prompt.segments])
    positions = joined_positions(placed)
    number = range(runner.family.num_layers)
    exact = runner.family.cache([_joined(prompt.conditioned, layer) for layer in number], positions)
    arms = [
        (layer, name, total)
        for layer in number
        for name in ("rotary", "plain")
        if (total := _energy(prompt, layer, name)) > 0.0
    ]
    probes = _probes(runner)
    reference = _logits(runner, [exact], end, probes)[0]
    found = {(layer, name): Sensitivity(0.0, 0.0, 0.0) for layer in number for name in ("rotary", "plain")}
    for first in range(0, len(arms), _GROUP):
        group = arms[first : first + _GROUP]
        caches = [_without(prompt, exact, positions, layer, name) for layer, name, _ in group]
        for (layer, name, total), rows in zip(group, _logits(runner, caches, end, probes), strict=True):
            kl = sum(next_token_kl(*pair) for pair in zip(reference, rows, strict=True)) / len(probes)
            found[layer, name] = Sensitivity(kl, MISSING_SHARE * total, total)
    return [(found[layer, "rotary"], found[layer, "plain"]) for layer in number]


def _probes(runner: ModelRunner) -> list[torch.Tensor]:
    """Token ids of the probes, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    closing = runner.question_ids("")
    model: Any = runner.model
    size = model.get_input_embeddings().weight.shape[0]
    return [
        torch.cat([torch.randint(size, (PROBE_TOKENS,), generator=generator).to(closing.dtype), closing])
        for _ in range(NUM_PROBES)
    ]


def _logits(
    runner: ModelRunner, caches: Sequence[DynamicCache], end: int, probes: Sequence[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """Next-token logits (vocab,) per cache and probe; one forward for all where the decoder takes masks."""
    if takes_masks(decoder_of(runner.model)):
        prompts = [Forced(probe, probe[-1:]) for probe in probes]
        return [[row[0] for row in rows] for rows in score(runner, caches, end, prompts, group=len(caches))]
    where = [Place(caches[0].get_seq_length(), end)]
    return [
        [logits_after(runner, cache, where, probe)[0].float().cpu() for probe in probes] for cache in caches
    ]


def _without(
    prompt: Prompt, exact: DynamicCache, positions: torch.Tensor, layer: int, name: str
) -> DynamicCache:
    """The prefill's cache with one tensor of one layer moved towards canonical KV; the other layers are shared."""
    kept = _joined(prompt.conditioned, layer)
    after, alone = getattr(kept, name), getattr(_joined(prompt.canonical, layer), name)
    moved = after.float() - math.sqrt(MISSING_SHARE) * (after.float() - alone.float())
    tensors = {"rotary": kept.rotary, "plain": kept.plain, name: moved.to(after.dtype)}
    changed = prompt.runner.family.cache([LayerKV(**tensors)], positions, first=layer).layers[0]
    made = DynamicCache()
    made.layers = [changed if index == layer else other for index, other in enumerate(exact.layers)]
    return made


def _energy(prompt: Prompt, layer: int, name: str) -> float:
    """‖Δ‖² of a tensor over all chunks, none where it is rounding."""
    after, alone = (
        getattr(_joined(chunks, layer), name) for chunks in (prompt.conditioned, prompt.canonical)
    )
    return float(absorbed(after, alone).square().sum())


def _joined(chunks: Sequence[list[LayerKV]], layer: int) -> LayerKV:
    """One layer of all parts in a row."""
    held = [chunk[layer] for chunk in chunks]
    return LayerKV(torch.cat([kv.rotary for kv in held]), torch.cat([kv.plain for kv in held]))
