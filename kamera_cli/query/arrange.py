"""From a request to a plan: which chunks in which order, what the store offers for each, what is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kamera_cli.library import FindPatch, Library, require_record
from kamera_cli.operator.compose import compose
from kamera_cli.operator.patch import LayerPatch
from kamera_cli.operator.plan import Action, Plan, Wanted, plan
from kamera_cli.options import QueryOptions
from kamera_cli.patches.pairs import composed_offer, gain_of
from kamera_cli.query.place import StoredOffer, best_placed
from kamera_cli.results import Placed, WindowView
from kamera_cli.trust import Offer, StoredKind, stored_offer
from kamera_cli.window import Chain, Conditioned, conditioning, identity_of, ordered
from kamera_store.format.keys import Identity
from kamera_store.format.records import Record


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
        entries, placed = best_placed(library, entries, options, offers)
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


def merged(restored: Sequence[LayerPatch], parts: Sequence[Record]) -> LayerPatch | None:
    """One layer of a chunk's patch from what was read for it."""
    if not restored:
        return None
    return restored[0] if len(restored) == 1 else compose(restored, gain=gain_of(parts))
