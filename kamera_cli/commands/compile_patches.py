"""``kamera compile-patches``: form patches ahead of the first question."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kamera_cli.commands.session import ChunksArgument, Session, WindowOption, command
from kamera_cli.options import DEFAULT_WINDOW, CompileKind, CompileOptions, FactorDtype
from kamera_cli.results import CompileResult, FormedPatch, ReplacedPatch
from kamera_cli.words import (
    brief_numbers,
    count,
    display,
    format_bytes,
    format_ms,
    format_number,
    short_id,
    table,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_REPLACED = 4
"""Patches that are named one by one among those that lost their place."""


@command
def compile_patches(
    session: Session,
    chunks: ChunksArgument = None,
    window: WindowOption = DEFAULT_WINDOW,
    kind: Annotated[
        CompileKind,
        typer.Option(
            "--kind",
            help="exact: for the antecedents in this order; orbit: for every order of up to 5 chunks; "
            "pair: each after each other one, of which any arrangement is composed; "
            "removal: survivors forget what has left the window",
        ),
    ] = CompileOptions.kind,
    rank: Annotated[
        str,
        typer.Option(
            "--rank", metavar="M|auto", help="Columns of a patch; auto gives each layer what it is worth"
        ),
    ] = "auto",
    energy: Annotated[
        float,
        typer.Option(
            "--energy",
            metavar="SHARE",
            help="Share of the residual's energy, by what it is worth to the output, that --rank auto captures",
        ),
    ] = CompileOptions.energy,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="SHARE|BYTES",
            help="Most that --rank auto spends on a patch: 3% of the KV it serves, or a size such as 20KB; "
            "of an orbit, on each set with its share of what all sets of a chunk read",
        ),
    ] = None,
    dtype: Annotated[
        FactorDtype,
        typer.Option("--dtype", help="What the patch's factors are kept in"),
    ] = CompileOptions.factor_dtype,
) -> None:
    """Form patches ahead of the first question.

    For a window's own order, or for the order of the given chunks: each chunk after the first gets a patch for what
    stands before it.
    """
    options = CompileOptions(
        window=window,
        chunks=chunks or None,
        kind=kind,
        rank=parse_rank(rank),
        energy=energy,
        factor_dtype=dtype,
        budget=budget,
        time_prefill=session.output.verbose,
    )
    with session.engine() as engine:
        result = engine.compile_patches(options=options)
    session.output.result("compile-patches", result, lambda: view(result))


def parse_rank(text: str) -> Any:
    """A whole number as one; anything else is left for `CompileOptions` to judge."""
    return int(text) if text.isascii() and text.isdigit() else text


def view(result: CompileResult) -> Iterable[RenderableType]:
    """What people see."""
    if result.kind == "removal":
        yield from removal_view(result)
    if not result.patches and result.kind != "removal":
        yield f"window {display(result.window)}: no chunk stands after another one, so there is nothing to patch"
        return
    if not result.patches:
        return
    yield table(
        (
            ">#",
            "patch",
            "after",
            "outcome",
            ">rank",
            ">energy",
            ">KL",
            ">KL unpatched",
            ">size",
            ">of KV",
            ">formed in",
        ),
        (
            (
                patch.chunk_number or "–",
                short_id(patch.id),
                _after(result, patch),
                patch.outcome,
                format_ranks(patch.ranks),
                format_share(patch.trusted_energy),
                format_number(patch.kl),
                format_number(patch.kl_blind),
                format_bytes(patch.patch_bytes),
                format_share(patch.patch_bytes / patch.chunk_kv_bytes if patch.chunk_kv_bytes else None),
                format_ms(patch.form_ms if patch.outcome == "formed" else None),
            )
            for patch in result.patches
        ),
    )
    formed = sum(patch.outcome == "formed" for patch in result.patches)
    if not formed:
        yield f"{count(len(result.patches), 'patch')} found in {format_ms(result.total_ms)}, none was missing"
    else:
        yield formed_line(result, formed)
    if line := replaced_line(result):
        yield line
    if result.composed:
        yield from composed_view(result)


def formed_line(result: CompileResult, formed: int) -> str:
    """How many patches were formed, and what that took."""
    return (
        f"{count(formed, 'patch')} formed, {len(result.patches) - formed} found in {format_ms(result.total_ms)} "
        f"({format_ms(result.prefill_ms)} of it in conditioned forwards, {format_ms(result.measure_ms)} measuring KL"
        + (f", {format_ms(result.learn_ms)} what each layer is worth" if result.learn_ms >= 10 else "")
        + (")" if result.form_ratio is None else f"; formed in {result.form_ratio:.2f} prefills)")
    )


def _after(result: CompileResult, patch: FormedPatch) -> str:
    """Numbers of the antecedents: in their order, or ascending where a patch serves every order."""
    numbers = patch.antecedent_numbers
    return brief_numbers(sorted(numbers) if result.kind == "orbit" else numbers)


def replaced_line(result: CompileResult) -> str | None:
    """Which stored patches the new ones took the place of; None where there was none, or just the same."""
    found = [(patch, old) for patch in result.patches if (old := patch.replaced) and _differs(patch, old)]
    if not found:
        return None
    listed = [
        f"chunk {patch.chunk_number or '?'} after {brief_numbers(patch.antecedent_numbers)} (rank {old.rank}, energy "
        f"{format_share(old.energy)}, {format_bytes(old.patch_bytes)})"
        for patch, old in found[:MAX_REPLACED]
    ]
    more = f", and {len(found) - MAX_REPLACED} more" if len(found) > MAX_REPLACED else ""
    lost = "; compositions of them are to be measured anew with --kind pair"
    lost = lost if result.kind != "pair" and any(old.had_compositions for _, old in found) else ""
    return f"took the place of stored patches: {', '.join(listed)}{more}{lost}"


def _differs(patch: FormedPatch, old: ReplacedPatch) -> bool:
    new = (max(patch.ranks, default=0), patch.trusted_energy, patch.patch_bytes)
    return old.had_compositions or new != (old.rank, old.energy, old.patch_bytes)


def composed_view(result: CompileResult) -> Iterable[RenderableType]:
    """What people see of the bounds of compositions, below the pairs."""
    yield table(
        (">antecedents", ">KL at most", ">KL unpatched", ">of the true Δ", ">arrangements measured"),
        (
            (
                bound.num_antecedents,
                format_number(bound.kl),
                format_number(bound.kl_blind),
                format_share(bound.energy),
                bound.num_samples,
            )
            for bound in result.composed
        ),
    )


def removal_view(result: CompileResult) -> Iterable[RenderableType]:
    """What people see of a removal, above the patches that it formed."""
    if not result.survivors:
        yield f"window {display(result.window)}: no chunk is conditioned on one that has left; nothing to remove"
        return
    who = f"{count(len(result.survivors), 'chunk')} ({' '.join(map(str, result.survivors))})"
    yield (
        f"window {display(result.window)}: {who} no longer hold what they "
        f"took in from chunks that have left; KL to a prefill of this window {format_number(result.kl_kept)} before, "
        f"{format_number(result.kl_removed)} now"
    )


def format_ranks(ranks: tuple[int, ...]) -> str:
    """``16``, or ``≤16`` when layers differ (the first layer never needs any)."""
    if not ranks:
        return "–"
    low, high = min(ranks), max(ranks)
    return str(low) if low == high else f"≤{high}"


def format_share(share: float | None) -> str:
    """``99.1 %``; ``–`` for None."""
    return "–" if share is None else f"{share * 100:.1f} %"
