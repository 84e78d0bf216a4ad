"""A window in hand: the calls of an engine, each with this window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kamera_cli.context import Context
from kamera_cli.errors import NotFoundError
from kamera_cli.options import CompileOptions, EvictOptions, IngestOptions, QueryOptions, RecallOptions
from kamera_cli.results import (
    CompileResult,
    EvictResult,
    IngestResult,
    QueryResult,
    RecallResult,
    WindowEntry,
    WindowView,
)
from kamera_cli.window import load_window


@dataclass(frozen=True)
class Window:
    """A named window of an engine: what it sees now, in order, and what can come back.

    Get one with ``Engine.open_window``. Nothing is remembered here: the window stands in the store, so two handles of
    one name, or another process, see the same one. Each method is the engine's of the same name with this window,
    takes its other options as keywords and raises the same errors. Chunks are named by number, name or id.

    Attributes
    ----------
    context : Context
        Store and model of the engine.
    name : str

    Examples
    --------
    >>> window = engine.open_window("notes")
    >>> result = window.ingest("red.txt", "blue.txt")
    >>> moved = window.evict(1)
    >>> [entry.number for entry in window.chunks], [entry.number for entry in window.evicted]
    ([2], [1])
    """

    context: Context
    name: str

    @property
    def view(self) -> WindowView | None:
        """The window as stored; None before the first ingest."""
        try:
            return load_window(self.context.store, self.context.tenant, self.name)
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

    def ingest(self, *sources: str | Path, **fields: Any) -> IngestResult:
        """Encode sources once and append their chunks; see ``Engine.ingest``."""
        from kamera_cli.ingest.sources import ingest

        return ingest(self.context, sources, IngestOptions(window=self.name, **fields))

    def query(self, question: str, chunks: Sequence[str | int] | None = None, **fields: Any) -> QueryResult:
        """Answer from what the window holds, or from some of it in the order given; see ``Engine.query``."""
        from kamera_cli.query.answer import query

        return query(self.context, question, QueryOptions(window=self.name, chunks=chunks, **fields))

    def evict(self, *chunks: str | int, **fields: Any) -> EvictResult:
        """Take chunks out, or the ``oldest`` ones; the store keeps them unless ``purge``. See ``Engine.evict``."""
        from kamera_cli.evict import evict

        return evict(self.context, EvictOptions(window=self.name, chunks=chunks or None, **fields))

    def recall(self, *chunks: str | int, **fields: Any) -> RecallResult:
        """Put evicted chunks back, each patched for what then stands before it; see ``Engine.recall``."""
        from kamera_cli.recall import recall

        return recall(self.context, RecallOptions(window=self.name, chunks=chunks, **fields))

    def compile_patches(self, chunks: Sequence[str | int] | None = None, **fields: Any) -> CompileResult:
        """Form patches ahead of a question; see ``Engine.compile_patches``."""
        from kamera_cli.patches.compile import compile_patches

        return compile_patches(self.context, CompileOptions(window=self.name, chunks=chunks, **fields))
