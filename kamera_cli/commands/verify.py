"""``kamera verify``: read every stored byte and check it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from kamera_cli.commands.session import DryRunOption, Session, command
from kamera_cli.output import count, display, format_bytes, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kamera_store import VerifyReport

DAMAGED = 5


@command
def verify(session: Session, dry_run: DryRunOption = False) -> None:
    """Check every stored byte.

    Damaged entries are moved aside, so that they are misses from now on; with --dry-run they stay. The exit code is
    5 if any were found.
    """
    with session.store(read_only=dry_run) as store, session.output.working() as on_progress:
        report = store.verify(on_progress=on_progress, quarantine=not dry_run)
    session.output.result("verify", payload(report), lambda: view(report, dry_run))
    if report.damaged:
        raise typer.Exit(DAMAGED)
