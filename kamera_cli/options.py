"""What may be asked of the engine: a frozen dataclass for each call, with its defaults and checks. Imports no torch.

The command line and `kamera_cli.Engine` make the same object and hand it to the job unchanged. Each class is checked
when it is made and raises `UsageError`; what depends on the store, such as whether a chunk is there, is checked later.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from kamera_cli.errors import UsageError
from kamera_cli.media.chunk import Sampling
from kamera_cli.settings import DEFAULT_ENERGY, checked_name, parse_bytes

Reuse = Literal["auto", "patched", "blind", "none"]
"""What a query may use of the store; see `kamera_cli.operator.plan.plan`."""

CompileKind = Literal["exact", "orbit", "pair", "removal"]
"""Which patches are formed; see `CompileOptions`."""

FactorDtype = Literal["auto", "fp32", "fp16", "bf16", "int8", "int6", "int4"]
"""What the factors of a patch are kept in; ``auto`` is int8."""

DEFAULT_WINDOW = "default"


@dataclass(frozen=True)
class ChunkOptions:
    """A window and some of its chunks.

    Attributes
    ----------
    window : str
    chunks : sequence of str or int, or None
        Numbers, names or ids, in an order; None for the window's own.
    """

    window: str = DEFAULT_WINDOW
    chunks: Sequence[str | int] | None = None

    @property
    def names(self) -> tuple[str, ...] | None:
        """``chunks`` as text; None for the window's own order."""
        return None if self.chunks is None else tuple(map(str, self.chunks))


@dataclass(frozen=True)
class IngestOptions:
    """Options of ``Engine.ingest``.

    Attributes
    ----------
    window : str
        The window that the chunks are appended to.
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

    window: str = DEFAULT_WINDOW
    fps: float = Sampling.fps
    chunk_seconds: float = Sampling.chunk_seconds
    max_pixels: int | None = None
    chunk_tokens: int = Sampling.chunk_tokens
    name: str | None = None
    partial: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        self.sampling()
        if self.max_pixels is not None and self.max_pixels < 1:
            raise UsageError(f"--max-pixels {self.max_pixels}: must be at least 1")
        if self.name is not None:
            checked_name("chunk", self.name)

    def sampling(self, frame_multiple: int = Sampling.frame_multiple) -> Sampling:
        """How a source is cut, for a model whose temporal patches hold ``frame_multiple`` frames."""
        return Sampling(self.fps, self.chunk_seconds, frame_multiple, self.chunk_tokens)

    def checked_sources(self, sources: Sequence[str | Path]) -> list[str]:
        """Sources as paths; there is at least one, and only one under a ``name``."""
        paths = [os.fspath(source) for source in sources]
        if not paths:
            raise UsageError("name at least one source")
        if not all(paths):
            raise UsageError("a source's name is empty")
        if self.name is not None and len(paths) > 1:
            raise UsageError("--name goes with one source")
        return paths


@dataclass(frozen=True)
class CompileOptions(ChunkOptions):
    """Options of ``Engine.compile_patches``.

    Attributes
    ----------
    kind : {"exact", "orbit", "pair", "removal"}
        ``exact`` forms the patch of each chunk for what stands before it, in this order. ``orbit`` forms patches for
        every set of the given chunks before each of them, so that any order is served; at most
        `kamera_cli.operator.orbit.ORBIT_LIMIT` chunks. ``pair`` forms a patch of every chunk after every other one, of
        which patches for any arrangement are composed, and measures how far these are off. ``removal`` takes what
        chunks absorbed from chunks that have left the window out of them again.
    rank : int or "auto"
        ``auto`` captures ``energy`` of ‖Δ‖², at most rank 64 of a tensor: of all layers together, each weighted by
        its measured sensitivity, with what a typical patch is worth as the whole; of each tensor apart where the
        sensitivity is not known.
    energy : float
        Share above 0 and up to 1, for ``rank="auto"``.
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

    kind: CompileKind = "exact"
    rank: int | Literal["auto"] = "auto"
    energy: float = DEFAULT_ENERGY
    factor_dtype: FactorDtype = "auto"
    probe: str = ""
    time_prefill: bool = False
    budget: str | None = None

    def __post_init__(self) -> None:
        _require_one_of("--kind", self.kind, CompileKind)
        is_rank = isinstance(self.rank, int) and not isinstance(self.rank, bool) and self.rank >= 1
        if self.rank != "auto" and not is_rank:
            raise UsageError(f"--rank {self.rank} is neither 'auto' nor a whole number from 1 up")
        if not 0 < self.energy <= 1:
            raise UsageError(f"--energy {self.energy}: must be above 0 and at most 1")
        _require_one_of("--dtype", self.factor_dtype, FactorDtype)
        if self.budget is not None:
            object.__setattr__(self, "budget", str(self.budget))
            parse_budget(str(self.budget))
            if self.rank != "auto":
                raise UsageError(
                    f"--budget {self.budget} and --rank {self.rank} exclude each other; a budget goes with --rank auto"
                )
        if self.kind == "removal" and self.chunks is not None:
            raise UsageError("--kind removal goes by the window's own order; name no chunks")


@dataclass(frozen=True)
class QueryOptions(ChunkOptions):
    """Options of ``Engine.query``; those that decide the plan also of ``Engine.explain``.

    Attributes
    ----------
    reuse : {"auto", "patched", "blind", "none"}
        See `kamera_cli.operator.plan.plan`.
    compare : bool
        Also re-encode from the sources (or re-prefill where they are gone) and report KL, agreement and TTFT.
    max_kl : float or None
        Refuse patches whose measured KL, in nats, is above it; for None, ``auto`` takes
        `kamera_cli.operator.plan.AUTO_MAX_KL`.
    require_hit : bool
        Raise `NotFoundError` instead of prefilling.
    max_new_tokens : int
        Length of the answer.
    temperature : float
        0 always takes the likeliest token.
    seed : int
        Of the sampling, at a temperature above 0.
    rank : int or None
        Use only the first directions of each patch; with ``patched`` alone, since KL and energy were measured
        with all of them.
    place : bool
        Choose the order that reads the fewest bytes of patches and rebuilds none
        (`kamera_cli.operator.placement`); the given one where every order would miss a patch.
    on_token : callable or None
        Receives each piece of the answer as it comes.
    """

    reuse: Reuse = "auto"
    compare: bool = False
    max_kl: float | None = None
    require_hit: bool = False
    max_new_tokens: int = 32
    temperature: float = 0.0
    seed: int = 0
    rank: int | None = None
    place: bool = False
    on_token: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        _require_one_of("--reuse", self.reuse, Reuse)
        if self.max_kl is not None and not self.max_kl >= 0:
            raise UsageError(f"--max-kl {self.max_kl}: must not be negative, and be a number")
        if self.max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens {self.max_new_tokens}: must be at least 1")
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"--temperature {self.temperature}: must be a number, and not negative")
        if self.rank is not None and self.rank < 1:
            raise UsageError(f"--rank {self.rank}: must be at least 1")
        if self.rank is not None and self.reuse != "patched":
            raise UsageError(
                "--rank goes with --reuse patched: the KL of a patch was measured with all of its columns"
            )
        if self.place and self.reuse in ("blind", "none"):
            raise UsageError(f"--place chooses the order by its patches; --reuse {self.reuse} uses none")

    @property
    def gives_order(self) -> bool:
        """Whether the chunks stand in another order than the window's own."""
        return self.place or self.chunks is not None


@dataclass(frozen=True)
class EvictOptions(ChunkOptions):
    """Options of ``Engine.evict``: chunks, or the ``oldest`` N of the window.

    Attributes
    ----------
    oldest : int or None
        The first N chunks.
    purge : bool
        Delete them from the store too.
    dry_run : bool
        Say what would be done, change nothing.
    """

    oldest: int | None = None
    purge: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        if bool(self.chunks) == (self.oldest is not None):
            raise UsageError("name chunks to evict, or give --oldest N (one of the two)")
        if self.oldest is not None and self.oldest < 1:
            raise UsageError(f"--oldest {self.oldest}: must be at least 1")


@dataclass(frozen=True)
class RecallOptions(ChunkOptions):
    """Options of ``Engine.recall``: evicted chunks, in the order in which they come back.

    Attributes
    ----------
    at : "end" or int
        Where: at the end, or as the N-th chunk.
    repair : bool
        Also condition the chunks whose patches name a recalled one anew on what stands before them now.
    """

    at: int | str = "end"
    repair: bool = False

    def __post_init__(self) -> None:
        if not self.chunks:
            raise UsageError("name the chunks to recall; `kamera recall --list` shows them")
        if self.at != "end" and (not re.fullmatch(r"\d+", str(self.at), re.ASCII) or int(self.at) < 1):
            raise UsageError(f"--at {self.at}: must be 'end' or a place from 1")

    @property
    def index(self) -> int | None:
        """Before which chunk of the window they are placed; None for the end."""
        return None if self.at == "end" else int(self.at) - 1


@dataclass(frozen=True)
class Budget:
    """Bytes that a patch may take: a share of the KV that it serves, or a number."""

    share: float | None = None
    num_bytes: int | None = None

    def of(self, kv_bytes: int) -> int:
        """Bytes for a chunk whose canonical KV takes ``kv_bytes``."""
        if self.share is not None:
            return int(self.share * kv_bytes)
        assert self.num_bytes is not None, "a budget has a share or a size"
        return self.num_bytes


def parse_budget(text: str) -> Budget:
    """``3%`` of the KV that a patch serves, or bytes as in ``20KB``.

    Raises
    ------
    UsageError
        Neither, or nothing at all.
    """
    share = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text, re.ASCII)
    try:
        budget = Budget(share=float(share.group(1)) / 100) if share else Budget(num_bytes=parse_bytes(text))
    except UsageError as error:
        raise UsageError(f"--budget {text!r} is neither a share such as 3% nor bytes such as 20KB") from error
    if budget.share == 0 or budget.num_bytes == 0:
        raise UsageError(f"--budget {text}: a patch takes more than no bytes")
    return budget


def checked_question(question: str) -> str:
    """A question that a tokenizer can read.

    Raises
    ------
    UsageError
        It is empty, or holds bytes that are no UTF-8, which stand in an argument as lone surrogates.
    """
    if not question.strip():
        raise UsageError("the question is empty")
    try:
        question.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the question is not valid Unicode ({error.reason} at {error.start})") from error
    return question


def _require_one_of(flag: str, value: object, choices: object) -> None:
    known = get_args(choices)
    if value not in known:
        raise UsageError(f"{flag} {value} is not supported (supported: {', '.join(known)})")
