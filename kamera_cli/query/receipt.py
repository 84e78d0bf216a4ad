"""What was used for each chunk of an answer, or would be, as commands show it, and what a reader has to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kamera_cli.library import assembly_size, segment_size
from kamera_cli.operator.plan import Action
from kamera_cli.options import QueryOptions
from kamera_cli.query.arrange import Arranged, Found, arrange
from kamera_cli.query.read import Reading
from kamera_cli.results import ChunkReceipt, PlannedChunk, QueryPlan, WindowView
from kamera_cli.window import load_window
from kamera_cli.words import chunks_words
from kamera_store.format.records import Record

if TYPE_CHECKING:
    from kamera_cli.context import Context


def receipts_of(
    arranged: Arranged, reading: Reading, start: int, rank: int | None
) -> tuple[ChunkReceipt, ...]:
    """What was used for each chunk, in prompt order; ``start`` is the position of the first one."""
    offset, receipts = start, []
    for (chunk, action), bytes_read, hot_bytes in zip(
        arranged.chosen, reading.bytes_read, reading.hot_bytes, strict=True
    ):
        parts, offer, entry = chunk.chosen(action), action.offer, chunk.wanted.entry
        of_parts = _full_rank(parts)
        cut = of_parts is not None and rank is not None and rank < of_parts
        receipts.append(
            ChunkReceipt(
                id=entry.chunk,
                number=entry.number,
                name=entry.name,
                used=action.used,
                num_tokens=entry.num_tokens,
                position=offset,
                patch=parts[-1].id if parts and action.used != "composed" else None,
                rank=rank if cut else of_parts,
                energy=None if offer is None or cut else offer.energy,
                kl=None if offer is None or cut else offer.kl,
                bytes_read=bytes_read,
                hot_bytes=hot_bytes,
                pairs=tuple(part.id for part in parts) if action.used == "composed" else (),
                why_not=action.why_not,
            )
        )
        offset += chunk.record.meta["span"]
    return tuple(receipts)


def warnings_of(receipts: Sequence[ChunkReceipt], *, is_routed: bool) -> tuple[str, ...]:
    """What a reader of the answer has to know: chunks that miss something, and a KL that may not carry over."""
    found = []
    blind = [receipt.number for receipt in receipts if receipt.used == "blind"]
    if blind:
        verb = "was" if len(blind) == 1 else "were"
        found.append(
            f"{chunks_words(blind)} {verb} reused without a patch: what was taken in from earlier chunks is missing"
        )
    if is_routed and any(receipt.kl is not None for receipt in receipts):
        found.append(
            "this model sends each token to a few of its experts, and a token between two of them can take the other "
            "one: the KL in the receipt was measured on another question and may not hold for this one; "
            "--compare measures it"
        )
    return tuple(found)


def remembered(view: WindowView, arranged: Arranged) -> tuple[int, ...]:
    """Numbers of chunks that are not in the prompt, of which a patch restores what its chunk took in."""
    present = {chunk.wanted.entry.chunk for chunk in arranged.found}
    numbers = {entry.chunk: entry.number for entry in view.evicted}
    absent = {
        link.id
        for chunk, action in arranged.chosen
        if action.offer is not None
        for link in chunk.wanted.antecedents or ()
        if link.id not in present
    }
    return tuple(sorted(numbers.get(name, 0) for name in absent))


def explain(context: Context, options: QueryOptions) -> QueryPlan:
    """What a query would use and read; nothing is read or run. See ``Engine.explain``."""
    view = load_window(context.store, context.tenant, options.window)
    context.refuse_other_model(view)
    return _described(arrange(context.library, view, options), options)


def _full_rank(records: Sequence[Record]) -> int | None:
    """Rank of what a patch is made of: of one patch, or of pairs side by side."""
    ranks = [max(part.meta["ranks"], default=0) for part in records]
    return sum(ranks) if ranks else None


def _described(arranged: Arranged, options: QueryOptions) -> QueryPlan:
    """The plan as commands show it: what would be used, why nothing better, and the stored bytes to read."""
    prefilled = arranged.plan.fallback is not None
    return QueryPlan(
        window=options.window,
        reuse=options.reuse,
        fallback=arranged.plan.fallback,
        chunks=tuple(_planned(chunk, action, prefilled) for chunk, action in arranged.chosen),
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
        rank=_full_rank(records),
        energy=None if offer is None else offer.energy,
        kl=None if offer is None else offer.kl,
        bytes_to_read=own + sum(record.stored_bytes for record in records),
        why_not=action.why_not,
    )
