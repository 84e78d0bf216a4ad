"""Figures, tables and charts of the suite ``deficit`` (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kamera_cli.bench.results import Chart, Series, SuiteResult, Table
from kamera_cli.bench.shares import mean
from kamera_cli.words import format_number

CAPTURE_RANKS = (4, 16)
ENERGIES = (0.9, 0.99)
SPECTRUM = (1, 2, 4, 8, 16, 32, 64)


@dataclass
class Findings:
    """Sums over episodes.

    Attributes
    ----------
    kl : dict of str to list of float
        Per arm, KL to re-prefill of every question.
    spectra : dict of (int, str) to list of torch.Tensor
        Per layer and ``keys`` or ``values``, cumulative energy of Δ over directions, one per chunk.
    shares : list of torch.Tensor
        Per patched chunk, cumulative energy of Δ over its tokens, largest first.
    energy : dict of int to float
        Per layer, ‖Δ‖² of keys and values over all chunks.
    """

    kl: dict[str, list[float]] = field(default_factory=dict)
    spectra: dict[tuple[int, str], list[torch.Tensor]] = field(default_factory=dict)
    shares: list[torch.Tensor] = field(default_factory=list)
    energy: dict[int, float] = field(default_factory=dict)

    def closed(self, arm: str) -> float | None:
        """1 − KL of an arm / KL of blind."""
        blind, kl = mean(self.kl["blind"]), mean(self.kl[arm])
        return 1 - kl / blind if blind else None


def needed(cumulative: torch.Tensor, share: float) -> int:
    """How many of the largest parts hold a share of the whole."""
    return int((cumulative < share).sum()) + 1


def _mean_needed(curves: list[torch.Tensor], share: float) -> float:
    return sum(needed(curve, share) for curve in curves) / len(curves)


def _at(curves: list[torch.Tensor], count: int) -> float:
    return sum(float(curve[min(count, len(curve)) - 1]) for curve in curves) / len(curves)


def report(found: Findings, cuts: list[int], described: dict) -> SuiteResult:
    """All that the suite hands back.

    Parameters
    ----------
    cuts : list of int
        Layers at which the stack was cut in two.
    described : dict
        Model, device and episodes; goes into the data as it is.
    """
    total = sum(found.energy.values())
    layers = [
        {
            "layer": layer,
            "energy_share": energy / total if total else None,
            **{
                f"rank_{share:.0%}_{name}": _mean_needed(found.spectra[layer, name], share) if layer else 0.0
                for share in ENERGIES
                for name in ("keys", "values")
            },
        }
        for layer, energy in sorted(found.energy.items())
    ]
    injected = [
        {"cut": cut, "closed_below": found.closed(f"below {cut}"), "closed_from": found.closed(f"from {cut}")}
        for cut in cuts
    ]
    tokens = {
        f"{share:.0%}": sum(needed(curve, share) / len(curve) for curve in found.shares) / len(found.shares)
        for share in (0.5, 0.9)
    }
    spectrum = {
        name: {
            rank: _at(
                [curve for (_, kind), curves in found.spectra.items() if kind == name for curve in curves],
                rank,
            )
            for rank in SPECTRUM
        }
        for name in ("keys", "values")
    }
    capture = {
        name: {"kl_mean": mean(found.kl[name]), "closed": found.closed(name)} for name in _capture_arms()
    }
    middle = min(injected, key=lambda row: abs(row["cut"] - described["num_layers"] / 2))
    sentence = (
        f"Δ put back exactly below layer {middle['cut']} of {described['num_layers']} closes "
        f"{_percent(middle['closed_below'])} of the KL of blind reuse, from there on "
        f"{_percent(middle['closed_from'])}; "
        f"90 % of its energy takes {_percent(tokens['90%'])} of the tokens"
    )
    data = {
        **described,
        "layers": layers,
        "injected": injected,
        "token_share_for_energy": tokens,
        "energy_at_rank": spectrum,
        "capture": capture,
    }
    tables = (_layer_table(layers, injected, described, tokens), _capture_table(capture))
    return SuiteResult("deficit", sentence, data, tables, _charts(injected, spectrum, described))


def _capture_arms() -> list[str]:
    return [
        "blind",
        "blind, bare",
        *(f"rank {rank}{how}" for rank in CAPTURE_RANKS for how in ("", ", bare")),
    ]


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _layer_table(layers: list[dict], injected: list[dict], described: dict, tokens: dict) -> Table:
    closed = {row["cut"]: row for row in injected}
    rows = []
    for row in layers:
        cut = closed.get(row["layer"], {"closed_below": None, "closed_from": None})
        ranks = [
            f"{row[f'rank_{share:.0%}_{name}']:.0f}" for name in ("keys", "values") for share in ENERGIES
        ]
        shown = (
            row["layer"],
            _percent(row["energy_share"]),
            *ranks,
            _percent(cut["closed_below"]),
            _percent(cut["closed_from"]),
        )
        rows.append(tuple(map(str, shown)))
    columns = (
        ">layer", ">share of ‖Δ‖²", ">rank for 90 %, keys", ">99 %", ">rank for 90 %, values", ">99 %",
        ">KL closed by Δ below it", ">by Δ from it on",
    )  # fmt: skip
    notes = (
        f"{described['model']}, {described['num_episodes']} episodes. Ranks: mean over chunks. KL closed: the "
        "re-prefill's own KV in those layers only, canonical KV in the others. Layer 0 has no Δ.",
        f"Half of ‖Δ‖² lies in {_percent(tokens['50%'])} of a chunk's tokens, nine tenths in "
        f"{_percent(tokens['90%'])}.",
    )
    return Table("Where the deficit lies", columns, tuple(rows), notes)


def _capture_table(capture: dict[str, dict]) -> Table:
    rows = tuple(
        (name, format_number(row["kl_mean"]), _percent(row["closed"])) for name, row in capture.items()
    )
    notes = (
        "Bare: canonical KV captured at position 0 with nothing in front, so the first chunk needs a patch too. Else: "
        "behind the preamble, as the product captures it.",
    )
    return Table("Canonical KV behind the preamble, and bare", ("arm", ">KL mean", ">KL closed"), rows, notes)


def _charts(injected: list[dict], spectrum: dict, described: dict) -> tuple[Chart, ...]:
    caption = f"{described['model']}, {described['num_episodes']} episodes, {described['device']} {described['dtype']}."
    x = tuple(float(row["cut"]) for row in injected)
    lines = (
        Series("Δ in the layers below", x, tuple(100 * (row["closed_below"] or 0.0) for row in injected)),
        Series("Δ from this layer on", x, tuple(100 * (row["closed_from"] or 0.0) for row in injected)),
    )
    energy = tuple(
        Series(name, tuple(map(float, found)), tuple(100 * value for value in found.values()))
        for name, found in spectrum.items()
    )
    return (
        Chart("deficit_layers", "Where in the stack Δ matters", "layer", "KL of blind reuse closed, %", lines,
              f"{caption} Exact Δ in a part of the layers."),
        Chart("deficit_spectrum", "Energy of Δ by rank", "rank", "energy, %", energy,
              f"{caption} Mean over chunks and layers, before RoPE.", x_log=True),
    )  # fmt: skip
