"""Suite ``compose``: patches composed from pairs against exact ones, by the number of antecedents.

Every episode goes through the product: it is ingested, its pairs are compiled and calibrated as ``compile-patches
--kind pair`` does, and the patches of one order are composed of what the store then holds. The last chunk of the window
has so many antecedents, each chunk before it one less, and all of them stand on composed patches at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kamera_cli.bench.episodes import CHUNK_SECONDS, FPS, SPLIT, asked, episode_seed, shuffled, write_episode
from kamera_cli.bench.figures import (
    BLIND,
    REFERENCE,
    Arm,
    Chart,
    Series,
    SuiteResult,
    Table,
    accuracies,
    arm_table,
    caption,
    eta,
    interval,
    measured_on,
    percent,
)
from kamera_cli.bench.prompt import Patches, Prompt
from kamera_cli.bench.rivals import chosen
from kamera_cli.bench.runner import Run, Task, answer
from kamera_cli.operator.compose import compose
from kamera_cli.operator.patch import Factors, LayerPatch
from kamera_cli.options import CompileOptions
from kamera_cli.patches.chunk import read_chunks
from kamera_cli.patches.pairs import gain_of
from kamera_cli.patches.worth import known_worth
from kamera_cli.tiny.world import MAX_CHUNKS, MIN_CHUNKS, episode
from kamera_cli.window import identity_of
from kamera_cli.words import format_number
from kamera_store.format.keys import Identity
from kamera_store.format.records import Record

EPISODES = 100
NUM_ANTECEDENTS = tuple(range(MIN_CHUNKS - 1, MAX_CHUNKS))
"""What the card world gives: its episodes have two to six chunks."""
EXACT = "exact, one per order"
COMPOSED, NO_GAIN, SUM, MEAN = "composed", "composed, gain 1", "sum of pairs", "mean of pairs"
ALL = "all"

Row = dict[str, Any]
Rule = Callable[[Sequence[LayerPatch], Sequence[Record]], LayerPatch]
"""One layer's patch of the pairs of one chunk, and their records."""


def measure(task: Task) -> SuiteResult:
    """Answer over episodes of two to six chunks in turn.

    Returns
    -------
    SuiteResult
        A table of answers and one of KL, two charts.
    """
    count = task.options.episodes or EPISODES
    rules = RULES if chosen(task.options.rivals) else {COMPOSED: RULES[COMPOSED]}
    arms: dict[str, Arm] = {}
    with task.run(shows_jobs=False) as run:
        for index in run.counted("composing", count, range(count)):
            _episode(run, index, rules, arms)
        described = run.described()
    numbers = sorted({mark.num_antecedents for mark in arms[REFERENCE].marks})
    return report(arms, numbers, described)


def _episode(run: Run, index: int, rules: Mapping[str, Rule], arms: dict[str, Arm]) -> None:
    engine, seed = run.engine, run.options.seed
    number = NUM_ANTECEDENTS[index % len(NUM_ANTECEDENTS)]
    found = episode(episode_seed(index, seed), num_chunks=number + 1, split=SPLIT)
    path, window = run.work / f"{index}.mp4", str(index)
    write_episode(path, found, 100_000 * seed + index)
    engine.ingest([path], window=window, fps=FPS, chunk_seconds=CHUNK_SECONDS)
    path.unlink()
    engine.compile_patches(kind="pair", window=window)
    entries = engine.window(window).entries
    order = shuffled(len(entries), episode_seed(index, seed))
    links = [identity_of(entries[place]) for place in order]
    chunks = read_chunks(engine.context, links)
    prompt = Prompt(engine.runner, tuple(chunks[link] for link in links))
    patches: dict[str, Patches] = {EXACT: prompt.patches(CompileOptions(), known_worth(engine.context))}
    patches |= _composed(run, links, rules)
    caches = {REFERENCE: prompt.exact, BLIND: prompt.blind}
    caches |= {name: prompt.patched(made) for name, made in patches.items()}
    questions = asked(engine.runner, found.questions)
    answer(engine.runner, arms, caches, prompt.end, questions, num_antecedents=number)
    engine.evict([str(entry.number) for entry in entries], window=window, purge=True)


def _composed(run: Run, links: Sequence[Identity], rules: Mapping[str, Rule]) -> Mapping[str, Patches]:
    """Patches of every rule for chunks in this order, out of the stored pairs: none for the first one, the pair itself
    for the second, and compositions for the others."""
    library = run.engine.library
    made: dict[str, list[list[LayerPatch] | None]] = {name: [None] for name in rules}
    for place, link in enumerate(links[1:], start=1):
        found = [library.find_patch(link, (antecedent,), "exact") for antecedent in links[:place]]
        records = [record for record in found if record is not None]
        assert len(records) == place, "a pair of this run is gone"
        pairs = [library.patch_layers(record) for record in records]
        for name, rule in rules.items():
            layers = [rule(of_layer, records) for of_layer in zip(*pairs, strict=True)]
            made[name].append(pairs[0] if len(pairs) == 1 else layers)
    return made


def _weighted(pairs: Sequence[LayerPatch], weight: float) -> LayerPatch:
    """Σ weight · Δ_i, every direction kept."""

    def joined(parts: Sequence[Factors]) -> Factors:
        return Factors(
            weight * torch.cat([part.u.float() for part in parts]),
            torch.cat([part.v.float() for part in parts]),
        )

    rotary, plain = ([getattr(pair, name) for pair in pairs] for name in ("rotary", "plain"))
    return LayerPatch(joined(rotary), joined(plain), 0.0, 0.0)


RULES: dict[str, Rule] = {
    COMPOSED: lambda pairs, records: compose(pairs, gain=gain_of(records)),
    NO_GAIN: lambda pairs, _records: compose(pairs),
    SUM: lambda pairs, _records: _weighted(pairs, 1.0),
    MEAN: lambda pairs, _records: _weighted(pairs, 1.0 / len(pairs)),
}
"""Ways to make one patch of pairs; all but the product's own are rivals."""


def report(arms: dict[str, Arm], numbers: Sequence[int], described: Row) -> SuiteResult:
    """All that the suite hands back.

    Parameters
    ----------
    numbers : sequence of int
        Numbers of antecedents that were measured.
    described : dict
        Model, device and episodes; goes into the data as it is.
    """
    columns: dict[str, Sequence[int]] = {**{str(number): [number] for number in numbers}, ALL: numbers}
    rows = {
        name: {key: arm.after(of).figures(arms[BLIND].after(of)) for key, of in columns.items()}
        for name, arm in arms.items()
    }
    data = {**described, "num_antecedents": list(numbers), "arms": rows}
    told = ", ".join(
        f"{name} {percent(rows[name][ALL]['two_hop']['accuracy'])}" for name in (REFERENCE, EXACT, COMPOSED)
    )
    kl = {name: format_number(rows[name][ALL]["kl_mean"]) for name in (COMPOSED, EXACT)}
    sentence = (
        f"two-hop answers over {numbers[0]} to {numbers[-1]} antecedents: {told}; mean KL of composed patches "
        f"{kl[COMPOSED]}, of exact ones {kl[EXACT]}"
    )
    tables = (_answers(rows, numbers, described), _kls(rows, numbers))
    return SuiteResult("compose", sentence, data, tables, _charts(rows, numbers, described))


def _by_number(numbers: Sequence[int], cell: Callable[[Row], str]) -> dict[str, Callable[[Row], str]]:
    """A column for each number of antecedents, and one for all."""

    def of(key: str) -> Callable[[Row], str]:
        return lambda row: cell(row[key])

    return {f">{key}": of(str(key)) for key in (*numbers, ALL)}


def _answers(rows: dict[str, Row], numbers: Sequence[int], described: Row) -> Table:
    counts = ", ".join(str(rows[REFERENCE][str(number)]["two_hop"]["count"]) for number in numbers)
    notes = (
        f"{measured_on(described)} {described['num_episodes']} episodes of 2 to 6 chunks (no episode has more) in an "
        f"order other than that of ingest; {counts} two-hop questions. Columns: antecedents of the last chunk. Per "
        "cent with Wilson 95 % intervals; exact match of the greedy answer.",
        "Pairs and gains as compile-patches --kind pair forms and measures them, on up to twelve orders of the same "
        "chunks; every chunk after the second stands on a composed patch at once. Exact: as compile-patches forms "
        "them for this order. Sum and mean keep every direction of the pairs.",
    )
    columns = _by_number(numbers, lambda found: interval(found["two_hop"]))
    return arm_table("Two-hop answers by number of antecedents", rows, columns, notes)


def _kls(rows: dict[str, Row], numbers: Sequence[int]) -> Table:
    notes = (
        "Mean / 95th percentile in nats of the next token to re-prefill, over all questions. η: share of blind's mean "
        "KL over all that is gone.",
    )
    columns = {
        **_by_number(
            numbers, lambda found: f"{format_number(found['kl_mean'])} / {format_number(found['kl_p95'])}"
        ),
        ">η": lambda row: eta(row[ALL]),
    }
    others = {name: found for name, found in rows.items() if name != REFERENCE}
    return arm_table("KL by number of antecedents", others, columns, notes)


def _charts(rows: dict[str, Row], numbers: Sequence[int], described: Row) -> tuple[Chart, ...]:
    x, x_label, where = tuple(map(float, numbers)), "antecedents of the last chunk", caption(described)
    found = {name: [row[str(number)] for number in numbers] for name, row in rows.items() if name != NO_GAIN}
    answers = tuple(accuracies(name, x, of) for name, of in found.items() if name != BLIND)
    kl = tuple(
        Series(name, x, tuple(row["kl_p95"] for row in of)) for name, of in found.items() if name != REFERENCE
    )
    return (
        Chart("compose_two_hop", "Two-hop answers by antecedents", x_label, "exact match, %", answers,
              f"{where} Bands: Wilson 95 % intervals."),
        Chart("compose_kl", "KL to re-prefill by antecedents", x_label, "95th percentile, nats per next token", kl,
              where, y_log=True),
    )  # fmt: skip
