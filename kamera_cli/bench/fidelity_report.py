"""Figures, tables and charts of the suite ``fidelity`` (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kamera_cli.bench.episodes import GROUPS
from kamera_cli.bench.forming import AS_COMPILED
from kamera_cli.bench.results import Chart, Series, SuiteResult, Table
from kamera_cli.bench.rivals import SHARES
from kamera_cli.bench.shares import Share, mean, percentile
from kamera_cli.words import format_number

REFERENCE, BLIND = "re-prefill", "blind"
COMPILED = f"patch, {AS_COMPILED}"
FORMED_KINDS = ("patch", "patch_compiled")
OWN_KINDS = {"reprefill", "blind", "patch_after_rope", *FORMED_KINDS}
SHOWN_RANK = 16
"""The rank that stands in the headline, when it was measured."""


@dataclass
class Arm:
    """What one arm gave over all episodes: per group, right or not; per question, KL to re-prefill in nats."""

    kind: str
    setting: float | None = None
    right: dict[str, list[bool]] = field(default_factory=lambda: {group: [] for group in GROUPS})
    kl: dict[str, list[float]] = field(default_factory=lambda: {group: [] for group in GROUPS})
    raw_bytes: int = 0
    stored_bytes: int = 0
    captured: float = 0.0

    @property
    def all_kl(self) -> list[float]:
        return [value for group in GROUPS for value in self.kl[group]]

    def share(self, group: str) -> Share:
        """Accuracy of one group of questions."""
        return Share(sum(self.right[group]), len(self.right[group]))


@dataclass
class Totals:
    """Sums over the chunks that stand after another one: the ones that a patch is for."""

    kv_raw_bytes: int = 0
    kv_stored_bytes: int = 0
    delta: float = 0.0
    num_chunks: int = 0
    num_tokens: int = 0
    width: int = 0


def patch_name(rank: int) -> str:
    """Name of the arm of a patch."""
    return f"patch, rank {rank}"


def report(arms: dict[str, Arm], totals: Totals, ranks: tuple[int, ...], described: dict) -> SuiteResult:
    """All that the suite hands back.

    Parameters
    ----------
    arms : dict of str to Arm
        By name, in the order in which they are shown.
    described : dict
        Model, device, episodes and questions; goes into the data as it is.
    """
    blind_kl = mean(arms[BLIND].all_kl)
    rows = {name: _figures(arm, blind_kl, totals) for name, arm in arms.items()}
    best = rows[patch_name(SHOWN_RANK if SHOWN_RANK in ranks else max(ranks))]
    reference, blind = rows[REFERENCE], rows[BLIND]
    sentence = (
        f"{described['num_episodes']} episodes, two-hop accuracy: re-prefill {_percent(reference['two_hop'])}, blind "
        f"{_percent(blind['two_hop'])}, patch of rank {best['setting']:g} {_percent(best['two_hop'])}; mean KL "
        f"{format_number(blind['kl_mean'])} blind, {format_number(best['kl_mean'])} patched"
    )
    data = {
        **described,
        "arms": rows,
        "chunks": {
            "num_patched": totals.num_chunks,
            "mean_tokens": totals.num_tokens / totals.num_chunks,
            "kv_width": totals.width,
            "kv_raw_bytes": totals.kv_raw_bytes,
            "kv_stored_bytes": totals.kv_stored_bytes,
        },
    }
    return SuiteResult(
        "fidelity",
        sentence,
        data,
        (_table(rows, described), _bytes_table(rows, data)),
        _charts(rows, described),
    )


def _figures(arm: Arm, blind_kl: float | None, totals: Totals) -> dict:
    kl = mean(arm.all_kl)
    is_patch = arm.kind in FORMED_KINDS
    return {
        "kind": arm.kind,
        "setting": arm.setting,
        **{group: arm.share(group).to_json() for group in GROUPS},
        "kl_mean": kl,
        "kl_p95": percentile(arm.all_kl, 95),
        "kl_two_hop_mean": mean(arm.kl["two_hop"]),
        "kl_closed": 1 - kl / blind_kl if kl is not None and blind_kl else None,
        "patch_raw_bytes": arm.raw_bytes if is_patch else None,
        "patch_stored_bytes": arm.stored_bytes if is_patch else None,
        "patch_to_kv_raw_ratio": arm.raw_bytes / totals.kv_raw_bytes if is_patch else None,
        "patch_to_kv_stored_ratio": arm.stored_bytes / totals.kv_stored_bytes if is_patch else None,
        "energy": min(1.0, arm.captured / totals.delta) if is_patch and totals.delta else None,
    }


def _percent(share: dict) -> str:
    return "–" if share["accuracy"] is None else f"{100 * share['accuracy']:.1f} %"


def _with_interval(share: dict) -> str:
    if share["accuracy"] is None:
        return "–"
    return f"{100 * share['accuracy']:.1f} [{100 * share['low']:.1f}, {100 * share['high']:.1f}]"


def _table(rows: dict[str, dict], described: dict) -> Table:
    lines = tuple(
        (
            name,
            *(_with_interval(row[group]) for group in GROUPS),
            format_number(row["kl_mean"]),
            format_number(row["kl_p95"]),
            "–" if row["kl_closed"] is None else f"{100 * row['kl_closed']:.1f} %",
        )
        for name, row in rows.items()
    )
    counts = described["num_questions"]
    notes = (
        f"{described['model']}, {described['device']} {described['dtype']}. {described['num_episodes']} episodes of 3 "
        f"to 6 chunks in an order other than that of ingest; {counts['two_hop']} two-hop, {counts['one_hop']} one-hop "
        f"and {counts['unknown']} unanswerable questions. Per cent with Wilson 95 % intervals; exact match of the "
        "greedy answer.",
        "KL in nats of the next token to re-prefill, over all questions; closed: 1 − KL / KL of blind.",
        "Patches are formed for this very order, factors in 8-bit integers; as compile-patches forms them: ranks by "
        "what the layers are worth.",
    )
    if any(row["kind"] == "patch_after_rope" for row in rows.values()):
        notes += ("After RoPE: keys factored after their rotation, which fits one position only.",)
    rival_notes = (
        "Per cent behind a rival's name: share of the chunk tokens that are computed anew for each prompt. Oracle "
        "tokens are those with the largest true Δ and get the re-prefill's own KV. CacheBlend also computes layers 0 "
        "and 1 in full. Patches compute no token anew.",
    )
    if any(row["kind"] not in OWN_KINDS for row in rows.values()):
        notes += rival_notes
    columns = ("arm", ">two-hop", ">one-hop", ">unknown", ">KL mean", ">KL p95", ">KL closed")
    return Table("Fidelity to re-prefill", columns, lines, notes)


def _bytes_table(rows: dict[str, dict], data: dict) -> Table:
    chunks = data["chunks"]
    tokens, width = chunks["mean_tokens"], chunks["kv_width"]
    lines = tuple(
        (
            _rank(row),
            f"{100 * row['patch_to_kv_raw_ratio']:.1f} %",
            f"{100 * row['patch_to_kv_stored_ratio']:.1f} %",
            "–" if row["setting"] is None else f"{100 * row['setting'] * (1 / tokens + 1 / width):.1f} %",
            f"{100 * row['energy']:.1f} %" if row["energy"] is not None else "–",
        )
        for row in rows.values()
        if row["kind"] in FORMED_KINDS
    )
    notes = (
        f"Chunks have {tokens:.0f} tokens and a KV width of {width}, both small: m · (1/T + 1/D) falls with either.",
        "Raw counts tensor bytes (factors in 8 bits, KV in the compute dtype); stored counts what the store writes.",
    )
    columns = (">rank", ">patch : KV, raw", ">patch : KV, stored", ">m · (1/T + 1/D)", ">energy of Δ")
    return Table("Size of a patch", columns, lines, notes)


def _rank(row: dict) -> str:
    return "auto" if row["setting"] is None else f"{row['setting']:g}"


def _charts(rows: dict[str, dict], described: dict) -> tuple[Chart, ...]:
    patches = [row for row in rows.values() if row["kind"] == "patch"]
    after = [row for row in rows.values() if row["kind"] == "patch_after_rope"]
    groups = {"two-hop": "two_hop", "one-hop": "one_hop", "unknown": "unknown"}
    lines = tuple(
        _accuracy(label, patches, group) for label, group in groups.items() if patches[0][group]["count"]
    )
    levels = tuple(
        (f"{name}, two-hop", 100 * rows[name]["two_hop"]["accuracy"])
        for name in (REFERENCE, BLIND)
        if rows[name]["two_hop"]["count"]
    )
    caption = f"{described['model']}, {described['num_episodes']} episodes, {described['device']} {described['dtype']}."
    banded = f"{caption} Bands: Wilson 95 % intervals."
    ranks = tuple(float(row["setting"]) for row in patches)
    kl = (Series("patch, factored before RoPE", ranks, tuple(row["kl_mean"] for row in patches)),)
    if after:
        kl += (Series("patch, factored after RoPE", ranks, tuple(row["kl_mean"] for row in after)),)
    made = [
        Chart("fidelity_accuracy", "Answers by rank of the patch", "rank", "exact match, %", lines, banded,
              x_log=True, levels=levels),
        Chart("fidelity_kl", "KL to re-prefill by rank of the patch", "rank", "nats per next token", kl,
              caption, x_log=True, y_log=True, levels=((BLIND, rows[BLIND]["kl_mean"]),)),
    ]  # fmt: skip
    names = sorted({row["kind"] for row in rows.values()} - OWN_KINDS)
    if names and rows[REFERENCE]["two_hop"]["count"]:
        selected = {kind: [row for row in rows.values() if row["kind"] == kind] for kind in names}
        shares = tuple(
            replace(_accuracy(kind, found, "two_hop"), x=tuple(100 * share for share in SHARES))
            for kind, found in selected.items()
        )
        made.append(
            Chart("fidelity_rivals", "Recomputing tokens instead", "tokens computed anew, %", "two-hop exact match, %",
                  shares, banded,
                  levels=(*levels, (_label(patches), 100 * _shown(patches)["two_hop"]["accuracy"])))
        )  # fmt: skip
    return tuple(made)


def _shown(patches: list[dict]) -> dict:
    return next((row for row in patches if row["setting"] == SHOWN_RANK), patches[-1])


def _label(patches: list[dict]) -> str:
    return f"patch of rank {_shown(patches)['setting']:g}, no token anew"


def _accuracy(name: str, found: list[dict], group: str) -> Series:
    return Series(
        name,
        tuple(float(row["setting"]) for row in found),
        tuple(100 * row[group]["accuracy"] for row in found),
        tuple(100 * row[group]["low"] for row in found),
        tuple(100 * row[group]["high"] for row in found),
    )
