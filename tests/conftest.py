"""What all tests share: no network, one thread, tiny random checkpoints, engines over fresh stores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.update(
    HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false"
)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny random checkpoint by family name."""
    import torch
    from tiny_models import save

    torch.set_num_threads(1)
    root, made = tmp_path_factory.mktemp("checkpoints"), {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = save(family, root / family)
        return made[family]

    return folder


@pytest.fixture(scope="session")
def runners(checkpoints: Callable[[str], Path]) -> Callable[..., object]:
    """A loaded `ModelRunner` by family and dtype; shared, since no call may leave state on a model."""
    made = {}

    def runner(family: str, dtype: str = "fp32") -> object:
        from backbone_runners import loaded_runner

        if (family, dtype) not in made:
            made[family, dtype] = loaded_runner(checkpoints(family), dtype)
        return made[family, dtype]

    return runner


@pytest.fixture
def open_engine(checkpoints: Callable[[str], Path], tmp_path: Path) -> Iterator[Callable[..., object]]:
    """Make engines over one fresh store: ``open_engine(family, warnings=[], **settings)``."""
    opened = []

    def make(
        family: str = "qwen2_5_vl",
        *,
        warnings: list[str] | None = None,
        runner: object = None,
        **settings: object,
    ) -> object:
        from kamera_cli.engine import Engine
        from kamera_cli.settings import Settings

        options = {
            "store": tmp_path / "store",
            "device": "cpu",
            "model": str(checkpoints(family)),
            **settings,
        }
        engine = Engine(
            Settings(**options), on_warning=None if warnings is None else warnings.append, runner=runner
        )
        opened.append(engine)
        return engine

    yield make
    for engine in opened:
        engine.close()
