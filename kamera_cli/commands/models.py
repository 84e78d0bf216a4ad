"""``kamera models``: what is supported and verified; ``kamera models check`` tests one checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from kamera_cli.commands.session import EPILOG, Session, command
from kamera_cli.errors import RefusedError
from kamera_cli.words import count, display, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kamera_cli.engine import SelfTest

app = typer.Typer(rich_markup_mode=None)


@app.callback(invoke_without_command=True)
@command
def models(session: Session) -> None:
    """List supported architectures.

    With what was verified for each; `check` tests a checkpoint.
    """
    from kamera_cli.model.architectures import ARCHITECTURES

    if session.subcommand is None:
        rows = [dataclasses.asdict(architecture) for architecture in ARCHITECTURES]
        session.output.result("models", {"architectures": rows}, list_view)


@app.command("check", epilog=EPILOG)
@command
def check(
    session: Session,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A checkpoint's folder or name")],
) -> None:
    """Load a checkpoint and compare capture, positions and relocation with its own cold prefill."""
    session = dataclasses.replace(session, settings=dataclasses.replace(session.settings, model=directory))
    with session.engine(creates_store=True) as engine:
        report = engine.self_test()
    payload = {
        "model": directory,
        "ok": report.ok,
        "checks": [dataclasses.asdict(item) for item in report.checks],
    }
    session.output.result("models-check", payload, lambda: check_view(directory, report))
    if not report.ok:
        failed = "; ".join(f"{item.name}: {item.detail}" for item in report.checks if not item.ok)
        raise RefusedError(
            f"{directory} does not pass its self-test ({failed}); kamera will not store its KV"
        )


def list_view() -> Iterable[RenderableType]:
    """What people see of the list."""
    from kamera_cli.model.architectures import ARCHITECTURES, NOTES

    yield table(
        ("model_type", "architecture", "attention", "media", "RoPE", "verified", "note"),
        (
            (
                entry.model_type,
                entry.name,
                entry.family,
                " ".join(entry.media),
                entry.layout or "plain",
                entry.suite,
                entry.note,
            )
            for entry in ARCHITECTURES
        ),
    )
    yield from NOTES


def check_view(directory: str, report: SelfTest) -> Iterable[RenderableType]:
    """What people see of a self-test."""
    yield table(
        ("check", "result", "detail"),
        ((item.name, "ok" if item.ok else "failed", item.detail) for item in report.checks),
    )
    passed = sum(item.ok for item in report.checks)
    yield f"{display(directory)}: {passed} of {count(len(report.checks), 'check')} passed"
