"""An engine over a store that is thrown away, for suites that run the product itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kamera_cli.engine import Engine
from kamera_cli.results import Progress
from kamera_cli.settings import Settings


@contextmanager
def scratch_engine(
    settings: Settings, on_progress: Callable[[Progress], None] | None = None
) -> Iterator[tuple[Engine, Path]]:
    """The model of some settings over a fresh store without a quota, and a folder for files beside it.

    Both are gone when the block ends.
    """
    with tempfile.TemporaryDirectory(prefix="kamera-bench-") as folder:
        work = Path(folder)
        own = replace(settings, store=work / "store", quota_bytes=None, rehash=False)
        with Engine(own, on_progress=on_progress) as engine:
            yield engine, work
