"""``kamera stats``: how much the store holds, of what, and how much room is left."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kamera_cli.commands.session import Session, command, store_line
from kamera_cli.output import display, format_bytes, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kamera_store import Stats


@command
def stats(session: Session) -> None:
    """Say how much the store holds, of what, and how much room is left."""
    with session.store() as store:
        found = store.stats()
    session.output.result("stats", payload(session, found), lambda: view(session, found))
