"""From a request to a plan: which chunks in which order, what the store offers for each, what is used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kamera_cli.library import FindPatch, Library, require_record
from kamera_cli.operator.compose import compose
from kamera_cli.operator.patch import LayerPatch
from kamera_cli.operator.placement import best_order
from kamera_cli.operator.plan import Action, Plan, Wanted, plan
from kamera_cli.options import QueryOptions, Reuse
from kamera_cli.patches.pairs import composed_offer, gain_of
from kamera_cli.results import Placed, WindowEntry, WindowView
from kamera_cli.trust import AUTO_MAX_KL, Offer, StoredKind, refusal, stored_offer
from kamera_cli.window import Chain, Conditioned, conditioning, identity_of, ordered
from kamera_store.format.keys import Identity
from kamera_store.format.records import Record


@dataclass(frozen=True)
class StoredOffer:
    """An offer and the records that are read for it."""

    offer: Offer
    records: tuple[Record, ...]


@dataclass(frozen=True)
class Found:
    """A chunk of the arrangement as the store has it: its record, and the patches that fit, best first."""

    wanted: Conditioned
    record: Record
    patches: tuple[StoredOffer, ...]

    def chosen(self, action: Action) -> tuple[Record, ...]:
        """What is read for the patch that was chosen."""
        return next((stored.records for stored in self.patches if stored.offer == action.offer), ())


@dataclass(frozen=True)
class Arranged:
    """Chunks in prompt order and the plan for them; ``placed`` where the order was chosen here."""

    found: tuple[Found, ...]
    plan: Plan
    placed: Placed | None = None

    @property
    def records(self) -> list[Record]:
        """The chunks."""
        return [chunk.record for chunk in self.found]

    @property
    def chosen(self) -> list[tuple[Found, Action]]:
        """Each chunk with what is done for it."""
        return list(zip(self.found, self.plan.actions, strict=True))

    @property
    def patches(self) -> list[tuple[Record, ...]]:
        """What is read for the patch of each chunk: nothing, one patch, or pairs."""
        return [chunk.chosen(action) for chunk, action in self.chosen]


def arrange(library: Library, view: WindowView, options: QueryOptions) -> Arranged:
    """Look up what there is and decide.

    Raises
    ------
    NotFoundError
        No such chunk, or one is gone from the store.
    UsageError
        The window is empty, or a chunk is named twice.
    """
    entries, placed = ordered(view, options.names), None
    if options.place:
        entries, placed = _placed(library, entries, options.reuse, options.max_kl)
    wanted = conditioning(view, entries, given_order=options.gives_order)
    found = tuple(_find(library, chunk) for chunk in wanted)
    return Arranged(found, plan(_wanted(found), reuse=options.reuse, max_kl=options.max_kl), placed)


def _find(library: Library, chunk: Conditioned) -> Found:
    identity, entry = identity_of(chunk.entry), chunk.entry
    record = require_record(library, identity, f"{entry.number} ({entry.name})")
    patches = offers(library.find_patch, identity, chunk.antecedents) if chunk.antecedents else ()
    return Found(chunk, record, patches)


def _wanted(found: Sequence[Found]) -> list[Wanted]:
    return [
        Wanted(
            chunk=chunk.record.key,
            num_antecedents=len(chunk.wanted.entry.conditioned_on)
            if chunk.wanted.antecedents is None
            else len(chunk.wanted.antecedents),
            offers=tuple(stored.offer for stored in chunk.patches),
        )
        for chunk in found
    ]


def offers(find_patch: FindPatch, chunk: Identity, antecedents: Chain) -> tuple[StoredOffer, ...]:
    """Patches for a chunk after antecedents in this order, best first: exact, orbit, composed of pairs."""
    found = []
    kinds: tuple[StoredKind, ...] = ("exact", "orbit")
    for kind in kinds:
        patch = find_patch(chunk, antecedents, kind)
        if patch is not None:
            found.append(StoredOffer(stored_offer(patch.key, patch.meta), (patch,)))
    composed = composed_offer(find_patch, chunk, antecedents) if len(antecedents) > 1 else None
    if composed is not None:
        keys = tuple(record.key for record in composed.records)
        offer = Offer(keys, "composed", composed.kl, composed.energy)
        found.append(StoredOffer(offer, tuple(composed.records)))
    return tuple(found)


def _placed(
    library: Library, entries: tuple[WindowEntry, ...], reuse: Reuse, max_kl: float | None
) -> tuple[tuple[WindowEntry, ...], Placed]:
    """The order that reads the fewest bytes of patches and rebuilds none; the given one where there is none."""
    by_identity = {identity_of(entry): entry for entry in entries}
    bound = AUTO_MAX_KL if max_kl is None and reuse == "auto" else max_kl
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
                if refusal(stored.offer, reuse, bound) is None
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


def merged(restored: Sequence[LayerPatch], parts: Sequence[Record]) -> LayerPatch | None:
    """One layer of a chunk's patch from what was read for it."""
    if not restored:
        return None
    return restored[0] if len(restored) == 1 else compose(restored, gain=gain_of(parts))
