"""Loaded tiny backbones for tests that look at one runner."""

from __future__ import annotations

from pathlib import Path

from tiny_backbones import save_backbone

from kamera_cli.model.checkpoint import open_checkpoint
from kamera_cli.model.loading import load
from kamera_cli.model.runner import ModelRunner


def backbone_runner(name: str, folder: Path, **fields: object) -> ModelRunner:
    """A fresh tiny checkpoint of a backbone in ``folder``, loaded in fp32; ``fields`` go to `save_backbone`."""
    checkpoint = open_checkpoint(str(save_backbone(name, folder / name, **fields)))
    return ModelRunner(
        load(checkpoint, device="cpu", dtype="fp32", attention="auto", trust_remote_code=False)
    )
