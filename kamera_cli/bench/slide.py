"""Suite ``slide``: what a window still knows of a chunk that has left it, and what it knows once the chunk is recalled.

A chunk that answers half of a two-hop question stands first and leaves; the survivors move up and keep what they took
in from it. Then it comes back at the end, conditioned on what now stands before it.
"""

from __future__ import annotations

from typing import Any

from kamera_cli.bench.episodes import Asked, Encoded, group_of, shuffled
from kamera_cli.bench.figures import (
    Arm,
    Chart,
    SuiteResult,
    arm_table,
    bars,
    eta,
    interval,
    measured_on,
    number,
    of_group,
)
from kamera_cli.bench.prompt import AS_COMPILED, Patches, Prompt
from kamera_cli.bench.runner import Task, answer
from kamera_cli.model.compat import DynamicCache
from kamera_cli.operator.patch import LayerPatch
from kamera_cli.operator.ranks import Worth
from kamera_cli.options import CompileOptions
from kamera_cli.patches.worth import Learned, learn
from kamera_cli.tiny.world import Question

EPISODES = 60
RANKS = (4, 16)
GROUPS = {
    "through": "two-hop through the chunk that left",
    "other": "one-hop in the others",
    "gone": "one-hop in the chunk that left",
}
BEFORE = "before, re-prefill"
LEFT, LEFT_BLIND, LEFT_PATCHED = (
    "left, re-prefill of the others",
    "left, others blind",
    "left, others patched",
)
LEFT_AS_BEFORE, REMOVED = "left, others as they were", "left and removed"
RECALLED_EXACT, RECALLED_BLIND, RECALLED = "recalled, re-prefill", "recalled, all blind", "recalled, patched"

Row = dict[str, Any]


def measure(task: Task) -> SuiteResult:
    """Answer before a chunk leaves, after it has left, and after it was recalled.

    Returns
    -------
    SuiteResult
        One table, one chart.
    """
    ranks = task.options.ranks_or(RANKS)
    arms: dict[str, Arm] = {}
    known = Learned()
    with task.run() as run:
        for encoded in run.episodes("sliding", EPISODES):
            leaving = _leaving(encoded.episode.questions)
            if leaving is None:
                continue
            others = [index for index in shuffled(len(encoded.chunks), encoded.seed) if index != leaving]
            orders = ([leaving, *others], others, [*others, leaving])
            before, after, back = map(encoded.arranged, orders)
            known = learn(encoded.runner, known, before.chunks, before.conditioned)
            questions = _asked(encoded, leaving)
            for end, caches in contexts(before, after, back, ranks, known.worth):
                answer(encoded.runner, arms, caches, end, questions)
        described = run.described()
    return report(arms, described)


def _leaving(questions: tuple[Question, ...]) -> int | None:
    """The first chunk of the first two-hop question."""
    return next((question.chunks[0] for question in questions if group_of(question) == "two_hop"), None)


def _asked(encoded: Encoded, leaving: int) -> list[Asked]:
    """The questions that are counted, each in its one of `GROUPS`."""
    found = []
    for question, (kind, prompt) in zip(encoded.episode.questions, encoded.asked, strict=True):
        is_there = leaving in question.chunks
        if kind == "two_hop" and is_there:
            found.append(("through", prompt))
        elif kind == "one_hop":
            found.append(("gone" if is_there else "other", prompt))
    return found


def contexts(
    before: Prompt, after: Prompt, back: Prompt, ranks: tuple[int, ...], known: Worth | None
) -> list[tuple[int, dict[str, DynamicCache]]]:
    """Caches of all arms, by window and name, each window with the position at which a question starts.

    Parameters
    ----------
    before, after, back : Prompt
        The chunk that leaves and the others; the others alone; the others and the chunk once more, at the end.
    known : Worth or None
        What the layers are worth.

    Returns
    -------
    list of (int, dict)
        The first cache of each window is its re-prefill.
    """
    left = {LEFT: after.exact, LEFT_BLIND: after.blind}
    removed, recalled = {}, {RECALLED_EXACT: back.exact, RECALLED_BLIND: back.blind}
    fixed, compiled = CompileOptions(rank=max(ranks)), CompileOptions()
    of_ranks, as_compiled = (_formed(before, after, back, options, known) for options in (fixed, compiled))
    ways = [*((f"rank {rank}", of_ranks, rank) for rank in ranks), (AS_COMPILED, as_compiled, None)]
    for kind, (kept, without, returning), rank in ways:
        left[f"{LEFT_PATCHED}, {kind}"] = after.patched(kept, rank)
        removed[f"{REMOVED}, {kind}"] = after.patched(without, rank)
        recalled[f"{RECALLED}, {kind}"] = back.patched([*kept, returning], rank)
    as_before = {LEFT_AS_BEFORE: after.holding(before.conditioned[1:])}
    return [
        (before.end, {BEFORE: before.exact}),
        (after.end, {**left, **removed, **as_before}),
        (back.end, recalled),
    ]


def _formed(
    before: Prompt, after: Prompt, back: Prompt, options: CompileOptions, known: Worth | None
) -> tuple[Patches, Patches, list[LayerPatch]]:
    """Patches that the others had before the slide, those after the removal, and the recalled chunk's on its return."""
    worth = None if options.rank != "auto" else known
    returning = back.patch(len(back.chunks) - 1, options, worth)
    return before.patches(options, worth)[1:], after.patches(options, worth), returning


def report(arms: dict[str, Arm], described: Row) -> SuiteResult:
    """All that the suite hands back.

    Parameters
    ----------
    described : dict
        Model, device and episodes; goes into the data as it is.
    """
    rows = {}
    for name, arm in arms.items():
        figures = arm.figures(arms.get(_blind_of(name)), tuple(GROUPS))
        rows[name] = {**figures, "kl": figures["kl_mean"]}
    notes = (
        f"{measured_on(described)} {described['num_episodes']} episodes, {rows[BEFORE]['through']['count']} two-hop "
        "questions. Per cent with Wilson 95 % intervals; exact match of the greedy answer.",
        "Patched: the patches that the chunks had before it left; recalled: these, and one for the recalled chunk "
        "after what now stands before it. As they were: the others' own KV of before, moved up. Removed: what they "
        "took in from the chunk that left is taken out again. As compile-patches forms them: ranks by what the layers "
        "are worth, at its own energy; all factors are 8-bit integers.",
        "KL: next token, over questions, to a re-prefill of what stands in the window; arms that keep what the others "
        "took in from the chunk that left are meant to differ from it. η: share of the mean KL of the blind arm of the "
        "same window that is gone.",
    )
    columns = {
        **{f">{label}": of_group(group) for group, label in GROUPS.items()},
        ">KL mean": number("kl_mean"),
        ">KL p95": number("kl_p95"),
        ">η": eta,
    }
    table = arm_table("A chunk leaves the window and comes back", rows, columns, notes)
    told = {
        "re-prefill of the others": LEFT,
        "others patched": f"{LEFT_PATCHED}, {AS_COMPILED}",
        "once it is recalled": f"{RECALLED}, {AS_COMPILED}",
    }
    shown = ", ".join(f"{label} {interval(rows[name]['through'])} %" for label, name in told.items())
    sentence = f"two-hop answers through a chunk that has left: {shown}"
    return SuiteResult("slide", sentence, {**described, "arms": rows}, (table,), (_chart(rows, described),))


def _blind_of(name: str) -> str:
    """The blind arm of the same window; nothing for arms that are meant to differ from its re-prefill."""
    if name.startswith(("before", LEFT_PATCHED)) or name == LEFT_AS_BEFORE:
        return ""
    return RECALLED_BLIND if name.startswith("recalled") else LEFT_BLIND


def _chart(rows: dict[str, Row], described: Row) -> Chart:
    shown = {
        "before: re-prefill": BEFORE,
        "left: re-prefill": LEFT,
        "left: blind": LEFT_BLIND,
        "left: patched": f"{LEFT_PATCHED}, {AS_COMPILED}",
        "left and removed": f"{REMOVED}, {AS_COMPILED}",
        "recalled: re-prefill": RECALLED_EXACT,
        "recalled: blind": RECALLED_BLIND,
        "recalled: patched": f"{RECALLED}, {AS_COMPILED}",
    }
    series = tuple(
        bars(label, [rows[name][group] for name in shown.values()]) for group, label in GROUPS.items()
    )
    where = f"{described['model']}, {described['num_episodes']} episodes. Patches {AS_COMPILED}."
    return Chart(
        "slide_answers", "What a window knows", ", ".join(shown), "exact match, %", series, where, kind="bars"
    )
