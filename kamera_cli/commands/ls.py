"""``kamera ls``: the windows of a tenant and their chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kamera_cli.commands.session import Session, command
from kamera_cli.results import WindowEntry, WindowView
from kamera_cli.words import brief_numbers, count, display, format_bytes, short_id, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kamera_store import KVStore, Record


@dataclass(frozen=True)
class Listed:
    """A chunk as it is listed: its window entry where it has one, its record where the store still holds it."""

    id: str
    name: str
    number: int
    num_tokens: int
    state: str
    conditioned_on: tuple[str, ...]
    num_patches: int
    stored_bytes: int | None
    kind: str | None


@command
def ls(
    session: Session,
    window: Annotated[str | None, typer.Option("--window", metavar="NAME", help="Only this window")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also chunks that no window holds")] = False,
) -> None:
    """List windows and their chunks."""
    from kamera_cli.window import list_windows, load_window

    tenant = session.settings.tenant
    with session.store() as store:
        windows = (load_window(store, tenant, window),) if window is not None else list_windows(store, tenant)
        listed = [(view, [_entry(store, entry, state) for entry, state in _rows(view)]) for view in windows]
        held = {entry.chunk for view in windows for entry in (*view.entries, *view.evicted)}
        loose = [
            _loose(store, record)
            for record in store.iterate("chunk", tenant)
            if everything and record.id not in held
        ]
    session.output.result(
        "ls",
        payload(tenant, listed, loose if everything else None),
        lambda: view_all(listed, loose, everything),
    )


def payload(
    tenant: str, listed: Sequence[tuple[WindowView, Sequence[Listed]]], loose: Sequence[Listed] | None
) -> dict[str, object]:
    """The fields of ``kamera.ls.v1``."""
    document: dict[str, object] = {
        "tenant": tenant,
        "windows": [
            {"name": view.name, "fingerprint": view.fingerprint, "chunks": chunks} for view, chunks in listed
        ],
    }
    return document if loose is None else document | {"in_no_window": loose}


def view_all(
    listed: Sequence[tuple[WindowView, Sequence[Listed]]], loose: Sequence[Listed], everything: bool
) -> Iterable[RenderableType]:
    """What people see: a table for each window."""
    for view, chunks in listed:
        yield f"window {display(view.name)}: {count(len(view.entries), 'chunk')}"
        yield _table(chunks)
    if everything and loose:
        yield f"in no window: {count(len(loose), 'chunk')}"
        yield _table(loose)
    if not listed and not loose:
        yield "no window yet; `kamera ingest FILE` makes one"


def _rows(view: WindowView) -> Iterable[tuple[WindowEntry, str]]:
    yield from ((entry, "in window") for entry in view.entries)
    yield from ((entry, "evicted") for entry in view.evicted)


def _entry(store: KVStore, entry: WindowEntry, state: str) -> Listed:
    key = bytes.fromhex(entry.chunk)
    record = store.get(key)
    return Listed(
        id=entry.chunk,
        name=entry.name,
        number=entry.number,
        num_tokens=entry.num_tokens,
        state=state if record is not None else "gone from the store",
        conditioned_on=entry.conditioned_on,
        num_patches=len(store.patches_of(key)),
        stored_bytes=None if record is None else record.stored_bytes,
        kind=None if record is None else record.meta.get("kind"),
    )


def _loose(store: KVStore, record: Record) -> Listed:
    return Listed(
        id=record.id,
        name=str(record.meta.get("name", "")),
        number=0,
        num_tokens=int(record.meta.get("num_tokens", 0)),
        state="in no window",
        conditioned_on=(),
        num_patches=len(store.patches_of(record.key)),
        stored_bytes=record.stored_bytes,
        kind=record.meta.get("kind"),
    )


def _table(chunks: Sequence[Listed]) -> RenderableType:
    numbers = {chunk.id: chunk.number for chunk in chunks}
    return table(
        (">#", "chunk", "id", "kind", ">tokens", "state", "conditioned on", ">patches", ">stored"),
        (
            (
                chunk.number or "–",
                chunk.name,
                short_id(chunk.id),
                chunk.kind or "–",
                chunk.num_tokens,
                chunk.state,
                brief_numbers([numbers.get(key, 0) for key in chunk.conditioned_on]),
                chunk.num_patches or "–",
                format_bytes(chunk.stored_bytes),
            )
            for chunk in chunks
        ),
    )
