"""Form patches: one conditioned forward from stored embeddings, Δ per chunk, factors, measured KL."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from kamera_cli.errors import NotFoundError
from kamera_cli.generate import next_token_kl
from kamera_cli.jobs.common import (
    Chain,
    conditioning,
    maximal,
    ordered,
    refuse_other_model,
    require_record,
)
from kamera_cli.jobs.conditioned import Prefilled, count_branches, each_branch
from kamera_cli.jobs.formed import describe, kv_bytes, why_not_auto
from kamera_cli.jobs.measuring import Part, assembled, places_of
from kamera_cli.jobs.sensitivity import layer_worth
from kamera_cli.library import Library, NewPatch
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.inputs import Segment
from kamera_cli.model.scoring import logits_after_each
from kamera_cli.operator.patch import FACTOR_DTYPES, Precision, check_rank, direction_bytes, form
from kamera_cli.operator.ranks import Worth, check_budget, parse_budget
from kamera_cli.results import CompileResult, FormedPatch, Progress, RecallResult, WindowEntry
from kamera_cli.settings import DEFAULT_ENERGY
from kamera_cli.window import load_window, pick, recalled, update_window
from kamera_store.records import Record

if TYPE_CHECKING:
    from kamera_cli.engine import Engine


@dataclass(frozen=True)
class PatchOptions:
    """Options of ``Engine.compile_patches``, see there.

    With ``any_usable`` a stored patch that ``--reuse auto`` takes is enough, however it was asked for.
    """

    rank: int | Literal["auto"] = "auto"
    energy: float = DEFAULT_ENERGY
    factor_dtype: str = "auto"
    probe: str = ""
    time_prefill: bool = False
    budget: str | None = None
    learn: bool = False
    any_usable: bool = False
    worth: Worth | None = None

    @property
    def dtype(self) -> Precision:
        """Dtype of the factors; None lets `form` choose."""
        return FACTOR_DTYPES[self.factor_dtype]

    @property
    def request(self) -> dict:
        """What decides the factors; kept with a patch, so that the same request finds it done."""
        asked = {"rank": self.rank, "energy": self.energy, "factor_dtype": self.factor_dtype}
        return asked if self.budget is None else {**asked, "budget": self.budget}

    def budget_bytes(self, chunk: Record) -> int | None:
        """Bytes that the patch of a chunk may take."""
        return None if self.budget is None else parse_budget(self.budget).of(kv_bytes(chunk))

    def check_budget(self, chunk: Record, what: str, *, num_sharing: int = 1) -> None:
        """Refuse a budget that leaves the patch of a chunk without any direction.

        Parameters
        ----------
        num_sharing : int
            Patches that share V.

        Raises
        ------
        UsageError
        """
        if self.budget is None:
            return
        sizes = [
            direction_bytes(tensor.shape[0], math.prod(tensor.shape[1:]), self.dtype, num_sharing=num_sharing)
            for tensor in chunk.tensors
            if tensor.layer >= 0
        ]
        check_budget(parse_budget(self.budget), kv_bytes(chunk), min(sizes), what)


@dataclass(frozen=True)
class Costs:
    """What forming took, in ms.

    Attributes
    ----------
    prefill_ms : float
        Conditioned forwards.
    forming_ms : float
        Everything but measuring: reading, forwards, factors, writing.
    measure_ms : float
        Logits for the KL of the patches.
    plain_ms : float or None
        One plain prefill of the same chains, each from the preamble on; None where it was not timed.
    learn_ms : float
        Once per model: what each layer is worth.
    """

    prefill_ms: float
    forming_ms: float
    measure_ms: float
    plain_ms: float | None
    learn_ms: float = 0.0

    @property
    def form_ratio(self) -> float | None:
        """Forming in units of one plain prefill."""
        return self.forming_ms / self.plain_ms if self.plain_ms else None


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
    formed, costs = form_chains(engine, chains, options, numbers)
    total_ms = 1e3 * (time.perf_counter() - started)
    return CompileResult(
        window, "exact", tuple(formed), costs.prefill_ms, total_ms,
        measure_ms=costs.measure_ms, form_ratio=costs.form_ratio, learn_ms=costs.learn_ms,
    )  # fmt: skip


def form_chains(
    engine: Engine,
    chains: Sequence[Chain],
    options: PatchOptions,
    numbers: dict[bytes, int],
    *,
    learn_on: Chain | None = None,
) -> tuple[list[FormedPatch], Costs]:
    """Form the patch of the last chunk of every chain; chains that share a prefix share its forward.

    Parameters
    ----------
    learn_on : Chain or None
        Chunks to learn from what each layer is worth; the longest of the chains for None.

    Returns
    -------
    list of FormedPatch
        In the order of ``chains``; found ones included.
    Costs
    """
    formed = {chain: _found(engine.library, chain, options, numbers) for chain in chains}
    missing = [chain for chain in chains if formed[chain] is None]
    if not missing:
        return [formed[chain] for chain in chains], Costs(0.0, 0.0, 0.0, None)
    for chain in missing:
        label = str(numbers.get(chain[-1].key, chain[-1].short_id))
        options.check_budget(require_record(engine.library, chain[-1], label), f"chunk {label}")
    learning = time.perf_counter()
    learns = options.learn and options.rank == "auto"
    learned = (learn_on or max(missing, key=len)) if learns else None
    options = replace(options, worth=layer_worth(engine, learned, numbers))
    learn_ms = 1e3 * (time.perf_counter() - learning)
    forming = _Forming(engine, options, numbers, frozenset(missing))
    # By now the model is in memory: loading it is no part of what forming costs.
    started = time.perf_counter()
    probe_tokens = forming.probe.numel()
    total = count_branches(missing)
    for done, branch in enumerate(each_branch(engine, missing, numbers, num_more=probe_tokens)):
        engine.progress(Progress("forming patches", done, total, "forwards"))
        formed |= forming.branch(branch)
    engine.progress(Progress("forming patches", total, total, "forwards"))
    spent_ms = 1e3 * (time.perf_counter() - started)
    plain_ms = forming.prefill_ms if forming.is_plain else None
    if plain_ms is None and options.time_prefill:
        plain_ms = _plain_prefill_ms(engine, maximal(missing), numbers)
    costs = Costs(forming.prefill_ms, spent_ms - forming.measure_ms, forming.measure_ms, plain_ms, learn_ms)
    return [formed[chain] for chain in chains], costs


class _Forming:
    """What a walk over branches has formed: the assembled path above the next branch, and clocks."""

    def __init__(
        self, engine: Engine, options: PatchOptions, numbers: dict[bytes, int], wanted: frozenset[Chain]
    ) -> None:
        self._runner, self._library = engine.runner, engine.library
        self._options, self._numbers, self._wanted = options, numbers, wanted
        self._parts = [Part(self._runner.preamble, self._runner.preamble_layers)]
        self.probe = self._runner.question_ids(options.probe)
        self.prefill_ms = self.measure_ms = 0.0
        self.is_plain, self._num_branches = False, 0

    def branch(self, branch: Prefilled) -> dict[Chain, FormedPatch]:
        """Factor Δ of every chunk of a branch, measure the wanted ones and store them."""
        self.prefill_ms += branch.prefill_ms
        self._num_branches += 1
        self.is_plain = branch.is_cold and self._num_branches == 1
        del self._parts[1 + len(branch.before) :]
        spent = []
        for index, (record, segment) in enumerate(zip(branch.records, branch.segments, strict=True)):
            started = time.perf_counter()
            self._parts.append(self._part(record, segment, branch.captured[index], len(branch.chain(index))))
            spent.append(1e3 * (time.perf_counter() - started))
        wanted = [index for index in range(len(branch.links)) if branch.chain(index) in self._wanted]
        patches = [
            NewPatch(
                branch.records[index],
                branch.chain(index)[:-1],
                "exact",
                self._parts[len(branch.chain(index))].patch,
                meta=measured,
                cost_ms=spent[index] + branch.prefill_ms / len(branch.links),
            )
            for index, measured in zip(wanted, self._measured(branch, wanted), strict=True)
        ]
        older = [
            self._library.find_patch(branch.chain(index)[-1], branch.chain(index)[:-1], "exact")
            for index in wanted
        ]
        started = time.perf_counter()
        stored = self._library.put_patches(patches)
        write_ms = 1e3 * (time.perf_counter() - started) / max(1, len(wanted))
        return {
            branch.chain(index): describe(
                record, branch.records[index], self._numbers, "formed", spent[index] + write_ms, old
            )
            for index, record, old in zip(wanted, stored, older, strict=True)
        }

    def _part(self, record: Record, segment: Segment, after: list[LayerKV], length: int) -> Part:
        if length == 1:
            return Part(segment, after)
        options, canonical = self._options, self._library.layers(record)
        patch = form(
            after, canonical, rank=options.rank, energy=options.energy, dtype=options.dtype,
            budget_bytes=options.budget_bytes(record), worth=options.worth,
        )  # fmt: skip
        return Part(segment, canonical, patch)

    def _measured(self, branch: Prefilled, wanted: Sequence[int]) -> list[dict]:
        """KL to the branch's own forward behind each wanted chunk, with all patches of its path and with none."""
        if not wanted:
            return []
        started = time.perf_counter()
        ends = [1 + len(branch.before) + index for index in wanted]
        places = places_of([part.segment for part in self._parts], ends)
        bare = [replace(part, patch=None) for part in self._parts]
        caches = [branch.cache, assembled(self._runner, self._parts), assembled(self._runner, bare)]
        exact, patched, blind = logits_after_each(self._runner, caches, places, self.probe)
        options = self._options
        found = [
            {
                "kl": next_token_kl(reference, with_patches),
                "kl_blind": next_token_kl(reference, without),
                "probe": options.probe,
                "request": options.request,
            }
            for reference, with_patches, without in zip(exact, patched, blind, strict=True)
        ]
        self.measure_ms += 1e3 * (time.perf_counter() - started)
        return found


def _plain_prefill_ms(engine: Engine, chains: Sequence[Chain], numbers: dict[bytes, int]) -> float:
    """Time of one cold prefill of each chain, in ms."""
    runner, library = engine.runner, engine.library
    spent_ms = 0.0
    for chain in chains:
        names = [str(numbers.get(link.key, link.short_id)) for link in chain]
        segments = [
            library.segment(require_record(library, *named)) for named in zip(chain, names, strict=True)
        ]
        runner.synchronize()
        started = time.perf_counter()
        runner.prefill_captured([runner.preamble, *segments])
        runner.synchronize()
        spent_ms += 1e3 * (time.perf_counter() - started)
    return spent_ms


def _found(
    library: Library, chain: Chain, options: PatchOptions, numbers: dict[bytes, int]
) -> FormedPatch | None:
    record = library.find_patch(chain[-1], chain[:-1], "exact")
    if record is None or not serves(record, options):
        return None
    chunk = require_record(library, chain[-1], str(numbers.get(chain[-1].key, chain[-1].short_id)))
    return describe(record, chunk, numbers, "found", 0.0)


def serves(record: Record, options: PatchOptions) -> bool:
    """Whether a stored patch is what was asked for, or the same with more directions, which a reader can leave out."""
    if options.any_usable and why_not_auto(record) is None:
        return True
    kept, wanted = record.meta["request"], options.request
    if kept == wanted:
        return True
    fixed = isinstance(kept["rank"], int) and isinstance(wanted["rank"], int)
    return fixed and kept["rank"] >= wanted["rank"] and kept["factor_dtype"] == wanted["factor_dtype"]


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
        engine, [chunk.chain for chunk in wanted if chunk.antecedents], PatchOptions(any_usable=True), numbers
    )
    update_window(engine.store, tenant, window, lambda current: recalled(current, returning, at))
    entries = {entry.chunk: entry for entry in after.entries}
    return RecallResult(
        window=after,
        recalled=tuple(entries[entry.chunk] for entry in returning),
        patched=tuple(patch.id for patch in formed),
        cascade=cascade_of(engine, returning),
        vision_calls=engine.vision_calls - calls,
        total_ms=1e3 * (time.perf_counter() - started),
    )


def cascade_of(engine: Engine, entries: Sequence[WindowEntry]) -> tuple[str, ...]:
    """Chunks (hex) with patches that name one of these as an antecedent."""
    tenant = engine.settings.tenant
    named = (engine.store.patches_naming(bytes.fromhex(entry.chunk), tenant=tenant) for entry in entries)
    return tuple(sorted({patch.meta["chunk"] for patches in named for patch in patches}))
