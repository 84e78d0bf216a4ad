"""Form exact patches: one conditioned forward over chunks that share a prefix, Δ per chunk, factors, measured KL.

`each_formed` works on chunks in memory; `form_chains` finds, reads, forms and writes those of a store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kamera_cli.library import require_record
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.generate import next_token_kl
from kamera_cli.model.runner import ModelRunner
from kamera_cli.model.scoring import logits_after_each
from kamera_cli.operator.patch import LayerPatch
from kamera_cli.patches.chunk import Chunk, ChunkChain, read_chunks
from kamera_cli.patches.measure import Part, assembled, front, places_of
from kamera_cli.patches.report import describe
from kamera_cli.patches.request import PatchOptions, factor, find_formed
from kamera_cli.patches.tree import Prefilled, count_branches, each_branch, maximal
from kamera_cli.patches.worth import known_worth, learned_worth
from kamera_cli.results import CompileResult, FormedPatch, Progress
from kamera_cli.window import Chain
from kamera_cli.writing import NewPatch, put_patches

if TYPE_CHECKING:
    from kamera_cli.context import Context

Factor = Callable[[Sequence[LayerKV], Chunk], list[LayerPatch]]
"""Factors Δ of a chunk out of its conditioned KV."""


@dataclass(frozen=True)
class Formed:
    """The patch of the last chunk of a chain.

    Attributes
    ----------
    kl, kl_blind : float
        Next-token KL in nats to the forward of the chain, with the patches of all of its chunks and with none.
    form_ms : float
        Time of factoring.
    """

    chain: ChunkChain
    patch: list[LayerPatch]
    kl: float
    kl_blind: float
    form_ms: float


@dataclass(frozen=True)
class FormedBranch:
    """What one forward gave.

    Attributes
    ----------
    patches : tuple of Formed
        Of the chunks that were asked for.
    prefill_ms, measure_ms : float
        Time of the forward, and of the logits for KL.
    num_chunks : int
        Chunks that the forward conditioned.
    is_cold : bool
        Whether it was a plain prefill.
    """

    patches: tuple[Formed, ...]
    prefill_ms: float
    measure_ms: float
    num_chunks: int
    is_cold: bool


def each_formed(
    runner: ModelRunner, chains: Sequence[ChunkChain], factored: Factor, probe: torch.Tensor
) -> Iterator[FormedBranch]:
    """Form the patch of the last chunk of every chain; chains that share a prefix share its forward.

    Parameters
    ----------
    chains : sequence of ChunkChain
        Of two chunks or more, within the model's context with the probe behind them.
    factored : callable
        Such as `kamera_cli.patches.request.factor` with options.
    probe : torch.Tensor
        (n,) token ids behind which KL is measured.
    """
    wanted = frozenset(chains)
    parts = [front(runner)]
    for branch in each_branch(runner, chains):
        del parts[1 + len(branch.before) :]
        spent = []
        for chunk, after in zip(branch.chunks, branch.captured, strict=True):
            started = time.perf_counter()
            parts.append(Part.of(chunk, factored(after, chunk) if len(parts) > 1 else None))
            spent.append(1e3 * (time.perf_counter() - started))
        ends = [index for index in range(len(branch.chunks)) if branch.chain(index) in wanted]
        started = time.perf_counter()
        kls = _kl_behind(runner, branch, parts, ends, probe) if ends else []
        measure_ms = 1e3 * (time.perf_counter() - started)
        patches = tuple(
            Formed(
                branch.chain(index),
                list(parts[1 + len(branch.before) + index].patch or ()),
                *kl,
                spent[index],
            )
            for index, kl in zip(ends, kls, strict=True)
        )
        yield FormedBranch(patches, branch.prefill_ms, measure_ms, len(branch.chunks), branch.is_cold)


def _kl_behind(
    runner: ModelRunner, branch: Prefilled, parts: Sequence[Part], ends: Sequence[int], probe: torch.Tensor
) -> list[tuple[float, float]]:
    """KL to the branch's own forward behind some of its chunks, with all patches of the path and with none."""
    places = places_of([part.segment for part in parts], [1 + len(branch.before) + end for end in ends])
    bare = [replace(part, patch=None) for part in parts]
    caches = [branch.cache, assembled(runner, parts), assembled(runner, bare)]
    rows = zip(*logits_after_each(runner, caches, places, probe), strict=True)
    return [(next_token_kl(exact, patched), next_token_kl(exact, blind)) for exact, patched, blind in rows]


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

    prefill_ms: float = 0.0
    forming_ms: float = 0.0
    measure_ms: float = 0.0
    plain_ms: float | None = None
    learn_ms: float = 0.0

    @property
    def form_ratio(self) -> float | None:
        """Forming in units of one plain prefill."""
        return self.forming_ms / self.plain_ms if self.plain_ms else None

    def result(self, window: str, kind: str, formed: Sequence[FormedPatch], **more: Any) -> CompileResult:
        """What a job with these costs hands back; the whole time is not known yet."""
        return CompileResult(
            window, kind, tuple(formed), self.prefill_ms, 0.0,
            **{"measure_ms": self.measure_ms, "form_ratio": self.form_ratio, "learn_ms": self.learn_ms, **more},
        )  # fmt: skip


def form_chains(
    context: Context, chains: Sequence[Chain], options: PatchOptions, *, learn_on: Chain | None = None
) -> tuple[list[FormedPatch], Costs]:
    """The patch of the last stored chunk of every chain, formed where the store has none that serves.

    Parameters
    ----------
    learn_on : Chain or None
        Chunks to learn from what each layer is worth; the longest of the chains for None.

    Returns
    -------
    list of FormedPatch
        In the order of ``chains``; found ones included.
    Costs

    Raises
    ------
    NotFoundError
        A chunk is gone from the store.
    UsageError
        A budget without room for any direction, or a chain that is longer than the model's context.
    """
    found = {chain: find_formed(context, chain, options) for chain in chains}
    missing = [chain for chain, patch in found.items() if patch is None]
    formed = {chain: patch for chain, patch in found.items() if patch is not None}
    if not missing:
        return [formed[chain] for chain in chains], Costs()
    for chain in missing:
        label = context.label(chain[-1])
        options.check_budget(require_record(context.library, chain[-1], label), f"chunk {label}")
    runner = context.runner  # loading it is no part of what forming costs
    started = time.perf_counter()
    learned = (learn_on or max(missing, key=len)) if options.learns else ()
    chunks = read_chunks(context, [link for chain in (*missing, learned) for link in chain])
    held = {tuple(chunks[link] for link in chain): chain for chain in missing}
    probe = runner.question_ids(options.probe)
    require_fit(context, held, probe.numel())
    learning = time.perf_counter()
    worth = learned_worth(context, [chunks[link] for link in learned]) if learned else known_worth(context)
    learn_ms = 1e3 * (time.perf_counter() - learning)
    total, done = count_branches(missing), list[FormedBranch]()
    for branch in each_formed(
        runner, list(held), lambda after, chunk: factor(after, chunk.canonical, options, worth), probe
    ):
        context.progress(Progress("forming patches", len(done), total, "forwards"))
        formed |= _written(context, branch, held, options)
        done.append(branch)
    context.progress(Progress("forming patches", total, total, "forwards"))
    spent_ms = 1e3 * (time.perf_counter() - started) - learn_ms
    prefill_ms, measure_ms = sum(one.prefill_ms for one in done), sum(one.measure_ms for one in done)
    plain_ms = prefill_ms if total == 1 and done[0].is_cold else None
    if plain_ms is None and options.time_prefill:
        plain_ms = _plain_prefill_ms(runner, maximal(list(held)))
    costs = Costs(prefill_ms, spent_ms - measure_ms, measure_ms, plain_ms, learn_ms)
    return [formed[chain] for chain in chains], costs


def require_fit(context: Context, chains: Iterable[ChunkChain], num_more: int) -> None:
    """Refuse chains that do not fit into the model's context with so many positions behind them.

    Raises
    ------
    UsageError
    """
    for chain in chains:
        spans = sum(chunk.segment.positions.span for chunk in chain)
        context.require_context(context.runner.preamble.positions.span + spans + num_more, "this arrangement")


def _written(
    context: Context, branch: FormedBranch, held: Mapping[ChunkChain, Chain], options: PatchOptions
) -> dict[Chain, FormedPatch]:
    """Store the patches of a branch in one transaction."""
    library = context.library
    chains = [held[one.chain] for one in branch.patches]
    older = [library.find_patch(chain[-1], chain[:-1], "exact") for chain in chains]
    started = time.perf_counter()
    shared_ms = branch.prefill_ms / branch.num_chunks
    stored = put_patches(library, [
        NewPatch(
            one.chain[-1].stored, chain[:-1], "exact", one.patch,
            meta={"kl": one.kl, "kl_blind": one.kl_blind, **options.stated}, cost_ms=one.form_ms + shared_ms,
        )
        for one, chain in zip(branch.patches, chains, strict=True)
    ])  # fmt: skip
    write_ms = 1e3 * (time.perf_counter() - started) / max(1, len(stored))
    return {
        chain: describe(context, record, one.chain[-1].stored, "formed", one.form_ms + write_ms, before)
        for chain, one, record, before in zip(chains, branch.patches, stored, older, strict=True)
    }


def _plain_prefill_ms(runner: ModelRunner, chains: Sequence[ChunkChain]) -> float:
    """Time of one cold prefill of each chain, in ms."""
    spent_ms = 0.0
    for chain in chains:
        runner.synchronize()
        started = time.perf_counter()
        runner.prefill_captured([runner.preamble, *(chunk.segment for chunk in chain)])
        runner.synchronize()
        spent_ms += 1e3 * (time.perf_counter() - started)
    return spent_ms
