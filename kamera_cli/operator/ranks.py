"""How many directions each tensor of a patch gets: by what they do to the output, per byte. Pure; imports no torch.

What a patch leaves out costs about Σ weight · σ², over all tensors and all directions that were left out, where a
tensor's weight is the next-token KL that a unit of its missing energy was measured to cost. Directions of one tensor
come in descending σ² and at equal bytes, so taking them by weight · σ² per byte is the best choice there is, up to the
one direction at which a budget ends.

What may be missing is measured against a typical patch and not against the patch itself: a chunk that took in little
from its antecedents has little to lose, and on the embedded model needs a third of the bytes for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from kamera_cli.errors import UsageError
from kamera_cli.options import Budget

FLOOR = 0.1
"""Smallest weight of a layer, as a share of the largest. A sensitivity is measured on a few probes of one window, and
a question may read what none of them did; on the embedded model 0.1 beats both 0.02 and equal weights."""


@dataclass(frozen=True)
class Spectrum:
    """What one tensor of one layer has to offer.

    Attributes
    ----------
    squares : tuple of float
        σ² of its directions, descending; no more of them than may be taken.
    total : float
        ‖Δ‖², all directions counted.
    direction_bytes : int
        Bytes of one direction as it will be written.
    weight : float
        Next-token KL in nats per unit of missing energy.
    """

    squares: tuple[float, ...]
    total: float
    direction_bytes: int
    weight: float


@dataclass(frozen=True)
class Sensitivity:
    """Measured for one tensor of one layer: next-token KL in nats while ``missing`` of its ``total`` energy was out."""

    kl: float
    missing: float
    total: float


def check_budget(budget: Budget, kv_bytes: int, direction_bytes: int, what: str) -> None:
    """Refuse a budget in which not even one direction of the smallest tensor has room.

    Raises
    ------
    UsageError
    """
    allowed = budget.of(kv_bytes)
    if allowed < direction_bytes:
        asked = f"{budget.share:.4%} of {kv_bytes} bytes of KV" if budget.share is not None else "the budget"
        raise UsageError(
            f"{what}: {asked} is {allowed} bytes, one direction of a patch takes {direction_bytes}; "
            "raise --budget"
        )


@dataclass(frozen=True)
class Worth:
    """What the tensors of a model are worth to its output.

    Attributes
    ----------
    layers : tuple of (float, float)
        Weight of the rotary and of the plain tensor of each layer, in nats per unit of missing energy.
    per_token : float
        Σ weight · ‖Δ‖² of one token, on average over what was measured.
    """

    layers: tuple[tuple[float, float], ...]
    per_token: float

    def shares(self, num_tokens: int) -> list[float]:
        """Weights, rotary and plain layer by layer, in units of all that a typical patch of so many tokens is worth."""
        typical = self.per_token * num_tokens
        return [weight / typical if typical > 0 else 0.0 for layer in self.layers for weight in layer]


def worth(measured: Sequence[tuple[Sensitivity, Sensitivity]], num_tokens: int) -> Worth:
    """`weights`, and what Δ of one of the ``num_tokens`` conditioned tokens that were measured is worth by them."""
    layers = weights(measured)
    total = sum(
        weight * tensor.total
        for pair, layer in zip(layers, measured, strict=True)
        for weight, tensor in zip(pair, layer, strict=True)
    )
    return Worth(tuple(layers), total / num_tokens)


def weights(measured: Sequence[tuple[Sensitivity, Sensitivity]]) -> list[tuple[float, float]]:
    """Weight of the rotary and of the plain tensor of each layer, in nats per unit of energy.

    A layer counts as the more sensitive of its two tensors, per share of their energy: values matter where keys are
    read, and a probe that reads no key says nothing about the value behind it. No layer with any Δ falls below `FLOOR`
    of the largest.
    """
    layers = [max(_per_share(tensor) for tensor in layer) for layer in measured]
    least = FLOOR * max(layers, default=0.0) or 1.0
    return [
        (_weight(size, least, rotary), _weight(size, least, plain))
        for size, (rotary, plain) in zip(layers, measured, strict=True)
    ]


def _weight(size: float, least: float, tensor: Sensitivity) -> float:
    return max(size, least) / tensor.total if tensor.total > 0 else 0.0


def _per_share(tensor: Sensitivity) -> float:
    return max(0.0, tensor.kl) * tensor.total / tensor.missing if tensor.missing > 0 else 0.0


def choose(
    spectra: Sequence[Spectrum],
    *,
    energy: float,
    typical: float | None = None,
    budget_bytes: int | None = None,
) -> tuple[int, ...]:
    """Ranks that leave no more weighted energy out than is allowed, in no more than a budget.

    Parameters
    ----------
    energy : float
        In (0, 1]: a share of 1 − ``energy`` of ``typical`` may be missing.
    typical : float or None
        Σ weight · ‖Δ‖² of a typical patch; None for that of these tensors.
    budget_bytes : int or None
        Bytes of all directions together. A direction that no longer fits ends its tensor; smaller ones may follow.

    Returns
    -------
    tuple of int
        One rank per spectrum. A larger budget, or a higher energy, never takes fewer directions of tensors that cost
        the same.
    """
    total = sum(spectrum.weight * spectrum.total for spectrum in spectra)
    wanted = total - (1.0 - energy) * (total if typical is None else typical)
    ranks, captured, spent = [0] * len(spectra), 0.0, 0
    queue = [_entry(index, spectrum, 0) for index, spectrum in enumerate(spectra) if spectrum.squares]
    heapq.heapify(queue)
    while queue and captured < wanted:
        gain, index = heapq.heappop(queue)
        spectrum = spectra[index]
        if gain == 0 or (budget_bytes is not None and spent + spectrum.direction_bytes > budget_bytes):
            continue
        captured -= gain * spectrum.direction_bytes
        spent += spectrum.direction_bytes
        ranks[index] += 1
        if ranks[index] < len(spectrum.squares):
            heapq.heappush(queue, _entry(index, spectrum, ranks[index]))
    return tuple(ranks)


def _entry(index: int, spectrum: Spectrum, rank: int) -> tuple[float, int]:
    """Order of the queue: the largest weighted energy per byte first, the earlier tensor first among equals."""
    return -spectrum.weight * spectrum.squares[rank] / spectrum.direction_bytes, index


def weighted_energy(parts: Sequence[tuple[float | None, float]]) -> float | None:
    """1 less the share of a typical patch's worth that is missing, at least 0.

    Parameters
    ----------
    parts : sequence of (float or None, float)
        Of each tensor what its Δ is worth, in units of a typical patch, and the captured share. None for what was not
        measured, which makes the result None.
    """
    known = [(part, share) for part, share in parts if part is not None]
    if not parts or len(known) < len(parts):
        return None
    return max(0.0, 1.0 - sum(part * (1.0 - share) for part, share in known))
