"""``kamera ingest``: cut media into chunks, encode each once, store them and append them to a window."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from kamera_cli.commands.session import Session, WindowOption, command
from kamera_cli.errors import KameraError, PartialFailure
from kamera_cli.options import DEFAULT_WINDOW, IngestOptions
from kamera_cli.results import IngestedChunk, IngestedSource, IngestResult, SourceFailure
from kamera_cli.words import count, display, format_bytes, format_ms, short_id, table

if TYPE_CHECKING:
    from rich.console import RenderableType


@command
def ingest(
    session: Session,
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE", help="Videos, images (also of PDF pages) or text files")
    ],
    window: WindowOption = DEFAULT_WINDOW,
    fps: Annotated[
        float, typer.Option("--fps", metavar="RATE", help="Frames taken from each second of a video")
    ] = IngestOptions.fps,
    chunk_seconds: Annotated[
        float, typer.Option("--chunk-seconds", metavar="SECONDS", help="Length of a chunk of video")
    ] = IngestOptions.chunk_seconds,
    max_pixels: Annotated[
        int | None,
        typer.Option(
            "--max-pixels", metavar="N", help="Shrink each frame or image to at most this many pixels"
        ),
    ] = None,
    chunk_tokens: Annotated[
        int, typer.Option("--chunk-tokens", metavar="N", help="Length of a chunk of text")
    ] = IngestOptions.chunk_tokens,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="TEXT", help="Call the chunks this, not by the file's name"),
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Keep the sources that work when others fail")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done and how large it is")
    ] = False,
) -> None:
    """Encode media into chunks and keep them.

    A chunk that the store already has is found, not encoded again; a file that was ingested before with the same
    settings is neither decoded nor encoded.
    """
    options = IngestOptions(
        window=window,
        fps=fps,
        chunk_seconds=chunk_seconds,
        max_pixels=max_pixels,
        chunk_tokens=chunk_tokens,
        name=name,
        partial=partial,
        dry_run=dry_run,
    )
    options.checked_sources(sources)
    with session.engine(creates_store=True) as engine:
        result = engine.ingest(sources, options)
    if result.sources or session.output.json_mode:
        session.output.result("ingest", result, lambda: view(result))
    report_failures(session, result, partial=partial)


def report_failures(session: Session, result: IngestResult, *, partial: bool) -> None:
    """One line for each source that did not go in; raises unless ``partial`` allows it.

    Raises
    ------
    KameraError, PartialFailure
        If a source failed and not (``partial`` and another one is in).
    """
    lines = [failure_line(failure) for failure in result.failures]
    if not lines:
        return
    if partial and result.sources:
        for line in lines:
            session.output.warn(line)
        return
    if len(lines) == 1:
        raise PartialFailure(lines[0]) if result.sources else KameraError(lines[0])
    for line in lines[:-1]:
        session.output.error(line)
    raise PartialFailure(lines[-1])


def failure_line(failure: SourceFailure) -> str:
    """``path: reason``, the path once."""
    return failure.reason if failure.path in failure.reason else f"{failure.path}: {failure.reason}"


def view(result: IngestResult) -> Iterable[RenderableType]:
    """What people see."""
    for source in result.sources:
        yield f"{display(source.path)}  {_source_line(source)}"
        for note in source.notes:
            yield f"  {display(note)}"
    yield table(
        (">#", "chunk", "id", "span", ">tokens", "outcome", ">raw", ">stored"),
        (
            (
                chunk.number or "–",
                chunk.name,
                short_id(chunk.id),
                _span(chunk),
                chunk.num_tokens,
                chunk.outcome,
                format_bytes(chunk.raw_bytes),
                format_bytes(chunk.stored_bytes or None),
            )
            for chunk in result.chunks
        ),
    )
    outcomes = ", ".join(f"{number} {outcome}" for outcome, number in result.counts.items() if number)
    where = "nothing was written" if result.dry_run else f"window {display(result.window)}"
    yield f"{count(len(result.chunks), 'chunk')} ({outcomes or 'none'}) in {format_ms(result.total_ms)}; {where}"


def _source_line(source: IngestedSource) -> str:
    if source.from_index:
        return f"{source.kind}, known: neither decoded nor encoded"
    stages = (
        ("decode", source.decode_ms),
        ("vision", source.encode_ms),
        ("prefill", source.prefill_ms),
        ("write", source.write_ms),
    )
    times = " · ".join(f"{name} {format_ms(spent)}" for name, spent in stages if spent)
    return source.kind + (f", {times}" if times else "")


def _span(chunk: IngestedChunk) -> str:
    if chunk.start_s is None or chunk.end_s is None:
        return "–"
    return f"{chunk.start_s:g}–{chunk.end_s:g} s"
