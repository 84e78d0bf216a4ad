"""Suite ``orbit``: one patch per chunk and antecedent set against exact patches, over every order of small sets.

The rivals inside show what was chosen and why: a patch per set with a V of its own, one order instead of two opposite
ones, and the paper's single mean patch per chunk.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kamera_cli.bench.arrangement import Arrangement
from kamera_cli.bench.episodes import Encoded, encoded_episodes, forced, group_of
from kamera_cli.bench.results import SuiteResult, Table
from kamera_cli.bench.shares import Share, mean, percentile
from kamera_cli.engine import Engine
from kamera_cli.generate import next_token_kl
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.scoring import is_greedy_match, score
from kamera_cli.operator.orbit import antecedent_sets, form_orbit, formed_orders, mean_kv
from kamera_cli.operator.patch import AUTO_BITS, LayerPatch, form
from kamera_cli.operator.quantise import row_bytes
from kamera_cli.results import Progress
from kamera_cli.settings import Settings
from kamera_cli.text import format_number

if TYPE_CHECKING:
    from kamera_cli.bench import BenchOptions

SIZES = (3, 4)
"""Chunks of the sets; all 3! and 4! orders are asked."""
EPISODES = 20
RANK = 8
RE_PREFILL, BLIND, EXACT, ORBIT = "re-prefill", "blind", "exact, one per order", "orbit, shared V"
_Patches = dict[tuple[tuple[int, ...], int], list[LayerPatch]]


@dataclass
class _Arm:
    """What one way of patching gave, over all questions and orders."""

    right: dict[str, list[bool]] = field(
        default_factory=lambda: {"two_hop": [], "one_hop": [], "unknown": []}
    )
    kl: list[float] = field(default_factory=list)
    raw_bytes: int = 0


def measure(
    settings: Settings, options: BenchOptions, on_progress: Callable[[Progress], None]
) -> SuiteResult:
    """Answers in every order of sets of three and of four chunks.

    Returns
    -------
    SuiteResult
        One table per size of the set.
    """
    count, rank = options.episodes or EPISODES, max(options.ranks, default=RANK)
    tables, data = [], {}
    with tempfile.TemporaryDirectory(prefix="kamera-bench-") as folder:
        own = replace(settings, store=Path(folder) / "store", quota_bytes=None, rehash=False)
        with Engine(own, on_progress=on_progress) as engine:
            for size in SIZES:
                arms: dict[str, _Arm] = {}
                kv_bytes = 0
                episodes = encoded_episodes(engine.runner, count, options.seed, Path(folder), num_chunks=size)
                for done, encoded in enumerate(episodes):
                    on_progress(Progress(f"orders of {size}", done, count, "episodes"))
                    kv_bytes += _episode(encoded, rank, arms)
                tables.append(_table(size, count, rank, arms, kv_bytes))
                data[f"of_{size}"] = _data(arms, kv_bytes)
            described = {"model": engine.checkpoint.label, "device": str(engine.runner.device)}
    told = ", ".join(f"{size}!: {_share(data[f'of_{size}']['arms'][ORBIT]['two_hop'])}" for size in SIZES)
    sentence = f"two-hop answers with orbit patches of rank {rank} over all orders, {told} %"
    return SuiteResult(
        "orbit", sentence, {**described, "episodes": count, "rank": rank, **data}, tuple(tables)
    )


def _episode(encoded: Encoded, rank: int, arms: dict[str, _Arm]) -> int:
    """Ask one episode in every order; bytes of KV that a patch of every set serves."""
    size, canonical = len(encoded.segments), encoded.canonical
    after: dict[tuple[tuple[int, ...], int], list[LayerKV]] = {}
    arranged = {order: encoded.arranged(order) for order in itertools.permutations(range(size))}
    for order, arrangement in arranged.items():
        for place, chunk in enumerate(order):
            after[order[:place], chunk] = arrangement.conditioned[place]
    made = _made(after, canonical, rank)
    for name, (_, kept) in made.items():
        arms.setdefault(name, _Arm()).raw_bytes += _bytes(kept)
    asked = [(group_of(question), forced(encoded.runner, question)) for question in encoded.episode.questions]
    for order, arrangement in arranged.items():
        caches = {RE_PREFILL: arrangement.exact, BLIND: arrangement.blind}
        caches |= {name: _patched(arrangement, order, patches) for name, (patches, _) in made.items()}
        prompts = [prompt for _, prompt in asked]
        scored = score(encoded.runner, list(caches.values()), arrangement.end, prompts)
        for name, answers in zip(caches, scored, strict=True):
            arm = arms.setdefault(name, _Arm())
            for (group, prompt), expected, logits in zip(asked, scored[0], answers, strict=True):
                arm.right[group].append(is_greedy_match(logits, prompt.answer_ids, encoded.runner.eos_ids))
                arm.kl.append(next_token_kl(expected[0], logits[0]))
    num_sets = 2 ** (size - 1) - 1
    return num_sets * sum(kv.rotary.nbytes + kv.plain.nbytes for layers in canonical for kv in layers)


def _made(
    after: dict[tuple[tuple[int, ...], int], list[LayerKV]], canonical: list[list[LayerKV]], rank: int
) -> dict[str, tuple[_Patches, list]]:
    """Per arm, patches by order and chunk, and the factors that have to be kept for them."""
    size = len(canonical)
    own: dict[str, _Patches] = {
        name: {} for name in (EXACT, ORBIT, "a V for each set", "one order", "one mean patch")
    }
    kept: dict[str, list] = {name: [] for name in own}

    def factored(layers: list[LayerKV], chunk: int) -> list[LayerPatch]:
        return form(layers, canonical[chunk], rank=min(rank, layers[0].rotary.shape[0]), energy=1.0)

    for (before, chunk), layers in after.items():
        if before:
            own[EXACT][before, chunk] = factored(layers, chunk)
            kept[EXACT] += _factors(own[EXACT][before, chunk])
    for chunk in range(size):
        sets = antecedent_sets(chunk, list(range(size)))
        means = [mean_kv([after[order, chunk] for order in formed_orders(of)]) for of in sets]
        joint = form_orbit(means, canonical[chunk], rank=rank, energy=1.0)
        everywhere = mean_kv([layers for (before, one), layers in after.items() if one == chunk and before])
        single = factored(everywhere, chunk)
        kept["one mean patch"] += _factors(single)
        kept[ORBIT] += [factors.v for patch in joint[0] for factors in (patch.rotary, patch.plain)]
        for of, layers, shared in zip(sets, means, joint, strict=True):
            apart, first = factored(layers, chunk), factored(after[of, chunk], chunk)
            kept[ORBIT] += [factors.u for patch in shared for factors in (patch.rotary, patch.plain)]
            kept["a V for each set"] += _factors(apart)
            kept["one order"] += _factors(first)
            for before in itertools.permutations(of):
                own[ORBIT][before, chunk] = shared
                own["a V for each set"][before, chunk] = apart
                own["one order"][before, chunk] = first
                own["one mean patch"][before, chunk] = single
    return {name: (own[name], kept[name]) for name in own}


def _patched(arrangement: Arrangement, order: tuple[int, ...], patches: _Patches):
    chosen = [patches[order[:place], chunk] if place else None for place, chunk in enumerate(order)]
    return arrangement.patched(chosen, None)


def _factors(layers: list[LayerPatch]) -> list:
    return [
        rows for patch in layers for factors in (patch.rotary, patch.plain) for rows in (factors.u, factors.v)
    ]


def _bytes(kept: list) -> int:
    """Raw bytes of factors as they are stored: integers of `AUTO_BITS` and a scale for each row."""
    return sum(rows.shape[0] * row_bytes(rows.shape[1], AUTO_BITS) for rows in kept)


def _data(arms: dict[str, _Arm], kv_bytes: int) -> dict:
    return {
        "kv_bytes": kv_bytes,
        "arms": {
            name: {
                **{group: Share(sum(marks), len(marks)).to_json() for group, marks in arm.right.items()},
                "kl_mean": mean(arm.kl),
                "kl_p95": percentile(arm.kl, 95),
                "kl_max": max(arm.kl),
                "eta": 1 - mean(arm.kl) / mean(arms[BLIND].kl),
                "patch_bytes": arm.raw_bytes,
            }
            for name, arm in arms.items()
        },
    }


def _table(size: int, count: int, rank: int, arms: dict[str, _Arm], kv_bytes: int) -> Table:
    data = _data(arms, kv_bytes)["arms"]
    rows = tuple(
        (
            name,
            _share(found["two_hop"]),
            _share(found["one_hop"]),
            format_number(found["kl_mean"]),
            format_number(found["kl_p95"]),
            f"{found['eta']:.5f}",
            "–" if not found["patch_bytes"] else f"{100 * found['patch_bytes'] / kv_bytes:.2f} %",
        )
        for name, found in data.items()
    )
    orders = len(arms[BLIND].right["two_hop"])
    notes = (
        f"{count} episodes in every order, {orders} two-hop answers, rank {rank}. Per cent with Wilson 95 % intervals. "
        "η: share of blind's mean KL that is gone. Bytes: of all patches that every order needs, over the KV that one "
        "patch of each set serves.",
    )
    columns = ("arm", ">two-hop", ">one-hop", ">mean KL", ">p95 KL", ">η", ">bytes")
    return Table(f"Every order of {size} chunks", columns, rows, notes)


def _share(found: dict) -> str:
    if found["accuracy"] is None:
        return "–"
    return f"{100 * found['accuracy']:.1f} [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"
