"""Figures, table and chart of the suite ``slide`` (pure)."""

from __future__ import annotations

from kamera_cli.bench.forming import AS_COMPILED
from kamera_cli.bench.results import Chart, Series, SuiteResult, Table
from kamera_cli.bench.shares import Share, mean, percentile
from kamera_cli.words import format_number

GROUPS = {
    "through": "two-hop through the chunk that left",
    "other": "one-hop in the others",
    "gone": "one-hop in the chunk that left",
}
LEFT_BLIND, LEFT_PATCHED = "left, others blind", "left, others patched"
RECALLED_BLIND, RECALLED = "recalled, all blind", "recalled, patched"
LEFT_AS_BEFORE = "left, others as they were"
Right = dict[str, dict[str, list[bool]]]
Kls = dict[str, list[float]]


def report(right: Right, kls: Kls, described: dict) -> SuiteResult:
    """All that the suite hands back.

    Parameters
    ----------
    right : dict
        By arm and group, right or not per question.
    kls : dict
        By arm, nats per question.
    described : dict
        Model, device and episodes; goes into the data as it is.
    """
    arms = {name: _figures(name, right, kls) for name in right}
    rows = tuple(
        (
            name,
            *(_shown(found[group]) for group in GROUPS),
            format_number(found["kl"]),
            format_number(found["kl_p95"]),
            "–" if found["eta"] is None else f"{found['eta']:.5f}",
        )
        for name, found in arms.items()
    )
    count = len(next(iter(right.values()))["through"])
    notes = (
        f"{described['model']}, {described['device']} {described['dtype']}. {described['num_episodes']} episodes, "
        f"{count} two-hop questions. Per cent with Wilson 95 % intervals; exact match of the greedy answer.",
        "Patched: the patches that the chunks had before it left; recalled: these, and one for the recalled chunk "
        "after what now stands before it. As they were: the others' own KV of before, moved up. Removed: what they "
        "took in from the chunk that left is taken out again. As compile-patches forms them: ranks by what the layers "
        "are worth, at its own energy; all factors are 8-bit integers.",
        "KL: next token, over questions, to a re-prefill of what stands in the window; arms that keep what the others "
        "took in from the chunk that left are meant to differ from it. η: share of the mean KL of the blind arm of the "
        "same window that is gone.",
    )
    columns = ("arm", *(f">{label}" for label in GROUPS.values()), ">KL mean", ">KL p95", ">η")
    table = Table("A chunk leaves the window and comes back", columns, rows, notes)
    told = {
        "re-prefill of the others": "left, re-prefill of the others",
        "others patched": f"{LEFT_PATCHED}, {AS_COMPILED}",
        "once it is recalled": f"{RECALLED}, {AS_COMPILED}",
    }
    shown = ", ".join(f"{label} {_shown(arms[name]['through'])} %" for label, name in told.items())
    sentence = f"two-hop answers through a chunk that has left: {shown}"
    return SuiteResult("slide", sentence, {**described, "arms": arms}, (table,), (_chart(arms, described),))


def _figures(name: str, right: Right, kls: Kls) -> dict:
    kl, blind = mean(kls[name]), _blind_of(name)
    blind_kl = None if blind is None else mean(kls[blind])
    return {
        "kl": kl,
        "kl_p95": percentile(kls[name], 95),
        "eta": 1 - kl / blind_kl if kl is not None and blind_kl else None,
        **{group: Share(sum(marks), len(marks)).to_json() for group, marks in right[name].items()},
    }


def _blind_of(name: str) -> str | None:
    """The blind arm of the same window; None for arms that are meant to differ from its re-prefill."""
    if name.startswith("before") or name.startswith(LEFT_PATCHED) or name == LEFT_AS_BEFORE:
        return None
    return RECALLED_BLIND if name.startswith("recalled") else LEFT_BLIND


def _chart(arms: dict[str, dict], described: dict) -> Chart:
    shown = {
        "before: re-prefill": "before, re-prefill",
        "left: re-prefill": "left, re-prefill of the others",
        "left: blind": LEFT_BLIND,
        "left: patched": f"{LEFT_PATCHED}, {AS_COMPILED}",
        "left and removed": f"left and removed, {AS_COMPILED}",
        "recalled: re-prefill": "recalled, re-prefill",
        "recalled: blind": RECALLED_BLIND,
        "recalled: patched": f"{RECALLED}, {AS_COMPILED}",
    }
    places = tuple(range(len(shown)))
    series = tuple(
        Series(label, places, tuple(100 * (arms[name][group]["accuracy"] or 0.0) for name in shown.values()))
        for group, label in GROUPS.items()
    )
    caption = f"{described['model']}, {described['num_episodes']} episodes. Patches {AS_COMPILED}."
    return Chart(
        "slide_answers",
        "What a window knows",
        ", ".join(shown),
        "exact match, %",
        series,
        caption,
        kind="bars",
    )


def _shown(share: dict) -> str:
    if share["accuracy"] is None:
        return "–"
    return f"{100 * share['accuracy']:.1f} [{100 * share['low']:.1f}, {100 * share['high']:.1f}]"
