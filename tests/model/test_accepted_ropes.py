"""A RoPE variant that the table accepts for an architecture is one for which that architecture's self-test holds."""

from __future__ import annotations

import pytest
from backbone_runners import loaded_runner
from tiny_backbones import BACKBONES, save_backbone

from kamera_cli.model.architectures import ARCHITECTURES
from kamera_cli.model.self_test import self_test

# Lengths so short that the scaled part of each table is reached.
SCALING = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.7},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
}  # fmt: skip
ACCEPTED = {entry.model_type: entry.rope for entry in ARCHITECTURES}


@pytest.mark.parametrize("rope_type", SCALING)
@pytest.mark.parametrize("name", BACKBONES)
def test_an_accepted_rope_variant_is_moved_by_the_models_own_table(name, rope_type, tmp_path):
    assert rope_type in ACCEPTED[name]
    folder = save_backbone(name, tmp_path / name, rope={"rope_type": rope_type, **SCALING[rope_type]})
    result = self_test(loaded_runner(folder))
    assert result.ok, [check for check in result.checks if not check.ok]


def test_no_variant_is_accepted_that_is_not_tried_here():
    assert {name for names in ACCEPTED.values() for name in names} == {"default", *SCALING}
