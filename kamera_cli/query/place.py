"""``--place``: which order of the chunks reads the fewest bytes of patches and rebuilds none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kamera_cli.library import FindPatch, Library
from kamera_cli.operator.placement import best_order
from kamera_cli.options import QueryOptions
from kamera_cli.results import Placed, WindowEntry
from kamera_cli.trust import AUTO_MAX_KL, Offer, StoredKind, refusal
from kamera_cli.window import Chain, identity_of
from kamera_store.format.keys import Identity
from kamera_store.format.records import Record


@dataclass(frozen=True)
class StoredOffer:
    """An offer and the records that are read for it."""

    offer: Offer
    records: tuple[Record, ...]


def best_placed(
    library: Library,
    entries: tuple[WindowEntry, ...],
    options: QueryOptions,
    offers: Callable[[FindPatch, Identity, Chain], Sequence[StoredOffer]],
) -> tuple[tuple[WindowEntry, ...], Placed]:
    """The order that reads the fewest bytes of patches and rebuilds none; the given one where there is none.

    Parameters
    ----------
    offers : callable
        What there is for a chunk after antecedents in an order, best first.
    """
    by_identity = {identity_of(entry): entry for entry in entries}
    bound = AUTO_MAX_KL if options.max_kl is None and options.reuse == "auto" else options.max_kl
    prices: dict[tuple[bytes, tuple[bytes, ...] | frozenset[bytes]], int | None] = {}
    known = _PatchIndex(library, tuple(by_identity))

    def price(chunk: Identity, before: tuple[Identity, ...]) -> int | None:
        if not before:
            return 0
        keys = tuple(one.key for one in before)
        # Only exact patches go by order: what an orbit or pairs give is the same for every order of a set.
        ordered_by = keys if known.has_exact(chunk, before) else frozenset(keys)
        if (chunk.key, ordered_by) not in prices:
            usable = (
                sum(record.stored_bytes for record in stored.records)
                for stored in offers(known.find_patch, chunk, before)
                if refusal(stored.offer, options.reuse, bound) is None
            )
            prices[chunk.key, ordered_by] = next(usable, None)
        return prices[chunk.key, ordered_by]

    given = tuple(by_identity)
    costs = [price(chunk, given[:index]) for index, chunk in enumerate(given)]
    best = best_order(given, price)
    order = given if best is None else best[0]
    placed = Placed(
        order=tuple(by_identity[chunk].number for chunk in order),
        patch_bytes=None if best is None else best[1],
        given_misses=costs.count(None),
        given_patch_bytes=sum(cost for cost in costs if cost is not None),
    )
    return tuple(by_identity[chunk] for chunk in order), placed


class _PatchIndex:
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
        self._patches: dict[tuple[bytes, str, tuple[str, ...]], Record | None] = {}

    def has_exact(self, chunk: Identity, antecedents: Sequence[Identity]) -> bool:
        """Whether there is an exact patch for this order."""
        return (chunk.key, "exact", tuple(one.id for one in antecedents)) in self._stored

    def find_patch(self, chunk: Identity, antecedents: Sequence[Identity], kind: StoredKind) -> Record | None:
        """See `kamera_cli.library.Library.find_patch`."""
        asked = chunk.key, kind, _named((one.id for one in antecedents), kind)
        if asked not in self._stored:
            return None
        if asked not in self._patches:
            self._patches[asked] = self._library.find_patch(chunk, antecedents, kind)
        return self._patches[asked]


def _named(antecedents: Iterable[str], kind: str) -> tuple[str, ...]:
    return tuple(sorted(antecedents) if kind == "orbit" else antecedents)
