"""Every backbone, in fp32 and bf16, against its own cold prefill: moved, reordered, after text, slid, recalled.

The reference is the model's ordinary forward over token ids and pixels, with its own cache, positions and mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from backbone_runners import loaded_runner
from plain_model import kl
from tiny_backbones import BACKBONES, MEDIA, save_backbone
from transformers import DynamicCache

from kamera_cli.model.compat import cache_argument, rope_index
from kamera_cli.model.families.mla import MLA
from kamera_cli.model.inputs import ChunkInputs, joined_tensors
from kamera_cli.model.runner import ModelRunner
from kamera_cli.operator.assemble import assemble, joined_positions, place
from kamera_cli.operator.residual import form

DTYPES = ("fp32", "bf16")
RELATIVE = {"fp32": 1e-5, "bf16": 2e-2}
KL = {"fp32": 1e-6, "bf16": 1e-3}
WINDOWS = {"moved": "ba", "reordered": "cab", "after text": "tab", "slid": "bc", "recalled": "bca"}
"""Chunks of each arrangement by name; what is patched in it is conditioned on what stands before it there."""


@dataclass
class Backbone:
    """A loaded tiny checkpoint with three chunks a, b, c, a text t and a question."""

    name: str
    dtype: str
    runner: ModelRunner

    @cached_property
    def chunks(self) -> dict[str, ChunkInputs]:
        generator = torch.Generator().manual_seed(5)
        texts = {name: self._text(generator, 20 + 3 * index) for index, name in enumerate("abct")}
        if self.name not in MEDIA or not MEDIA[self.name]:
            return texts
        pixels = torch.randint(256, (8, 56, 84, 3), generator=generator, dtype=torch.uint8)
        make = self.runner.media_inputs
        texts["a"] = make("image", pixels[0], fps=None, max_pixels=None)
        texts["b"] = make("image", pixels[1].transpose(0, 1), fps=None, max_pixels=None)
        if "video" in MEDIA[self.name]:
            texts["c"] = make("video", pixels[4:], fps=2.0, max_pixels=None, start_s=6.0)
        return texts

    def _text(self, generator: torch.Generator, num_tokens: int) -> ChunkInputs:
        reserved = {*self.runner.placeholders.values(), *self.runner.eos_ids}
        plain = torch.tensor([token for token in range(9, 60) if token not in reserved])
        return self.runner.text_inputs(plain[torch.randint(len(plain), (num_tokens,), generator=generator)])

    @cached_property
    def question(self) -> torch.Tensor:
        return self.runner.question_ids("which letter goes with the red circle?")

    @cached_property
    def encoded(self) -> dict:
        return {name: self.runner.encode(chunk) for name, chunk in self.chunks.items()}

    @torch.no_grad()
    def cold(self, order: str, question: bool = True) -> tuple[torch.Tensor, DynamicCache]:
        """Logits of the last token and the cache, by the ordinary forward of the whole model."""
        runner = self.runner
        parts = [runner.text_inputs(runner.preamble_ids), *(self.chunks[name] for name in order)]
        parts += [runner.text_inputs(self.question)] if question else []
        accepted = frozenset(name for part in parts for name in part.tensors)
        inputs = {
            name: tensor.to(runner.dtype) if "pixel_values" in name else tensor
            for name, tensor in joined_tensors(parts, accepted).items()
        }
        if runner.mrope and inputs:
            inputs["mm_token_type_ids"] = torch.cat([part.token_types for part in parts])[None]
        if hasattr(runner.model.model, "rope_deltas"):
            runner.model.model.rope_deltas = None
        cache = DynamicCache()
        inputs[cache_argument(runner.model)] = cache
        ids = torch.cat([part.token_ids for part in parts])
        return runner.model(input_ids=ids[None], use_cache=True, **inputs).logits[0, -1], cache

    def patches(self, order: str) -> list:
        """Full-rank patches of an arrangement's chunks; None for the first."""
        segments = [self.encoded[name].segment for name in order]
        conditioned = self.runner.prefill_captured([self.runner.preamble, *segments])[1:]
        return [None] + [
            form(
                after,
                self.encoded[name].layers,
                rank=after[0].rotary.shape[0],
                energy=1.0,
                dtype=torch.float32,
            )
            for name, after in zip(order[1:], conditioned[1:], strict=True)
        ]

    def assembled(self, order: str, patches: list) -> tuple[DynamicCache, torch.Tensor, torch.Tensor]:
        """Cache of an arrangement, its positions, and the logits after the question."""
        runner = self.runner
        segments = [runner.preamble, *(self.encoded[name].segment for name in order)]
        placed, end = place([(segment.positions, segment.num_tokens) for segment in segments])
        positions = joined_positions(placed)
        parts = [(runner.preamble_layers, None)]
        parts += [(self.encoded[name].layers, patch) for name, patch in zip(order, patches, strict=True)]
        layers = [
            [(kv[layer], None if patch is None else patch[layer]) for kv, patch in parts]
            for layer in range(runner.family.num_layers)
        ]
        kept = assemble(runner.family, layers, positions)
        grown = assemble(runner.family, layers, positions)
        after = runner.positions_from(end, self.question.numel())
        return kept, positions, runner.extend(grown, runner.embed(self.question), after)


@pytest.fixture(scope="module")
def backbones(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("backbones"), {}

    def backbone(name: str, dtype: str) -> Backbone:
        folder = root / name
        if not folder.exists():
            save_backbone(name, folder)
        if (name, dtype) not in made:
            made[name, dtype] = Backbone(name, dtype, loaded_runner(folder, dtype))
        return made[name, dtype]

    return backbone


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


every_backbone = pytest.mark.parametrize("name", BACKBONES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@every_dtype
@every_backbone
def test_captured_kv_that_is_not_the_models_own(backbones, name, dtype):
    backbone = backbones(name, dtype)
    runner = backbone.runner
    start = runner.preamble.num_tokens
    for chunk in "abc":
        encoded = backbone.encoded[chunk]
        _, own = backbone.cold(chunk, question=False)
        ours = runner.family.cache(
            encoded.layers, encoded.segment.positions.at(runner.preamble.positions.span)
        )
        for mine, theirs in zip(ours.layers, own.layers, strict=True):
            assert torch.equal(mine.keys, theirs.keys[:, :, start:])
            assert torch.equal(mine.values, theirs.values[:, :, start:])


@every_dtype
@every_backbone
@pytest.mark.parametrize("shift", [37, 900])
def test_layer_0_that_a_cold_prefill_writes_otherwise_at_the_new_place(backbones, name, dtype, shift):
    """Bit for bit: the cold forward has as many rows, so that its matrix products run in the same kernel order."""
    backbone = backbones(name, dtype)
    runner = backbone.runner
    for chunk in "abc":
        encoded, own = backbone.encoded[chunk], DynamicCache()
        span, start = runner.preamble.positions.span, runner.preamble.num_tokens
        moved = encoded.segment.positions.at(span + shift)
        rows = torch.cat([runner.preamble.embeddings, encoded.segment.embeddings])
        runner.extend(own, rows, torch.cat([runner.preamble.positions.at(shift), moved], dim=-1))
        ours, theirs = runner.family.cache([encoded.layers[0]], moved).layers[0], own.layers[0]
        assert torch.equal(ours.keys, theirs.keys[:, :, start:])
        assert torch.equal(ours.values, theirs.values[:, :, start:])


@every_dtype
@every_backbone
def test_a_forward_from_stored_embeddings_that_is_not_the_one_from_pixels(backbones, name, dtype):
    backbone = backbones(name, dtype)
    runner = backbone.runner
    order = "tbac"
    logits, own = backbone.cold(order)
    segments = [backbone.encoded[chunk].segment for chunk in order]
    cache, ours, _, _ = runner.prefill([runner.preamble, *segments, runner.text_segment(backbone.question)])
    assert relative(ours, logits) <= RELATIVE[dtype]
    for mine, theirs in zip(cache.layers, own.layers, strict=True):
        assert relative(mine.keys, theirs.keys) <= RELATIVE[dtype]
        assert relative(mine.values, theirs.values) <= RELATIVE[dtype]


@every_dtype
@every_backbone
@pytest.mark.parametrize("arrangement", WINDOWS)
def test_an_arrangement_that_differs_from_its_cold_prefill(backbones, name, dtype, arrangement):
    backbone = backbones(name, dtype)
    order = WINDOWS[arrangement]
    logits, own = backbone.cold(order)
    cache, positions, patched = backbone.assembled(order, backbone.patches(order))
    num_tokens = positions.shape[-1]
    assert torch.equal(positions, own_positions(backbone, order))
    assert kl(logits, patched) <= KL[dtype]
    if dtype == "fp32":
        assert relative(patched, logits) <= 1e-5
        for mine, theirs in zip(cache.layers, own.layers, strict=True):
            assert relative(mine.keys, theirs.keys[:, :, :num_tokens]) <= 1e-5
            assert relative(mine.values, theirs.values[:, :, :num_tokens]) <= 1e-5
        # The proof could fail: without the patches the answer is another one.
        assert relative(backbone.assembled(order, [None] * len(order))[2], logits) > 1e-3


@every_dtype
@every_backbone
def test_a_survivor_that_loses_its_conditioning_when_the_window_slides(backbones, name, dtype):
    """Rotation only: what b and c absorbed from a stays, and stands at the positions of the slid window."""
    backbone = backbones(name, dtype)
    runner = backbone.runner
    segments = [backbone.encoded[chunk].segment for chunk in "abc"]
    conditioned = runner.prefill_captured([runner.preamble, *segments])
    cache, positions, _ = backbone.assembled("bc", backbone.patches("abc")[1:])
    parts = zip(runner.preamble_layers, conditioned[2], conditioned[3], strict=True)
    for layer, kept in enumerate(parts):
        whole = type(kept[0])(
            torch.cat([part.rotary for part in kept]), torch.cat([part.plain for part in kept])
        )
        expected = runner.family.cache([whole], positions, first=layer).layers[0]
        assert relative(cache.layers[layer].keys, expected.keys) <= RELATIVE[dtype]
        assert relative(cache.layers[layer].values, expected.values) <= RELATIVE[dtype]
    assert torch.equal(positions, own_positions(backbone, "bc"))


@every_dtype
@pytest.mark.parametrize(
    "name", [name for name in BACKBONES if name.startswith(("deepseek_v2", "deepseek_v3", "kimi"))]
)
def test_a_latent_that_changes_when_it_moves(backbones, name, dtype):
    backbone = backbones(name, dtype)
    family = backbone.runner.family
    assert isinstance(family, MLA) and family.layout == "latent"
    cache, _, _ = backbone.assembled("cab", [None] * 3)
    start = backbone.runner.preamble.num_tokens
    for layer in range(family.num_layers):
        stored = torch.cat([backbone.encoded[chunk].layers[layer].plain for chunk in "cab"])
        held = cache.layers[layer].keys[0, 0, start:]
        assert held.contiguous().view(torch.uint8).equal(stored[:, 0].contiguous().view(torch.uint8))


def own_positions(backbone: Backbone, order: str) -> torch.Tensor:
    """Position ids of preamble and chunks by the installed model's own rule for the whole prompt."""
    runner = backbone.runner
    parts = [runner.text_inputs(runner.preamble_ids), *(backbone.chunks[name] for name in order)]
    ids = torch.cat([part.token_ids for part in parts])
    if not runner.mrope:
        return torch.arange(ids.numel())
    types = torch.cat([part.token_types for part in parts])
    grids = joined_tensors(parts, frozenset({"image_grid_thw", "video_grid_thw", "second_per_grid_ts"}))
    return rope_index(
        runner.model, ids[None], types[None],
        grids.get("image_grid_thw"), grids.get("video_grid_thw"), grids.get("second_per_grid_ts"),
    )  # fmt: skip
