"""The engine: ingest, compile_patches, query, evict and recall over one store and one model.

A thin face: what the calls share stands in `kamera_cli.context`, what each may be asked in `kamera_cli.options`, and
how each is done in the module that it calls. Importing this module loads no torch; the model is loaded by the first
call that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kamera_cli.context import Context
from kamera_cli.handle import Window
from kamera_cli.options import (
    DEFAULT_WINDOW,
    CompileOptions,
    EvictOptions,
    IngestOptions,
    QueryOptions,
    RecallOptions,
)
from kamera_cli.results import (
    CompileResult,
    EvictResult,
    IngestResult,
    Progress,
    QueryPlan,
    QueryResult,
    RecallResult,
    WindowView,
)
from kamera_cli.settings import Settings, checked_name
from kamera_cli.window import list_windows, load_window
from kamera_store.kvstore import KVStore

if TYPE_CHECKING:
    from kamera_cli.library import Library
    from kamera_cli.model.runner import ModelRunner
    from kamera_cli.model.self_test import SelfTest

Options = TypeVar("Options", IngestOptions, CompileOptions, QueryOptions, EvictOptions, RecallOptions)


class Engine:
    """One store and one model, for as many calls as a process makes.

    The model is loaded by the first call that needs it, once. With ``Settings.hot_bytes`` what was read of a chunk or a
    patch stays in memory, so that asking again reads nothing. Calls from several threads are safe.

    Each call takes its options as keywords, or as one object of `kamera_cli.options` in ``options``, which keywords
    change. Defaults and checks stand there, and the command line has the same.

    Parameters
    ----------
    settings : Settings, optional
        The defaults of the command line when not given.
    on_progress : callable, optional
        Receives a `Progress` after each step of a long job.
    on_warning : callable, optional
        Receives one line at a time that a person should see.
    runner : ModelRunner, optional
        The model of ``settings.model``, loaded already by another engine.

    Notes
    -----
    A context manager; ``close`` releases the store. Methods raise subclasses of `kamera_cli.errors.KameraError`,
    `kamera_cli.media.errors.MediaError` and `kamera_store.errors.KameraStoreError`.

    Examples
    --------
    >>> from pathlib import Path
    >>> from kamera_cli import Engine, Settings
    >>> with Engine(Settings(store=Path("my-store"), device="cpu")) as engine:
    ...     ingested = engine.ingest(["red.txt", "blue.txt"])
    ...     result = engine.query("what is on the card ?")
    >>> [chunk.used for chunk in result.chunks]
    ['prefilled', 'prefilled']
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        on_warning: Callable[[str], None] | None = None,
        runner: ModelRunner | None = None,
    ) -> None:
        settings = Settings() if settings is None else settings
        self.context = Context(settings, on_progress=on_progress, on_warning=on_warning, runner=runner)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the store; the engine can be used again afterwards.

        Examples
        --------
        >>> engine.close()
        >>> len(engine.windows())
        1
        """
        self.context.close()

    @property
    def settings(self) -> Settings:
        """What the engine was made with."""
        return self.context.settings

    @property
    def store(self) -> KVStore:
        """The store at ``settings.store``, created when it is not there."""
        return self.context.store

    @property
    def runner(self) -> ModelRunner:
        """The loaded model."""
        return self.context.runner

    @property
    def library(self) -> Library:
        """Chunks and patches of this tenant and model in the store; made without loading the model."""
        return self.context.library

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model as it is used here, 64 hex digits."""
        return self.context.fingerprint

    @property
    def vision_calls(self) -> int:
        """Forwards of the vision tower so far; none while the model is not loaded."""
        return self.context.vision_calls

    def self_test(self) -> SelfTest:
        """Compare capture, relocation and positions with the model's own (``kamera models check``).

        Examples
        --------
        >>> engine.self_test().ok
        True
        """
        return self.context.self_test()

    def ingest(
        self, sources: Sequence[str | Path], options: IngestOptions | None = None, **fields: Any
    ) -> IngestResult:
        """Decode, cut, encode once, store, and append to a window.

        Parameters
        ----------
        sources : sequence of path
            Videos, images or UTF-8 text files.

        Raises
        ------
        MediaError
            A source cannot be decoded; with several sources it is a failure in the result instead.
        RefusedError
            The window belongs to another model, or the model fails its self-test.
        NoRoomError
            The quota does not hold all sources at once.

        Examples
        --------
        >>> result = engine.ingest(["red.txt"], name="a red card", window="cards")
        >>> [(chunk.number, chunk.name, chunk.outcome) for chunk in result.chunks]
        [(1, 'a red card#1', 'found')]
        """
        from kamera_cli.ingest.sources import ingest

        return ingest(self.context, sources, _merged(IngestOptions, options, fields))

    def compile_patches(
        self,
        chunks: Sequence[str | int] | None = None,
        options: CompileOptions | None = None,
        **fields: Any,
    ) -> CompileResult:
        """Form the patch of every chunk for what stands before it, in one conditioned forward.

        Parameters
        ----------
        chunks : sequence of str or int, or None
            An order (numbers, names, ids); None for the window's own.

        Raises
        ------
        NotFoundError
            No such window or chunk.
        RefusedError
            The window belongs to another model.
        UsageError
            Empty window, a rank out of range for a chunk, or a number of chunks that the kind does not take.

        Examples
        --------
        >>> result = engine.compile_patches([2, 1], rank=4)
        >>> [(patch.chunk_number, patch.antecedent_numbers, patch.outcome) for patch in result.patches]
        [(1, (2,), 'formed')]
        """
        from kamera_cli.patches.compile import compile_patches

        given = fields if chunks is None else {"chunks": chunks, **fields}
        return compile_patches(self.context, _merged(CompileOptions, options, given))

    def query(self, question: str, options: QueryOptions | None = None, **fields: Any) -> QueryResult:
        """Answer from stored chunks, with a receipt.

        Parameters
        ----------
        question : str

        Raises
        ------
        NotFoundError
            No such window or chunk, or a miss under ``require_hit`` or ``reuse="patched"``.
        RefusedError
            The window belongs to another model.
        UsageError
            Empty window or question, or a prompt longer than the model's context.

        Examples
        --------
        >>> result = engine.query("what is on the card ?", chunks=[2, 1], reuse="blind", max_new_tokens=4)
        >>> [(chunk.number, chunk.used) for chunk in result.chunks]
        [(2, 'canonical'), (1, 'blind')]
        """
        from kamera_cli.query.answer import query

        return query(self.context, question, _merged(QueryOptions, options, fields))

    def explain(self, options: QueryOptions | None = None, **fields: Any) -> QueryPlan:
        """What a query with these options would use, and what it would read; nothing is read or run.

        Raises
        ------
        NotFoundError, RefusedError, UsageError
            As `query` does for its window, its chunks and its options.

        Examples
        --------
        >>> [(chunk.number, chunk.used) for chunk in engine.explain(reuse="blind").chunks]
        [(1, 'canonical'), (2, 'blind')]
        """
        from kamera_cli.query.receipt import explain

        return explain(self.context, _merged(QueryOptions, options, fields))

    def evict(
        self, chunks: Sequence[str | int] | None = None, options: EvictOptions | None = None, **fields: Any
    ) -> EvictResult:
        """Take chunks out of a window; the store keeps them unless ``purge``. Needs no model.

        Parameters
        ----------
        chunks : sequence of str or int, or None
            Numbers, names or ids; None with ``oldest``.

        Raises
        ------
        NotFoundError
            No such window or chunk.
        RefusedError
            A chunk to purge is in another window too.
        UsageError
            The window holds fewer chunks.

        Examples
        --------
        >>> [entry.number for entry in engine.evict(oldest=1).evicted]
        [1]
        """
        from kamera_cli.evict import evict

        given = fields if chunks is None else {"chunks": chunks, **fields}
        return evict(self.context, _merged(EvictOptions, options, given))

    def recall(
        self, chunks: Sequence[str | int] | None = None, options: RecallOptions | None = None, **fields: Any
    ) -> RecallResult:
        """Put evicted chunks back, each with a patch for what now stands before it; the vision tower never runs.

        The model is loaded only where such a patch is not in the store yet. With ``repair`` the chunks of the window
        whose patches name a recalled one are conditioned anew on what stands before them now, the cheapest first; asked
        again, a repair that was interrupted goes on.

        Parameters
        ----------
        chunks : sequence of str or int
            Numbers, names or ids, in the order in which they come back.

        Raises
        ------
        NotFoundError
            No such window, or no such chunk among the evicted ones, or it is gone from the store.
        RefusedError
            The window belongs to another model.
        UsageError
            The window already holds the chunk, or the place lies outside the window.

        Examples
        --------
        >>> moved = engine.evict([1])
        >>> back = engine.recall([1], at=1)
        >>> [entry.number for entry in back.window.entries], back.vision_calls
        ([1, 2], 0)
        """
        from kamera_cli.recall import recall

        given = fields if chunks is None else {"chunks": chunks, **fields}
        return recall(self.context, _merged(RecallOptions, options, given))

    def open_window(self, name: str = DEFAULT_WINDOW) -> Window:
        """A window as one object to hold on to; the window itself begins with its first ingest.

        Raises
        ------
        UsageError
            Nothing can be called so.

        Examples
        --------
        >>> window = engine.open_window()
        >>> [entry.name for entry in window.chunks]
        ['red.txt#1', 'blue.txt#1']
        """
        return Window(self.context, checked_name("window", name))

    def window(self, name: str = DEFAULT_WINDOW) -> WindowView:
        """A window of this tenant as it is stored.

        Raises
        ------
        NotFoundError
            There is none.

        Examples
        --------
        >>> [entry.num_tokens > 0 for entry in engine.window().entries]
        [True, True]
        """
        return load_window(self.store, self.settings.tenant, name)

    def windows(self) -> tuple[WindowView, ...]:
        """All windows of this tenant, by name.

        Examples
        --------
        >>> [view.name for view in engine.windows()]
        ['default']
        """
        return list_windows(self.store, self.settings.tenant)


def _merged(kind: type[Options], options: Options | None, fields: dict[str, Any]) -> Options:
    return kind(**fields) if options is None else replace(options, **fields)
