"""What was formed, as commands show it: a stored patch, what it took the place of, and what a plan will not use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from kamera_cli.patches.pairs import META as COMPOSITIONS
from kamera_cli.results import CompileResult, ComposedBound, FormedPatch, ReplacedPatch
from kamera_cli.trust import (
    AUTO_MAX_KL,
    AUTO_MIN_ENERGY,
    Offer,
    WhyNot,
    proven_energy,
    refusal,
    stored_offer,
)
from kamera_cli.words import chunks_words
from kamera_store.format.records import Record

if TYPE_CHECKING:
    from kamera_cli.context import Context


def kv_bytes(chunk: Record) -> int:
    """Raw bytes of a chunk's canonical KV."""
    return sum(tensor.raw_bytes for tensor in chunk.tensors if tensor.layer >= 0)


def describe(
    context: Context,
    record: Record,
    chunk: Record,
    outcome: Literal["formed", "found"],
    form_ms: float,
    older: Record | None = None,
) -> FormedPatch:
    """A stored patch as commands show it; bytes are raw tensor bytes on both sides.

    Parameters
    ----------
    context : Context
        Knows the numbers of chunks in the window at hand.
    older : Record or None
        What it took the place of.
    """
    meta = record.meta
    return FormedPatch(
        id=record.id,
        chunk=chunk.id,
        chunk_number=context.number(chunk.key),
        antecedents=tuple(meta["antecedents"]),
        outcome=outcome,
        ranks=tuple(meta["ranks"]),
        energy=min(meta["energy"], default=1.0),
        kl=meta["kl"],
        kl_blind=meta["kl_blind"],
        patch_bytes=record.raw_bytes,
        chunk_kv_bytes=kv_bytes(chunk),
        form_ms=form_ms,
        energy_weighted=meta.get("energy_weighted"),
        energy_in_orders=meta.get("energy_in_orders"),
        split=tuple(map(tuple, meta.get("split", ()))),
        antecedent_numbers=tuple(context.number(bytes.fromhex(id)) for id in meta["antecedents"]),
        why_not=why_not_auto(record),
        replaced=None if older is None else _replaced(older),
    )


def why_not_auto(patch: Record) -> WhyNot | None:
    """Why ``--reuse auto`` does not use a stored patch; None where it does."""
    return refusal(stored_offer(patch.key, patch.meta), "auto", AUTO_MAX_KL)


def _replaced(patch: Record) -> ReplacedPatch:
    meta = patch.meta
    rank = max(meta["ranks"], default=0)
    return ReplacedPatch(rank, proven_energy(meta), meta["kl"], patch.raw_bytes, bool(meta.get(COMPOSITIONS)))


def refused_lines(result: CompileResult) -> list[str]:
    """What a person should know of patches and compositions that ``--reuse auto`` will not use: a line per reason."""
    low = [patch for patch in result.patches if patch.why_not == "low_energy"]
    by_order = [patch for patch in low if patch.captured_energy >= AUTO_MIN_ENERGY]
    thin = [patch for patch in low if patch.captured_energy < AUTO_MIN_ENERGY]
    far = [patch for patch in result.patches if patch.why_not == "max_kl"]
    composed = [bound for bound in result.composed if refusal(_offer_of(bound), "auto", AUTO_MAX_KL)]
    lines = [
        _thin_line(thin) if thin else "",
        _by_order_line(by_order) if by_order else "",
        _far_line(far) if far else "",
        _composed_line(composed) if composed else "",
    ]
    return [line for line in lines if line]


def _thin_line(patches: Sequence[FormedPatch]) -> str:
    captured = _span([100 * patch.trusted_energy for patch in patches], "{:.1f} %")
    return (
        f"--reuse auto will not use the patches of {_chunks_of(patches)}: they capture {captured} of the energy, below "
        f"{100 * AUTO_MIN_ENERGY:.0f} %; more --rank, --budget, --energy or --dtype bits help, --reuse patched takes "
        "them anyway"
    )


def _by_order_line(patches: Sequence[FormedPatch]) -> str:
    held = _span([100 * patch.trusted_energy for patch in patches], "{:.1f} %")
    sets = dict.fromkeys(tuple(sorted(patch.antecedent_numbers)) for patch in patches)
    after = " or ".join(f"{{{', '.join(map(str, numbers))}}}" for numbers in sets)
    return (
        f"--reuse auto will not use the orbit patches of {_chunks_of(patches)} after {after}: there the order matters, "
        f"and in the worst one they hold {held} of what a prefill gives, below {100 * AUTO_MIN_ENERGY:.0f} %; "
        "--kind exact serves one order, --reuse patched takes them anyway"
    )


def _far_line(patches: Sequence[FormedPatch]) -> str:
    found = _span([patch.kl for patch in patches if patch.kl is not None], "{:.2g}")
    return (
        f"--reuse auto will not use the patches of {_chunks_of(patches)}: their measured KL is {found}, above "
        f"{AUTO_MAX_KL:g}; more --rank, --budget, --energy or --dtype bits help, --max-kl of query allows more"
    )


def _composed_line(bounds: Sequence[ComposedBound]) -> str:
    numbers = ", ".join(str(bound.num_antecedents) for bound in bounds)
    held = _span([100 * bound.energy for bound in bounds], "{:.0f} %")
    return (
        f"--reuse auto will not use compositions of {numbers} pairs: they hold {held} of what a prefill gives, at a KL "
        f"up to {max(bound.kl for bound in bounds):.2g}; --reuse patched takes them, and --kind orbit or exact forms "
        "what auto takes"
    )


def _offer_of(bound: ComposedBound) -> Offer:
    return Offer((), "composed", bound.kl, bound.energy)


def _chunks_of(patches: Sequence[FormedPatch]) -> str:
    return chunks_words(dict.fromkeys(patch.chunk_number for patch in patches))


def _span(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low.removesuffix(' %')} to {high}"
