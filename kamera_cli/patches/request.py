"""What is asked of patches, how factors follow it, and which stored patches answer it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kamera_cli.library import require_record
from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator.patch import FACTOR_DTYPES, LayerPatch, direction_bytes
from kamera_cli.operator.ranks import Worth, check_budget
from kamera_cli.operator.residual import Residual
from kamera_cli.options import CompileOptions, parse_budget
from kamera_cli.patches.report import describe, kv_bytes, why_not_auto
from kamera_cli.results import FormedPatch
from kamera_cli.window import Chain
from kamera_store.format.records import Record

if TYPE_CHECKING:
    from kamera_cli.context import Context


@dataclass(frozen=True)
class PatchOptions(CompileOptions):
    """What was asked for, and what forming adds to it.

    With ``any_usable`` a stored patch that ``--reuse auto`` takes is enough, however it was asked for; so is a finer
    one. With ``learn`` it may be measured what each layer is worth.
    """

    learn: bool = False
    any_usable: bool = False

    @property
    def learns(self) -> bool:
        """Whether what each layer is worth may be measured now: only automatic ranks go by it."""
        return self.learn and self.rank == "auto"

    @property
    def request(self) -> dict[str, Any]:
        """What decides the factors; kept with a patch, so that the same request finds it done."""
        asked = {"rank": self.rank, "energy": self.energy, "factor_dtype": self.factor_dtype}
        return asked if self.budget is None else {**asked, "budget": self.budget}

    @property
    def stated(self) -> dict[str, Any]:
        """What a patch keeps of its making."""
        return {"probe": self.probe, "request": self.request}

    def check_budget(self, chunk: Record, what: str) -> None:
        """Refuse a budget that leaves the patch of a chunk without any direction.

        Raises
        ------
        UsageError
        """
        if self.budget is None:
            return
        sizes = [
            direction_bytes(tensor.shape[0], math.prod(tensor.shape[1:]), FACTOR_DTYPES[self.factor_dtype])
            for tensor in chunk.tensors
            if tensor.layer >= 0
        ]
        check_budget(parse_budget(self.budget), kv_bytes(chunk), min(sizes), what)


def cut(residual: Residual, options: CompileOptions, worth: Worth | None = None) -> list[LayerPatch]:
    """The patch that is asked for out of Δ of a chunk, one `LayerPatch` per layer.

    Parameters
    ----------
    worth : Worth or None
        What the layers are worth, where that is known.
    """
    return residual.patch(
        rank=options.rank,
        energy=options.energy,
        dtype=FACTOR_DTYPES[options.factor_dtype],
        budget_bytes=None if options.budget is None else parse_budget(options.budget).of(residual.kv_bytes),
        worth=worth,
    )


def factor(
    after: Sequence[LayerKV],
    canonical: Sequence[LayerKV],
    options: CompileOptions,
    worth: Worth | None = None,
) -> list[LayerPatch]:
    """`cut` from Δ of conditioned and canonical KV, position-free, of the same T tokens."""
    return cut(Residual(after, canonical), options, worth)


def find_formed(context: Context, chain: Chain, options: PatchOptions) -> FormedPatch | None:
    """The stored exact patch of a chain, if there is one that serves the request."""
    record = context.library.find_patch(chain[-1], chain[:-1], "exact")
    if record is None or not serves(record, options):
        return None
    chunk = require_record(context.library, chain[-1], context.label(chain[-1]))
    return describe(context, record, chunk, "found", 0.0)


def serves(record: Record, options: PatchOptions) -> bool:
    """Whether a stored patch is what was asked for, or the same with more directions, which a reader can leave out."""
    if options.any_usable and why_not_auto(record) is None:
        return True
    kept, wanted = record.meta["request"], options.request
    if kept == wanted:
        return True
    if options.any_usable and kept["rank"] == wanted["rank"] == "auto" and kept["energy"] >= wanted["energy"]:
        return True
    fixed = isinstance(kept["rank"], int) and isinstance(wanted["rank"], int)
    return fixed and kept["rank"] >= wanted["rank"] and kept["factor_dtype"] == wanted["factor_dtype"]
