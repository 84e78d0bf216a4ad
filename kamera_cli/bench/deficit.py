"""Suite ``deficit``: what blind reuse loses. In which layers it lies, over how many tokens, in how many directions.

Also whether canonical KV is better captured behind the preamble or bare, on the same episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kamera_cli.bench.figures import (
    BLIND,
    REFERENCE,
    Arm,
    Chart,
    Series,
    SuiteResult,
    Table,
    arm_table,
    caption,
    number,
    percent,
)
from kamera_cli.bench.prompt import Prompt, tensors_of
from kamera_cli.bench.runner import Task, answer
from kamera_cli.model.compat import DynamicCache, fill_cache
from kamera_cli.operator.factorise import residual
from kamera_cli.options import CompileOptions

EPISODES = 40
MAX_CUTS = 7
CAPTURE_RANKS = (4, 16)
ENERGIES = (0.9, 0.99)
SPECTRUM = (1, 2, 4, 8, 16, 32, 64)
CAPTURE_ARMS = (
    BLIND,
    f"{BLIND}, bare",
    *(f"rank {rank}{how}" for rank in CAPTURE_RANKS for how in ("", ", bare")),
)
TENSORS = {"keys": "rotary", "values": "plain"}
"""What the tables call the tensors of a layer, and their names in `LayerKV`."""

Row = dict[str, Any]


@dataclass
class Spectra:
    """Where Δ lies, over all episodes.

    Attributes
    ----------
    directions : dict of (int, str) to list of torch.Tensor
        Per layer and ``keys`` or ``values``, cumulative energy of Δ over directions, one per chunk.
    tokens : list of torch.Tensor
        Per patched chunk, cumulative energy of Δ over its tokens, largest first.
    energy : dict of int to float
        Per layer, ‖Δ‖² of keys and values over all chunks.
    """

    directions: dict[tuple[int, str], list[torch.Tensor]] = field(default_factory=dict)
    tokens: list[torch.Tensor] = field(default_factory=list)
    energy: dict[int, float] = field(default_factory=dict)

    def add(self, prompt: Prompt) -> None:
        """Look at Δ of every chunk of a prompt that has an antecedent."""
        per_token = prompt.delta_energy()
        for (start, end), conditioned, chunk in zip(
            prompt.bounds[1:], prompt.conditioned[1:], prompt.chunks[1:], strict=True
        ):
            self.tokens.append(_cumulative(per_token[start:end].sort(descending=True).values))
            for layer, (after, alone) in enumerate(zip(conditioned, chunk.canonical, strict=True)):
                for name, tensor in TENSORS.items():
                    delta = residual(getattr(after, tensor), getattr(alone, tensor))
                    self.energy[layer] = self.energy.get(layer, 0.0) + float(delta.square().sum())
                    if layer:
                        squares = torch.linalg.svdvals(delta.cpu()).square()
                        self.directions.setdefault((layer, name), []).append(_cumulative(squares))

    def layers(self) -> list[Row]:
        """Per layer, its share of ‖Δ‖² and the mean number of directions that hold each of `ENERGIES`."""
        total = sum(self.energy.values())
        rows = []
        for layer, energy in sorted(self.energy.items()):
            row: Row = {"layer": layer, "energy_share": energy / total if total else None}
            for share in ENERGIES:
                for name in TENSORS:
                    found = [needed(curve, share) for curve in self.directions.get((layer, name), [])]
                    row[f"rank_{share:.0%}_{name}"] = sum(found) / len(found) if found else 0.0
            rows.append(row)
        return rows

    def at_ranks(self) -> dict[str, dict[int, float]]:
        """Mean energy of the first directions, by tensor and rank."""
        return {
            name: {rank: _mean_at(curves, rank) for rank in SPECTRUM}
            for name in TENSORS
            for curves in [[one for key, found in self.directions.items() if key[1] == name for one in found]]
        }

    def token_shares(self) -> dict[str, float]:
        """Mean share of a chunk's tokens that holds a half, and nine tenths, of its ‖Δ‖²."""
        return {
            f"{share:.0%}": sum(needed(curve, share) / len(curve) for curve in self.tokens) / len(self.tokens)
            for share in (0.5, 0.9)
        }


def measure(task: Task) -> SuiteResult:
    """Look at Δ itself and put it back layer by layer.

    Returns
    -------
    SuiteResult
        Tables of layers, tokens and capture; two charts.
    """
    arms: dict[str, Arm] = {}
    spectra = Spectra()
    with task.run() as run:
        num_layers = run.engine.runner.family.num_layers
        cuts = layer_cuts(num_layers)
        for encoded in run.episodes("looking at Δ", EPISODES):
            prompt = encoded.shuffled()
            answer(encoded.runner, arms, _caches(prompt, cuts), prompt.end, encoded.asked)
            spectra.add(prompt)
        described = run.described() | {"num_layers": num_layers}
    return report(arms, spectra, cuts, described)


def layer_cuts(num_layers: int) -> list[int]:
    """Layers at which the stack is cut in two, evenly spread, never more than `MAX_CUTS`."""
    step = max(1, -(-(num_layers - 1) // MAX_CUTS))
    return list(range(1, num_layers, step))


def _caches(prompt: Prompt, cuts: Sequence[int]) -> dict[str, DynamicCache]:
    caches = {REFERENCE: prompt.exact, BLIND: prompt.blind}
    for cut in cuts:
        caches[f"below {cut}"] = _joined(prompt.exact, prompt.blind, cut)
        caches[f"from {cut}"] = _joined(prompt.blind, prompt.exact, cut)
    bare = prompt.bare()
    caches[f"{BLIND}, bare"] = bare.blind
    options = CompileOptions(rank=max(CAPTURE_RANKS))
    # Without the preamble in front of it, the canonical KV of the first chunk lacks something too.
    patches, of_bare = prompt.patches(options), [bare.patch(0, options), *bare.patches(options)[1:]]
    for rank in CAPTURE_RANKS:
        caches[f"rank {rank}"] = prompt.patched(patches, rank)
        caches[f"rank {rank}, bare"] = bare.patched(of_bare, rank)
    return caches


def _joined(below: DynamicCache, above: DynamicCache, cut: int) -> DynamicCache:
    """The layers below a cut of one cache with the others of another."""
    return fill_cache([*tensors_of(below)[:cut], *tensors_of(above)[cut:]])


def _cumulative(descending: torch.Tensor) -> torch.Tensor:
    sums = descending.double().cpu().cumsum(0)
    return sums / sums[-1].clamp_min(torch.finfo(torch.float64).tiny)


def needed(cumulative: torch.Tensor, share: float) -> int:
    """How many of the largest parts hold a share of the whole."""
    return int((cumulative < share).sum()) + 1


def _mean_at(curves: Sequence[torch.Tensor], rank: int) -> float:
    return sum(float(curve[min(rank, len(curve)) - 1]) for curve in curves) / len(curves)


def report(arms: dict[str, Arm], spectra: Spectra, cuts: Sequence[int], described: Row) -> SuiteResult:
    """All that the suite hands back.

    Parameters
    ----------
    cuts : sequence of int
        Layers at which the stack was cut in two.
    described : dict
        Model, device and episodes; goes into the data as it is.
    """
    figures = {name: arm.figures(arms[BLIND]) for name, arm in arms.items()}
    closed = {name: row["eta"] for name, row in figures.items()}
    injected = [
        {"cut": cut, "closed_below": closed[f"below {cut}"], "closed_from": closed[f"from {cut}"]}
        for cut in cuts
    ]
    capture = {name: {"kl_mean": figures[name]["kl_mean"], "closed": closed[name]} for name in CAPTURE_ARMS}
    layers, tokens, spectrum = spectra.layers(), spectra.token_shares(), spectra.at_ranks()
    middle = min(injected, key=lambda row: abs(row["cut"] - described["num_layers"] / 2))
    sentence = (
        f"Δ put back exactly below layer {middle['cut']} of {described['num_layers']} closes "
        f"{percent(middle['closed_below'], 0)} of the KL of blind reuse, from there on "
        f"{percent(middle['closed_from'], 0)}; "
        f"90 % of its energy takes {percent(tokens['90%'], 0)} of the tokens"
    )
    data = {
        **described,
        "layers": layers,
        "injected": injected,
        "token_share_for_energy": tokens,
        "energy_at_rank": spectrum,
        "capture": capture,
    }
    tables = (_layer_table(layers, injected, tokens, described), _capture_table(capture))
    return SuiteResult("deficit", sentence, data, tables, _charts(injected, spectrum, described))


def _layer_table(
    layers: Sequence[Row], injected: Sequence[Row], tokens: dict[str, float], described: Row
) -> Table:
    closed = {row["cut"]: (row["closed_below"], row["closed_from"]) for row in injected}
    rows = tuple(
        (
            str(row["layer"]),
            percent(row["energy_share"], 0),
            *(f"{row[f'rank_{share:.0%}_{name}']:.0f}" for name in TENSORS for share in ENERGIES),
            *(percent(share, 0) for share in closed.get(row["layer"], (None, None))),
        )
        for row in layers
    )
    columns = (
        ">layer", ">share of ‖Δ‖²", ">rank for 90 %, keys", ">99 %", ">rank for 90 %, values", ">99 %",
        ">KL closed by Δ below it", ">by Δ from it on",
    )  # fmt: skip
    notes = (
        f"{described['model']}, {described['num_episodes']} episodes. Ranks: mean over chunks. KL closed: the "
        "re-prefill's own KV in those layers only, canonical KV in the others. Layer 0 has no Δ.",
        f"Half of ‖Δ‖² lies in {percent(tokens['50%'], 0)} of a chunk's tokens, nine tenths in "
        f"{percent(tokens['90%'], 0)}.",
    )
    return Table("Where the deficit lies", columns, rows, notes)


def _capture_table(capture: dict[str, Row]) -> Table:
    notes = (
        "Bare: canonical KV captured at position 0 with nothing in front, so the first chunk needs a patch too. Else: "
        "behind the preamble, as the product captures it.",
    )
    columns = {">KL mean": number("kl_mean"), ">KL closed": lambda row: percent(row["closed"], 0)}
    return arm_table("Canonical KV behind the preamble, and bare", capture, columns, notes)


def _charts(
    injected: Sequence[Row], spectrum: dict[str, dict[int, float]], described: Row
) -> tuple[Chart, ...]:
    x = tuple(float(row["cut"]) for row in injected)
    lines = tuple(
        Series(name, x, tuple(100 * (row[key] or 0.0) for row in injected))
        for name, key in (("Δ in the layers below", "closed_below"), ("Δ from this layer on", "closed_from"))
    )
    energy = tuple(
        Series(name, tuple(map(float, found)), tuple(100 * value for value in found.values()))
        for name, found in spectrum.items()
    )
    where = caption(described)
    return (
        Chart("deficit_layers", "Where in the stack Δ matters", "layer", "KL of blind reuse closed, %", lines,
              f"{where} Exact Δ in a part of the layers."),
        Chart("deficit_spectrum", "Energy of Δ by rank", "rank", "energy, %", energy,
              f"{where} Mean over chunks and layers, before RoPE.", x_log=True),
    )  # fmt: skip
