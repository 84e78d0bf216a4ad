"""A window as an agent holds it: one object with the engine's calls, over chunks that come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kamera_cli.errors import NotFoundError
from kamera_cli.results import (
    CompileResult,
    EvictResult,
    IngestResult,
    QueryResult,
    RecallResult,
    WindowEntry,
    WindowView,
)

if TYPE_CHECKING:
    from kamera_cli.engine import Engine


@dataclass(frozen=True)
class Window:
    """A named window of an engine: what it sees now, in order, and what can come back.

    Get one with ``Engine.open_window``. Nothing is remembered here: the window stands in the store, so two handles of
    one name, or another process, see the same one. Each method is the engine's of the same name with this window,
    takes its other options and raises the same errors. Chunks are named by number, name or id, numbers also as int.

    Attributes
    ----------
    engine : Engine
    name : str
    """

    engine: Engine
    name: str

    @property
    def view(self) -> WindowView | None:
        """The window as stored; None before the first ingest."""
        try:
            return self.engine.window(self.name)
        except NotFoundError:
            return None

    @property
    def chunks(self) -> tuple[WindowEntry, ...]:
        """What the window holds, in order."""
        view = self.view
        return () if view is None else view.entries

    @property
    def evicted(self) -> tuple[WindowEntry, ...]:
        """What has left and can be recalled."""
        view = self.view
        return () if view is None else view.evicted

    def ingest(self, *sources: str | Path, **options: Any) -> IngestResult:
        """Encode sources once and append their chunks; see ``Engine.ingest``."""
        return self.engine.ingest(sources, window=self.name, **options)

    def query(self, question: str, chunks: Sequence[str | int] | None = None, **options: Any) -> QueryResult:
        """Answer from what the window holds, or from some of it in the order given; see ``Engine.query``."""
        named = None if chunks is None else _names(chunks)
        return self.engine.query(question, window=self.name, chunks=named, **options)

    def evict(self, *chunks: str | int, **options: Any) -> EvictResult:
        """Take chunks out, or the ``oldest`` ones; the store keeps them unless ``purge``. See ``Engine.evict``."""
        return self.engine.evict(_names(chunks) or None, window=self.name, **options)

    def recall(self, *chunks: str | int, at: str | int = "end", **options: Any) -> RecallResult:
        """Put evicted chunks back, each patched for what then stands before it; see ``Engine.recall``."""
        return self.engine.recall(_names(chunks), window=self.name, at=at, **options)

    def compile_patches(self, chunks: Sequence[str | int] | None = None, **options: Any) -> CompileResult:
        """Form patches ahead of a question; see ``Engine.compile_patches``."""
        named = None if chunks is None else _names(chunks)
        return self.engine.compile_patches(named, window=self.name, **options)


def _names(chunks: Sequence[str | int]) -> list[str]:
    return [str(chunk) for chunk in chunks]
