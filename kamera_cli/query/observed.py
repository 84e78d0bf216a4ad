"""What a comparison measured is kept: a patch states the largest KL that was ever found with it.

A KL is measured when a patch is formed, on one question. ``--compare`` measures it on another one, and where that gives
more, the patches of that answer state the larger figure from then on, so that no later plan goes by the smaller one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kamera_cli.library import Library
from kamera_cli.operator.plan import AUTO_MAX_KL, Plan
from kamera_cli.query.arrange import Found
from kamera_cli.window import identity_of
from kamera_cli.words import format_number
from kamera_store.errors import DamagedError, MissingRecordError, NoRoomError, ReadOnlyError
from kamera_store.format.records import Record

if TYPE_CHECKING:
    from kamera_cli.context import Context

PROBE = "a later question"


def keep_worst(context: Context, library: Library, found: Sequence[Found], chosen: Plan, kl: float) -> None:
    """Raise the stated KL of the exact and orbit patches that an answer used to what was measured on its question.

    Nothing is done where the comparison says nothing of the patches: chunks that keep what they took in elsewhere are
    meant to differ from a prefill of this order, and of composed or blind chunks no one patch is to blame. The answer
    stands already, so a store that cannot be written costs a warning.

    Parameters
    ----------
    kl : float
        Next-token KL in nats to a prefill of the same chunks in the same order.
    """
    if not _in_order(found) or any(
        action.used in ("blind", "composed", "prefilled") for action in chosen.actions
    ):
        return
    used = [
        chunk.chosen(action)[-1]
        for chunk, action in zip(found, chosen.actions, strict=True)
        if action.used in ("exact", "orbit")
    ]
    if raise_stated(context, library, used, kl) and kl > AUTO_MAX_KL:
        context.warn(
            f"on this question the KL is {format_number(kl)}, above {AUTO_MAX_KL:g}: its patches state that from now "
            "on, and --reuse auto forms finer ones"
        )


def raise_stated(context: Context, library: Library, patches: Sequence[Record], kl: float) -> bool:
    """Let stored patches that state a smaller KL, or none, state this one; whether any did."""
    num_raised = 0
    for record in patches:
        try:
            num_raised += _raised(library, record, kl)
        except (DamagedError, MissingRecordError, NoRoomError, ReadOnlyError) as error:
            context.warn(f"the KL that was measured on this question was not kept: {error}")
    return num_raised > 0


def _raised(library: Library, record: Record, kl: float) -> bool:
    """Whether a patch states this KL now and did not before.

    Raises
    ------
    MissingRecordError
        It was removed meanwhile, or formed anew.
    """
    standing = library.store.get(record.key)
    if standing is None or standing.digest != record.digest or standing.tensors != record.tensors:
        raise MissingRecordError(record.key)
    # Another process may have raised it since it was read.
    if standing.meta["kl"] is not None and standing.meta["kl"] >= kl:
        return False
    library.restate(standing, {"kl": kl, "probe": PROBE})
    return True


def _in_order(found: Sequence[Found]) -> bool:
    """Whether every chunk is conditioned on exactly what stands before it."""
    links = [identity_of(chunk.wanted.entry) for chunk in found]
    return all(chunk.wanted.antecedents == tuple(links[:at]) for at, chunk in enumerate(found))
