"""Self-test of a loaded checkpoint against its own cache and its own cold prefill (paper, "The operator").

It runs once per fingerprint before the first write, since a wrong capture point gives fluent nonsense and no error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kamera_cli.errors import RefusedError
from kamera_cli.model.compat import DynamicCache, rope_index
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.generate import next_token_kl
from kamera_cli.model.inputs import ChunkInputs, Segment
from kamera_cli.model.runner import ModelRunner
from kamera_cli.operator.assemble import assemble, joined_positions, place
from kamera_cli.operator.patch import LayerPatch
from kamera_cli.operator.residual import form

_TOKENS = 24
_LIMIT = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest relative difference of two kernels' results that counts as rounding."""
_KL_LIMIT = {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-3}


@dataclass(frozen=True)
class Check:
    """One comparison. ``detail`` states what was measured."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class SelfTest:
    """All comparisons; ``ok`` when every one held."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


def require(result: SelfTest, label: str) -> None:
    """Raise for a failed self-test.

    Raises
    ------
    RefusedError
        Naming the first check that failed.
    """
    for check in result.checks:
        if not check.ok:
            raise RefusedError(
                f"model {label} fails the self-test {check.name!r}: {check.detail}; nothing was written"
            )


@torch.inference_mode()
def self_test(runner: ModelRunner) -> SelfTest:
    """Compare capture, relocation, positions, patches and stored embeddings with the model's own."""
    generator = torch.Generator().manual_seed(0)
    ids = _token_ids(runner, generator)
    chunks = [runner.text_segment(row) for row in ids]
    checks = [_capture(runner, chunks), _relocation(runner, chunks[1]), _full_rank(runner, chunks)]
    media = [make(runner, generator) for kind, make in _MEDIA.items() if runner.takes(kind)]
    if media:
        # A picture between two passages and a clip at the end: each kind of neighbour occurs.
        checks += [
            _positions(runner, [*media, runner.text_inputs(ids[0]), media[0]]),
            _embeddings(runner, [runner.text_inputs(ids[0]), *media], ids[1]),
        ]
    return SelfTest(tuple(checks))


def _token_ids(runner: ModelRunner, generator: torch.Generator) -> torch.Tensor:
    """Three rows of token ids of plain text: none stands for pixels or ends an answer."""
    most = min(1000, runner.model.get_input_embeddings().weight.shape[0] // 2)
    reserved = {*runner.placeholders.values(), *runner.eos_ids}
    plain = torch.tensor([token for token in range(most) if token not in reserved])
    return plain[torch.randint(len(plain), (3, _TOKENS), generator=generator)]


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    scale = float(theirs.float().abs().max()) or 1.0
    return float((ours.float() - theirs.float()).abs().max()) / scale


def _capture(runner: ModelRunner, chunks: list[Segment]) -> Check:
    """Captured keys, rotated by us, are the keys in the model's cache: each norm and each rotation happens once."""
    cache, _, captured, _ = runner.prefill(chunks)
    placed, _ = place([(chunk.positions, chunk.num_tokens) for chunk in chunks])
    worst, same = 0.0, True
    for layer, own in enumerate(cache.layers):
        whole = LayerKV(
            torch.cat([chunk[layer].rotary for chunk in captured]),
            torch.cat([chunk[layer].plain for chunk in captured]),
        )
        ours = runner.family.cache([whole], joined_positions(placed), first=layer).layers[0]
        for mine, theirs in ((ours.keys, own.keys), (ours.values, own.values)):
            if mine.shape != theirs.shape:
                detail = f"layer {layer} holds {tuple(theirs.shape)}, captured {tuple(mine.shape)}"
                return Check("captured KV = own cache", False, detail)
            worst, same = max(worst, _difference(mine, theirs)), same and torch.equal(mine, theirs)
    detail = "bit-identical" if same else f"largest relative difference {worst:.1e}"
    return Check("captured KV = own cache", worst <= _LIMIT[runner.dtype], detail)


def _relocation(runner: ModelRunner, chunk: Segment) -> Check:
    """Layer-0 KV captured alone and moved is what the model itself writes at the new place."""
    alone = runner.prefill_captured([chunk])[0][0]
    filled = chunk.num_tokens if runner.family.gapless else 0
    shift = filled or runner.max_tokens // 2
    moved = chunk.positions.at(shift)
    ours, own = runner.family.cache([alone], moved).layers[0], DynamicCache()
    if filled:
        runner.extend(own, chunk.embeddings, chunk.positions.at(0))
    runner.extend(own, chunk.embeddings, moved)
    theirs = own.layers[0]
    pairs = ((ours.keys, theirs.keys[:, :, filled:]), (ours.values, theirs.values[:, :, filled:]))
    difference = max(_difference(mine, other) for mine, other in pairs)
    same = all(torch.equal(mine, other) for mine, other in pairs)
    detail = "bit-identical" if same else f"largest relative difference {difference:.1e}"
    return Check(
        "layer-0 keys after relocation", difference <= _LIMIT[runner.dtype], f"{detail} at shift {shift}"
    )


def _full_rank(runner: ModelRunner, chunks: list[Segment]) -> Check:
    """Canonical KV with full-rank patches answers like a cold prefill."""
    *context, question = [runner.preamble, *chunks]
    _, reference, captured, _ = runner.prefill([*context, question])
    parts: list[list[tuple[LayerKV, LayerPatch | None]]] = [[(layer, None) for layer in captured[0]]]
    for index, chunk in enumerate(context[1:], start=1):
        alone = runner.prefill_captured([runner.preamble, chunk])[1]
        patch = form(captured[index], alone, rank=chunk.num_tokens, energy=1.0, dtype=torch.float32)
        parts.append(list(zip(alone, patch, strict=True)))
    placed, end = place([(segment.positions, segment.num_tokens) for segment in context])
    layers = ([part[layer] for part in parts] for layer in range(runner.family.num_layers))
    cache = assemble(runner.family, layers, joined_positions(placed))
    logits = runner.extend(cache, question.embeddings, question.positions.at(end))
    kl = next_token_kl(reference, logits)
    return Check("full-rank patch = cold prefill", kl <= _KL_LIMIT[runner.dtype], f"next-token KL {kl:.1e}")


def _positions(runner: ModelRunner, chunks: list[ChunkInputs]) -> Check:
    """Chunk positions moved by one scalar are the model's own for the whole prompt."""
    placed, _ = place([(chunk.positions, chunk.num_tokens) for chunk in chunks])
    ids, types = (
        torch.cat([chunk.token_ids for chunk in chunks]),
        torch.cat([chunk.token_types for chunk in chunks]),
    )
    if not runner.mrope:
        same = torch.equal(joined_positions(placed), torch.arange(ids.numel()))
        return Check("positions = own index function", same, "one step for each token")

    def joined(name: str) -> torch.Tensor | None:
        found = [chunk.tensors[name] for chunk in chunks if name in chunk.tensors]
        return torch.cat(found) if found else None

    own = rope_index(
        runner.model, ids[None], types[None],
        joined("image_grid_thw"), joined("video_grid_thw"), joined("second_per_grid_ts"),
    )  # fmt: skip
    same = torch.equal(own, joined_positions(placed))
    return Check(
        "positions = own index function", same, "equal" if same else "they differ for media with text between"
    )


def _embeddings(runner: ModelRunner, media: list[ChunkInputs], question: torch.Tensor) -> Check:
    """A prefill from stored embeddings answers like the ordinary forward from pixels."""
    cold = runner.reencode(media, question)
    segments = [runner.encode(chunk).segment for chunk in media]
    _, logits, _, _ = runner.prefill([runner.preamble, *segments, runner.text_segment(question)])
    kl = next_token_kl(cold.logits, logits)
    return Check("stored embeddings = pixels", kl <= _KL_LIMIT[runner.dtype], f"next-token KL {kl:.1e}")


def _picture(runner: ModelRunner, generator: torch.Generator) -> ChunkInputs:
    pixels = torch.randint(256, (56, 84, 3), generator=generator, dtype=torch.uint8)
    return runner.media_inputs("image", pixels, fps=None, max_pixels=None)


def _clip(runner: ModelRunner, generator: torch.Generator) -> ChunkInputs:
    frames = torch.randint(256, (8, 56, 84, 3), generator=generator, dtype=torch.uint8)
    return runner.media_inputs("video", frames, fps=2.0, max_pixels=None)


_MEDIA = {"image": _picture, "video": _clip}
