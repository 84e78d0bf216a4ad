"""Suite ``orbit``: one patch per chunk and antecedent set against exact patches, over every order of small sets.

Without ``--ranks`` both are formed as ``compile-patches`` forms them: ranks by worth, learned on the first episodes.
The rivals inside show what was chosen and why: a patch per set with a V of its own, one order instead of two opposite
ones, and the paper's single mean patch per chunk; ``--rivals none`` leaves them out.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kamera_cli.bench.arrangement import Arrangement
from kamera_cli.bench.episodes import Encoded, encoded_episodes, forced, group_of
from kamera_cli.bench.forming import Learner
from kamera_cli.bench.orbit_forming import ORBIT, Patches, Ways, arms_of, conditioned
from kamera_cli.bench.results import Chart, Series, SuiteResult, Table
from kamera_cli.bench.scratch import scratch_engine
from kamera_cli.bench.shares import Share, mean, percentile
from kamera_cli.model.generate import next_token_kl
from kamera_cli.model.scoring import is_greedy_match, score
from kamera_cli.operator.patch import AUTO_BITS
from kamera_cli.operator.quantise import row_bytes
from kamera_cli.results import Progress
from kamera_cli.settings import Settings
from kamera_cli.words import format_number

if TYPE_CHECKING:
    from kamera_cli.bench import BenchOptions

SIZES = (3, 4)
"""Chunks of the sets; all 3! and 4! orders are asked."""
EPISODES = 20
"""Episodes of the smallest sets. Larger ones have more orders and as many fewer episodes, so that each size gives about
as many answers."""
RE_PREFILL, BLIND = "re-prefill", "blind"


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
    num_episodes = options.episodes or EPISODES
    ways = Ways(max(options.ranks, default="auto"), with_rivals=options.rivals != ("none",))
    learner = Learner() if ways.rank == "auto" else None
    tables, data = [], {}
    with scratch_engine(settings, on_progress) as (engine, work):
        for size in SIZES:
            count = max(1, num_episodes * math.factorial(SIZES[0]) // math.factorial(size))
            arms: dict[str, _Arm] = {}
            kv_bytes = 0
            started = time.perf_counter()
            episodes = encoded_episodes(engine.runner, count, options.seed, work, num_chunks=size)
            for done, encoded in enumerate(episodes):
                on_progress(Progress(f"orders of {size}", done, count, "episodes"))
                kv_bytes += _episode(encoded, ways, learner, arms)
            seconds = (time.perf_counter() - started) / count
            found = _data(arms, kv_bytes) | {"episodes": count, "seconds_per_episode": seconds}
            tables.append(_table(size, count, ways, found))
            data[f"of_{size}"] = found
        described = {
            "model": engine.context.checkpoint.label,
            "device": str(engine.runner.device),
            "rank": ways.rank,
            "energy": ways.energy if ways.rank == "auto" else None,
            "windows_learned_on": learner.num_windows if learner else 0,
        }
    told = ", ".join(f"{size}!: {_share(data[f'of_{size}']['arms'][ORBIT]['two_hop'])}" for size in SIZES)
    sentence = f"two-hop answers with orbit patches {ways.described} over all orders, {told} %"
    return SuiteResult("orbit", sentence, {**described, **data}, tuple(tables), (_chart(data),))


def _episode(encoded: Encoded, ways: Ways, learner: Learner | None, arms: dict[str, _Arm]) -> int:
    """Ask one episode in every order; bytes of KV that a patch of every set serves."""
    size, canonical = len(encoded.segments), encoded.canonical
    after = conditioned(encoded)
    arranged = {
        order: Arrangement(
            encoded.runner,
            [encoded.segments[chunk] for chunk in order],
            [canonical[chunk] for chunk in order],
            [after[order[:place], chunk] for place, chunk in enumerate(order)],
        )
        for order in itertools.permutations(range(size))
    }
    if learner is not None:
        ways = replace(ways, worth=learner.worth(arranged[tuple(range(size))]))
    made = arms_of(after, canonical, ways)
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


def _patched(arrangement: Arrangement, order: tuple[int, ...], patches: Patches):
    chosen = [patches[order[:place], chunk] if place else None for place, chunk in enumerate(order)]
    return arrangement.patched(chosen, None)


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


def _table(size: int, count: int, ways: Ways, measured: dict) -> Table:
    data, kv_bytes = measured["arms"], measured["kv_bytes"]
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
    answers = data[BLIND]["two_hop"]["count"]
    how = f"{ways.described}, energy {ways.energy}" if ways.rank == "auto" else ways.described
    notes = (
        f"{count} episodes in every order, {answers} two-hop answers; patches {how}. Per cent with Wilson 95 % "
        "intervals. η: share of blind's mean KL that is gone. Bytes: of all patches that every order needs, over the "
        "KV that one patch of each set serves.",
    )
    columns = ("arm", ">two-hop", ">one-hop", ">mean KL", ">p95 KL", ">η", ">bytes")
    return Table(f"Every order of {size} chunks", columns, rows, notes)


def _chart(data: dict) -> Chart:
    arms = {size: data[f"of_{size}"]["arms"] for size in SIZES}
    names = tuple(arms[SIZES[0]])
    series = tuple(
        Series(
            f"every order of {size}",
            tuple(range(len(names))),
            tuple(100 * (arms[size][name]["two_hop"]["accuracy"] or 0.0) for name in names),
        )
        for size in SIZES
    )
    caption = "Two-hop answers in every order of the chunks."
    labels = ", ".join(name.replace(",", ":") for name in names)
    return Chart(
        "orbit_answers",
        "Two-hop answers in every order",
        labels,
        "exact match, %",
        series,
        caption,
        kind="bars",
    )


def _share(found: dict) -> str:
    if found["accuracy"] is None:
        return "–"
    return f"{100 * found['accuracy']:.1f} [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"
