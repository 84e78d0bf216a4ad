"""Suite ``memory``: bytes of patches against what they restore, every patch formed and written as the product does it.

All arms answer the same questions over the same chunks in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from kamera_cli.bench.figures import (
    BLIND,
    REFERENCE,
    Arm,
    Chart,
    Series,
    Size,
    SuiteResult,
    Table,
    accuracies,
    arm_table,
    caption,
    eta,
    measured_on,
    number,
    of_group,
    percent,
)
from kamera_cli.bench.prompt import kv_size, patch_size
from kamera_cli.bench.runner import Task, answer
from kamera_cli.operator.plan import AUTO_MAX_KL
from kamera_cli.options import CompileOptions, FactorDtype
from kamera_cli.patches.worth import Learned, learn
from kamera_cli.settings import DEFAULT_ENERGY

RANKS = (1, 2, 4, 8, 16)
EPISODES = 100
ENERGIES = (0.95, 0.99, 0.995, DEFAULT_ENERGY)
INT8_RANK = 4
"""The fixed rank that is also measured in 8-bit integers; the largest one where it is not measured."""
POINT = 0.01
"""How far below re-prefill's two-hop accuracy still counts as full recovery."""

Row = dict[str, Any]


def measure(task: Task) -> SuiteResult:
    """Run all arms over episodes of the card world.

    Returns
    -------
    SuiteResult
        One table, two charts.
    """
    arms = {
        REFERENCE: Arm(REFERENCE),
        BLIND: Arm(BLIND),
        **arms_of(task.options.ranks_or(RANKS)),
    }
    known, kv = Learned(), Size()
    with task.run() as run:
        for encoded in run.episodes("answering", EPISODES):
            prompt = encoded.shuffled()
            known = learn(encoded.runner, known, prompt.chunks, prompt.conditioned)
            caches = {REFERENCE: prompt.exact, BLIND: prompt.blind}
            for name, arm in arms.items():
                if arm.options is not None:
                    patches = prompt.patches(arm.options, known.worth if arm.by_worth else None)
                    arm.size = (arm.size or Size()) + patch_size(patches)
                    caches[name] = prompt.patched(patches)
            kv += kv_size(prompt.chunks[1:])
            answer(encoded.runner, arms, caches, prompt.end, encoded.asked)
        described = run.described() | {
            "num_questions": arms[REFERENCE].num_questions(),
            "num_windows_learned_from": known.num_windows,
        }
    return report(arms, kv, described)


def arms_of(ranks: tuple[int, ...]) -> dict[str, Arm]:
    """The ways to spend bytes, by name, in the order in which they are shown."""
    fixed: list[tuple[FactorDtype, int]] = [("fp16", rank) for rank in ranks]
    fixed.append(("int8", INT8_RANK if INT8_RANK in ranks else max(ranks)))
    arms = [
        Arm(f"fixed, {dtype}", rank, options=CompileOptions(rank=rank, factor_dtype=dtype))
        for dtype, rank in fixed
    ]
    of_each = CompileOptions(energy=0.99, factor_dtype="fp16")
    arms.append(Arm("energy of each tensor, fp16", 0.99, options=of_each))
    dtypes: tuple[FactorDtype, ...] = ("int8", "int6")
    for dtype, energy in product(dtypes, ENERGIES):
        options = CompileOptions(energy=energy, factor_dtype=dtype)
        arms.append(Arm(f"auto, {dtype}", energy, options=options, by_worth=True))
    for per_cent in (1.0, 3.0):
        options = CompileOptions(budget=f"{per_cent:g}%", factor_dtype="int8")
        arms.append(Arm("budget, int8", per_cent, options=options, by_worth=True))
    return {_name(arm): arm for arm in arms}


def _name(arm: Arm) -> str:
    what, _, dtype = arm.kind.rpartition(", ")
    unit = " %" if what == "budget" else ""
    return f"{'rank' if what == 'fixed' else what} {arm.setting:g}{unit}, {dtype}"


def report(arms: dict[str, Arm], kv: Size, described: Row) -> SuiteResult:
    """All that the suite hands back.

    Parameters
    ----------
    arms : dict of str to Arm
        By name, in the order in which they are shown.
    kv : Size
        Of the canonical KV that the patches of one arm serve.
    described : dict
        Model, device, episodes and questions; goes into the data as it is.
    """
    rows = {
        name: {
            "kind": arm.kind,
            "setting": arm.setting,
            **arm.byte_figures(kv),
            **arm.figures(arms[BLIND]),
            "num_above_bound": sum(kl > AUTO_MAX_KL for kl in arm.kls()),
        }
        for name, arm in arms.items()
    }
    data = {**described, "kv_raw_bytes": kv.raw, "kv_stored_bytes": kv.stored, "arms": rows}
    return SuiteResult("memory", sentence(rows), data, (_table(rows, described),), _charts(rows, described))


def sentence(rows: dict[str, Row]) -> str:
    """The least bytes at full recovery, against the smallest fixed rank that is enough for it."""
    best = rows[REFERENCE]["two_hop"]["accuracy"]
    if best is None:
        return "no two-hop questions were asked"
    enough = {
        name: row
        for name, row in rows.items()
        if row["patch_raw_bytes"] is not None and row["two_hop"]["accuracy"] >= best - POINT
    }
    aim = f"two-hop answers within one point of re-prefill ({percent(best)})"
    if not enough:
        return f"no patch of this run gives {aim}"
    least = min(enough, key=lambda name: enough[name]["patch_raw_bytes"])
    fixed = [name for name, row in enough.items() if row["kind"] == "fixed, fp16"]
    rival = min(fixed, key=lambda name: enough[name]["setting"], default=None)
    against = "no fixed rank of this run" if rival is None else f"{_ratio(enough[rival])} for {rival}"
    return f"{aim}: patches take {_ratio(enough[least])} of the KV ({least}) against {against}"


def _ratio(row: Row) -> str:
    return percent(row["patch_to_kv_raw_ratio"], 2)


def _table(rows: dict[str, Row], described: Row) -> Table:
    counts = described["num_questions"]
    notes = (
        f"{measured_on(described)} {described['num_episodes']} episodes of 3 to 6 chunks in an order other than that "
        f"of ingest; {counts['two_hop']} two-hop, {counts['one_hop']} one-hop and {counts['unknown']} unanswerable "
        "questions. Per cent with Wilson 95 % intervals; KL in nats of the next token to re-prefill, over all "
        "questions; above: of how many questions it is above the bound of --reuse auto; η: share of blind's mean KL "
        "that is gone.",
        "Bytes: patches over the canonical KV that they serve, of the tensors and as the store writes both. Auto: "
        f"--energy, ranks by what the layers are worth; auto {DEFAULT_ENERGY:g}, int8 is what compile-patches forms by "
        "default. Budget: --budget with that energy.",
    )
    columns = {
        ">bytes : KV": _ratio,
        ">stored : stored": lambda row: percent(row["patch_to_kv_stored_ratio"], 2),
        ">two-hop": of_group("two_hop"),
        ">one-hop": of_group("one_hop"),
        ">KL mean": number("kl_mean"),
        ">KL p95": number("kl_p95"),
        f">above {AUTO_MAX_KL:g}": lambda row: str(row["num_above_bound"]),
        ">η": eta,
    }
    return arm_table("Bytes of patches and what they restore", rows, columns, notes)


def _charts(rows: dict[str, Row], described: Row) -> tuple[Chart, ...]:
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows.values(), key=lambda row: row["patch_to_kv_raw_ratio"] or 0.0):
        if row["patch_raw_bytes"]:
            lines.setdefault(row["kind"], []).append(row)
    lines = {
        kind: lines[kind] for kind in dict.fromkeys(row["kind"] for row in rows.values()) if kind in lines
    }
    where, x_label = caption(described), "bytes of the patches, % of the KV that they serve"
    kl = tuple(
        Series(kind, _x(found), tuple(row["kl_p95"] for row in found)) for kind, found in lines.items()
    )
    charts = [
        Chart("memory_kl", "KL to re-prefill by bytes", x_label, "95th percentile, nats per next token", kl, where,
              x_log=True, y_log=True, levels=((BLIND, rows[BLIND]["kl_p95"]),)),
    ]  # fmt: skip
    if rows[REFERENCE]["two_hop"]["count"]:
        answers = tuple(accuracies(kind, _x(found), found) for kind, found in lines.items())
        levels = tuple((name, 100 * rows[name]["two_hop"]["accuracy"]) for name in (REFERENCE, BLIND))
        charts.insert(
            0,
            Chart("memory_two_hop", "Two-hop answers by bytes", x_label, "exact match, %", answers,
                  f"{where} Bands: Wilson 95 % intervals.", x_log=True, levels=levels),
        )  # fmt: skip
    return tuple(charts)


def _x(rows: Sequence[Row]) -> tuple[float, ...]:
    return tuple(100 * row["patch_to_kv_raw_ratio"] for row in rows)
