"""Figures, table and charts of the suite ``memory`` (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kamera_cli.bench.episodes import GROUPS
from kamera_cli.bench.results import Chart, Series, SuiteResult, Table
from kamera_cli.bench.shares import Share, mean, percentile
from kamera_cli.bench.sizes import Size
from kamera_cli.operator.plan import AUTO_MAX_KL
from kamera_cli.settings import DEFAULT_ENERGY
from kamera_cli.words import format_number

if TYPE_CHECKING:
    from kamera_cli.patches.request import PatchOptions

REFERENCE, BLIND = "re-prefill", "blind"
POINT = 0.01
"""How far below re-prefill's two-hop accuracy still counts as full recovery."""


@dataclass
class Arm:
    """One way to spend bytes, and what it gave.

    Attributes
    ----------
    kind : str
        Arms of one kind differ in their setting alone and make one line of a chart.
    options : PatchOptions or None
        What is asked of `kamera_cli.patches.request`; None for an arm without patches.
    by_worth : bool
        Whether ranks go by what the layers are worth, as by default.
    kl : list of float
        Nats per question, next token to re-prefill.
    size : Size
        Of all patches.
    """

    kind: str
    setting: float | None = None
    options: PatchOptions | None = None
    by_worth: bool = False
    right: dict[str, list[bool]] = field(default_factory=lambda: {group: [] for group in GROUPS})
    kl: list[float] = field(default_factory=list)
    size: Size = field(default_factory=Size)

    @property
    def name(self) -> str:
        if self.setting is None:
            return self.kind
        what, _, dtype = self.kind.rpartition(", ")
        unit = " %" if what == "budget" else ""
        return f"{'rank' if what == 'fixed' else what} {self.setting:g}{unit}, {dtype}"


def report(arms: dict[str, Arm], kv: Size, described: dict) -> SuiteResult:
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
    rows = {name: _figures(arm, kv, mean(arms[BLIND].kl)) for name, arm in arms.items()}
    data = {**described, "kv_raw_bytes": kv.raw, "kv_stored_bytes": kv.stored, "arms": rows}
    return SuiteResult("memory", sentence(rows), data, (_table(rows, described),), _charts(rows, described))


def _figures(arm: Arm, kv: Size, blind_kl: float | None) -> dict:
    kl, is_patch = mean(arm.kl), arm.options is not None
    return {
        "kind": arm.kind,
        "setting": arm.setting,
        "patch_raw_bytes": arm.size.raw if is_patch else None,
        "patch_stored_bytes": arm.size.stored if is_patch else None,
        "patch_to_kv_raw_ratio": arm.size.raw / kv.raw if is_patch else None,
        "patch_to_kv_stored_ratio": arm.size.stored / kv.stored if is_patch else None,
        **{group: Share(sum(marks), len(marks)).to_json() for group, marks in arm.right.items()},
        "kl_mean": kl,
        "kl_p95": percentile(arm.kl, 95),
        "kl_max": max(arm.kl, default=None),
        "num_above_bound": sum(found > AUTO_MAX_KL for found in arm.kl),
        "eta": 1 - kl / blind_kl if kl is not None and blind_kl else None,
    }


def sentence(rows: dict[str, dict]) -> str:
    """The least bytes at full recovery, against the smallest fixed rank that is enough for it."""
    best = rows[REFERENCE]["two_hop"]["accuracy"]
    if best is None:
        return "no two-hop questions were asked"
    enough = {
        name: row
        for name, row in rows.items()
        if row["patch_raw_bytes"] is not None and row["two_hop"]["accuracy"] >= best - POINT
    }
    aim = f"two-hop answers within one point of re-prefill ({100 * best:.1f} %)"
    if not enough:
        return f"no patch of this run gives {aim}"
    least = min(enough, key=lambda name: enough[name]["patch_raw_bytes"])
    fixed = [name for name, row in enough.items() if row["kind"] == "fixed, fp16"]
    rival = min(fixed, key=lambda name: enough[name]["setting"], default=None)
    against = "no fixed rank of this run" if rival is None else f"{_ratio(enough[rival])} for {rival}"
    return f"{aim}: patches take {_ratio(enough[least])} of the KV ({least}) against {against}"


def _ratio(row: dict, unit: str = "raw") -> str:
    share = row[f"patch_to_kv_{unit}_ratio"]
    return "–" if share is None else f"{100 * share:.2f} %"


def _interval(share: dict) -> str:
    if share["accuracy"] is None:
        return "–"
    return f"{100 * share['accuracy']:.1f} [{100 * share['low']:.1f}, {100 * share['high']:.1f}]"


def _table(rows: dict[str, dict], described: dict) -> Table:
    lines = tuple(
        (
            name,
            _ratio(row),
            _ratio(row, "stored"),
            _interval(row["two_hop"]),
            _interval(row["one_hop"]),
            format_number(row["kl_mean"]),
            format_number(row["kl_p95"]),
            str(row["num_above_bound"]),
            "–" if row["eta"] is None else f"{row['eta']:.5f}",
        )
        for name, row in rows.items()
    )
    counts = described["num_questions"]
    notes = (
        f"{described['model']}, {described['device']} {described['dtype']}. {described['num_episodes']} episodes of 3 "
        f"to 6 chunks in an order other than that of ingest; {counts['two_hop']} two-hop, {counts['one_hop']} one-hop "
        f"and {counts['unknown']} unanswerable questions. Per cent with Wilson 95 % intervals; KL in nats of the next "
        "token to re-prefill, over all questions; above: of how many questions it is above the bound of --reuse auto; "
        "η: share of blind's mean KL that is gone.",
        "Bytes: patches over the canonical KV that they serve, of the tensors and as the store writes both. Auto: "
        f"--energy, ranks by what the layers are worth; auto {DEFAULT_ENERGY:g}, int8 is what compile-patches forms by "
        "default. Budget: --budget with that energy.",
    )
    columns = (
        "arm", ">bytes : KV", ">stored : stored", ">two-hop", ">one-hop", ">KL mean", ">KL p95",
        f">above {AUTO_MAX_KL:g}", ">η"
    )  # fmt: skip
    return Table("Bytes of patches and what they restore", columns, lines, notes)


def _charts(rows: dict[str, dict], described: dict) -> tuple[Chart, ...]:
    patches = [row for row in rows.values() if row["patch_raw_bytes"]]
    kinds = dict.fromkeys(row["kind"] for row in patches)
    lines = {
        kind: sorted(
            (row for row in patches if row["kind"] == kind), key=lambda row: row["patch_to_kv_raw_ratio"]
        )
        for kind in kinds
    }
    caption = f"{described['model']}, {described['num_episodes']} episodes, {described['device']} {described['dtype']}."
    x_label = "bytes of the patches, % of the KV that they serve"
    charts = [
        Chart(
            "memory_kl", "KL to re-prefill by bytes", x_label, "95th percentile, nats per next token",
            tuple(Series(kind, _bytes(found), tuple(row["kl_p95"] for row in found)) for kind, found in lines.items()),
            caption, x_log=True, y_log=True, levels=((BLIND, rows[BLIND]["kl_p95"]),),
        )
    ]  # fmt: skip
    if rows[REFERENCE]["two_hop"]["count"]:
        series = tuple(
            Series(
                kind,
                _bytes(found),
                *(tuple(100 * row["two_hop"][end] for row in found) for end in ("accuracy", "low", "high")),
            )
            for kind, found in lines.items()
        )
        levels = tuple((name, 100 * rows[name]["two_hop"]["accuracy"]) for name in (REFERENCE, BLIND))
        banded = f"{caption} Bands: Wilson 95 % intervals."
        charts.insert(
            0,
            Chart("memory_two_hop", "Two-hop answers by bytes", x_label, "exact match, %", series, banded,
                  x_log=True, levels=levels),
        )  # fmt: skip
    return tuple(charts)


def _bytes(found: list[dict]) -> tuple[float, ...]:
    return tuple(100 * row["patch_to_kv_raw_ratio"] for row in found)
