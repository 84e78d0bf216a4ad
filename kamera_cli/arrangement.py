"""What compile, query and recall share: an order of chunks, and what each is to be conditioned on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kamera_cli.errors import NotFoundError, UsageError
from kamera_cli.library import Library, identity_of
from kamera_cli.results import WindowEntry, WindowView
from kamera_cli.window import pick, refuse_what_left
from kamera_store.format.keys import Identity
from kamera_store.format.records import Record

Chain = tuple[Identity, ...]
"""Chunks in the order in which a conditioned forward prefills them; the last one is conditioned on the others."""


@dataclass(frozen=True)
class Conditioned:
    """A chunk of an arrangement and its antecedents in order; None when one of them is known to nobody any more."""

    entry: WindowEntry
    antecedents: Chain | None

    @property
    def chain(self) -> Chain | None:
        return None if self.antecedents is None else (*self.antecedents, identity_of(self.entry))


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


def maximal(chains: Sequence[Chain]) -> list[Chain]:
    """Chains that are no prefix of another one: a forward over these conditions every chunk of all of them."""
    distinct = list(dict.fromkeys(chains))
    return [
        chain
        for chain in distinct
        if not any(len(other) > len(chain) and other[: len(chain)] == chain for other in distinct)
    ]


def require_record(library: Library, identity: Identity, label: str) -> Record:
    """The record of a chunk.

    Raises
    ------
    NotFoundError
        It was evicted from the store.
    """
    record = library.store.find(identity, tenant=library.tenant)
    if record is None:
        raise NotFoundError(f"chunk {label} is no longer in the store; ingest its source again")
    return record
