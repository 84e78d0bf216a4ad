"""``kamera verify``: read every stored byte and check it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from kamera_cli.commands.session import DryRunOption, Session, command
from kamera_cli.errors import KameraError, UsageError
from kamera_cli.results import Progress
from kamera_cli.words import count, display, format_bytes, short_id, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kamera_store import SalvageReport, VerifyReport


class DamageFound(KameraError):
    """Entries were found that are not what was written (exit code 5)."""

    exit_code = 5


@command
def verify(
    session: Session,
    dry_run: DryRunOption = False,
    rescue: Annotated[
        str | None,
        typer.Option(
            "--rescue", metavar="DIR", help="Copy what is sound into a new store there, change nothing here"
        ),
    ] = None,
) -> None:
    """Check every stored byte.

    Damaged entries are moved aside, so that they are misses from now on; with --dry-run they stay. A data file
    that cannot be opened any more is read with --rescue. The exit code is 5 if anything was damaged.
    """
    if rescue is not None:
        if dry_run:
            raise UsageError("--rescue changes nothing in the damaged store and takes no --dry-run")
        rescue_to(session, rescue)
        return
    with session.store(read_only=dry_run) as store, session.output.working() as on_progress:
        report = store.verify(on_progress=_counting(on_progress, "checking"), quarantine=not dry_run)
    session.output.result("verify", payload(report), lambda: view(report))
    if not report.ok:
        aside = sum(damage.quarantined for damage in report.damaged)
        raise DamageFound(f"{count(len(report.damaged), 'damaged entry')} found, {aside} moved aside")


def rescue_to(session: Session, target: str) -> None:
    """Copy every sound entry into a new store.

    Raises
    ------
    NotFoundError
        If there is no store to rescue.
    DamageFound
        If entries were lost.
    """
    from kamera_store import salvage

    session.require_store()
    with session.output.working() as on_progress:
        report = salvage(session.settings.store, target, on_progress=_counting(on_progress, "rescuing"))
    session.output.result("verify", rescue_payload(report), lambda: rescue_view(report))
    if not report.num_records:
        raise DamageFound(
            f"no record of {display(session.settings.store)} could be read; its media must be ingested again"
        )
    if report.lost:
        raise DamageFound(f"{count(len(report.lost), 'entry')} lost; the others are in {report.path}")


def rescue_payload(report: SalvageReport) -> dict[str, object]:
    """The fields of ``kamera.verify.v1`` for a rescue."""
    return {
        "ok": bool(report.num_records) and not report.lost,
        "rescued_to": report.path,
        "num_records": report.num_records,
        "num_states": report.num_states,
        "lost": report.lost,
    }


def rescue_view(report: SalvageReport) -> Iterable[RenderableType]:
    """What people see of a rescue."""
    yield (
        f"{count(report.num_records, 'record')} and {count(report.num_states, 'small state')} saved to "
        f"{display(report.path)}; use it with --store"
    )
    yield from (f"lost: {display(name)}" for name in report.lost)


def _counting(on_progress: Callable[[Progress], None], what: str) -> Callable[[int, int], None]:
    return lambda done, total: on_progress(Progress(what, done, total, "records"))


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
