"""Which patch for which chunk, or which fallback: a pure function."""

from __future__ import annotations

from dataclasses import dataclass

from kamera_cli.options import Reuse
from kamera_cli.results import Used
from kamera_cli.trust import (
    AUTO_MAX_KL,
    AUTO_MIN_ENERGY,
    Offer,
    PatchKind,
    WhyNot,
    refusal,
)

__all__ = [
    "AUTO_MAX_KL",
    "AUTO_MIN_ENERGY",
    "Action",
    "Offer",
    "PatchKind",
    "Plan",
    "Wanted",
    "plan",
    "refusal",
]


@dataclass(frozen=True)
class Wanted:
    """One chunk of an arrangement.

    Attributes
    ----------
    num_antecedents : int
        Chunks that it is to be conditioned on; 0 when nothing stands before it.
    offers : tuple of Offer
        What fits these antecedents, best first: exact, orbit, composed.
    """

    chunk: bytes
    num_antecedents: int
    offers: tuple[Offer, ...] = ()


@dataclass(frozen=True)
class Action:
    """What is used for one chunk; ``why_not`` says why nothing better was."""

    used: Used
    offer: Offer | None = None
    why_not: WhyNot | None = None


@dataclass(frozen=True)
class Plan:
    """An action per chunk. ``fallback`` is None, or why the language model is prefilled from stored embeddings."""

    actions: tuple[Action, ...]
    fallback: str | None = None


def plan(wanted: list[Wanted], *, reuse: Reuse, max_kl: float | None) -> Plan:
    """Choose for each chunk in this order: nothing needed, exact patch, orbit patch, composed patch, fallback.

    With ``auto`` one miss makes the whole arrangement a prefill from stored embeddings, so the answer is right and the
    patches come free. ``patched`` never prefills: the caller refuses a plan with misses. ``blind`` never patches;
    ``none`` always prefills. A patch whose measured KL is above ``max_kl`` counts as a miss, and with ``auto`` also one
    that captured less than `AUTO_MIN_ENERGY`; ``auto`` takes `AUTO_MAX_KL` for None.
    """
    if reuse == "none":
        return Plan(tuple(Action("prefilled") for _ in wanted), "--reuse none")
    if max_kl is None and reuse == "auto":
        max_kl = AUTO_MAX_KL
    actions = tuple(_action(chunk, reuse, max_kl) for chunk in wanted)
    misses = [action.why_not for action in actions if action.why_not is not None]
    if reuse == "auto" and misses:
        return Plan(
            tuple(Action("prefilled", why_not=action.why_not) for action in actions),
            _because(misses, len(wanted)),
        )
    return Plan(actions)


def _action(chunk: Wanted, reuse: Reuse, max_kl: float | None) -> Action:
    if chunk.num_antecedents == 0:
        return Action("canonical")
    if reuse == "blind":
        return Action("blind")
    refusals = [refusal(offer, reuse, max_kl) for offer in chunk.offers]
    for offer, why_not in zip(chunk.offers, refusals, strict=True):
        if why_not is None:
            return Action(offer.kind, offer)
    return Action("blind", why_not=refusals[0] if refusals else "no_patch")


def _because(misses: list[WhyNot], num_chunks: int) -> str:
    reasons = {reason: misses.count(reason) for reason in sorted(set(misses))}
    listed = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    return f"{len(misses)} of {num_chunks} chunks without a usable patch ({listed})"
