"""The engine: ingest, compile_patches, query, evict and recall over one store and one model.

What is common to all calls stands here (store, model, fingerprint, what is kept in memory); how each of them is done
stands in the module of `kamera_cli.jobs` that it calls.

Importing this module loads no torch; the model is loaded by the first call that needs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kamera_cli import evict as moves
from kamera_cli.context import Context
from kamera_cli.ingest import sources as ingest_job
from kamera_cli.live import Window
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
from kamera_cli.settings import DEFAULT_ENERGY, Settings, checked_name
from kamera_cli.window import list_windows, load_window
from kamera_store.kvstore import KVStore

if TYPE_CHECKING:
    from kamera_cli.library import Library
    from kamera_cli.model.runner import ModelRunner
    from kamera_cli.model.self_test import SelfTest


class Engine:
    """One store and one model, for as many calls as a process makes.

    The model is loaded by the first call that needs it, once. With ``Settings.hot_bytes`` what was read of a chunk or a
    patch stays in memory, so that asking again reads nothing. Calls from several threads are safe.

    Parameters
    ----------
    settings : Settings
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
    """

    def __init__(
        self,
        settings: Settings,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        on_warning: Callable[[str], None] | None = None,
        runner: ModelRunner | None = None,
    ) -> None:
        self.context = Context(settings, on_progress=on_progress, on_warning=on_warning, runner=runner)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the store; the engine can be used again afterwards."""
        self.context.close()

    @property
    def settings(self) -> Settings:
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
        """Compare capture, relocation and positions with the model's own (``kamera models check``)."""
        return self.context.self_test()

    def ingest(
        self,
        sources: Sequence[str | Path],
        *,
        window: str = "default",
        fps: float = 2.0,
        chunk_seconds: float = 8.0,
        max_pixels: int | None = None,
        chunk_tokens: int = 512,
        name: str | None = None,
        partial: bool = False,
        dry_run: bool = False,
    ) -> IngestResult:
        """Decode, cut, encode once, store, and append to a window.

        Parameters
        ----------
        sources : sequence of path
            Videos, images or UTF-8 text files.
        fps : float
            Frames sampled per second of video.
        chunk_seconds : float
            Length of a video chunk.
        max_pixels : int or None
            Bound on the pixels of a frame after resizing; None keeps the checkpoint's own.
        chunk_tokens : int
            Length of a text chunk.
        name : str or None
            What chunks are called instead of the file name.
        partial : bool
            Keep the sources that work when others fail, instead of appending nothing to the window.
        dry_run : bool
            Decode and count, but encode and write nothing.
        """
        options = ingest_job.IngestOptions(
            fps, chunk_seconds, max_pixels, chunk_tokens, name, partial, dry_run
        )
        return ingest_job.ingest(self.context, [os.fspath(source) for source in sources], window, options)

    def compile_patches(
        self,
        chunks: Sequence[str] | None = None,
        *,
        window: str = "default",
        kind: Literal["exact", "orbit", "pair", "removal"] = "exact",
        rank: int | Literal["auto"] = "auto",
        energy: float = DEFAULT_ENERGY,
        factor_dtype: str = "auto",
        probe: str = "",
        time_prefill: bool = False,
        budget: str | None = None,
    ) -> CompileResult:
        """Form the patch of every chunk for what stands before it, in one conditioned forward.

        Parameters
        ----------
        chunks : sequence of str or None
            An order (numbers, names, ids); None for the window's own.
        kind : {"exact", "orbit", "pair", "removal"}
            ``orbit`` forms patches for every set of the given chunks before each of them, so that any order is served;
            at most `kamera_cli.operator.orbit.ORBIT_LIMIT` chunks. ``pair`` forms a patch of every chunk after every
            other one, of which patches for any arrangement are composed, and measures how far these are off.
            ``removal`` takes what chunks absorbed from chunks that have left the window out of them again.
        rank : int or "auto"
            ``auto`` captures ``energy`` of ‖Δ‖², at most rank 64 of a tensor: of all layers together, each weighted by
            its measured sensitivity, with what a typical patch is worth as the whole; of each tensor apart where the
            sensitivity is not known.
        factor_dtype : {"auto", "fp32", "fp16", "bf16", "int8", "int6", "int4"}
            ``auto`` is integers of `kamera_cli.operator.patch.AUTO_BITS` bits.
        probe : str
            Question on which the KL of each patch is measured; empty for the template's closing tokens alone.
        time_prefill : bool
            Also run one plain prefill of what was formed, so that the result tells the cost in units of it.
        budget : str or None
            Most bytes of each patch, a share of the KV that it serves (``3%``) or a size (``20KB``); with ``auto``. In
            an orbit this holds for each set: its own factors and its share of those that all sets of a chunk read.
        """
        from kamera_cli.patches import compile as compiling
        from kamera_cli.patches.request import PatchOptions

        if budget is not None:
            budget = str(budget)
        options = PatchOptions(rank, energy, factor_dtype, probe, time_prefill, budget=budget, learn=True)
        return compiling.compile_patches(self.context, chunks, window, kind, options)

    def query(
        self,
        question: str,
        *,
        window: str = "default",
        chunks: Sequence[str] | None = None,
        reuse: Literal["auto", "patched", "blind", "none"] = "auto",
        compare: bool = False,
        max_kl: float | None = None,
        require_hit: bool = False,
        max_new_tokens: int = 32,
        temperature: float = 0.0,
        seed: int = 0,
        rank: int | None = None,
        place: bool = False,
        on_token: Callable[[str], None] | None = None,
    ) -> QueryResult:
        """Answer from stored chunks, with a receipt.

        Parameters
        ----------
        chunks : sequence of str or None
            An order (numbers, names, ids); None for the window's own.
        reuse : {"auto", "patched", "blind", "none"}
            See `kamera_cli.operator.plan.plan`.
        compare : bool
            Also re-encode from the sources (or re-prefill where they are gone) and report KL, agreement and TTFT.
        max_kl : float or None
            Refuse patches whose measured KL is above it; for None, ``auto`` takes
            `kamera_cli.operator.plan.AUTO_MAX_KL`.
        require_hit : bool
            Raise instead of prefilling.
        rank : int or None
            Use only the first directions of each patch; with ``patched`` alone, since KL and energy were measured
            with all of them.
        place : bool
            Choose the order that reads the fewest bytes of patches and rebuilds none
            (`kamera_cli.operator.placement`); the given one where every order would miss a patch.

        Raises
        ------
        NotFoundError
            No such window or chunk, or a miss under ``require_hit``.
        RefusedError
            The window belongs to another model.
        UsageError
            Empty window or question, or a prompt longer than the model's context.
        """
        from kamera_cli.query import answer as query

        options = query.QueryOptions(
            reuse, compare, max_kl, require_hit, max_new_tokens, temperature, seed, rank, on_token, place
        )
        return query.query(self.context, question, window, chunks, options)

    def explain(
        self,
        *,
        window: str = "default",
        chunks: Sequence[str] | None = None,
        reuse: Literal["auto", "patched", "blind", "none"] = "auto",
        max_kl: float | None = None,
        place: bool = False,
    ) -> QueryPlan:
        """What a query with these options would use, and what it would read; nothing is read or run."""
        from kamera_cli.query import arrange as arranging

        arranging.check_request(reuse, max_kl, place)
        view = load_window(self.store, self.settings.tenant, window)
        self.context.refuse_other_model(view)
        found = arranging.arrange(self.library, view, chunks, reuse=reuse, max_kl=max_kl, place=place)
        return arranging.described(found, window, reuse)

    def evict(
        self,
        chunks: Sequence[str] | None = None,
        *,
        window: str = "default",
        oldest: int | None = None,
        purge: bool = False,
        dry_run: bool = False,
    ) -> EvictResult:
        """Take chunks out of a window; the store keeps them unless ``purge``. Needs no model."""
        result = moves.evict(
            self.store, self.settings.tenant, window, chunks, oldest=oldest, purge=purge, dry_run=dry_run
        )
        self.context.drop_deleted()
        return result

    def recall(
        self, chunks: Sequence[str], *, window: str = "default", at: str | int = "end", repair: bool = False
    ) -> RecallResult:
        """Put evicted chunks back, each with a patch for what now stands before it; the vision tower never runs.

        The model is loaded only where such a patch is not in the store yet. With ``repair`` the chunks of the window
        whose patches name a recalled one are conditioned anew on what stands before them now, the cheapest first; asked
        again, a repair that was interrupted goes on.
        """
        from kamera_cli import recall as recalling

        return recalling.recall(self.context, chunks, window, at, repair=repair)

    def open_window(self, name: str = "default") -> Window:
        """A window as one object to hold on to; the window itself begins with its first ingest.

        Raises
        ------
        UsageError
            Nothing can be called so.
        """
        return Window(self, checked_name("window", name))

    def window(self, name: str = "default") -> WindowView:
        """A window of this tenant; `NotFoundError` when there is none."""
        return load_window(self.store, self.settings.tenant, name)

    def windows(self) -> tuple[WindowView, ...]:
        """All windows of this tenant."""
        return list_windows(self.store, self.settings.tenant)
