from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kamera_cli.engine import Engine
from kamera_cli.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(store=tmp_path / "unused", model="kamera-tiny", device="cpu", dtype="fp32")


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The embedded model over a store of this session."""
    folder = tmp_path_factory.mktemp("bench") / "store"
    with Engine(Settings(store=folder, model="kamera-tiny", device="cpu", dtype="fp32")) as opened:
        yield opened
