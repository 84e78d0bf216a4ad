"""``kamera stats``: how much the store holds, of what, and how much room is left."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kamera_cli.commands.session import Session, command, store_line
from kamera_cli.words import count, display, format_bytes, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kamera_store import Stats


@command
def stats(session: Session) -> None:
    """Say what the store holds.

    How much of what, and how much room is left.
    """
    with session.store() as store:
        found = store.stats()
    path = session.settings.store
    session.output.result("stats", {"store": path, **found.as_dict()}, lambda: view(path, found))


def view(path: Path, found: Stats) -> Iterable[RenderableType]:
    """What people see."""
    yield display(path)
    yield ""
    rows = [*found.kinds.items(), *((f"tenant {name}", share) for name, share in found.tenants.items())]
    yield table(
        ("", ">records", ">in memory", ">stored", ">ratio"),
        (
            (
                name,
                share.count,
                format_bytes(share.raw_bytes),
                format_bytes(share.stored_bytes),
                f"{share.raw_bytes / share.stored_bytes:.2f}"
                if share.raw_bytes and share.stored_bytes
                else "–",
            )
            for name, share in (*rows, ("all", found))
        ),
    )
    yield ""
    share_used = f" ({found.used_bytes / found.quota_bytes:.0%})" if found.quota_bytes else ""
    yield f"{format_bytes(found.used_bytes)} of the quota of {format_bytes(found.quota_bytes)} in use{share_used}"
    yield store_line(found.file_bytes, found.free_inside_bytes)
    if found.quarantined:
        yield f"{count(found.quarantined, 'damaged entry')} set aside by kamera verify"
