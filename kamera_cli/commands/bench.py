"""``kamera bench``: measure the method on this machine and write the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kamera_cli.bench import RIVALS, SUITES, BenchOptions
from kamera_cli.bench.figures import BenchResult
from kamera_cli.commands.session import Session, command
from kamera_cli.errors import UsageError
from kamera_cli.words import count, display, table

if TYPE_CHECKING:
    from rich.console import RenderableType


@command
def bench(
    session: Session,
    suites: Annotated[
        list[str] | None,
        typer.Argument(metavar="SUITE", help=f"{', '.join(SUITES)} or all", show_default=False),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder for JSON, pictures and the HTML report")
    ] = Path("kamera-bench"),
    rivals: Annotated[
        str | None,
        typer.Option(
            "--rivals",
            metavar="LIST",
            help=f"Measure beside: {', '.join(RIVALS)}, all or none  [default: all]",
        ),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option("--ranks", metavar="LIST", help="Ranks to measure, as in 4,8,16")
    ] = None,
    geometry: Annotated[
        str | None,
        typer.Option("--geometry", metavar="NAME", help="Time a model of this shape, with random weights"),
    ] = None,
    episodes: Annotated[
        int | None, typer.Option("--episodes", metavar="N", min=1, help="How many episodes")
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, help="Of episodes, orders and random weights")
    ] = 0,
) -> None:
    """Measure the method on this machine.

    Writes JSON, pictures and one HTML report; the store is not touched.
    """
    chosen = choose_suites(suites or [], SUITES)
    options = BenchOptions(
        out=out,
        rivals=parse_list(rivals),
        ranks=parse_ranks(ranks),
        geometry=geometry,
        episodes=episodes,
        seed=seed,
    )
    from kamera_cli.bench.runner import run

    with session.output.working() as on_progress:
        result = run(chosen, session.settings, options, on_progress)
    document = result.to_json()
    document["total_ms"] = document.pop("total_s") * 1000
    session.output.result("bench", document, lambda: view(result, out))


def choose_suites(names: list[str], available: Mapping[str, object]) -> tuple[str, ...]:
    """The suites to run, in the module's own order; none named, or ``all``, means all of them.

    Raises
    ------
    UsageError
        On a name that is no suite.
    """
    unknown = [name for name in names if name != "all" and name not in available]
    if unknown:
        raise UsageError(f"no suite {unknown[0]!r}; there are: {', '.join(available)}, all")
    if not names or "all" in names:
        return tuple(available)
    return tuple(name for name in available if name in names)


def parse_list(text: str | None) -> tuple[str, ...]:
    """The items of ``a,b``."""
    return () if text is None else tuple(item.strip() for item in text.split(",") if item.strip())


def parse_ranks(text: str | None) -> tuple[int, ...]:
    """The ranks of ``4,8,16``.

    Raises
    ------
    UsageError
        If one is no whole number from 1 up.
    """
    items = parse_list(text)
    for item in items:
        if not item.isascii() or not item.isdigit() or int(item) < 1:
            raise UsageError(f"--ranks {text!r}: {item!r} is no whole number from 1 up")
    return tuple(int(item) for item in items)


def view(result: BenchResult, out: Path) -> Iterable[RenderableType]:
    """What people see: each suite's sentence and tables, then where the files lie."""
    for suite in result.suites:
        yield f"{suite.name}: {display(suite.headline)}"
        for part in suite.tables:
            yield ""
            yield display(part.title)
            yield table(part.columns, part.rows)
            yield from (display(note) for note in part.notes)
        yield ""
    yield from (display(note) for note in result.notes)
    names = ", ".join(display(Path(file).name) for file in result.files)
    yield f"{count(len(result.files), 'file')} in {display(out)}: {names}"
