"""What was formed, as commands show it: a stored patch, what it took the place of, and what a plan will not use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kamera_cli.operator.plan import AUTO_MAX_KL, AUTO_MIN_ENERGY, Offer, refusal
from kamera_cli.operator.ranks import proven_energy
from kamera_cli.patches.pairs import META as COMPOSITIONS
from kamera_cli.results import CompileResult, ComposedBound, FormedPatch, ReplacedPatch, WhyNot
from kamera_cli.words import chunks_words
from kamera_store.format.records import Record


def kv_bytes(chunk: Record) -> int:
    """Raw bytes of a chunk's canonical KV."""
    return sum(tensor.raw_bytes for tensor in chunk.tensors if tensor.layer >= 0)


def describe(
    record: Record,
    chunk: Record,
    numbers: dict[bytes, int],
    outcome: str,
    form_ms: float,
    older: Record | None = None,
) -> FormedPatch:
    """A stored patch as commands show it; bytes are raw tensor bytes on both sides.

    Parameters
    ----------
    older : Record or None
        What it took the place of.
    """
    return FormedPatch(
        id=record.id,
        chunk=chunk.id,
        chunk_number=numbers.get(chunk.key, 0),
        antecedents=tuple(record.meta["antecedents"]),
        outcome=outcome,
        ranks=tuple(record.meta["ranks"]),
        energy=min(record.meta["energy"], default=1.0),
        kl=record.meta["kl"],
        kl_blind=record.meta["kl_blind"],
        patch_bytes=record.raw_bytes,
        chunk_kv_bytes=kv_bytes(chunk),
        form_ms=form_ms,
        energy_weighted=record.meta.get("energy_weighted"),
        energy_in_orders=record.meta.get("energy_in_orders"),
        split=tuple(map(tuple, record.meta.get("split", ()))),
        antecedent_numbers=tuple(numbers.get(bytes.fromhex(id), 0) for id in record.meta["antecedents"]),
        why_not=why_not_auto(record),
        replaced=None if older is None else _replaced(older.meta, older.raw_bytes),
    )


def why_not_auto(patch: Record) -> WhyNot | None:
    """Why ``--reuse auto`` does not use a stored patch; None where it does."""
    offer = Offer((patch.key,), patch.meta["kind"], patch.meta["kl"], proven_energy(patch.meta))
    return refusal(offer, "auto", AUTO_MAX_KL)


def _replaced(meta: Mapping, patch_bytes: int) -> ReplacedPatch:
    rank = max(meta["ranks"], default=0)
    return ReplacedPatch(rank, proven_energy(meta), meta["kl"], patch_bytes, bool(meta.get(COMPOSITIONS)))


def refused_lines(result: CompileResult) -> list[str]:
    """What a person should know of patches and compositions that ``--reuse auto`` will not use: a line per reason."""
    lines = []
    low = [patch for patch in result.patches if patch.why_not == "low_energy"]
    by_order = [patch for patch in low if patch.captured_energy >= AUTO_MIN_ENERGY]
    low = [patch for patch in low if patch not in by_order]
    if low:
        captured = _span([100 * patch.trusted_energy for patch in low], "{:.1f} %")
        lines.append(
            f"--reuse auto will not use the patches of {_chunks_of(low)}: they capture {captured} of the energy, below "
            f"{100 * AUTO_MIN_ENERGY:.0f} %; more --rank, --budget, --energy or --dtype bits help, --reuse patched "
            "takes them anyway"
        )
    if by_order:
        held = _span([100 * patch.trusted_energy for patch in by_order], "{:.1f} %")
        lines.append(
            f"--reuse auto will not use the orbit patches of {_chunks_of(by_order)} after "
            f"{_antecedents_of(by_order)}: there the order matters, and in the worst one they hold {held} of what a "
            f"prefill gives, below {100 * AUTO_MIN_ENERGY:.0f} %; --kind exact serves one order, --reuse patched takes "
            "them anyway"
        )
    far = [patch for patch in result.patches if patch.why_not == "max_kl"]
    if far:
        found = _span([patch.kl for patch in far], "{:.2g}")
        lines.append(
            f"--reuse auto will not use the patches of {_chunks_of(far)}: their measured KL is {found}, above "
            f"{AUTO_MAX_KL:g}; more --rank, --budget, --energy or --dtype bits help, --max-kl of query allows more"
        )
    refused = [bound for bound in result.composed if refusal(_offer_of(bound), "auto", AUTO_MAX_KL)]
    if refused:
        numbers = ", ".join(str(bound.num_antecedents) for bound in refused)
        held = _span([100 * bound.energy for bound in refused], "{:.0f} %")
        lines.append(
            f"--reuse auto will not use compositions of {numbers} pairs: they hold {held} of what a prefill gives, "
            f"at a KL up to {max(bound.kl for bound in refused):.2g}; --reuse patched takes them, and --kind orbit or "
            "exact forms what auto takes"
        )
    return lines


def _offer_of(bound: ComposedBound) -> Offer:
    return Offer((), "composed", bound.kl, bound.energy)


def _chunks_of(patches: Sequence[FormedPatch]) -> str:
    return chunks_words(dict.fromkeys(patch.chunk_number for patch in patches))


def _antecedents_of(patches: Sequence[FormedPatch]) -> str:
    sets = dict.fromkeys(tuple(sorted(patch.antecedent_numbers)) for patch in patches)
    return " or ".join(f"{{{', '.join(map(str, numbers))}}}" for numbers in sets)


def _span(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low.removesuffix(' %')} to {high}"
