"""Other methods of reuse, run on the same tokens with the same model in the same run; one file per method."""

from __future__ import annotations

RIVALS = ("oracle", "cacheblend", "epic")
"""Names for ``--rivals``; ``kamera_cli.bench.rivals.<name>.arms`` gives a method's KV at each share of tokens."""

SHARES = (0.15, 0.30, 0.50)
"""Shares of the context tokens that a token-selecting method may recompute."""


def chosen(names: tuple[str, ...]) -> tuple[str, ...]:
    """Rivals to run: all when none is named or with ``all``, none with ``none``."""
    if not names or "all" in names:
        return RIVALS
    return tuple(name for name in RIVALS if name in names)
