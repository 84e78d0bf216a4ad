"""From a request to a plan: which chunks in which order, what the store offers for each, what is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kamera_cli.errors import NotFoundError
from kamera_cli.library import assembly_size, segment_size
from kamera_cli.operator.placement import best_order
from kamera_cli.operator.plan import AUTO_MAX_KL, Action, Plan, Wanted, plan, refusal
from kamera_cli.options import QueryOptions, Reuse
from kamera_cli.query.offers import Listing, StoredOffer, offers
from kamera_cli.results import Placed, PlannedChunk, QueryPlan, WindowEntry, WindowView
from kamera_cli.window import Conditioned, conditioning, identity_of, load_window, ordered
from kamera_store.format.keys import Identity
from kamera_store.format.records import Record

if TYPE_CHECKING:
    from kamera_cli.context import Context
    from kamera_cli.library import Library


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


def explain(context: Context, options: QueryOptions) -> QueryPlan:
    """What a query would use and read; nothing is read or run. See ``Engine.explain``."""
    view = load_window(context.store, context.tenant, options.window)
    context.refuse_other_model(view)
    return described(arrange(context.library, view, options), options)


def full_rank(records: Sequence[Record]) -> int | None:
    """Rank of what a patch is made of: of one patch, or of pairs side by side."""
    ranks = [max(part.meta["ranks"], default=0) for part in records]
    return sum(ranks) if ranks else None


def described(arranged: Arranged, options: QueryOptions) -> QueryPlan:
    """The plan as commands show it: what would be used, why nothing better, and the stored bytes to read."""
    prefilled = arranged.plan.fallback is not None
    return QueryPlan(
        window=options.window,
        reuse=options.reuse,
        fallback=arranged.plan.fallback,
        chunks=tuple(
            _planned(chunk, action, prefilled)
            for chunk, action in zip(arranged.found, arranged.plan.actions, strict=True)
        ),
        placed=arranged.placed,
    )


def _planned(chunk: Found, action: Action, prefilled: bool) -> PlannedChunk:
    records, offer, entry = chunk.chosen(action), action.offer, chunk.wanted.entry
    own = segment_size(chunk.record) if prefilled else assembly_size(chunk.record)
    return PlannedChunk(
        id=entry.chunk,
        number=entry.number,
        name=entry.name,
        num_tokens=entry.num_tokens,
        used=action.used,
        patches=tuple(record.id for record in records),
        rank=full_rank(records),
        energy=None if offer is None else offer.energy,
        kl=None if offer is None else offer.kl,
        bytes_to_read=own + sum(record.stored_bytes for record in records),
        why_not=action.why_not,
    )


def _find(library: Library, chunk: Conditioned) -> Found:
    record = library.find_chunk(chunk.entry)
    if record is None:
        raise NotFoundError(
            f"chunk {chunk.entry.number} ({chunk.entry.name}) is no longer in the store; ingest its source again"
        )
    patches = offers(library, identity_of(chunk.entry), chunk.antecedents) if chunk.antecedents else ()
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


def _placed(
    library: Library, entries: tuple[WindowEntry, ...], reuse: Reuse, max_kl: float | None
) -> tuple[tuple[WindowEntry, ...], Placed]:
    """The order that reads the fewest bytes of patches and rebuilds none; the given one where there is none."""
    by_identity = {identity_of(entry): entry for entry in entries}
    bound = AUTO_MAX_KL if max_kl is None and reuse == "auto" else max_kl
    prices: dict[tuple[bytes, tuple[bytes, ...] | frozenset[bytes]], int | None] = {}
    listing = Listing(library, tuple(by_identity))

    def price(chunk: Identity, before: tuple[Identity, ...]) -> int | None:
        if not before:
            return 0
        keys = tuple(one.key for one in before)
        # Only exact patches go by order: what an orbit or pairs give is the same for every order of a set.
        ordered_by = keys if listing.has_exact(chunk, before) else frozenset(keys)
        if (chunk.key, ordered_by) not in prices:
            usable = (
                sum(record.stored_bytes for record in stored.records)
                for stored in offers(listing, chunk, before)
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
