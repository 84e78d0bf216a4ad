"""Suite ``slide``: what a window still knows of a chunk that has left it, and what it knows once the chunk is recalled.

A chunk that answers half of a two-hop question stands first and leaves; the survivors move up and keep what they took
in from it. Then it comes back at the end, conditioned on what now stands before it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kamera_cli.bench.episodes import Encoded, encoded_episodes, forced, group_of, shuffled
from kamera_cli.bench.results import SuiteResult, Table
from kamera_cli.bench.shares import Share
from kamera_cli.engine import Engine
from kamera_cli.generate import next_token_kl
from kamera_cli.model.compat import DynamicCache
from kamera_cli.model.scoring import is_greedy_match, score
from kamera_cli.results import Progress
from kamera_cli.settings import Settings
from kamera_cli.text import format_number

if TYPE_CHECKING:
    from kamera_cli.bench import BenchOptions

EPISODES = 60
RANKS = (4, 16)
GROUPS = {
    "through": "two-hop through the chunk that left",
    "other": "one-hop in the others",
    "gone": "one-hop in the chunk that left",
}
_Right = dict[str, dict[str, list[bool]]]
_Kls = dict[str, list[float]]


def measure(
    settings: Settings, options: BenchOptions, on_progress: Callable[[Progress], None]
) -> SuiteResult:
    """Answer before a chunk leaves, after it has left, and after it was recalled.

    Returns
    -------
    SuiteResult
        One table.
    """
    count = options.episodes or EPISODES
    ranks = tuple(sorted(set(options.ranks))) or RANKS
    right: _Right = {}
    kls: _Kls = {}
    with tempfile.TemporaryDirectory(prefix="kamera-bench-") as folder:
        work = Path(folder)
        own = replace(settings, store=work / "store", quota_bytes=None, rehash=False)
        with Engine(own, on_progress=on_progress) as engine:
            runner = engine.runner
            for done, encoded in enumerate(encoded_episodes(runner, count, options.seed, work)):
                on_progress(Progress("sliding", done, count, "episodes"))
                _episode(encoded, ranks, right, kls)
            described = {
                "model": engine.checkpoint.label,
                "device": str(runner.device),
                "dtype": engine.dtype_name,
                "num_episodes": count,
            }
    return _result(right, kls, max(ranks), described)


def _episode(encoded: Encoded, ranks: tuple[int, ...], right: _Right, kls: _Kls) -> None:
    leaving = next((q.chunks[0] for q in encoded.episode.questions if group_of(q) == "two_hop"), None)
    if leaving is None:
        return
    others = [index for index in shuffled(len(encoded.segments), encoded.seed) if index != leaving]
    before = encoded.arranged([leaving, *others])
    after = encoded.arranged(others)
    back = encoded.arranged([*others, leaving])
    patches, returning = before.patches(max(ranks))[1:], back.patches(max(ranks))[-1]
    removed = after.patches(max(ranks))
    contexts: list[tuple[int, dict[str, DynamicCache]]] = [
        (before.end, {"before, re-prefill": before.exact}),
        (
            after.end,
            {
                "left, re-prefill of the others": after.exact,
                "left, others blind": after.blind,
                **{f"left, others patched, rank {rank}": after.patched(patches, rank) for rank in ranks},
                **{f"left and removed, rank {rank}": after.patched(removed, rank) for rank in ranks},
                "left, others as they were": after.holding(before.conditioned[1:]),
            },
        ),
        (
            back.end,
            {
                "recalled, re-prefill": back.exact,
                "recalled, all blind": back.blind,
                **{
                    f"recalled, patched, rank {rank}": back.patched([*patches, returning], rank)
                    for rank in ranks
                },
            },
        ),
    ]
    asked = [
        (group, question)
        for question in encoded.episode.questions
        if (group := _group(group_of(question), question.chunks, leaving)) is not None
    ]
    prompts = [forced(encoded.runner, question) for _, question in asked]
    for end, caches in contexts:
        scored = score(encoded.runner, list(caches.values()), end, prompts)
        for name, answers in zip(caches, scored, strict=True):
            # The first cache of each context is its re-prefill.
            kls.setdefault(name, []).extend(
                next_token_kl(expected[0], logits[0])
                for expected, logits in zip(scored[0], answers, strict=True)
            )
            for (group, _), prompt, logits in zip(asked, prompts, answers, strict=True):
                marks = right.setdefault(name, {each: [] for each in GROUPS})[group]
                marks.append(is_greedy_match(logits, prompt.answer_ids, encoded.runner.eos_ids))


def _group(kind: str, chunks: tuple[int, ...], leaving: int) -> str | None:
    if kind == "two_hop":
        return "through" if leaving in chunks else None
    if kind == "one_hop":
        return "gone" if leaving in chunks else "other"
    return None


def _result(right: _Right, kls: _Kls, shown_rank: int, described: dict) -> SuiteResult:
    shares = {
        name: {group: Share(sum(marks[group]), len(marks[group])) for group in GROUPS}
        for name, marks in right.items()
    }
    means = {name: sum(found) / len(found) for name, found in kls.items()}
    rows = tuple(
        (name, *(_shown(found[group]) for group in GROUPS), format_number(means[name]))
        for name, found in shares.items()
    )
    count = len(next(iter(right.values()))["through"])
    notes = (
        f"{described['model']}, {described['device']} {described['dtype']}. {described['num_episodes']} episodes, "
        f"{count} two-hop questions. Per cent with Wilson 95 % intervals; exact match of the greedy answer.",
        "Patched: the patches that the chunks had before it left; recalled: these, and one for the recalled chunk "
        "after what now stands before it. As they were: the others' own KV of before, moved up. Removed: what they "
        "took in from the chunk that left is taken out again. KL: next token, mean over questions, to a re-prefill of "
        "what stands in the window.",
    )
    columns = ("arm", *(f">{label}" for label in GROUPS.values()), ">KL to re-prefill")
    table = Table("A chunk leaves the window and comes back", columns, rows, notes)
    told = {
        name: _shown(shares[name]["through"])
        for name in ("left, re-prefill of the others", f"left, others patched, rank {shown_rank}")
    }
    sentence = (
        "two-hop answers through a chunk that has left: "
        + ", ".join(f"{name.removeprefix('left, ')} {value}" for name, value in told.items())
        + " %"
    )
    data = {
        **described,
        "arms": {
            name: {"kl": means[name], **{group: share.to_json() for group, share in found.items()}}
            for name, found in shares.items()
        },
    }
    return SuiteResult("slide", sentence, data, (table,))


def _shown(share: Share) -> str:
    if share.interval is None:
        return "–"
    low, high = share.interval
    return f"{100 * share.value:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
