"""What the store has for a chunk after its antecedents: offers for the plan, and how each is put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kamera_cli.operator.compose import compose
from kamera_cli.operator.patch import LayerPatch
from kamera_cli.operator.plan import Offer
from kamera_cli.operator.ranks import proven_energy
from kamera_cli.patches.pairs import composed_offer, gain_of

if TYPE_CHECKING:
    from kamera_cli.library import Library
    from kamera_cli.window import Chain
    from kamera_store.format.keys import Identity
    from kamera_store.format.records import Record


class Listing:
    """The library's patches of some chunks, listed once: the same answers, for a search that asks after many orders.

    A question for what is not there costs no look into the store, and no question is put to it twice.
    """

    def __init__(self, library: Library, chunks: Sequence[Identity]) -> None:
        self._library = library
        self._stored = {
            (chunk.key, record.meta["kind"], _named(record.meta["antecedents"], record.meta["kind"]))
            for chunk in chunks
            for record in library.store.patches_of(chunk.key, tenant=library.tenant)
        }
        self._patches: dict[tuple, Record | None] = {}

    def has_exact(self, chunk: Identity, antecedents: Sequence[Identity]) -> bool:
        """Whether there is an exact patch for this order."""
        return (chunk.key, "exact", tuple(one.id for one in antecedents)) in self._stored

    def find_patch(self, chunk: Identity, antecedents: Sequence[Identity], kind: str) -> Record | None:
        """See `kamera_cli.library.Library.find_patch`."""
        asked = chunk.key, kind, _named((one.id for one in antecedents), kind)
        if asked not in self._stored:
            return None
        if asked not in self._patches:
            self._patches[asked] = self._library.find_patch(chunk, antecedents, kind)
        return self._patches[asked]


def _named(antecedents: Iterable[str], kind: str) -> tuple[str, ...]:
    return tuple(sorted(antecedents) if kind == "orbit" else antecedents)


@dataclass(frozen=True)
class StoredOffer:
    """An offer and the records that are read for it."""

    offer: Offer
    records: tuple[Record, ...]


def offers(library: Library | Listing, chunk: Identity, antecedents: Chain) -> tuple[StoredOffer, ...]:
    """Patches for a chunk after antecedents in this order, best first: exact, orbit, composed of pairs."""
    found = []
    for kind in ("exact", "orbit"):
        patch = library.find_patch(chunk, antecedents, kind)
        if patch is not None:
            offer = Offer((patch.key,), kind, patch.meta["kl"], proven_energy(patch.meta))
            found.append(StoredOffer(offer, (patch,)))
    composed = composed_offer(library, chunk, antecedents) if len(antecedents) > 1 else None
    if composed is not None:
        keys = tuple(record.key for record in composed.records)
        offer = Offer(keys, "composed", composed.kl, composed.energy)
        found.append(StoredOffer(offer, tuple(composed.records)))
    return tuple(found)


def merged(restored: Sequence[LayerPatch], parts: Sequence[Record]) -> LayerPatch | None:
    """One layer of a chunk's patch from what was read for it."""
    if not restored:
        return None
    return restored[0] if len(restored) == 1 else compose(restored, gain=gain_of(parts))
