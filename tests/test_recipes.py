"""The recipes of ``docs/how-to-add.md``, followed."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import measured_tables
import pytest
from tiny_backbones import _TEXT, MEDIA, save_backbone

from kamera_cli.bench import SUITES
from kamera_cli.errors import RefusedError
from kamera_cli.model import architectures
from kamera_cli.model.checkpoint import open_checkpoint
from kamera_cli.model.loading import load
from kamera_cli.model.runner import ModelRunner
from kamera_cli.model.self_test import self_test
from kamera_store.base import Store

ROOT = Path(__file__).resolve().parents[1]
NEW = "granite"
"""An architecture of transformers that has no row, and is the example of the recipe."""


def recipe(title: str) -> str:
    text = (ROOT / "docs" / "how-to-add.md").read_text(encoding="utf-8")
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_a_backbone_is_one_row_and_a_tiny_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f'_text("{NEW}", ' in recipe("A backbone")
    monkeypatch.setitem(MEDIA, NEW, ())
    monkeypatch.setitem(_TEXT, NEW, (NEW, {}))
    folder = save_backbone(NEW, tmp_path / NEW)
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] == NEW
    with pytest.raises(RefusedError, match=f"architecture '{NEW}' is not supported"):
        open_checkpoint(str(folder))

    row = architectures._text(NEW, "Granite")
    monkeypatch.setattr(architectures, "ARCHITECTURES", (*architectures.ARCHITECTURES, row))
    loaded = load(
        open_checkpoint(str(folder)), device="cpu", dtype="fp32", attention="auto", trust_remote_code=False
    )
    tested = self_test(ModelRunner(loaded))
    assert [check.name for check in tested.checks if not check.ok] == []
    assert len(tested.checks) >= 3


def test_every_bench_suite_is_listed_recorded_and_shown() -> None:
    for name in SUITES:
        assert callable(importlib.import_module(f"kamera_cli.bench.{name}").measure), name
    assert set(SUITES) == set(measured_tables.KEPT) == set(measured_tables.SHOWN)


def test_a_store_backend_implements_the_verbs_that_the_recipe_lists() -> None:
    listed = set(re.findall(r"`([a-z_]+)`", recipe("A store backend").split("What follows")[0]))
    assert listed == set(Store.__abstractmethods__)
