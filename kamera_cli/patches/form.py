"""Form patches: one conditioned forward from stored embeddings, Δ per chunk, factors, measured KL."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kamera_cli.library import NewPatch, require_record
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.generate import next_token_kl
from kamera_cli.model.inputs import Segment
from kamera_cli.model.scoring import logits_after_each
from kamera_cli.operator.patch import form
from kamera_cli.patches.branches import count_branches, maximal
from kamera_cli.patches.measure import Part, assembled, places_of
from kamera_cli.patches.report import describe
from kamera_cli.patches.request import PatchOptions, find_formed
from kamera_cli.patches.tree import Prefilled, each_branch
from kamera_cli.patches.worth import layer_worth
from kamera_cli.results import FormedPatch, Progress
from kamera_cli.window import Chain
from kamera_store.format.records import Record

if TYPE_CHECKING:
    from kamera_cli.context import Context


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


def form_chains(
    context: Context,
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
    formed = {chain: find_formed(context.library, chain, options, numbers) for chain in chains}
    missing = [chain for chain in chains if formed[chain] is None]
    if not missing:
        return [formed[chain] for chain in chains], Costs(0.0, 0.0, 0.0, None)
    for chain in missing if options.budget is not None else ():
        label = str(numbers.get(chain[-1].key, chain[-1].short_id))
        options.check_budget(require_record(context.library, chain[-1], label), f"chunk {label}")
    learning = time.perf_counter()
    learns = options.learn and options.rank == "auto"
    learned = (learn_on or max(missing, key=len)) if learns else None
    options = replace(options, worth=layer_worth(context, learned, numbers))
    learn_ms = 1e3 * (time.perf_counter() - learning)
    forming = _Forming(context, options, numbers, frozenset(missing))
    # By now the model is in memory: loading it is no part of what forming costs.
    started = time.perf_counter()
    probe_tokens = forming.probe.numel()
    total = count_branches(missing)
    for done, branch in enumerate(each_branch(context, missing, numbers, num_more=probe_tokens)):
        context.progress(Progress("forming patches", done, total, "forwards"))
        formed |= forming.branch(branch)
    context.progress(Progress("forming patches", total, total, "forwards"))
    spent_ms = 1e3 * (time.perf_counter() - started)
    plain_ms = forming.prefill_ms if forming.is_plain else None
    if plain_ms is None and options.time_prefill:
        plain_ms = _plain_prefill_ms(context, maximal(missing), numbers)
    costs = Costs(forming.prefill_ms, spent_ms - forming.measure_ms, forming.measure_ms, plain_ms, learn_ms)
    return [formed[chain] for chain in chains], costs


class _Forming:
    """What a walk over branches has formed: the assembled path above the next branch, and clocks."""

    def __init__(
        self, context: Context, options: PatchOptions, numbers: dict[bytes, int], wanted: frozenset[Chain]
    ) -> None:
        self._runner, self._library = context.runner, context.library
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


def _plain_prefill_ms(context: Context, chains: Sequence[Chain], numbers: dict[bytes, int]) -> float:
    """Time of one cold prefill of each chain, in ms."""
    runner, library = context.runner, context.library
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
