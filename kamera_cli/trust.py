"""Whether a patch is good enough to be used: the one rule that plans, reports and listings go by. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kamera_cli.options import Reuse

StoredKind = Literal["exact", "orbit"]
"""What a stored patch is good for: one order of its antecedents, or every order of them."""

PatchKind = Literal[StoredKind, "composed"]
"""The same, and what is made of pairs when it is used."""

WhyNot = Literal["no_patch", "max_kl", "low_energy", "damaged"]
"""Why a patch is not used."""

AUTO_MAX_KL = 0.05
"""Largest measured KL, in nats, of a patch that ``auto`` uses unless told otherwise."""

AUTO_MIN_ENERGY = 0.95
"""Smallest `trusted_energy` of a patch that ``auto`` uses. A KL is measured on one question; another one may read what
a patch of few directions left out."""


@dataclass(frozen=True)
class Offer:
    """What the store has for a chunk after its antecedents.

    Attributes
    ----------
    keys : tuple of bytes
        Records that are read: one patch, or the pairs that a composed one is made of.
    kind : {"exact", "orbit", "composed"}
    kl : float or None
        Measured when it was formed; of a composed patch the bound that was measured for so many antecedents.
    energy : float
        See `trusted_energy`.
    """

    keys: tuple[bytes, ...]
    kind: PatchKind
    kl: float | None
    energy: float


def stored_offer(key: bytes, meta: Mapping[str, Any]) -> Offer:
    """What an exact or orbit patch offers, by the key and the meta of its record."""
    return Offer((key,), meta["kind"], meta["kl"], proven_energy(meta))


def proven_energy(meta: Mapping[str, Any]) -> float:
    """`trusted_energy` of a stored patch, by the meta of its record."""
    return trusted_energy(meta["energy"], meta.get("energy_weighted"), meta.get("energy_in_orders"))


def trusted_energy(layers: Sequence[float], weighted: float | None, in_orders: float | None) -> float:
    """The captured share of energy by which a patch may be trusted.

    Parameters
    ----------
    layers : sequence of float
        Captured share of each layer, of which the smallest counts where nothing else is known; 1 where there is none.
    weighted : float or None
        That of all layers together, weighted by what they are worth to the output, where that was measured.
    in_orders : float or None
        Of an orbit patch, the smallest share that it holds of the Δ of any measured order.
    """
    captured = min(layers, default=1.0) if weighted is None else weighted
    return captured if in_orders is None else min(captured, in_orders)


def refusal(offer: Offer, reuse: Reuse, max_kl: float | None) -> WhyNot | None:
    """Why an offer is not used; None when it is good enough. A composition that was never measured never is.

    Parameters
    ----------
    max_kl : float or None
        Largest KL, in nats; None asks for none.
    """
    if reuse == "auto" and offer.energy < AUTO_MIN_ENERGY:
        return "low_energy"
    unmeasured = offer.kl is None and (max_kl is not None or offer.kind == "composed")
    if unmeasured or (max_kl is not None and offer.kl is not None and offer.kl > max_kl):
        return "max_kl"
    return None
