"""Figures, tables and charts of the suite ``compose`` (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kamera_cli.bench.results import Chart, Series, SuiteResult, Table
from kamera_cli.bench.shares import Share, mean, percentile
from kamera_cli.words import format_number

REFERENCE, BLIND, EXACT = "re-prefill", "blind", "exact, one per order"
COMPOSED, NO_GAIN, SUM, MEAN = "composed", "composed, gain 1", "sum of pairs", "mean of pairs"
GROUPS = ("two_hop", "one_hop", "unknown")
ALL = "all"


@dataclass
class Arm:
    """What one arm gave, by number of antecedents: right or not per group, KL in nats per question."""

    right: dict[int, dict[str, list[bool]]] = field(default_factory=dict)
    kl: dict[int, list[float]] = field(default_factory=dict)

    def add(self, number: int, group: str, is_right: bool, kl: float) -> None:
        """Count one question."""
        self.right.setdefault(number, {group: [] for group in GROUPS})[group].append(is_right)
        self.kl.setdefault(number, []).append(kl)


def report(arms: dict[str, Arm], numbers: Sequence[int], described: dict) -> SuiteResult:
    """All that the suite hands back.

    Parameters
    ----------
    arms : dict of str to Arm
        By name, in the order in which they are shown.
    numbers : sequence of int
        Numbers of antecedents that were measured.
    described : dict
        Model, device and episodes; goes into the data as it is.
    """
    rows = {
        name: {
            **{str(number): _figures(arm, [number], arms[BLIND]) for number in numbers},
            ALL: _figures(arm, numbers, arms[BLIND]),
        }
        for name, arm in arms.items()
    }
    data = {**described, "num_antecedents": list(numbers), "arms": rows}
    tables = (_answers(rows, numbers, described), _kls(rows, numbers))
    told = ", ".join(
        f"{name} {_percent(rows[name][ALL]['two_hop'])}" for name in (REFERENCE, EXACT, COMPOSED)
    )
    sentence = (
        f"two-hop answers over {numbers[0]} to {numbers[-1]} antecedents: {told}; mean KL of composed patches "
        f"{format_number(rows[COMPOSED][ALL]['kl_mean'])}, of exact ones {format_number(rows[EXACT][ALL]['kl_mean'])}"
    )
    return SuiteResult("compose", sentence, data, tables, _charts(rows, numbers, described))


def _figures(arm: Arm, numbers: Sequence[int], blind: Arm) -> dict:
    kl, of_blind = ([value for number in numbers for value in of.kl[number]] for of in (arm, blind))
    right = {group: [mark for number in numbers for mark in arm.right[number][group]] for group in GROUPS}
    lost = mean(of_blind)
    return {
        **{group: Share(sum(marks), len(marks)).to_json() for group, marks in right.items()},
        "kl_mean": mean(kl),
        "kl_p95": percentile(kl, 95),
        "eta": 1 - mean(kl) / lost if lost else None,
    }


def _percent(share: dict) -> str:
    return "–" if share["accuracy"] is None else f"{100 * share['accuracy']:.1f} %"


def _interval(share: dict) -> str:
    if share["accuracy"] is None:
        return "–"
    return f"{100 * share['accuracy']:.1f} [{100 * share['low']:.1f}, {100 * share['high']:.1f}]"


def _columns(numbers: Sequence[int]) -> tuple[str, ...]:
    return ("arm", *(f">{number}" for number in numbers), f">{ALL}")


def _answers(rows: dict[str, dict], numbers: Sequence[int], described: dict) -> Table:
    lines = tuple(
        (name, *(_interval(found[key]["two_hop"]) for key in (*map(str, numbers), ALL)))
        for name, found in rows.items()
    )
    counts = ", ".join(str(rows[REFERENCE][str(number)]["two_hop"]["count"]) for number in numbers)
    notes = (
        f"{described['model']}, {described['device']} {described['dtype']}. {described['num_episodes']} episodes of 2 "
        f"to 6 chunks (no episode has more) in an order other than that of ingest; {counts} two-hop questions. "
        "Columns: antecedents of the last chunk. Per cent with Wilson 95 % intervals; exact match of the greedy "
        "answer.",
        "Pairs and gains as compile-patches --kind pair forms and measures them, on up to twelve orders of the same "
        "chunks; every chunk after the second stands on a composed patch at once. Exact: as compile-patches forms "
        "them for this order. Sum and mean keep every direction of the pairs.",
    )
    return Table("Two-hop answers by number of antecedents", _columns(numbers), lines, notes)


def _kls(rows: dict[str, dict], numbers: Sequence[int]) -> Table:
    lines = tuple(
        (
            name,
            *(
                f"{format_number(found[key]['kl_mean'])} / {format_number(found[key]['kl_p95'])}"
                for key in (*map(str, numbers), ALL)
            ),
            "–" if found[ALL]["eta"] is None else f"{found[ALL]['eta']:.5f}",
        )
        for name, found in rows.items()
        if name != REFERENCE
    )
    notes = (
        "Mean / 95th percentile in nats of the next token to re-prefill, over all questions. η: share of blind's mean "
        "KL over all that is gone.",
    )
    return Table("KL by number of antecedents", (*_columns(numbers), ">η"), lines, notes)


def _charts(rows: dict[str, dict], numbers: Sequence[int], described: dict) -> tuple[Chart, ...]:
    x, x_label = tuple(float(number) for number in numbers), "antecedents of the last chunk"
    caption = f"{described['model']}, {described['num_episodes']} episodes, {described['device']} {described['dtype']}."

    def series(name: str, *keys: str, scale: float = 1.0) -> tuple[tuple[float, ...], ...]:
        found = [rows[name][str(number)] for number in numbers]
        return tuple(
            tuple(
                scale * (one["two_hop"][key] or 0.0) if key in one["two_hop"] else one[key] for one in found
            )
            for key in keys
        )

    answers = tuple(
        Series(name, x, *series(name, "accuracy", "low", "high", scale=100))
        for name in rows
        if name not in (BLIND, NO_GAIN)
    )
    kl = tuple(Series(name, x, *series(name, "kl_p95")) for name in rows if name not in (REFERENCE, NO_GAIN))
    return (
        Chart("compose_two_hop", "Two-hop answers by antecedents", x_label, "exact match, %", answers,
              f"{caption} Bands: Wilson 95 % intervals."),
        Chart("compose_kl", "KL to re-prefill by antecedents", x_label, "95th percentile, nats per next token", kl,
              caption, y_log=True),
    )  # fmt: skip
