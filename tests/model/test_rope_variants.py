"""Every RoPE variant that is not refused, in both families: relocated keys and answers against the model's own."""

from __future__ import annotations

import pytest
import torch
from backbone_runners import loaded_runner
from tiny_backbones import save_backbone
from transformers import DynamicCache

from kamera_cli.model.self_test import self_test

THETA = {"rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, **THETA}
VARIANTS = {
    "default": {"rope_type": "default", **THETA},
    "linear": {"rope_type": "linear", "factor": 4.0, **THETA},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, **THETA},
    "yarn": YARN,
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512, **THETA,
    },
}  # fmt: skip
MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 32, "beta_slow": 1}
CASES = [
    *(("llama", name, rope) for name, rope in VARIANTS.items()),
    *(("deepseek_v3", name, rope) for name, rope in VARIANTS.items() if name != "llama3"),
    ("deepseek_v3", "yarn with mscale", MSCALE),
    ("deepseek_v2", "yarn with mscale", MSCALE),
    ("glm4", "partial, yarn", {**YARN, "partial_rotary_factor": 0.5}),
    ("qwen2_5_vl", "blocks, yarn", {**YARN, "mrope_section": [2, 3, 3]}),
]


@pytest.mark.parametrize(
    ("name", "variant", "rope"), CASES, ids=[f"{name}-{variant}" for name, variant, _ in CASES]
)
def test_a_variant_whose_keys_are_rotated_otherwise(tmp_path, name, variant, rope):
    runner = loaded_runner(save_backbone(name, tmp_path / "model", rope=rope))
    rope_type = rope["rope_type"]
    assert runner.model.config.get_text_config().rope_parameters["rope_type"] == rope_type
    checks = self_test(runner)
    assert checks.ok, checks
    ids = torch.randint(9, 60, (40,), generator=torch.Generator().manual_seed(1))
    segment = runner.text_segment(ids)
    alone = runner.prefill_captured([segment])[0]
    for shift in (1, 333, runner.max_tokens - 40):
        own = DynamicCache()
        runner.extend(own, segment.embeddings, segment.positions.at(shift))
        ours = runner.family.cache(alone[:1], segment.positions.at(shift)).layers[0]
        assert torch.equal(ours.keys, own.layers[0].keys) and torch.equal(ours.values, own.layers[0].values)


def test_a_table_that_every_variant_shares_would_prove_nothing(tmp_path):
    tables = []
    for name, rope in VARIANTS.items():
        if name == "dynamic":
            continue  # the default table up to max_position_embeddings, and longer prompts are refused
        runner = loaded_runner(save_backbone("llama", tmp_path / name, rope=rope))
        like = runner.preamble.embeddings
        tables.append(torch.cat(runner.family.rotation(torch.arange(600), like)))
    for index, one in enumerate(tables):
        assert all(not torch.allclose(one, other, atol=1e-3) for other in tables[:index])


def test_dynamic_rope_remembers_nothing_of_an_earlier_prompt(tmp_path):
    """A longer prompt grows the table of this variant on the model object; within the context it is the default one."""
    runner = loaded_runner(save_backbone("llama", tmp_path / "model", rope=VARIANTS["dynamic"]))
    like, positions = runner.preamble.embeddings, torch.arange(64)
    before = runner.family.rotation(positions, like)
    runner.family.rotation(torch.arange(runner.max_tokens), like)
    after = runner.family.rotation(positions, like)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
