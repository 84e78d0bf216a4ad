"""``kamera verify``: read every stored byte and check it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kamera_cli.commands.session import DryRunOption, Session, command
from kamera_cli.errors import KameraError
from kamera_cli.results import Progress
from kamera_cli.text import count, format_bytes, short_id, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kamera_store import VerifyReport


class DamageFound(KameraError):
    """Entries were found that are not what was written (exit code 5)."""

    exit_code = 5


@command
def verify(session: Session, dry_run: DryRunOption = False) -> None:
    """Check every stored byte.

    Damaged entries are moved aside, so that they are misses from now on; with --dry-run they stay. The exit
    code is 5 if any were found.
    """
    with session.store(read_only=dry_run) as store, session.output.working() as on_progress:
        report = store.verify(
            on_progress=lambda done, total: on_progress(Progress("checking", done, total, "records")),
            quarantine=not dry_run,
        )
    session.output.result("verify", payload(report), lambda: view(report))
    if not report.ok:
        aside = sum(damage.quarantined for damage in report.damaged)
        raise DamageFound(f"{count(len(report.damaged), 'damaged entry')} found, {aside} moved aside")


def payload(report: VerifyReport) -> dict[str, object]:
    """The fields of ``kamera.verify.v1``."""
    return {
        "ok": report.ok,
        "num_records": report.num_records,
        "num_bytes": report.num_bytes,
        "damaged": [vars(damage) for damage in report.damaged],
    }


def view(report: VerifyReport) -> Iterable[RenderableType]:
    """What people see."""
    if report.damaged:
        yield table(
            ("where", "entry", "what", "expected", "found", "moved aside"),
            (
                (
                    damage.table,
                    short_id(damage.key.hex()),
                    damage.what,
                    damage.expected,
                    damage.found,
                    "yes" if damage.quarantined else "no",
                )
                for damage in report.damaged
            ),
        )
    yield (
        f"{count(report.num_records, 'record')}, {format_bytes(report.num_bytes)} read and checked: "
        f"{'all sound' if report.ok else count(len(report.damaged), 'damaged entry')}"
    )
