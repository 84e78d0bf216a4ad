"""A chunk in memory: all that forming a patch needs of it, wherever it came from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kamera_cli.library import require_record
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.inputs import Segment
from kamera_store.format.keys import Identity
from kamera_store.format.records import Record

if TYPE_CHECKING:
    from kamera_cli.context import Context


@dataclass(frozen=True, eq=False)
class Chunk:
    """One chunk; equal to itself alone, so that it can name what belongs to it in a dictionary.

    Attributes
    ----------
    segment : Segment
        Embeddings and relative positions: what a prefill starts from.
    canonical : list of LayerKV
        Position-free KV of its T tokens behind the preamble alone, per layer.
    record : Record or None
        Where it is stored, if it is.
    """

    segment: Segment
    canonical: list[LayerKV]
    record: Record | None = None

    @property
    def stored(self) -> Record:
        """The record of a chunk that came from a store."""
        assert self.record is not None, "the chunk was never stored"
        return self.record


ChunkChain = tuple[Chunk, ...]
"""Chunks in the order in which a conditioned forward prefills them; the last one is conditioned on the others."""


def read_chunks(context: Context, links: Iterable[Identity]) -> dict[Identity, Chunk]:
    """Chunks of the store, each read once.

    Raises
    ------
    NotFoundError
        One is gone from the store; nothing has been read then.
    """
    library = context.library
    records = {link: require_record(library, link, context.label(link)) for link in dict.fromkeys(links)}
    return {
        link: Chunk(library.segment(record), library.layers(record), record)
        for link, record in records.items()
    }
