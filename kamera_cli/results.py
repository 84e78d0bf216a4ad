"""What the engine hands back: frozen results that commands print and benches read. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from kamera_cli.trust import WhyNot, trusted_energy

Used = Literal["exact", "orbit", "composed", "canonical", "blind", "prefilled"]
Outcome = Literal["encoded", "found", "planned"]


NOT_IN_JSON = {"json": None}
"""Metadata of a field that JSON tells in another way; see `kamera_cli.words.to_json`."""


@dataclass(frozen=True)
class IngestedChunk:
    """One chunk of one source.

    Attributes
    ----------
    id : str
        Lower-case hex of the chunk key.
    number : int
        Its stable 1-based number in the window; 0 when no window was named.
    outcome : {"encoded", "found", "planned"}
        Whether the vision tower and the prefill ran, or the store had it, or ``--dry-run``.
    num_tokens : int
        Language-model tokens of the chunk, T.
    raw_bytes, stored_bytes : int
        Tensor bytes before and after compression (``stored_bytes`` is 0 for ``planned``).
    """

    id: str
    name: str
    number: int
    outcome: Outcome
    num_tokens: int
    raw_bytes: int
    stored_bytes: int
    start_s: float | None = None
    end_s: float | None = None


@dataclass(frozen=True)
class IngestedSource:
    """One source of an ingest. ``from_index`` means that neither a decoder nor the model was needed."""

    path: str
    kind: str
    chunks: tuple[IngestedChunk, ...]
    from_index: bool
    notes: tuple[str, ...] = ()
    decode_ms: float = 0.0
    encode_ms: float = 0.0
    prefill_ms: float = 0.0
    write_ms: float = 0.0


@dataclass(frozen=True)
class SourceFailure:
    """A source that could not be ingested, with a one-line reason."""

    path: str
    reason: str


@dataclass(frozen=True)
class IngestResult:
    """Result of ``Engine.ingest``."""

    window: str
    sources: tuple[IngestedSource, ...]
    failures: tuple[SourceFailure, ...]
    total_ms: float
    dry_run: bool = False

    @property
    def chunks(self) -> tuple[IngestedChunk, ...]:
        """Those of all sources."""
        return tuple(chunk for source in self.sources for chunk in source.chunks)

    @property
    def counts(self) -> dict[str, int]:
        """How many chunks came to which outcome."""
        found = [chunk.outcome for chunk in self.chunks]
        return {outcome: found.count(outcome) for outcome in get_args(Outcome)}

    def extra_json(self) -> dict[str, object]:
        """See `kamera_cli.words.to_json`."""
        return {
            "counts": self.counts,
            "raw_bytes": sum(chunk.raw_bytes for chunk in self.chunks),
            "stored_bytes": sum(chunk.stored_bytes for chunk in self.chunks),
        }


@dataclass(frozen=True)
class ReplacedPatch:
    """What stood in the store for the same chunk and antecedents before; fields as in `FormedPatch`.

    ``energy`` is the one by which a plan trusted it. ``had_compositions``: compositions of it and other pairs had been
    measured, which are lost with it.
    """

    rank: int
    energy: float
    kl: float | None
    patch_bytes: int
    had_compositions: bool = False


@dataclass(frozen=True)
class FormedPatch:
    """One patch of ``Engine.compile_patches``.

    ``kl`` and ``kl_blind`` are next-token KL divergences (nats) against the conditioned prefill, taken on the
    prompt's closing tokens when the patch was formed, with and without the patch. ``energy`` is the smallest captured
    share of the residual's squared Frobenius norm over layers; ``energy_weighted`` that of all layers together,
    weighted by their measured sensitivity (None where none was). ``split`` has the ranks of both tensors of each layer.
    ``energy_in_orders``, of an orbit patch, is the smallest share that it holds of a measured order's own Δ.
    ``antecedent_numbers`` are 0 for chunks that the window does not know. ``why_not`` says why ``--reuse auto`` will
    not use the patch, if it will not; ``replaced`` is what it took the place of.
    """

    id: str
    chunk: str
    chunk_number: int
    antecedents: tuple[str, ...]
    outcome: Literal["formed", "found"]
    ranks: tuple[int, ...]
    energy: float
    kl: float | None
    kl_blind: float | None
    patch_bytes: int
    chunk_kv_bytes: int
    form_ms: float
    energy_weighted: float | None = None
    energy_in_orders: float | None = None
    split: tuple[tuple[int, int], ...] = ()
    antecedent_numbers: tuple[int, ...] = ()
    why_not: WhyNot | None = None
    replaced: ReplacedPatch | None = None

    @property
    def trusted_energy(self) -> float:
        """The energy by which a plan trusts the patch (`kamera_cli.trust.trusted_energy`)."""
        return trusted_energy((self.energy,), self.energy_weighted, self.energy_in_orders)

    @property
    def captured_energy(self) -> float:
        """What its factors capture of the Δ that they were formed of, weighted where that was measured."""
        return trusted_energy((self.energy,), self.energy_weighted, None)


@dataclass(frozen=True)
class ComposedBound:
    """What compositions of so many pairs within one set of chunks were measured to do.

    ``kl`` and ``kl_blind`` are the largest next-token KL (nats) over ``num_samples`` real arrangements of the chunks,
    with every chunk composed and with no patch at all; ``gain`` is the one that was used
    (`kamera_cli.operator.compose.weights`). ``energy`` is the smallest share over samples that a composition had of the
    true residual, 1 - |made - true|^2 / |true|^2, each layer and tensor counting the same.
    """

    num_antecedents: int
    kl: float
    kl_blind: float
    energy: float
    gain: float
    num_samples: int


@dataclass(frozen=True)
class CompileResult:
    """Result of ``Engine.compile_patches``; ``prefill_ms`` is the conditioned forward that all patches shared.

    ``form_ratio`` is everything but measuring (reading, forwards, factors, writing) over one plain prefill of the same
    chunks; None where no such prefill was timed. ``measure_ms`` went into the KL of the patches,
    ``learn_ms``, once per model, into what each layer is worth.
    For a removal also the numbers of the survivors that lost something, and the next-token KL to a prefill of the slid
    window: as they were, and now. ``composed`` is what compositions of pairs are worth, by number of antecedents.
    """

    window: str
    kind: str
    patches: tuple[FormedPatch, ...]
    prefill_ms: float
    total_ms: float
    survivors: tuple[int, ...] = ()
    kl_kept: float | None = None
    kl_removed: float | None = None
    measure_ms: float = 0.0
    form_ratio: float | None = None
    learn_ms: float = 0.0
    composed: tuple[ComposedBound, ...] = ()

    def extra_json(self) -> dict[str, object]:
        """See `kamera_cli.words.to_json`."""
        return {"patch_bytes": sum(patch.patch_bytes for patch in self.patches)}


@dataclass(frozen=True)
class Placed:
    """An order that was chosen to need the least; see `kamera_cli.operator.placement`.

    Attributes
    ----------
    order : tuple of int
        Numbers of the chunks; the given order where every order would miss a patch.
    patch_bytes : int or None
        Stored bytes of the patches of that order; None where every order would miss one.
    given_misses, given_patch_bytes : int
        Patches that the given order would miss, and the bytes of those that it has.
    """

    order: tuple[int, ...]
    patch_bytes: int | None
    given_misses: int
    given_patch_bytes: int


@dataclass(frozen=True)
class PlannedChunk:
    """What a query would use for one chunk, and the stored bytes that it would read."""

    id: str
    number: int
    name: str
    num_tokens: int
    used: Used
    patches: tuple[str, ...]
    rank: int | None
    energy: float | None
    kl: float | None
    bytes_to_read: int
    why_not: WhyNot | None = None


@dataclass(frozen=True)
class QueryPlan:
    """Result of ``Engine.explain``: the plan of a query that was not run."""

    window: str
    reuse: str
    fallback: str | None
    chunks: tuple[PlannedChunk, ...]
    placed: Placed | None = None


@dataclass(frozen=True)
class ChunkReceipt:
    """What one chunk of an answer was made of; ``energy`` and ``kl`` are None where a patch was cut to a lower rank.

    ``bytes_read`` counts stored bytes that were read, ``hot_bytes`` those that were in memory instead
    (``Settings.hot_bytes``). ``pairs`` are the patches that a composed one was made of.
    """

    id: str
    number: int
    name: str
    used: Used
    num_tokens: int
    position: int
    patch: str | None = None
    rank: int | None = None
    energy: float | None = None
    kl: float | None = None
    bytes_read: int = 0
    why_not: WhyNot | None = None
    hot_bytes: int = 0
    pairs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stages:
    """Time of each stage up to the first token id on the host, in ms."""

    lookup: float = 0.0
    read: float = 0.0
    decompress: float = 0.0
    transfer: float = 0.0
    assemble: float = 0.0
    prefill: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """The same question over a re-prefill.

    Attributes
    ----------
    kl : float
        KL(re-prefill ‖ this answer) of the next-token distribution, in nats.
    ttft_ms : float
        Vision tower and prefill of all chunks from their sources, when ``full_reencode``; otherwise the prefill alone.
    decode_ms : float
        Reading and resizing the media again; not part of ``ttft_ms``.
    """

    ttft_ms: float
    vision_ms: float
    prefill_ms: float
    decode_ms: float
    full_reencode: bool
    kl: float
    same_answer: bool
    answer: str


@dataclass(frozen=True)
class QueryResult:
    """Answer and receipt of ``Engine.query``.

    ``remembered`` are numbers of chunks that stand no more in the window, of which others still hold what they took
    in: a re-prefill of the window would not know it. 0 for one that was purged.
    """

    question: str
    answer: str
    window: str
    reuse: str
    attention: str
    device: str
    dtype: str
    model: str
    fallback: str | None
    ttft_ms: float
    stages: Stages
    chunks: tuple[ChunkReceipt, ...]
    reused_tokens: int = field(metadata=NOT_IN_JSON)
    prefilled_tokens: int = field(metadata=NOT_IN_JSON)
    new_tokens: int = field(metadata=NOT_IN_JSON)
    total_ms: float
    tpot_ms: float | None
    patches_kept: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    compare: Comparison | None = None
    placed: Placed | None = None
    remembered: tuple[int, ...] = ()

    def extra_json(self) -> dict[str, object]:
        """See `kamera_cli.words.to_json`."""
        return {
            "tokens": {
                "reused": self.reused_tokens,
                "prefilled": self.prefilled_tokens,
                "new": self.new_tokens,
            },
            "why_not": {chunk.id: chunk.why_not for chunk in self.chunks if chunk.why_not is not None},
        }


@dataclass(frozen=True)
class WindowEntry:
    """A chunk in a window: stable number, chunk key and SHA-256 (hex), and the chunk keys it is conditioned on."""

    number: int
    chunk: str = field(metadata={"json": "id"})
    digest: str = field(metadata=NOT_IN_JSON)
    name: str
    num_tokens: int
    conditioned_on: tuple[str, ...] = ()


@dataclass(frozen=True)
class WindowView:
    """A window as commands show it. ``evicted`` keeps what can be recalled.

    ``next_number`` is above every number that the window ever gave, also to chunks that were purged since.
    """

    name: str
    tenant: str
    fingerprint: str
    entries: tuple[WindowEntry, ...] = ()
    evicted: tuple[WindowEntry, ...] = ()
    next_number: int = 1


@dataclass(frozen=True)
class EvictResult:
    """Result of ``Engine.evict``. Bytes are zero unless chunks were purged from the store.

    Attributes
    ----------
    purged, purged_patches : tuple of str
        Ids of the chunks that were deleted, and of the patches that went with them: theirs, and those that name one.
    freed_bytes : int
        Freed inside the data file, patches included.
    patch_bytes : int
        Stored bytes of those patches.
    """

    window: WindowView
    evicted: tuple[WindowEntry, ...]
    purged: tuple[str, ...] = ()
    freed_bytes: int = 0
    dry_run: bool = False
    purged_patches: tuple[str, ...] = ()
    patch_bytes: int = 0

    def extra_json(self) -> dict[str, object]:
        """See `kamera_cli.words.to_json`."""
        return {"window": self.window.name, "chunks": self.window.entries}


@dataclass(frozen=True)
class RecallResult:
    """Result of ``Engine.recall``. ``cascade``: chunks (hex) with patches that have a recalled one as antecedent.

    ``repaired``: numbers of those that were conditioned anew on what stands before them now, and their new patches.
    """

    window: WindowView
    recalled: tuple[WindowEntry, ...]
    patched: tuple[str, ...]
    cascade: tuple[str, ...]
    vision_calls: int
    total_ms: float
    repaired: tuple[int, ...] = ()
    repaired_patches: tuple[str, ...] = ()

    def extra_json(self) -> dict[str, object]:
        """See `kamera_cli.words.to_json`."""
        return {"window": self.window.name, "chunks": self.window.entries}


@dataclass(frozen=True)
class Progress:
    """One step of a long job: ``done`` of ``total`` ``unit``s of ``what`` (``total`` is None when unknown)."""

    what: str
    done: int
    total: int | None
    unit: str = "chunks"
    detail: str = field(default="")
