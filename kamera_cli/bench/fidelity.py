"""Suite ``fidelity``: what each way of reuse does to answers, on the same tokens, the same model, in the same run.

Every arm is a KV cache of the same context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kamera_cli.bench.figures import (
    BLIND,
    GROUPS,
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
    mean,
    measured_on,
    number,
    of_group,
    percent,
)
from kamera_cli.bench.prompt import AS_COMPILED, Patches, Prompt, kv_size, patch_size
from kamera_cli.bench.rivals import METHODS, SHARES, chosen, patched_after_rotation
from kamera_cli.bench.runner import Task, answer
from kamera_cli.model.compat import DynamicCache
from kamera_cli.options import CompileOptions
from kamera_cli.patches.worth import Learned, learn

RANKS = (1, 2, 4, 8, 16, 32)
EPISODES = 100
SHOWN_RANK = 16
"""The rank that stands in the headline, when it was measured."""
COMPILED = f"patch, {AS_COMPILED}"
FORMED_KINDS = ("patch", "patch_compiled")
OWN_KINDS = {"reprefill", "blind", "patch_after_rope", *FORMED_KINDS}
"""Kinds of arms that are no rivals."""

Row = dict[str, Any]


@dataclass
class Chunks:
    """Sums over the chunks that stand after another one: the ones that a patch is for.

    Attributes
    ----------
    delta : float
        ‖Δ‖² of all of them.
    captured : dict of str to float
        By arm, squared size of what its patches add.
    width : int
        Elements of one token's keys in one layer.
    """

    kv: Size
    captured: dict[str, float]
    delta: float = 0.0
    num_chunks: int = 0
    num_tokens: int = 0
    width: int = 0

    def add(self, prompt: Prompt) -> None:
        """Count the chunks of a prompt."""
        behind = prompt.chunks[1:]
        self.kv += kv_size(behind)
        self.delta += sum(prompt.residual(place).energy for place in range(1, len(prompt.chunks)))
        self.num_chunks += len(behind)
        self.num_tokens += sum(chunk.segment.num_tokens for chunk in behind)
        self.width = behind[0].canonical[0].rotary[0].numel()

    def energy(self, name: str) -> float | None:
        """Share of ‖Δ‖² that the patches of an arm hold; None for an arm without patches."""
        return min(1.0, self.captured[name] / self.delta) if name in self.captured and self.delta else None


def measure(task: Task) -> SuiteResult:
    """Run all arms over episodes of the card world.

    Returns
    -------
    SuiteResult
        One table of all arms, one of bytes; two charts, and one of the rivals. Without any rival, keys factored after
        their rotation are left out too.
    """
    ranks = task.options.ranks_or(RANKS)
    rivals = chosen(task.options.rivals)
    arms = {
        REFERENCE: Arm("reprefill"),
        BLIND: Arm("blind"),
        **{f"patch, rank {rank}": Arm("patch", rank, Size()) for rank in ranks},
        COMPILED: Arm("patch_compiled", None, Size()),
        **{_rotated(rank): Arm("patch_after_rope", rank) for rank in ranks if rivals},
        **{f"{rival} {share:.0%}": Arm(rival, share) for rival in rivals for share in SHARES},
    }
    known, chunks = Learned(), Chunks(Size(), {})
    with task.run() as run:
        for encoded in run.episodes("answering", EPISODES):
            prompt = encoded.shuffled()
            of_ranks = prompt.patches(CompileOptions(rank=max(ranks)))
            known = learn(encoded.runner, known, prompt.chunks, prompt.conditioned)
            compiled = prompt.patches(CompileOptions(), known.worth)
            chunks.add(prompt)
            caches = {REFERENCE: prompt.exact, BLIND: prompt.blind}
            for name, arm in arms.items():
                if arm.kind in FORMED_KINDS:
                    patches = compiled if arm.setting is None else of_ranks
                    caches[name] = _formed(prompt, patches, name, arm, chunks)
            if rivals:
                rotated = patched_after_rotation(prompt, ranks)
                caches |= {_rotated(rank): cache for rank, cache in rotated.items()}
            for rival in rivals:
                spent = METHODS[rival](prompt)
                caches |= {f"{rival} {share:.0%}": cache for share, cache in spent.items()}
            answer(encoded.runner, arms, caches, prompt.end, encoded.asked)
        described = run.described() | {"num_questions": arms[REFERENCE].num_questions()}
    return report(arms, chunks, described)


def _rotated(rank: int) -> str:
    return f"patch after RoPE, rank {rank}"


def _formed(prompt: Prompt, patches: Patches, name: str, arm: Arm, chunks: Chunks) -> DynamicCache:
    """The cache of an arm with patches, whose bytes and energy are added up."""
    rank = None if arm.setting is None else int(arm.setting)
    arm.size = (arm.size or Size()) + patch_size(patches, rank)
    chunks.captured[name] = chunks.captured.get(name, 0.0) + sum(
        float(factors.at_rank(rank).u.float().square().sum())
        for patch in patches
        for layer in patch or ()
        for factors in (layer.rotary, layer.plain)
    )
    return prompt.patched(patches, rank)


def report(arms: dict[str, Arm], chunks: Chunks, described: Row) -> SuiteResult:
    """All that the suite hands back.

    Parameters
    ----------
    arms : dict of str to Arm
        By name, in the order in which they are shown.
    described : dict
        Model, device, episodes and questions; goes into the data as it is.
    """
    rows = {name: _figures(name, arm, arms[BLIND], chunks) for name, arm in arms.items()}
    best = _shown([row for row in rows.values() if row["kind"] == "patch"])
    reference, blind = rows[REFERENCE], rows[BLIND]
    told = {REFERENCE: reference, BLIND: blind, f"patch of rank {best['setting']:g}": best}
    shares = [f"{name} {percent(row['two_hop']['accuracy'])}" for name, row in told.items()]
    sentence = (
        f"{described['num_episodes']} episodes, two-hop accuracy: {', '.join(shares)}; mean KL "
        f"{number('kl_mean')(blind)} blind, {number('kl_mean')(best)} patched"
    )
    of_chunks = {
        "num_patched": chunks.num_chunks,
        "mean_tokens": chunks.num_tokens / chunks.num_chunks,
        "kv_width": chunks.width,
        "kv_raw_bytes": chunks.kv.raw,
        "kv_stored_bytes": chunks.kv.stored,
    }
    tables = (_table(rows, described), _bytes_table(rows, of_chunks))
    data = {**described, "arms": rows, "chunks": of_chunks}
    return SuiteResult("fidelity", sentence, data, tables, _charts(rows, described))


def _figures(name: str, arm: Arm, blind: Arm, chunks: Chunks) -> Row:
    figures = arm.figures(blind)
    return {
        "kind": arm.kind,
        "setting": arm.setting,
        **figures,
        "kl_two_hop_mean": mean(arm.kls("two_hop")),
        "kl_closed": figures["eta"],
        **arm.byte_figures(chunks.kv),
        "energy": chunks.energy(name),
    }


def _table(rows: dict[str, Row], described: Row) -> Table:
    counts, kinds = described["num_questions"], {row["kind"] for row in rows.values()}
    notes = [
        f"{measured_on(described)} {described['num_episodes']} episodes of 3 to 6 chunks in an order other than that "
        f"of ingest; {counts['two_hop']} two-hop, {counts['one_hop']} one-hop and {counts['unknown']} unanswerable "
        "questions. Per cent with Wilson 95 % intervals; exact match of the greedy answer.",
        "KL in nats of the next token to re-prefill, over all questions; closed: 1 − KL / KL of blind.",
        "Patches are formed for this very order, factors in 8-bit integers; as compile-patches forms them: ranks by "
        "what the layers are worth.",
    ]
    if "patch_after_rope" in kinds:
        notes.append("After RoPE: keys factored after their rotation, which fits one position only.")
    if kinds - OWN_KINDS:
        notes.append(
            "Per cent behind a rival's name: share of the chunk tokens that are computed anew for each prompt. Oracle "
            "tokens are those with the largest true Δ and get the re-prefill's own KV. CacheBlend also computes layers "
            "0 and 1 in full. Patches compute no token anew."
        )
    columns = {
        **{f">{group.replace('_', '-')}": of_group(group) for group in GROUPS},
        ">KL mean": number("kl_mean"),
        ">KL p95": number("kl_p95"),
        ">KL closed": lambda row: percent(row["kl_closed"]),
    }
    return arm_table("Fidelity to re-prefill", rows, columns, tuple(notes))


def _bytes_table(rows: dict[str, Row], chunks: Row) -> Table:
    tokens, width = chunks["mean_tokens"], chunks["kv_width"]
    lines = tuple(
        (
            "auto" if row["setting"] is None else f"{row['setting']:g}",
            percent(row["patch_to_kv_raw_ratio"]),
            percent(row["patch_to_kv_stored_ratio"]),
            percent(None if row["setting"] is None else row["setting"] * (1 / tokens + 1 / width)),
            percent(row["energy"]),
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


def _charts(rows: dict[str, Row], described: Row) -> tuple[Chart, ...]:
    patches, rotated = (
        [row for row in rows.values() if row["kind"] == kind] for kind in ("patch", "patch_after_rope")
    )
    where = caption(described)
    banded = f"{where} Bands: Wilson 95 % intervals."
    ranks = tuple(float(row["setting"]) for row in patches)
    lines = tuple(
        accuracies(group.replace("_", "-"), ranks, patches, group)
        for group in GROUPS
        if patches[0][group]["count"]
    )
    kl = tuple(
        Series(f"patch, factored {when} RoPE", ranks, tuple(row["kl_mean"] for row in found))
        for when, found in (("before", patches), ("after", rotated))
        if found
    )
    made = [
        Chart("fidelity_accuracy", "Answers by rank of the patch", "rank", "exact match, %", lines, banded,
              x_log=True, levels=_levels(rows)),
        Chart("fidelity_kl", "KL to re-prefill by rank of the patch", "rank", "nats per next token", kl,
              where, x_log=True, y_log=True, levels=((BLIND, rows[BLIND]["kl_mean"]),)),
    ]  # fmt: skip
    if rivals := _rival_lines(rows):
        best = _shown(patches)
        name, level = f"patch of rank {best['setting']:g}, no token anew", 100 * best["two_hop"]["accuracy"]
        made.append(
            Chart("fidelity_rivals", "Recomputing tokens instead", "tokens computed anew, %", "two-hop exact match, %",
                  rivals, banded, levels=(*_levels(rows), (name, level)))
        )  # fmt: skip
    return tuple(made)


def _levels(rows: dict[str, Row]) -> tuple[tuple[str, float], ...]:
    """Two-hop accuracy in per cent of the arms between which all others lie; none when nothing was asked."""
    return tuple(
        (f"{name}, two-hop", 100 * rows[name]["two_hop"]["accuracy"])
        for name in (REFERENCE, BLIND)
        if rows[name]["two_hop"]["count"]
    )


def _rival_lines(rows: dict[str, Row]) -> tuple[Series, ...]:
    """Two-hop accuracy by share of recomputed tokens, one line for each rival; none when nothing was asked."""
    if not rows[REFERENCE]["two_hop"]["count"]:
        return ()
    found = {
        kind: [row for row in rows.values() if row["kind"] == kind]
        for kind in sorted({row["kind"] for row in rows.values()} - OWN_KINDS)
    }
    return tuple(accuracies(kind, [100 * row["setting"] for row in of], of) for kind, of in found.items())


def _shown(patches: Sequence[Row]) -> Row:
    """The patch that stands for all ranks."""
    return next((row for row in patches if row["setting"] == SHOWN_RANK), patches[-1])
