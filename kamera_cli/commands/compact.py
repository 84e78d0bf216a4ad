"""``kamera compact``: make the store's file as small as what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kamera_cli.commands.session import Session, command
from kamera_cli.words import format_bytes

if TYPE_CHECKING:
    from kamera_store import CompactReport


@command
def compact(session: Session) -> None:
    """Make the store's file smaller.

    Copies what it holds into a fresh file and swaps that in; needs room for the copy. A kill in between
    leaves the old file or the new one, never neither.
    """
    with session.store(read_only=False) as store, session.output.working():
        report = store.compact()
    session.output.result("compact", report, lambda: [compact_line(report)])


def compact_line(report: CompactReport) -> str:
    """``file 1.0 MiB → 8.0 KiB, 1016.0 KiB given back to the disk``."""
    before, after = report.before_bytes, report.after_bytes
    given_back = format_bytes(max(before - after, 0))
    return f"file {format_bytes(before)} → {format_bytes(after)}, {given_back} given back to the disk"
