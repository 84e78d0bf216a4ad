"""The receipt of an answer: what was used for each chunk, and what a reader has to know."""

from __future__ import annotations

from collections.abc import Sequence

from kamera_cli.operator.plan import Plan
from kamera_cli.query.arrange import Found, full_rank
from kamera_cli.query.read import Reading
from kamera_cli.results import ChunkReceipt, WindowView
from kamera_cli.words import chunks_words


def receipts_of(
    found: Sequence[Found], chosen: Plan, reading: Reading, start: int, rank: int | None
) -> tuple[ChunkReceipt, ...]:
    """What was used for each chunk, in prompt order; ``start`` is the position of the first one."""
    offset, receipts = start, []
    for chunk, action, bytes_read, hot_bytes in zip(
        found, chosen.actions, reading.bytes_read, reading.hot_bytes, strict=True
    ):
        parts, offer, entry = chunk.chosen(action), action.offer, chunk.wanted.entry
        of_parts = full_rank(parts)
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


def remembered(view: WindowView, found: Sequence[Found], chosen: Plan) -> tuple[int, ...]:
    """Numbers of chunks that are not in the prompt, of which a patch restores what its chunk took in."""
    present = {chunk.wanted.entry.chunk for chunk in found}
    numbers = {entry.chunk: entry.number for entry in view.evicted}
    absent = {
        link.id
        for chunk, action in zip(found, chosen.actions, strict=True)
        if action.offer is not None
        for link in chunk.wanted.antecedents or ()
        if link.id not in present
    }
    return tuple(sorted(numbers.get(name, 0) for name in absent))
