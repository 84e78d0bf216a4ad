"""What a composed patch is made of: stored pairs, and what was measured of compositions of them.

A pair is an exact patch with one antecedent. Pairs that were compiled together (`patches.pair_forming`) carry
a calibration: for each number of antecedents the gain of their compositions and the largest next-token KL among real
arrangements of the same chunks. It holds for compositions within that set of chunks alone, and goes with the pair: one
that is written anew has lost it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kamera_cli.results import ComposedBound
from kamera_cli.trust import proven_energy

if TYPE_CHECKING:
    from kamera_cli.library import FindPatch
    from kamera_cli.window import Chain
    from kamera_store.format.keys import Identity
    from kamera_store.format.records import Record

META = "compositions"
"""Field of a pair's meta: its calibrations, the latest first."""

MAX_CALIBRATIONS = 4
"""Calibrations that a pair keeps, one for each set of chunks."""


@dataclass(frozen=True)
class ComposedOffer:
    """Pairs from which the patch of a chunk can be composed.

    Attributes
    ----------
    records : tuple of Record
        One pair per antecedent, in their order.
    kl : float or None
        Largest measured KL for so many antecedents out of one set of chunks that holds them all; None where none is
        known.
    energy : float
        Smallest share of the true residual that compositions of so many pairs were measured to have; 0 where none was.
        It is far below that of the pairs themselves, and what keeps ``--reuse auto`` from answers that a KL on one
        question would let pass.
    gain : float
    """

    records: tuple[Record, ...]
    kl: float | None
    energy: float
    gain: float


def composed_offer(find_patch: FindPatch, chunk: Identity, antecedents: Chain) -> ComposedOffer | None:
    """Compose a chunk's patch for two or more antecedents, in any order; None where a pair is not stored.

    A single antecedent needs no composition: its pair is the exact patch.
    """
    if len(antecedents) < 2:
        return None
    records = []
    for antecedent in antecedents:
        record = find_patch(chunk, (antecedent,), "exact")
        if record is None:
            return None
        records.append(record)
    bound = bound_of(records)
    if bound is None:
        return ComposedOffer(tuple(records), None, 0.0, 1.0)
    energy = min(bound.energy, *(proven_energy(record.meta) for record in records))
    return ComposedOffer(tuple(records), bound.kl, energy, bound.gain)


def gain_of(pairs: Sequence[Record]) -> float:
    """The gain with which these pairs' composition was measured; 1 where it was not."""
    bound = bound_of(pairs)
    return 1.0 if bound is None else bound.gain


def bound_of(pairs: Sequence[Record]) -> ComposedBound | None:
    """The lowest bound of the calibrations that all of these pairs went through together."""
    shared = [{tuple(one["chunks"]): one["bounds"] for one in pair.meta.get(META, ())} for pair in pairs]
    number = str(len(pairs))
    found = [
        ComposedBound(len(pairs), **bounds[number])
        for chunks, bounds in shared[0].items()
        if number in bounds and all(chunks in other for other in shared[1:])
    ]
    return min(found, key=lambda bound: bound.kl, default=None)


def with_calibration(
    meta: Mapping[str, Any], chunks: Sequence[str], bounds: Sequence[ComposedBound]
) -> dict[str, Any]:
    """A pair's meta with the calibration of a set of chunks in front of what it had.

    Parameters
    ----------
    chunks : sequence of str
        Ids; their order does not matter.
    """
    names = sorted(chunks)
    others = [one for one in meta.get(META, ()) if one["chunks"] != names]
    measured = {}
    for bound in bounds:
        fields = asdict(bound)
        measured[str(fields.pop("num_antecedents"))] = fields
    new = {"chunks": names, "bounds": measured}
    return {**meta, META: [new, *others][:MAX_CALIBRATIONS]}
