"""A placement that is not the cheapest order, or that needs something nobody has."""

from __future__ import annotations

import itertools
import random

import pytest

from kamera_cli.operator.placement import best_order


def priced(table: dict, chunks: tuple) -> int | None:
    total = 0
    for index, chunk in enumerate(chunks):
        price = table.get((chunk, chunks[:index]))
        if price is None:
            return None
        total += price
    return total


@pytest.mark.parametrize("seed", range(60))
def test_the_order_is_the_cheapest_of_all(seed):
    rng = random.Random(seed)
    chunks = tuple(range(rng.randint(1, 5)))
    table = {
        (chunk, before): rng.randint(0, 9)
        for size in range(len(chunks))
        for before in itertools.permutations(chunks, size)
        for chunk in chunks
        if chunk not in before and rng.random() < 0.7
    }
    prices = [
        price for order in itertools.permutations(chunks) if (price := priced(table, order)) is not None
    ]
    found = best_order(chunks, lambda chunk, before: table.get((chunk, before)))
    if not prices:
        assert found is None
    else:
        order, price = found
        assert price == min(prices) == priced(table, order)


def test_the_given_order_stays_where_it_is_as_good():
    assert best_order("bca", lambda _chunk, _before: 1) == (tuple("bca"), 3)


def test_the_search_ends():
    looked = []
    best_order(range(12), lambda chunk, _before: looked.append(chunk) or 1, max_steps=500)
    assert len(looked) <= 500
