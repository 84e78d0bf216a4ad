"""Composed patches: Δ(B | A₁ … A_k) for an arrangement nobody compiled, from the pairs Δ(B | A_i).

Attention merges what it reads from several sources by their mass. With m_i the mass of A_i relative to what B sees
anyway (preamble and itself), o_i what it reads there and o_0 what it reads without, one head of one layer gives

    Δ_i = m_i (o_i − o_0) / (1 + m_i)
    Δ   = Σ m_i (o_i − o_0) / (1 + Σ m_j) = Σ w_i Δ_i    with    w_i = (1 + m_i) / (1 + Σ m_j)

Where one antecedent takes nearly all of a token's attention its Δ_i stands alone; where several take much, their mean
stands; only small masses add up. Which one a token attends to is seen in the pairs themselves: it is the one that
changes the token most. So the weights are taken from the sizes of the rows of U_i V_iᵀ, per token, layer and tensor,

    w_i = g · ‖Δ_i‖³ / Σ ‖Δ_j‖³

which on a trained model came much nearer to the truth than masses of an attention forward, averaged over heads and over
the layers below (heads differ more than any average can tell), and needs nothing that is not in every pair. The gain g
corrects the size as a whole: fitted where real arrangements are at hand (`GainFit`), 1 otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kamera_cli.operator.patch import Factors, LayerPatch

EXPONENT = 3.0
"""Power of a token's ‖Δ_i‖ in its weights: 0 gives the mean, ∞ the largest alone. Two-hop answers of a trained model
want 2 or more; where attention is diffuse, as with random weights, 0 to 4 differ by a tenth of the KL at most."""


def token_sizes(factors: Factors) -> torch.Tensor:
    """(T,) float32 sizes ‖Δ_t‖ = ‖(U Vᵀ)_t‖ of each token's part of one tensor; exact also where V was rounded."""
    u, v = factors.u.float(), factors.v.float()
    return ((v @ v.T @ u) * u).sum(0).clamp_min(0).sqrt()


def weights(sizes: torch.Tensor, *, gain: float = 1.0, exponent: float = EXPONENT) -> torch.Tensor:
    """Weight of each antecedent's Δ for each token.

    Parameters
    ----------
    sizes : torch.Tensor
        (k, T) not negative, from `token_sizes`.
    gain : float
        What the weights of a token sum up to.

    Returns
    -------
    torch.Tensor
        (k, T); zero for a token that no antecedent changes.
    """
    largest = sizes.amax(0).clamp_min(torch.finfo(sizes.dtype).tiny)
    powers = (sizes / largest) ** exponent
    powers = torch.where(sizes > 0, powers, 0.0)
    return gain * powers / powers.sum(0).clamp_min(1)


def compose(pairs: Sequence[LayerPatch], *, gain: float = 1.0) -> LayerPatch:
    """One layer's patch for several antecedents, from one patch for each.

    Parameters
    ----------
    pairs : sequence of LayerPatch
        At least one. Patches of the same chunk and layer, one antecedent each; their order does not matter.
    gain : float
        See `weights`.

    Returns
    -------
    LayerPatch
        Of the ranks' sum, directions with the largest share first, so that a lower rank is again the first rows. Its
        energies are the smallest of the pairs'.
    """
    return LayerPatch(
        _composed([pair.rotary for pair in pairs], gain),
        _composed([pair.plain for pair in pairs], gain),
        min(pair.rotary_energy for pair in pairs),
        min(pair.plain_energy for pair in pairs),
    )


def _composed(parts: Sequence[Factors], gain: float) -> Factors:
    """Factors of Σ w_i ⊙ U_i V_iᵀ in the widest dtype of the parts."""
    scale = weights(torch.stack([token_sizes(part) for part in parts]), gain=gain)
    u = torch.cat([part.u.float() * each for part, each in zip(parts, scale, strict=True)])
    v = torch.cat([part.v.float() for part in parts])
    order = (u.norm(dim=1) * v.norm(dim=1)).argsort(descending=True, stable=True)
    dtype = parts[0].u.dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.u.dtype)
    return Factors(u[order].to(dtype), v[order].to(dtype))


@dataclass
class GainFit:
    """Least squares for the gain that brings composed Δ nearest to true ones.

    Each layer and tensor counts relative to the size of its truth, so that none outweighs the others.
    """

    along: float = 0.0
    across: float = 0.0
    num_tensors: int = 0

    def add(self, composed: Factors, true: torch.Tensor) -> None:
        """Count one tensor of one layer: composed with gain 1, and the true Δ, (T, W) float32."""
        size = float(true.square().sum())
        if size > 0:
            made = composed.product()
            self.along += float((made * true).sum()) / size
            self.across += float(made.square().sum()) / size
            self.num_tensors += 1

    def __add__(self, other: GainFit) -> GainFit:
        return GainFit(
            self.along + other.along, self.across + other.across, self.num_tensors + other.num_tensors
        )

    @property
    def gain(self) -> float:
        """1.0 where nothing was composed or every truth is zero."""
        return self.along / self.across if self.across > 0 else 1.0

    def energy(self, gain: float) -> float:
        """Captured share 1 − ‖g · made − true‖² / ‖true‖², the mean over tensors; 1.0 where every truth is zero."""
        return (
            1.0 if self.num_tensors == 0 else gain * (2 * self.along - gain * self.across) / self.num_tensors
        )
