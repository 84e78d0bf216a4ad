"""Windows: ordered chunks with the antecedents that each is conditioned on, and how the store keeps them.

What changes a window is a pure function of `kamera_cli.window_changes`; `update_window` applies it to the stored one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kamera_cli.errors import NotFoundError, UsageError
from kamera_cli.results import WindowEntry, WindowView
from kamera_cli.settings import checked_name
from kamera_store.errors import ConflictError
from kamera_store.format.keys import Identity
from kamera_store.kvstore import KVStore

SPACE = "window"
"""State space of the store that holds windows, under ``<tenant>/<name>``."""

_RETRIES = 20

Chain = tuple[Identity, ...]
"""Chunks in the order in which a conditioned forward prefills them; the last one is conditioned on the others."""


@dataclass(frozen=True)
class Conditioned:
    """A chunk of an arrangement and its antecedents in order; None when one of them is known to nobody any more."""

    entry: WindowEntry
    antecedents: Chain | None

    @property
    def chain(self) -> Chain:
        """The antecedents and the chunk itself. Only for a chunk whose antecedents are known."""
        assert self.antecedents is not None
        return (*self.antecedents, identity_of(self.entry))


def identity_of(entry: WindowEntry) -> Identity:
    """Key and proof of the chunk that a window entry means."""
    return Identity("chunk", bytes.fromhex(entry.chunk), bytes.fromhex(entry.digest))


def pick(entries: Sequence[WindowEntry], names: Sequence[str], where: str) -> tuple[WindowEntry, ...]:
    """Entries by number, name, or id prefix, in the order asked for.

    Raises
    ------
    NotFoundError
        No entry fits, naming what there is.
    UsageError
        More than one entry fits, or one is named twice.
    """
    chosen: list[WindowEntry] = []
    for name in names:
        fits = [entry for entry in entries if str(entry.number) == name or entry.name == name]
        if not fits and len(name) >= 4:
            fits = [entry for entry in entries if entry.chunk.startswith(name.lower())]
        if not fits:
            there = ", ".join(str(entry.number) for entry in entries) or "none"
            raise NotFoundError(f"no chunk {name!r} in {where} (chunks there: {there})")
        if len(fits) > 1:
            raise UsageError(f"{name!r} fits {len(fits)} chunks in {where}; use a number or a longer id")
        if fits[0] in chosen:
            raise UsageError(f"chunk {name!r} is named twice")
        chosen.append(fits[0])
    return tuple(chosen)


def ordered(window: WindowView, chunks: Sequence[str] | None) -> tuple[WindowEntry, ...]:
    """Entries of a window in the order asked for; in its own order for None.

    Raises
    ------
    UsageError
        The window is empty, or a chunk is named twice.
    NotFoundError
        No such chunk.
    """
    if not window.entries:
        raise UsageError(f"window {window.name!r} is empty; put chunks back with recall, or ingest a source")
    if chunks is None:
        return window.entries
    if not chunks:
        raise UsageError("--chunks names no chunk")
    refuse_what_left(window, chunks, "put it back with: kamera recall {name}")
    return pick(window.entries, chunks, f"window {window.name!r}")


def conditioning(
    window: WindowView, entries: Sequence[WindowEntry], *, given_order: bool
) -> list[Conditioned]:
    """What each chunk is conditioned on: what stands before it in a given order, or what its window remembers."""
    if given_order:
        identities = [identity_of(entry) for entry in entries]
        return [Conditioned(entry, tuple(identities[:index])) for index, entry in enumerate(entries)]
    known = {entry.chunk: identity_of(entry) for entry in (*window.entries, *window.evicted)}
    return [
        Conditioned(entry, tuple(known[key] for key in entry.conditioned_on))
        if all(key in known for key in entry.conditioned_on)
        else Conditioned(entry, None)
        for entry in entries
    ]


def refuse_what_left(window: WindowView, names: Sequence[str], what: str) -> None:
    """Say so where a number means a chunk that the window no longer holds.

    Parameters
    ----------
    what : str
        What to do about it; ``{name}`` stands for the number.

    Raises
    ------
    NotFoundError
    """
    present = {str(entry.number) for entry in window.entries}
    gone = {str(entry.number) for entry in window.evicted}
    for name in names:
        if name not in present and name in gone:
            raise NotFoundError(f"chunk {name} has left window {window.name!r}; {what.format(name=name)}")


def load_window(store: KVStore, tenant: str, name: str) -> WindowView:
    """A stored window.

    Raises
    ------
    NotFoundError
        There is no window of that name for this tenant.
    """
    state = store.get_state(SPACE, _state_name(tenant, name))
    if state is None:
        raise NotFoundError(f"no window {name!r}; make one with: kamera ingest SOURCE --window {name}")
    return _from_json(state.value)


def list_windows(store: KVStore, tenant: str) -> tuple[WindowView, ...]:
    """All windows of a tenant, by name."""
    prefix = f"{tenant}/"
    names = [name[len(prefix) :] for name in store.list_state(SPACE) if name.startswith(prefix)]
    return tuple(load_window(store, tenant, name) for name in sorted(names))


def update_window(
    store: KVStore,
    tenant: str,
    name: str,
    change: Callable[[WindowView], WindowView],
    *,
    fingerprint: str | None = None,
) -> WindowView:
    """Apply a pure change to a stored window, again if another process changed it meanwhile.

    Parameters
    ----------
    fingerprint : str or None
        Given: a window that does not exist yet is started for this model. None: it must exist.
    """
    for attempt in range(_RETRIES):
        state = store.get_state(SPACE, _state_name(tenant, name))
        if state is not None:
            current = _from_json(state.value)
        elif fingerprint is not None:
            current = WindowView(name, tenant, fingerprint)
        else:
            return load_window(store, tenant, name)  # which says that there is none
        changed = change(current)
        if state is not None and changed == current:
            return current
        try:
            store.put_state(
                SPACE,
                _state_name(tenant, name),
                asdict(changed),
                expect=None if state is None else state.version,
            )
            return changed
        except ConflictError:
            if attempt == _RETRIES - 1:
                raise
    raise AssertionError("unreachable")


def _state_name(tenant: str, name: str) -> str:
    """Name of a window's state; ``a`` with ``b/c`` and ``a/b`` with ``c`` must not meet."""
    return f"{checked_name('tenant', tenant)}/{checked_name('window', name)}"


def _from_json(value: Mapping[str, Any]) -> WindowView:
    def entries(rows: Sequence[Mapping[str, Any]]) -> tuple[WindowEntry, ...]:
        return tuple(WindowEntry(**{**row, "conditioned_on": tuple(row["conditioned_on"])}) for row in rows)

    return WindowView(
        value["name"],
        value["tenant"],
        value["fingerprint"],
        entries(value["entries"]),
        entries(value["evicted"]),
        value["next_number"],
    )
