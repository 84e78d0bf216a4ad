"""Δ of one chunk in all layers, and the patches that are cut from it: Δ = KV(B|A) − KV(B|∅) ≈ U Vᵀ, per tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator.factorise import Directions, directions, stacks, tensor_pairs
from kamera_cli.operator.patch import MAX_AUTO_RANK, Factors, LayerPatch, Precision, direction_bytes
from kamera_cli.operator.ranks import Spectrum, Worth, choose

NUM_PROBED = 24
"""Directions of each tensor that ``auto`` looks at first; a tensor that takes them all is looked at whole."""


def form(
    conditioned: Sequence[LayerKV],
    canonical: Sequence[LayerKV],
    *,
    rank: int | Literal["auto"],
    energy: float,
    dtype: Precision = None,
    budget_bytes: int | None = None,
    worth: Worth | None = None,
) -> list[LayerPatch]:
    """Factor Δ of every layer; see `Residual` and `Residual.patch`."""
    return Residual(conditioned, canonical).patch(
        rank=rank, energy=energy, dtype=dtype, budget_bytes=budget_bytes, worth=worth
    )


class Residual:
    """Δ of one chunk in all layers; its directions are sought once, however many patches are cut from it.

    Parameters
    ----------
    conditioned, canonical : sequence of LayerKV
        Position-free KV of the same T tokens, prefilled after the antecedents and alone.

    Attributes
    ----------
    energy : float
        ‖Δ‖² over all tensors.
    kv_bytes : int
        Raw bytes of the canonical KV that a patch serves.

    Raises
    ------
    NotFiniteError
        Δ holds NaN or infinity.
    """

    def __init__(self, conditioned: Sequence[LayerKV], canonical: Sequence[LayerKV]) -> None:
        pairs = list(tensor_pairs(conditioned, canonical))
        self._stacks = stacks(pairs)
        # Stacks hold tensors by shape; `_where` finds the one at a place among all.
        self._where = {at: (stack, index) for stack in self._stacks for index, at in enumerate(stack.places)}
        self._known: list[Directions] = []
        self._num_sought = 0
        self.energy = sum(sum(stack.totals) for stack in self._stacks)
        self.kv_bytes = sum(alone.nbytes for _, alone in pairs)

    def patch(
        self,
        *,
        rank: int | Literal["auto"],
        energy: float,
        dtype: Precision = None,
        budget_bytes: int | None = None,
        worth: Worth | None = None,
    ) -> list[LayerPatch]:
        """Factors of every layer.

        Parameters
        ----------
        rank : int or "auto"
            ``auto`` takes the fewest directions that capture ``energy``, at most `MAX_AUTO_RANK` of a tensor: of all
            tensors together where their ``worth`` is known, and of each tensor apart otherwise.
        energy : float
            Share in (0, 1] of ‖Δ‖²; with ``worth``, all but 1 − ``energy`` of what a typical patch of T tokens is
            worth. Read by ``auto`` alone.
        dtype : torch.dtype, int or None
            Of the factors, an int for integers of so many bits, None for `AUTO_BITS`; a floating point factor with a
            value beyond its range is kept in fp32.
        budget_bytes : int or None
            With ``auto``: bytes that the factors of all layers may take, whatever energy that captures. Without
            ``worth``, each tensor's whole Δ counts the same.

        Returns
        -------
        list of LayerPatch
            One per layer.
        """
        shares = None if worth is None else worth.shares(self._shape(0)[0])
        if rank != "auto":
            ranks: Sequence[int] = [rank] * len(self._where)
            self._seek(rank + 1)
            self._complete(ranks, rank)
        else:
            self._seek(NUM_PROBED)
            ranks = self._ranks(energy, dtype, budget_bytes, shares)
            # Ranks are to be those that all directions would give, down to ones that are rounding.
            while self._complete(ranks, MAX_AUTO_RANK):
                ranks = self._ranks(energy, dtype, budget_bytes, shares)
        found: dict[int, tuple[Factors, float]] = {}
        for stack in self._stacks:
            known = [self._known[at] for at in stack.places]
            made = stack.truncated(known, [ranks[at] for at in stack.places], dtype)
            found |= zip(stack.places, made, strict=True)
        parts = [
            (*found[at], None if shares is None else shares[at] * known.total)
            for at, known in enumerate(self._known)
        ]
        return [
            LayerPatch(rotary, plain, rotary_energy, plain_energy, rotary_worth, plain_worth)
            for (rotary, rotary_energy, rotary_worth), (plain, plain_energy, plain_worth) in zip(
                parts[::2], parts[1::2], strict=True
            )
        ]

    def _shape(self, at: int) -> tuple[int, int]:
        """(T, W) of a tensor."""
        num_tokens, width = self._where[at][0].deltas.shape[1:]
        return num_tokens, width

    def _seek(self, count: int) -> None:
        """Know the ``count`` strongest directions of each tensor, as far as a block finds them well enough."""
        if count <= self._num_sought:
            return
        found = {
            at: each
            for stack in self._stacks
            for at, each in zip(stack.places, stack.strongest(count), strict=True)
        }
        self._known, self._num_sought = [found[at] for at in range(len(found))], count

    def _complete(self, ranks: Sequence[int], most: int) -> bool:
        """Look whole at tensors that take all that is known of them while there may be more; whether there were any."""
        short = [
            at
            for at, (rank, known) in enumerate(zip(ranks, self._known, strict=True))
            if rank >= len(known.squares) < min(most, *self._shape(at)) and known.total
        ]
        for at in short:
            stack, index = self._where[at]
            self._known[at] = directions(stack.deltas[index], most)
        return bool(short)

    def _ranks(
        self, energy: float, dtype: Precision, budget_bytes: int | None, shares: list[float] | None
    ) -> Sequence[int]:
        """Ranks of all tensors together, or of each apart where nothing weighs them against one another."""
        spectra = [
            Spectrum(
                tuple(known.squares[:MAX_AUTO_RANK].tolist()),
                known.total,
                direction_bytes(*self._shape(at), dtype),
                shares[at] if shares is not None else 1.0 / (known.total or 1.0),
            )
            for at, known in enumerate(self._known)
        ]
        if shares is None and budget_bytes is None:
            return [choose([spectrum], energy=energy)[0] for spectrum in spectra]
        typical = None if shares is None else 1.0
        return choose(spectra, energy=energy, typical=typical, budget_bytes=budget_bytes)
