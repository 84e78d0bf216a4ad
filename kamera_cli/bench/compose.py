"""Suite ``compose``: patches composed from pairs against exact ones, by the number of antecedents.

Every episode goes through the product: it is ingested, its pairs are compiled and calibrated as ``compile-patches
--kind pair`` does, and the patches of one order are composed of what the store then holds. The last chunk of the window
has so many antecedents, each chunk before it one less, and all of them stand on composed patches at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kamera_cli.bench.arrangement import Arrangement
from kamera_cli.bench.cards import CHUNK_SECONDS, FPS, SPLIT, write_episode
from kamera_cli.bench.compose_report import BLIND, COMPOSED, EXACT, MEAN, NO_GAIN, REFERENCE, SUM, Arm, report
from kamera_cli.bench.episodes import forced, group_of, shuffled
from kamera_cli.bench.results import SuiteResult
from kamera_cli.bench.rivals import chosen
from kamera_cli.bench.scratch import scratch_engine
from kamera_cli.engine import Engine
from kamera_cli.model.generate import next_token_kl
from kamera_cli.model.scoring import is_greedy_match, score
from kamera_cli.operator.compose import compose
from kamera_cli.operator.patch import Factors, LayerPatch
from kamera_cli.patches.pairs import gain_of
from kamera_cli.patches.worth import known_worth
from kamera_cli.results import Progress
from kamera_cli.settings import Settings
from kamera_cli.tiny.world import MAX_CHUNKS, MIN_CHUNKS, Episode, episode
from kamera_cli.window import identity_of
from kamera_store.format.records import Record

if TYPE_CHECKING:
    from kamera_cli.bench import BenchOptions

EPISODES = 100
NUM_ANTECEDENTS = tuple(range(MIN_CHUNKS - 1, MAX_CHUNKS))
"""What the card world gives: its episodes have two to six chunks."""

_Patches = list[list[LayerPatch] | None]
_Rule = Callable[[Sequence[LayerPatch], Sequence[Record]], LayerPatch]
"""One layer's patch of the pairs of one chunk, and their records."""


def measure(
    settings: Settings, options: BenchOptions, on_progress: Callable[[Progress], None]
) -> SuiteResult:
    """Answer over episodes of two to six chunks in turn.

    Returns
    -------
    SuiteResult
        A table of answers and one of KL, two charts.
    """
    count = options.episodes or EPISODES
    rules = dict(RULES) if chosen(options.rivals) else {COMPOSED: RULES[COMPOSED]}
    arms = {name: Arm() for name in (REFERENCE, BLIND, EXACT, *rules)}
    with scratch_engine(settings) as (engine, work):
        started = time.perf_counter()
        for index in range(count):
            on_progress(Progress("composing", index, count, "episodes"))
            _episode(engine, index, options.seed, rules, arms, work)
        on_progress(Progress("composing", count, count, "episodes"))
        described = {
            "model": engine.context.checkpoint.label,
            "fingerprint": engine.fingerprint,
            "device": str(engine.runner.device),
            "dtype": engine.context.dtype_name,
            "num_episodes": count,
            "seconds_per_episode": (time.perf_counter() - started) / count,
        }
    return report(arms, [number for number in NUM_ANTECEDENTS if number in arms[REFERENCE].kl], described)


def _episode(
    engine: Engine, index: int, seed: int, rules: dict[str, _Rule], arms: dict[str, Arm], work: Path
) -> None:
    at = 1_000_000 * seed + index
    number = NUM_ANTECEDENTS[index % len(NUM_ANTECEDENTS)]
    found = episode(at, num_chunks=number + 1, split=SPLIT)
    window = str(index)
    _ingest(engine, found, work / f"{index}.mp4", 100_000 * seed + index, window)
    engine.compile_patches(kind="pair", window=window)
    entries = engine.window(window).entries
    entries = [entries[place] for place in shuffled(len(entries), at)]
    chunks = [engine.library.find_chunk(entry) for entry in entries]
    arrangement = Arrangement(
        engine.runner, list(map(engine.library.segment, chunks)), list(map(engine.library.layers, chunks))
    )
    patches = {EXACT: arrangement.patches("auto", worth=known_worth(engine.context))}
    patches |= _composed(engine, list(map(identity_of, entries)), rules)
    caches = {REFERENCE: arrangement.exact, BLIND: arrangement.blind}
    caches |= {name: arrangement.patched(made, None) for name, made in patches.items()}
    prompts = [forced(engine.runner, question) for question in found.questions]
    scored = score(engine.runner, list(caches.values()), arrangement.end, prompts)
    for name, answers in zip(caches, scored, strict=True):
        for question, prompt, expected, logits in zip(
            found.questions, prompts, scored[0], answers, strict=True
        ):
            is_right = is_greedy_match(logits, prompt.answer_ids, engine.runner.eos_ids)
            arms[name].add(number, group_of(question), is_right, next_token_kl(expected[0], logits[0]))
    engine.evict([str(entry.number) for entry in entries], window=window, purge=True)


def _ingest(engine: Engine, found: Episode, path: Path, seed: int, window: str) -> None:
    write_episode(path, found, seed)
    engine.ingest([path], window=window, fps=FPS, chunk_seconds=CHUNK_SECONDS)
    path.unlink()


def _composed(engine: Engine, links: list, rules: dict[str, _Rule]) -> dict[str, _Patches]:
    """Patches of every rule for chunks in this order, out of the stored pairs: none for the first one, the pair itself
    for the second, and compositions for the others."""
    made: dict[str, _Patches] = {name: [None] for name in rules}
    for place, link in enumerate(links[1:], start=1):
        records = [engine.library.find_patch(link, (antecedent,), "exact") for antecedent in links[:place]]
        pairs = [engine.library.patch_layers(record) for record in records]
        for name, rule in rules.items():
            made[name].append(
                pairs[0]
                if len(pairs) == 1
                else [rule(layers, records) for layers in zip(*pairs, strict=True)]
            )
    return made


def _weighted(pairs: Sequence[LayerPatch], weight: float) -> LayerPatch:
    """Σ weight · Δ_i, every direction kept."""

    def joined(parts: list[Factors]) -> Factors:
        return Factors(
            weight * torch.cat([part.u.float() for part in parts]),
            torch.cat([part.v.float() for part in parts]),
        )

    return LayerPatch(
        joined([pair.rotary for pair in pairs]), joined([pair.plain for pair in pairs]), 0.0, 0.0
    )


RULES: dict[str, _Rule] = {
    COMPOSED: lambda pairs, records: compose(pairs, gain=gain_of(records)),
    NO_GAIN: lambda pairs, _records: compose(pairs),
    SUM: lambda pairs, _records: _weighted(pairs, 1.0),
    MEAN: lambda pairs, _records: _weighted(pairs, 1.0 / len(pairs)),
}
"""Ways to make one patch of pairs; all but the product's own are rivals."""
