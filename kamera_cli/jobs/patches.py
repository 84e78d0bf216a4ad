"""Form patches: one conditioned forward from stored embeddings, Δ per chunk, factors, measured KL."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from kamera_cli.errors import NotFoundError
from kamera_cli.generate import next_token_kl
from kamera_cli.jobs.common import (
    Chain,
    conditioning,
    maximal,
    ordered,
    refuse_other_model,
    require_context,
    require_record,
)
from kamera_cli.library import Library
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.inputs import Segment
from kamera_cli.model.loading import DTYPES
from kamera_cli.model.runner import ModelRunner
from kamera_cli.operator.assemble import assemble, joined_positions, place
from kamera_cli.operator.patch import LayerPatch, check_rank, form
from kamera_cli.results import CompileResult, FormedPatch, Progress, RecallResult
from kamera_cli.window import load_window, pick, recalled, update_window
from kamera_store.records import Record

if TYPE_CHECKING:
    from kamera_cli.engine import Engine


@dataclass(frozen=True)
class PatchOptions:
    """Options of ``Engine.compile_patches``, see there."""

    rank: int | Literal["auto"] = "auto"
    energy: float = 0.99
    factor_dtype: str = "auto"
    probe: str = ""

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the factors; None lets `form` choose."""
        return None if self.factor_dtype == "auto" else DTYPES[self.factor_dtype]

    @property
    def request(self) -> dict:
        """What decides the factors; kept with a patch, so that the same request finds it done."""
        return {"rank": self.rank, "energy": self.energy, "factor_dtype": self.factor_dtype}


@dataclass(frozen=True)
class Part:
    """A span of an assembled prompt in memory: positions and, per layer, KV with an optional patch."""

    segment: Segment
    layers: list[LayerKV]
    patch: list[LayerPatch] | None = None


def compile_window(
    engine: Engine, chunks: Sequence[str] | None, window: str, options: PatchOptions
) -> CompileResult:
    """Form what is missing for a window's own conditioning, or for a given order; see ``Engine.compile_patches``.

    Raises
    ------
    NotFoundError
        No such window or chunk, or an antecedent was purged.
    UsageError
        Empty window, or a rank out of range for one of the chunks.
    """
    started = time.perf_counter()
    view = load_window(engine.store, engine.settings.tenant, window)
    refuse_other_model(engine, view)
    wanted = conditioning(view, ordered(view, chunks), given_order=chunks is not None)
    for chunk in wanted:
        check_rank(options.rank, chunk.entry.num_tokens)
        if chunk.antecedents is None:
            raise NotFoundError(
                f"chunk {chunk.entry.number} is conditioned on a purged chunk; give an order of chunks"
            )
    chains = [chunk.chain for chunk in wanted if chunk.antecedents]
    numbers = {bytes.fromhex(entry.chunk): entry.number for entry in (*view.entries, *view.evicted)}
    formed, prefill_ms = form_chains(engine, chains, options, numbers)
    total_ms = 1e3 * (time.perf_counter() - started)
    return CompileResult(window, "exact", tuple(formed), prefill_ms, total_ms)


def form_chains(
    engine: Engine, chains: Sequence[Chain], options: PatchOptions, numbers: dict[bytes, int]
) -> tuple[list[FormedPatch], float]:
    """Form the patch of the last chunk of every chain; chains that share a prefix share the forward.

    Returns
    -------
    list of FormedPatch
        In the order of ``chains``; found ones included.
    float
        Time of the conditioned forwards, in ms.
    """
    library = engine.library
    formed = {chain: _found(library, chain, options, numbers) for chain in chains}
    missing = [chain for chain in chains if formed[chain] is None]
    longest = maximal(missing)
    prefill_ms = 0.0
    for done, chain in enumerate(longest):
        engine.progress(Progress("forming patches", done, len(longest), "forwards"))
        wanted = {len(short) for short in missing if chain[: len(short)] == short}
        new, spent = _form_chain(engine, library, chain, wanted, options, numbers)
        formed |= new
        prefill_ms += spent
    engine.progress(Progress("forming patches", len(longest), len(longest), "forwards"))
    return [formed[chain] for chain in chains], prefill_ms


def _found(
    library: Library, chain: Chain, options: PatchOptions, numbers: dict[bytes, int]
) -> FormedPatch | None:
    record = library.find_patch(chain[-1], chain[:-1], "exact")
    if record is None or not _serves(record, options):
        return None
    chunk = require_record(library, chain[-1], str(numbers.get(chain[-1].key, chain[-1].short_id)))
    return describe(record, chunk, numbers, "found", 0.0)


def _serves(record: Record, options: PatchOptions) -> bool:
    """Whether a stored patch is what was asked for, or the same with more directions, which a reader can leave out."""
    kept, wanted = record.meta["request"], options.request
    if kept == wanted:
        return True
    fixed = isinstance(kept["rank"], int) and isinstance(wanted["rank"], int)
    return fixed and kept["rank"] >= wanted["rank"] and kept["factor_dtype"] == wanted["factor_dtype"]


def _form_chain(
    engine: Engine,
    library: Library,
    chain: Chain,
    wanted: set[int],
    options: PatchOptions,
    numbers: dict[bytes, int],
) -> tuple[dict[Chain, FormedPatch], float]:
    runner = engine.runner
    records = [require_record(library, link, str(numbers.get(link.key, link.short_id))) for link in chain]
    segments = [library.segment(record) for record in records]
    probe = runner.question_ids(options.probe)
    length = sum(segment.positions.span for segment in [runner.preamble, *segments]) + probe.numel()
    require_context(engine, length, "this arrangement")
    runner.synchronize()
    started = time.perf_counter()
    conditioned = runner.prefill_captured([runner.preamble, *segments])
    runner.synchronize()
    prefill_ms = 1e3 * (time.perf_counter() - started)
    exact = [Part(runner.preamble, conditioned[0])]
    patched, blind = list(exact), list(exact)
    formed = {}
    for index, (record, segment) in enumerate(zip(records, segments, strict=True)):
        forming = time.perf_counter()
        canonical = library.layers(record)
        patch = None
        if index:
            patch = form(
                conditioned[index + 1],
                canonical,
                rank=options.rank,
                energy=options.energy,
                dtype=options.dtype,
            )
        exact.append(Part(segment, conditioned[index + 1]))
        patched.append(Part(segment, canonical, patch))
        blind.append(Part(segment, canonical))
        if index + 1 not in wanted:
            continue
        reference = probe_logits(runner, exact, probe)
        kl = next_token_kl(reference, probe_logits(runner, patched, probe))
        kl_blind = next_token_kl(reference, probe_logits(runner, blind, probe))
        form_ms = 1e3 * (time.perf_counter() - forming)
        measured = {"kl": kl, "kl_blind": kl_blind, "probe": options.probe, "request": options.request}
        stored = library.put_patch(
            record, chain[:index], "exact", patch, meta=measured, cost_ms=form_ms + prefill_ms / len(wanted)
        )
        formed[chain[: index + 1]] = describe(stored, record, numbers, "formed", form_ms)
    return formed, prefill_ms


def probe_logits(runner: ModelRunner, parts: list[Part], probe: torch.Tensor) -> torch.Tensor:
    """Next-token logits (vocab,) after ``probe`` tokens that follow the assembled parts."""
    placed, end = place([(part.segment.positions, part.segment.num_tokens) for part in parts])
    layers = (
        [(part.layers[layer], None if part.patch is None else part.patch[layer]) for part in parts]
        for layer in range(runner.family.num_layers)
    )
    cache = assemble(runner.family, layers, joined_positions(placed))
    return runner.extend(cache, runner.embed(probe), runner.positions_from(end, probe.numel()))


def describe(
    record: Record, chunk: Record, numbers: dict[bytes, int], outcome: str, form_ms: float
) -> FormedPatch:
    """A stored patch as commands show it; bytes are raw tensor bytes on both sides."""
    kv_bytes = sum(tensor.raw_bytes for tensor in chunk.tensors if tensor.layer >= 0)
    return FormedPatch(
        id=record.id,
        chunk=chunk.id,
        chunk_number=numbers.get(chunk.key, 0),
        antecedents=tuple(record.meta["antecedents"]),
        outcome=outcome,
        ranks=tuple(record.meta["ranks"]),
        energy=min(record.meta["energy"], default=1.0),
        kl=record.meta["kl"],
        kl_blind=record.meta["kl_blind"],
        patch_bytes=record.raw_bytes,
        chunk_kv_bytes=kv_bytes,
        form_ms=form_ms,
    )


def recall(engine: Engine, chunks: Sequence[str], window: str, at: int | None) -> RecallResult:
    """Put evicted chunks back, each with a patch for what now stands before it; see ``Engine.recall``.

    The window changes only after every patch is stored.

    Raises
    ------
    NotFoundError
        No such window, or no such chunk among the evicted ones, or it is gone from the store.
    UsageError
        The window already holds the chunk, or the place lies outside the window.
    """
    started = time.perf_counter()
    tenant = engine.settings.tenant
    view = load_window(engine.store, tenant, window)
    refuse_other_model(engine, view)
    returning = pick((*view.evicted, *view.entries), chunks, f"window {window!r}")
    after = recalled(view, returning, at)
    back = {entry.chunk for entry in returning}
    wanted = conditioning(after, [entry for entry in after.entries if entry.chunk in back], given_order=False)
    for chunk in wanted:
        require_record(engine.library, chunk.chain[-1], str(chunk.entry.number))
    calls = engine.vision_calls
    numbers = {bytes.fromhex(entry.chunk): entry.number for entry in (*after.entries, *after.evicted)}
    formed, _ = form_chains(
        engine, [chunk.chain for chunk in wanted if chunk.antecedents], PatchOptions(), numbers
    )
    update_window(engine.store, tenant, window, lambda current: recalled(current, returning, at))
    cascade = {
        patch.meta["chunk"]
        for chunk in wanted
        for patch in engine.store.patches_naming(chunk.chain[-1].key, tenant=tenant)
    }
    entries = {entry.chunk: entry for entry in after.entries}
    return RecallResult(
        window=after,
        recalled=tuple(entries[entry.chunk] for entry in returning),
        patched=tuple(patch.id for patch in formed),
        cascade=tuple(sorted(cascade)),
        vision_calls=engine.vision_calls - calls,
        total_ms=1e3 * (time.perf_counter() - started),
    )
