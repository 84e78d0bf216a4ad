"""Which patch for which chunk, or which fallback: a pure function (design §4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kamera_cli.results import Used, WhyNot

Reuse = Literal["auto", "patched", "blind", "none"]

AUTO_MAX_KL = 0.05
"""Largest measured KL, in nats, of a patch that ``auto`` uses unless told otherwise."""

AUTO_MIN_ENERGY = 0.95
"""Smallest captured energy, over layers, of a patch that ``auto`` uses. A KL is measured on one question; another one
may read what a patch of few directions left out."""


@dataclass(frozen=True)
class Offer:
    """A stored patch that fits a chunk and its antecedents; ``kl`` and ``energy`` were measured when it was formed."""

    key: bytes
    kind: str
    kl: float | None
    energy: float


@dataclass(frozen=True)
class Wanted:
    """One chunk of an arrangement.

    Attributes
    ----------
    num_antecedents : int
        Chunks that it is to be conditioned on; 0 when nothing stands before it.
    offer : Offer or None
        The stored patch for exactly these antecedents.
    """

    chunk: bytes
    num_antecedents: int
    offer: Offer | None = None


@dataclass(frozen=True)
class Action:
    """What is used for one chunk; ``why_not`` says why nothing better was."""

    used: Used
    patch: bytes | None = None
    why_not: WhyNot | None = None


@dataclass(frozen=True)
class Plan:
    """An action per chunk. ``fallback`` is None, or why the language model is prefilled from stored embeddings."""

    actions: tuple[Action, ...]
    fallback: str | None = None


def plan(wanted: list[Wanted], *, reuse: Reuse, max_kl: float | None) -> Plan:
    """Choose for each chunk in this order: nothing needed, exact patch, fallback.

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
    if chunk.offer is None:
        return Action("blind", why_not="no_patch")
    if reuse == "auto" and chunk.offer.energy < AUTO_MIN_ENERGY:
        return Action("blind", why_not="low_energy")
    if max_kl is not None and (chunk.offer.kl is None or chunk.offer.kl > max_kl):
        return Action("blind", why_not="max_kl")
    return Action("exact", patch=chunk.offer.key)


def _because(misses: list[WhyNot], num_chunks: int) -> str:
    reasons = {reason: misses.count(reason) for reason in sorted(set(misses))}
    listed = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    return f"{len(misses)} of {num_chunks} chunks without a usable patch ({listed})"
