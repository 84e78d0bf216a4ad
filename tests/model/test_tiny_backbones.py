"""The tiny checkpoints that everything else is proven on: complete, seeded, and not blind to a fault."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_backbones import BACKBONES, MEDIA, save_backbone
from tiny_models import EOS, passage
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.video_utils import VideoMetadata

VISION = tuple(name for name in BACKBONES if MEDIA[name])


@dataclass(frozen=True)
class Loaded:
    """A checkpoint through the Auto classes."""

    folder: Path
    model: PreTrainedModel
    renderer: object

    @property
    def tokenizer(self) -> object:
        return getattr(self.renderer, "tokenizer", self.renderer)

    def inputs(self, *items: str, seed: int = 0, text: str = "red circle") -> dict:
        """The processor's output for one prompt of content items: "image", "tall", "video", "text"."""
        kinds = ["image" if item == "tall" else item for item in items]
        content = [{"type": kind, "text": text} if kind == "text" else {"type": kind} for kind in kinds]
        block = self.renderer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        media: dict = {}
        heights = {"image": 56, "tall": 84}
        images = [picture(seed + at, heights[item]) for at, item in enumerate(items) if item in heights]
        if images:
            media["images"] = images
        clips = [clip(seed + at) for at, item in enumerate(items) if item == "video"]
        if clips:
            metadata = [
                VideoMetadata(total_num_frames=4, fps=2.0, frames_indices=[0, 1, 2, 3]) for _ in clips
            ]
            media["videos"] = clips
            media["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": metadata}
        spelling = {"add_special_tokens": False}
        return self.renderer(text=[block], return_tensors="pt", text_kwargs=spelling, **media)

    def text_inputs(self, text: str) -> dict:
        return dict(self.tokenizer(text, return_tensors="pt", return_token_type_ids=False))

    def logits(self, inputs: dict) -> torch.Tensor:
        with torch.no_grad():
            return self.model(**inputs).logits[0]


def picture(seed: int, height: int = 56) -> torch.Tensor:
    """(3, height, 56) uint8, coarse random colours."""
    cells = np.random.default_rng(seed).integers(0, 256, (3, 4, 4), dtype=np.uint8)
    return torch.from_numpy(np.kron(cells, np.ones((1, height // 4, 14), dtype=np.uint8)))


def clip(seed: int) -> torch.Tensor:
    """(4, 3, 56, 56) uint8."""
    return torch.stack([picture(1000 * seed + frame) for frame in range(4)])


def load(folder: Path, name: str, **options: object) -> Loaded:
    torch.set_num_threads(1)
    auto = AutoModelForImageTextToText if MEDIA[name] else AutoModelForCausalLM
    model, report = auto.from_pretrained(folder, local_files_only=True, output_loading_info=True, **options)
    left = {key: value for key, value in report.items() if value}
    assert not left, f"{name}: the checkpoint and its class disagree: {left}"
    renderer = (AutoProcessor if MEDIA[name] else AutoTokenizer).from_pretrained(
        folder, local_files_only=True
    )
    return Loaded(folder, model.eval(), renderer)


@pytest.fixture(scope="module")
def backbones(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    root = tmp_path_factory.mktemp("backbones")

    @cache
    def loaded(name: str) -> Loaded:
        return load(save_backbone(name, root / name), name, attn_implementation="eager")

    return loaded


@pytest.fixture(params=BACKBONES)
def backbone(request: pytest.FixtureRequest, backbones: Callable[[str], Loaded]) -> Loaded:
    return backbones(request.param)


def _arrangements(name: str) -> list[tuple[str, ...]]:
    found = [("image",), ("tall",), ("text", "image", "image"), ("image", "text", "tall")]
    if "video" in MEDIA[name]:
        found += [("video",), ("video", "image", "text", "video")]
    return found


def test_text_gives_no_finite_logits(backbone: Loaded) -> None:
    logits = backbone.logits(backbone.text_inputs(passage(12, 0)))
    assert torch.isfinite(logits).all()
    assert logits.shape[-1] == len(backbone.tokenizer)


@pytest.mark.parametrize("name", VISION)
def test_a_picture_or_video_does_not_reach_the_logits(name: str, backbones: Callable[[str], Loaded]) -> None:
    loaded = backbones(name)
    for items in _arrangements(name):
        one, other = loaded.inputs(*items, seed=1), loaded.inputs(*items, seed=50)
        assert torch.equal(one["input_ids"], other["input_ids"])
        first, second = loaded.logits(one), loaded.logits(other)
        assert torch.isfinite(first).all() and torch.isfinite(second).all()
        assert (first[-1] - second[-1]).abs().max() > 1e-2, items


@pytest.mark.parametrize("name", VISION)
def test_a_picture_makes_too_many_tokens(name: str, backbones: Callable[[str], Loaded]) -> None:
    loaded = backbones(name)
    bare = loaded.inputs("text")["input_ids"].numel()
    for item in ("image", "tall"):
        assert 4 <= loaded.inputs("text", item)["input_ids"].numel() - bare <= 30


def test_attention_is_uniform(backbone: Loaded) -> None:
    with torch.no_grad():
        attentions = backbone.model(**backbone.text_inputs(passage(24, 3)), output_attentions=True).attentions
    for layer in attentions:
        last = layer[0, :, -1]
        bits = (last * (last * last.shape[-1]).clamp_min(1e-30).log()).sum(-1)
        assert bits.mean() > 0.2


def test_what_stands_before_does_not_reach_the_last_token(backbone: Loaded) -> None:
    before, other, after = (passage(20, seed) for seed in (1, 2, 3))
    last = [
        backbone.logits(backbone.text_inputs(f"{text} {after}"))[-1].log_softmax(-1)
        for text in (before, other)
    ]
    assert (last[0].exp() * (last[0] - last[1])).sum() > 1e-2


def test_every_answer_is_the_end_mark(backbone: Loaded) -> None:
    answers = {int(backbone.logits(backbone.text_inputs(passage(9, seed)))[-1].argmax()) for seed in range(8)}
    assert answers != {EOS} and len(answers) > 1
    assert backbone.model.generation_config.eos_token_id == EOS


def test_a_weight_is_constant_and_hides_a_fault(backbone: Loaded) -> None:
    for path, parameter in backbone.model.named_parameters():
        assert parameter.numel() == 1 or parameter.std() > 1e-3, path
    for path, buffer in backbone.model.named_buffers():
        if path.endswith("e_score_correction_bias"):
            assert buffer.std() > 1e-3, path


def test_a_token_sits_at_a_tie_of_experts(backbone: Loaded) -> None:
    scores: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, inputs: tuple, _: object) -> None:
        hidden = inputs[0].reshape(-1, module.weight.shape[-1]).float()
        scores.append(hidden @ module.weight.float().T)

    gates = [
        module.register_forward_hook(keep)
        for path, module in backbone.model.named_modules()
        if path.endswith("mlp.gate")
    ]
    backbone.logits(backbone.text_inputs(passage(40, 5)))
    for gate in gates:
        gate.remove()
    assert len(gates) == len(scores)
    for layer in scores:
        ordered = layer.sort(dim=-1, descending=True).values
        assert layer.std() > 1.0
        assert (ordered[:, 1] - ordered[:, 2]).min() > 1e-4


@pytest.mark.parametrize("name", BACKBONES)
def test_the_same_seed_gives_other_bytes(
    name: str, backbones: Callable[[str], Loaded], tmp_path: Path
) -> None:
    again, other = save_backbone(name, tmp_path / "again"), save_backbone(name, tmp_path / "other", seed=1)
    assert _digests(again) == _digests(backbones(name).folder)
    assert _digests(other)["model.safetensors"] != _digests(again)["model.safetensors"]


@pytest.mark.parametrize("name", [n for n in ("qwen3_vl", "qwen3_vl_moe", "kimi_k25") if n in BACKBONES])
def test_two_time_stamps_fall_on_one_token(name: str, backbones: Callable[[str], Loaded]) -> None:
    tokenizer = backbones(name).tokenizer
    stamps = (
        "<0.2 seconds>",
        "<1.2 seconds>",
        "<12.5 seconds>",
        "00:00:01.500",
        "00:01:00.500",
        "Frame1: ",
        "Frame12: ",
    )
    spelt = [tuple(tokenizer(stamp, add_special_tokens=False)["input_ids"]) for stamp in stamps]
    assert len(set(spelt)) == len(stamps)
    assert all(tokenizer.unk_token_id not in ids for ids in spelt)


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
_ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": _YARN,
    "yarn with mscale": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}


@pytest.mark.parametrize("rope", _ROPES.values(), ids=_ROPES)
@pytest.mark.parametrize(
    "name", [n for n in ("qwen2_vl", "qwen3_vl", "kimi_k25", "glm4", "deepseek_v2") if n in MEDIA]
)
def test_a_rope_variant_is_not_applied(
    name: str, rope: dict, backbones: Callable[[str], Loaded], tmp_path: Path
) -> None:
    plain = backbones(name)
    # Dynamic scaling starts beyond the positions that the config allows.
    short = {"max_position_embeddings": 64} if rope["rope_type"] == "dynamic" else {}
    varied = load(save_backbone(name, tmp_path, rope=rope, **short), name)
    text = plain.model.config.get_text_config().rope_parameters
    assert varied.model.config.get_text_config().rope_parameters.items() >= {**text, **rope}.items()
    inputs = plain.text_inputs(passage(120, 2))
    logits = varied.logits(inputs)
    assert torch.isfinite(logits).all()
    assert (logits - plain.logits(inputs)).abs().max() > 1e-3


@pytest.mark.parametrize("text", ["qwen3", "llama"])
def test_another_text_model_of_internvl_does_not_load(text: str, tmp_path: Path) -> None:
    loaded = load(save_backbone("internvl", tmp_path, text=text), "internvl")
    assert loaded.model.config.text_config.model_type == text
    assert torch.isfinite(loaded.logits(loaded.inputs("video", "image"))).all()


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
