"""`show` tells ranks by layer, in as many columns as a terminal has, and the energy that it is trusted by."""

from __future__ import annotations

import io
from types import SimpleNamespace

from kamera_cli.commands.show import _runs, split, split_view


def patch(ranks, kind="exact", **fields):
    meta = {
        "kind": kind, "antecedents": ["cd" * 16, "aa" * 16], "split": ranks, "energy": [1.0] * len(ranks),
        "energy_weighted": 0.991, **fields,
    }  # fmt: skip
    return split(SimpleNamespace(id="ab" * 16, meta=meta, raw_bytes=8192, stored_bytes=4096))


def text(found, numbers=None) -> str:
    from rich.console import Console

    console = Console(width=120, record=True, file=io.StringIO())
    for part in split_view(found, numbers):
        console.print(part)
    return console.export_text()


def test_few_layers_stand_side_by_side():
    shown = text([patch([[0, 0], [4, 5], [12, 3]]), patch([[0, 0], [1, 1]], energy_weighted=None)])
    assert "0/0" in shown and "4/5" in shown and "12/3" in shown
    assert "99.1 %" in shown and "100.0 %" in shown


def test_an_orbit_patch_is_shown_with_the_energy_that_it_holds_in_its_worst_order():
    shown = text([patch([[4, 5]], kind="orbit", energy_in_orders=0.935)])
    assert "93.5 %" in shown and "99.1 %" not in shown


def test_many_layers_are_told_in_runs():
    ranks = [[0, 0]] * 4 + [[5, 6]] + [[2, 2]] * 23
    assert _runs(ranks) == "0-3: 0/0, 4: 5/6, 5-27: 2/2"
    assert "5-27: 2/2" in text([patch(ranks)])
    assert _runs([[1, 2]]) == "0: 1/2"


def test_antecedents_are_told_by_number_and_those_of_an_orbit_ascending():
    numbers = {"cd" * 16: 7, "aa" * 16: 3}
    assert "exact  7 3" in text([patch([[1, 1]])], numbers)
    assert "orbit  3 7" in text([patch([[1, 1]], kind="orbit")], numbers)
    assert "exact  ? ?" in text([patch([[1, 1]])])
