"""A break-even that forgets a cost, or that divides by a use that saves nothing."""

from __future__ import annotations

import pytest

from kamera_cli.bench.payback import Payback, payback_table, spread
from kamera_cli.bench.timing import Samples


def payback(**times: float) -> Payback:
    samples = {name: Samples((value, value), value, (2 * value, 2 * value)) for name, value in times.items()}
    return Payback(4, 520, samples, (20.0, 20.0), (90.0, 90.0))


COSTS = {"compile": 150.0, "plain": 100.0, "first": 160.0, "full": 200.0, "reprefill": 110.0, "patched": 10.0}


def test_measuring_is_left_out_of_the_ratio_and_counted_in_the_uses():
    point = payback(**COSTS)
    assert point.form_ratios() == [pytest.approx(1.3)] * 2
    assert point.uses("reprefill") == [pytest.approx(1.5)] * 2
    assert point.uses("full") == [pytest.approx(150 / 190)] * 2
    assert point.uses("reprefill", by_cpu=True) == [pytest.approx(1.5)] * 2


def test_patches_of_a_first_query_pay_for_what_they_add_to_it():
    (uses, _) = payback(**COSTS).uses_of_kept()
    assert COSTS["first"] + (uses - 1) * COSTS["patched"] == pytest.approx(uses * COSTS["reprefill"])
    assert uses == pytest.approx(1.5)


def test_uses_that_save_nothing_never_pay():
    point = payback(**{**COSTS, "reprefill": 10.0})
    assert point.uses("reprefill") == [None, None] and point.uses_of_kept() == [None, None]
    assert spread(point.uses("reprefill")) == "never"
    assert spread([1.0, None, 3.0]) == "2.00 [1.00 – 3.00], 1 never"
    table = payback_table([point], on_cpu=True)
    assert all(len(row) == len(table.columns) for row in table.rows)
