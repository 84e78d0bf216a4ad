"""Which order of chunks needs the least: since order is free where patches serve it, a query may choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

MAX_STEPS = 50_000
"""Partial orders that are looked at; the best complete one so far is the answer beyond that."""

_T = TypeVar("_T")


def best_order(
    chunks: Sequence[_T], cost: Callable[[_T, tuple[_T, ...]], int | None], max_steps: int = MAX_STEPS
) -> tuple[tuple[_T, ...], int] | None:
    """The order of least total cost in which nothing is missing; the given order where it is as good as any.

    Parameters
    ----------
    chunks : sequence
        Distinct, in the given order.
    cost : callable
        Of a chunk behind others in order, such as bytes to read; None where no usable patch is there. A pure function.

    Returns
    -------
    (tuple, int) or None
        Order and cost; None when every order misses something.
    """
    best: tuple[tuple[_T, ...], int] | None = None
    steps = 0

    def extend(before: tuple[_T, ...], spent: int) -> None:
        nonlocal best, steps
        if len(before) == len(chunks):
            best = (before, spent)
            return
        for chunk in chunks:
            if chunk in before:
                continue
            steps += 1
            if steps > max_steps:
                return
            price = cost(chunk, before)
            if price is not None and (best is None or spent + price < best[1]):
                extend((*before, chunk), spent + price)

    extend((), 0)
    return best
