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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kamera_cli.library import require_record
from kamera_cli.model.compat import DynamicCache, decoder_of, takes_masks
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.generate import next_token_kl
from kamera_cli.model.inputs import Segment
from kamera_cli.model.runner import ModelRunner
from kamera_cli.model.scoring import Forced, Place, logits_after, score
from kamera_cli.operator.assemble import joined_positions, place
from kamera_cli.operator.patch import absorbed
from kamera_cli.operator.ranks import Sensitivity, Worth, worth
from kamera_cli.results import Progress
from kamera_cli.window import Chain

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


def layer_worth(context: Context, chain: Chain | None, numbers: dict[bytes, int]) -> Worth | None:
    """What the tensors of each layer are worth, for `kamera_cli.operator.patch.form`.

    Parameters
    ----------
    chain : Chain or None
        Chunks to measure on while this model's sensitivity is not settled in this store; None to go by what is known.

    Returns
    -------
    Worth or None
        None where nothing was felt so far.

    Raises
    ------
    NotFoundError
        A chunk is gone from the store.
    """
    state = context.store.get_state(SENSITIVITY, context.fingerprint)
    known = {"layers": [], "windows": []} if state is None or not _as_written(state.value) else state.value
    settled = _felt(known) or len(known["windows"]) >= MAX_TRIES
    if not settled and chain is not None and (found := _measured(context, chain, numbers)) is not None:
        known = _added(known, found)
        context.store.put_state(SENSITIVITY, context.fingerprint, known, expect="any")
    if not _felt(known):
        return None
    measured = [tuple(Sensitivity(*tensor) for tensor in layer) for layer in known["layers"]]
    return worth(measured, sum(window["num_tokens"] for window in known["windows"]))


def _as_written(known: Mapping) -> bool:
    """Whether what another version may have left has the fields of this one; if not, it is measured anew."""
    windows = known.get("windows")
    return (
        isinstance(known.get("layers"), list)
        and isinstance(windows, list)
        and all(isinstance(window, dict) and window.get("num_tokens", 0) > 0 for window in windows)
    )


def _felt(known: Mapping) -> bool:
    highest = max((tensor[0] for layer in known["layers"] for tensor in layer), default=0.0)
    return highest >= LEAST_FELT * max(1, len(known["windows"]))


def _added(known: Mapping, found: Mapping) -> dict:
    """Sums over windows, so that those in which more was felt count for more."""
    layers = found["layers"]
    if known["layers"]:
        layers = [
            [[one + other for one, other in zip(*pair, strict=True)] for pair in zip(*both, strict=True)]
            for both in zip(known["layers"], layers, strict=True)
        ]
    window = {name: value for name, value in found.items() if name != "layers"}
    return {"layers": layers, "windows": [*known["windows"], window]}


def _measured(context: Context, chain: Chain, numbers: dict[bytes, int]) -> dict | None:
    """`measure` on the first chunks of a chain; None where it has one chunk, or no probe fits behind two of them."""
    if len(chain) < 2:
        return None
    runner, library = context.runner, context.library
    started = time.perf_counter()
    records = [require_record(library, link, str(numbers.get(link.key, link.short_id))) for link in chain]
    count, total = 2, sum(record.meta["num_tokens"] for record in records[:2])
    while count < len(records) and total + records[count].meta["num_tokens"] <= MAX_TOKENS:
        total += records[count].meta["num_tokens"]
        count += 1
    segments = [runner.preamble, *map(library.segment, records[:count])]
    spans = sum(segment.positions.span for segment in segments)
    if spans + PROBE_TOKENS + runner.question_ids("").numel() > runner.max_tokens:
        return None
    context.progress(Progress("measuring layers", 0, None, "layers"))
    canonical = [runner.preamble_layers, *map(library.layers, records[:count])]
    found = measure(Prompt(runner, segments, canonical, runner.prefill_captured(segments)))
    return {
        "layers": [[[tensor.kl, tensor.missing, tensor.total] for tensor in layer] for layer in found],
        "chunks": [link.id for link in chain[:count]],
        "num_tokens": sum(record.meta["num_tokens"] for record in records[1:count]),
        "probes": f"{NUM_PROBES} questions of {PROBE_TOKENS} random tokens",
        "ms": 1e3 * (time.perf_counter() - started),
    }


@torch.inference_mode()
def measure(context: Prompt) -> Measured:
    """Sensitivity of both tensors of every layer, averaged over the probes.

    Returns
    -------
    list of (Sensitivity, Sensitivity)
        Rotary and plain per layer; all zero where there is no Δ.
    """
    runner = context.runner
    placed, end = place([(part.positions, part.num_tokens) for part in context.segments])
    positions = joined_positions(placed)
    number = range(runner.family.num_layers)
    exact = runner.family.cache([_joined(context.conditioned, layer) for layer in number], positions)
    arms = [
        (layer, name, total)
        for layer in number
        for name in ("rotary", "plain")
        if (total := _energy(context, layer, name)) > 0.0
    ]
    probes = _probes(runner)
    reference = _logits(runner, [exact], end, probes)[0]
    found = {(layer, name): Sensitivity(0.0, 0.0, 0.0) for layer in number for name in ("rotary", "plain")}
    for first in range(0, len(arms), _GROUP):
        group = arms[first : first + _GROUP]
        caches = [_without(context, exact, positions, layer, name) for layer, name, _ in group]
        for (layer, name, total), rows in zip(group, _logits(runner, caches, end, probes), strict=True):
            kl = sum(next_token_kl(*pair) for pair in zip(reference, rows, strict=True)) / len(probes)
            found[layer, name] = Sensitivity(kl, MISSING_SHARE * total, total)
    return [(found[layer, "rotary"], found[layer, "plain"]) for layer in number]


def _probes(runner: ModelRunner) -> list[torch.Tensor]:
    """Token ids of the probes, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    closing = runner.question_ids("")
    size = runner.model.get_input_embeddings().weight.shape[0]
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
    context: Prompt, exact: DynamicCache, positions: torch.Tensor, layer: int, name: str
) -> DynamicCache:
    """The prefill's cache with one tensor of one layer moved towards canonical KV; the other layers are shared."""
    kept = _joined(context.conditioned, layer)
    after, alone = getattr(kept, name), getattr(_joined(context.canonical, layer), name)
    moved = after.float() - math.sqrt(MISSING_SHARE) * (after.float() - alone.float())
    tensors = {"rotary": kept.rotary, "plain": kept.plain, name: moved.to(after.dtype)}
    changed = context.runner.family.cache([LayerKV(**tensors)], positions, first=layer).layers[0]
    made = DynamicCache()
    made.layers = [changed if index == layer else other for index, other in enumerate(exact.layers)]
    return made


def _energy(context: Prompt, layer: int, name: str) -> float:
    """‖Δ‖² of a tensor over all chunks, none where it is rounding."""
    after, alone = (
        getattr(_joined(chunks, layer), name) for chunks in (context.conditioned, context.canonical)
    )
    return float(absorbed(after, alone).square().sum())


def _joined(chunks: Sequence[list[LayerKV]], layer: int) -> LayerKV:
    """One layer of all parts in a row; a part without tokens has no layers."""
    held = [chunk[layer] for chunk in chunks if chunk]
    return LayerKV(torch.cat([kv.rotary for kv in held]), torch.cat([kv.plain for kv in held]))
