"""Loaded checkpoints for tests that look at one runner."""

from __future__ import annotations

from pathlib import Path

from tiny_backbones import save_backbone

from kamera_cli.model.checkpoint import open_checkpoint
from kamera_cli.model.loading import load
from kamera_cli.model.runner import ModelRunner


def loaded_runner(folder: Path, dtype: str = "fp32", *, trust_remote_code: bool = False) -> ModelRunner:
    """The checkpoint in a folder on the CPU, with the attention kernel that ``auto`` takes."""
    checkpoint = open_checkpoint(str(folder), trust_remote_code=trust_remote_code)
    return ModelRunner(
        load(checkpoint, device="cpu", dtype=dtype, attention="auto", trust_remote_code=trust_remote_code)
    )


def backbone_runner(name: str, folder: Path, **fields: object) -> ModelRunner:
    """A fresh tiny checkpoint of a backbone in ``folder``, loaded in fp32; ``fields`` go to `save_backbone`."""
    return loaded_runner(save_backbone(name, folder / name, **fields))
