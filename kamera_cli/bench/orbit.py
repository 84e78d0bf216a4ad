"""Suite ``orbit``: one patch per chunk and antecedent set against exact patches, over every order of small sets.

Without ``--ranks`` both are formed as ``compile-patches`` forms them: ranks by worth, learned on the first episodes.
The rivals inside show what was chosen and why: one order instead of two opposite ones, and the paper's single mean
patch per chunk (arXiv 2606.23581, "Reorder"); ``--rivals none`` leaves them out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

from kamera_cli.bench.episodes import Encoded
from kamera_cli.bench.figures import (
    BLIND,
    REFERENCE,
    Arm,
    Chart,
    Size,
    SuiteResult,
    Table,
    arm_table,
    bars,
    eta,
    interval,
    number,
    of_group,
    percent,
)
from kamera_cli.bench.prompt import AS_COMPILED, Prompt, patch_size
from kamera_cli.bench.runner import Task, answer
from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator.orbit import antecedent_sets, mean_kv
from kamera_cli.operator.patch import LayerPatch
from kamera_cli.operator.ranks import Worth
from kamera_cli.options import CompileOptions
from kamera_cli.patches.chunk import Chunk, ChunkChain
from kamera_cli.patches.form import Factor
from kamera_cli.patches.orbit import set_patches
from kamera_cli.patches.request import factor
from kamera_cli.patches.tree import conditioned
from kamera_cli.patches.worth import Learned, learn

SIZES = (3, 4)
"""Chunks of the sets; all 3! and 4! orders are asked."""
EPISODES = 20
"""Episodes of the smallest sets. Larger ones have more orders and as many fewer episodes, so that each size gives about
as many answers."""
EXACT, ORBIT = "exact, one per order", "orbit, one per set"
ONE_ORDER, ONE_MEAN = "one order", "one mean patch"

Row = dict[str, Any]
Patches = dict[ChunkChain, list[LayerPatch]]
"""By the chunks before one, in order, and that one."""


def measure(task: Task) -> SuiteResult:
    """Answers in every order of sets of three and of four chunks.

    Returns
    -------
    SuiteResult
        One table per size of the set.
    """
    asked = CompileOptions(rank=max(task.options.ranks, default="auto"))
    by_worth = asked.rank == "auto"
    how = AS_COMPILED if by_worth else f"of rank {asked.rank}"
    known = Learned()
    tables: list[Table] = []
    data: dict[str, Row] = {}
    with task.run() as run:
        for size in SIZES:
            count = max(
                1, (task.options.episodes or EPISODES) * math.factorial(SIZES[0]) // math.factorial(size)
            )
            arms: dict[str, Arm] = {}
            kv_bytes, seconds = 0, run.seconds
            for encoded in run.sized_episodes(f"orders of {size}", count, size):
                after = conditioned(encoded.runner, chains_of(encoded.chunks))
                if by_worth:
                    known = learn(encoded.runner, known, encoded.chunks, _in_order(encoded.chunks, after))
                form = _former(asked, known.worth)
                made = _patches(encoded.chunks, after, form, with_rivals=task.options.rivals != ("none",))
                _ask(encoded, after, made, arms)
                kv_bytes += _kv_bytes(encoded.chunks)
            found: Row = {
                "kv_bytes": kv_bytes,
                "arms": _rows(arms),
                "episodes": count,
                "seconds_per_episode": (run.seconds - seconds) / count,
            }
            described_as = f"{how}, energy {asked.energy}" if by_worth else how
            tables.append(_table(size, described_as, found))
            data[f"of_{size}"] = found
        described = run.described() | {
            "rank": asked.rank,
            "energy": asked.energy if by_worth else None,
            "windows_learned_on": known.num_windows,
        }
    told = ", ".join(f"{size}!: {interval(data[f'of_{size}']['arms'][ORBIT]['two_hop'])}" for size in SIZES)
    sentence = f"two-hop answers with orbit patches {how} over all orders, {told} %"
    return SuiteResult("orbit", sentence, {**described, **data}, tuple(tables), (_chart(data),))


def _former(options: CompileOptions, worth: Worth | None) -> Factor:
    return lambda after, chunk: factor(after, chunk.canonical, options, worth)


def chains_of(chunks: Sequence[Chunk]) -> list[ChunkChain]:
    """Every order of some of the chunks."""
    return [chain for size in range(1, len(chunks) + 1) for chain in permutations(chunks, size)]


def _in_order(order: ChunkChain, after: Mapping[ChunkChain, list[LayerKV]]) -> list[list[LayerKV]]:
    """Conditioned KV of each chunk of an order."""
    return [after[order[: place + 1]] for place in range(len(order))]


def _patches(
    chunks: ChunkChain, after: Mapping[ChunkChain, list[LayerKV]], form: Factor, *, with_rivals: bool
) -> dict[str, tuple[Patches, Size]]:
    """Per arm, the patch of every chain, and the bytes of all that are kept for them."""
    exact = {chain: form(layers, chain[-1]) for chain, layers in after.items() if len(chain) > 1}
    ways = {EXACT: (exact, patch_size(list(exact.values())))}
    of_sets = {ORBIT: set_patches(chunks, after, form)}
    if with_rivals:
        of_sets[ONE_ORDER] = {(chunk, of): exact[(*of, chunk)] for chunk, of in of_sets[ORBIT]}
    for name, made in of_sets.items():
        ways[name] = _in_all_orders(made), patch_size(list(made.values()))
    if with_rivals:
        single = {chunk: form(_mean(chunk, after), chunk) for chunk in chunks}
        everywhere = {(chunk, of): single[chunk] for chunk, of in of_sets[ORBIT]}
        ways[ONE_MEAN] = _in_all_orders(everywhere), patch_size(list(single.values()))
    return ways


def _in_all_orders(of_sets: Mapping[tuple[Chunk, ChunkChain], list[LayerPatch]]) -> Patches:
    """The patch of a set for every order of the set."""
    return {(*order, chunk): patch for (chunk, of), patch in of_sets.items() for order in permutations(of)}


def _mean(chunk: Chunk, after: Mapping[ChunkChain, list[LayerKV]]) -> list[LayerKV]:
    """Mean KV of a chunk over all chains in which something stands before it."""
    return mean_kv([layers for chain, layers in after.items() if chain[-1] is chunk and len(chain) > 1])


def _ask(
    encoded: Encoded,
    after: Mapping[ChunkChain, list[LayerKV]],
    made: Mapping[str, tuple[Patches, Size]],
    arms: dict[str, Arm],
) -> None:
    """Ask one episode in every order."""
    for name, (_, size) in made.items():
        arm = arms.setdefault(name, Arm(name, size=Size()))
        arm.size = (arm.size or Size()) + size
    asked = encoded.asked
    for order in permutations(encoded.chunks):
        prompt = Prompt(encoded.runner, order, _in_order(order, after))
        caches = {REFERENCE: prompt.exact, BLIND: prompt.blind}
        for name, (patches, _) in made.items():
            chosen = [patches[order[: place + 1]] if place else None for place in range(len(order))]
            caches[name] = prompt.patched(chosen)
        answer(encoded.runner, arms, caches, prompt.end, asked)


def _kv_bytes(chunks: Sequence[Chunk]) -> int:
    """Bytes of KV that a patch of every set serves."""
    num_sets = len(antecedent_sets(chunks[0], chunks))
    return num_sets * sum(kv.rotary.nbytes + kv.plain.nbytes for chunk in chunks for kv in chunk.canonical)


def _rows(arms: dict[str, Arm]) -> dict[str, Row]:
    """Figures of every arm, the two without patches first."""
    names = [REFERENCE, BLIND, *(name for name in arms if name not in (REFERENCE, BLIND))]
    return {
        name: {
            **arms[name].figures(arms[BLIND]),
            "patch_bytes": (arms[name].size or Size()).raw,
        }
        for name in names
    }


def _table(size: int, how: str, found: Row) -> Table:
    rows, kv_bytes = found["arms"], found["kv_bytes"]
    notes = (
        f"{found['episodes']} episodes in every order, {rows[BLIND]['two_hop']['count']} two-hop answers; patches "
        f"{how}. Per cent with Wilson 95 % intervals. η: share of blind's mean KL that is gone. Bytes: of all patches "
        "that every order needs, over the KV that one patch of each set serves.",
    )
    columns = {
        ">two-hop": of_group("two_hop"),
        ">one-hop": of_group("one_hop"),
        ">mean KL": number("kl_mean"),
        ">p95 KL": number("kl_p95"),
        ">η": eta,
        ">bytes": lambda row: percent(row["patch_bytes"] / kv_bytes if row["patch_bytes"] else None, 2),
    }
    return arm_table(f"Every order of {size} chunks", rows, columns, notes)


def _chart(data: dict[str, Row]) -> Chart:
    arms = {size: data[f"of_{size}"]["arms"] for size in SIZES}
    names = list(arms[SIZES[0]])
    series = tuple(
        bars(f"every order of {size}", [rows[name]["two_hop"] for name in names])
        for size, rows in arms.items()
    )
    labels = ", ".join(name.replace(",", ":") for name in names)
    return Chart(
        "orbit_answers", "Two-hop answers in every order", labels, "exact match, %", series,
        "Two-hop answers in every order of the chunks.", kind="bars",
    )  # fmt: skip
