"""``kamera show``: what is stored of one chunk, patch or source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kamera_cli.commands.session import Session, WindowOption, command
from kamera_cli.errors import NotFoundError, UsageError
from kamera_cli.trust import proven_energy
from kamera_cli.words import brief_numbers, display, format_bytes, in_ms, short_id, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kamera_store import KVStore, Record


_MAX_COLUMNS = 12
"""Layers that are shown side by side."""


@command
def show(
    session: Session,
    item: Annotated[
        str, typer.Argument(metavar="CHUNK", help="Number, name or id; also the id of a patch or a source")
    ],
    window: WindowOption = "default",
) -> None:
    """Show what is stored of a chunk."""
    with session.store() as store:
        record = find(store, session.settings.tenant, window, item)
        patches = store.patches_of(record.key) if record.kind == "chunk" else []
        numbers = numbers_in(store, session.settings.tenant, window)
    session.output.result("show", payload(record, patches), lambda: view(record, patches, numbers))


def numbers_in(store: KVStore, tenant: str, window: str) -> dict[str, int]:
    """Number of each chunk of a window by its id; nothing where there is no such window."""
    from kamera_cli.window import list_windows

    found = [view for view in list_windows(store, tenant) if view.name == window]
    return {entry.chunk: entry.number for view in found for entry in (*view.entries, *view.evicted)}


def find(store: KVStore, tenant: str, window: str, item: str) -> Record:
    """The record behind a window's number or name, or behind an id prefix of four characters or more.

    Raises
    ------
    NotFoundError
        If nothing fits.
    UsageError
        If more than one thing fits.
    """
    from kamera_cli.window import list_windows, pick

    for view in list_windows(store, tenant):
        entries = (*view.entries, *view.evicted)
        if view.name == window and any(item in (str(entry.number), entry.name) for entry in entries):
            entry = pick(entries, [item], f"window {window}")[0]
            record = store.get(bytes.fromhex(entry.chunk))
            if record is None:
                raise NotFoundError(
                    f"chunk {item!r} of window {window!r} is no longer in the store; ingest it again"
                )
            return record
    found = store.resolve(item.lower(), tenant=tenant) if is_prefix(item) else []
    if not found:
        raise NotFoundError(
            f"nothing called {item!r} in window {window!r} or in the store; `kamera ls --all` lists it"
        )
    if len(found) > 1:
        raise UsageError(f"{item!r} fits {len(found)} entries; give more characters of the id")
    return found[0]


def is_prefix(text: str) -> bool:
    """Whether ``text`` can be the start of an id: four or more hexadecimal digits."""
    return 4 <= len(text) <= 32 and all(char in "0123456789abcdef" for char in text.lower())


def payload(record: Record, patches: Sequence[Record]) -> dict[str, object]:
    """The fields of ``kamera.show.v1``."""
    return {
        "id": record.id,
        "kind": record.kind,
        "digest": record.digest,
        "tenant": record.tenant,
        "unit": record.unit,
        "created_ms": round(record.created_s * 1000),
        "cost_ms": record.cost_ms,
        "raw_bytes": record.raw_bytes,
        "stored_bytes": record.stored_bytes,
        "num_layers": record.num_layers,
        "meta": meta_in_ms(record.meta),
        "tensors": [
            {
                "name": info.name,
                "layer": info.layer,
                "dtype": info.dtype,
                "shape": info.shape,
                "raw_bytes": info.raw_bytes,
                "stored_bytes": info.stored_bytes,
                "codec": info.codec,
                "checksum": f"{info.checksum:016x}",
            }
            for info in record.tensors
        ],
        "patches": [patch.id for patch in patches],
        "splits": [split(patch) for patch in ([record] if record.kind == "patch" else patches)],
    }


def split(patch: Record) -> dict[str, object]:
    """How the directions of a patch are spread over layers: ranks of its two tensors, and energy, per layer."""
    meta = patch.meta
    return {
        "patch": patch.id,
        "kind": meta["kind"],
        "antecedents": meta["antecedents"],
        "ranks": meta.get("split") or [[rank, rank] for rank in meta["ranks"]],
        "energy": meta["energy"],
        "energy_weighted": meta.get("energy_weighted"),
        "energy_in_orders": meta.get("energy_in_orders"),
        "proven_energy": proven_energy(meta),
        "kl": meta.get("kl"),
        "bits": (meta.get("factors") or {}).get("bits"),
        "raw_bytes": patch.raw_bytes,
        "stored_bytes": patch.stored_bytes,
    }


def meta_in_ms(value: object) -> object:
    """``value`` with every ``*_s`` field of seconds turned into ``*_ms``, as all JSON output has it."""
    if isinstance(value, Mapping):
        return dict(in_ms(name, meta_in_ms(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return [meta_in_ms(item) for item in value]
    return value


def view(
    record: Record, patches: Sequence[Record], numbers: Mapping[str, int] | None = None
) -> Iterable[RenderableType]:
    """What people see; chunks by their number in the window where they have one."""
    shown = record.meta if numbers is None else _with_numbers(record.meta, numbers)
    yield f"{record.kind} {record.id}  {display(record.meta.get('name', ''))}".rstrip()
    yield table(
        ("", ""),
        [(name, _brief(value)) for name, value in shown.items() if name != "name"]
        + [("size", f"{format_bytes(record.raw_bytes)}, stored in {format_bytes(record.stored_bytes)}")]
        + [("patches", str(len(patches) or "none"))] * (record.kind == "chunk"),
        header=False,
    )
    found = [split(patch) for patch in ([record] if record.kind == "patch" else patches)]
    if found:
        yield ""
        yield from split_view(found, numbers or {})
    yield ""
    yield table(
        (">layer", "tensor", "dtype", "shape", ">raw", ">stored", "codec"),
        (
            (
                "–" if info.layer < 0 else info.layer,
                info.name,
                info.dtype,
                "x".join(str(size) for size in info.shape),
                format_bytes(info.raw_bytes),
                format_bytes(info.stored_bytes),
                info.codec,
            )
            for info in record.tensors
        ),
    )


def _with_numbers(meta: Mapping, numbers: Mapping[str, int]) -> dict:
    """A patch's meta with chunks by their number where the window knows them, and by a short id otherwise."""

    def called(value: str) -> str:
        return str(numbers.get(value) or short_id(value))

    named = {name: called(value) for name, value in meta.items() if name == "chunk"}
    listed = {name: [called(one) for one in meta[name]] for name in ("antecedents",) if name in meta}
    return {**meta, **named, **listed}


def split_view(found: Sequence[dict], numbers: Mapping[str, int] | None = None) -> Iterable[RenderableType]:
    """Ranks of each patch's two tensors by layer, one row per patch.

    Parameters
    ----------
    numbers : mapping, optional
        Number of a chunk by its id, for the antecedents.
    """
    known = numbers or {}
    num_layers = max(len(patch["ranks"]) for patch in found)
    wide = num_layers > _MAX_COLUMNS
    yield table(
        (
            "patch",
            "kind",
            "after",
            *(("ranks",) if wide else (f">{layer}" for layer in range(num_layers))),
            ">energy",
            ">size",
        ),
        (
            (
                short_id(patch["patch"]),
                patch["kind"],
                _after(patch, known),
                *((_runs(patch["ranks"]),) if wide else _columns(patch["ranks"], num_layers)),
                f"{100 * patch['proven_energy']:.1f} %",
                format_bytes(patch["stored_bytes"]),
            )
            for patch in found
        ),
    )
    yield (
        "ranks by layer, of what RoPE turns and of what it does not; energy: weighted by what each layer is "
        "worth to the output where that was measured, of the worst layer otherwise; of an orbit patch what it holds "
        "in the worst order that was measured, where that is less"
    )


def _after(patch: Mapping, numbers: Mapping[str, int]) -> str:
    after = [numbers.get(chunk, 0) for chunk in patch["antecedents"]]
    return brief_numbers(sorted(after) if patch["kind"] == "orbit" else after)


def _columns(ranks: Sequence[Sequence[int]], count: int) -> list[str]:
    cells = [f"{rotary}/{plain}" for rotary, plain in ranks]
    return cells + [""] * (count - len(cells))


def _runs(ranks: Sequence[Sequence[int]]) -> str:
    """``0-3: 0/0, 4: 5/6``: layers in a row with the same ranks stand together."""
    parts, first = [], 0
    for layer in range(1, len(ranks) + 1):
        if layer == len(ranks) or list(ranks[layer]) != list(ranks[first]):
            span = str(first) if first == layer - 1 else f"{first}-{layer - 1}"
            parts.append(f"{span}: {ranks[first][0]}/{ranks[first][1]}")
            first = layer
    return ", ".join(parts)


def _brief(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_brief(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        shown = " ".join(_brief(item) for item in value[:8])
        return shown + (f" … ({len(value)})" if len(value) > 8 else "")
    return f"{value:g}" if isinstance(value, float) else str(value)
