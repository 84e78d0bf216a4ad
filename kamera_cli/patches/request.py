"""What is asked of patches, and which stored ones answer it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kamera_cli.library import Library, require_record
from kamera_cli.operator.patch import FACTOR_DTYPES, Precision, direction_bytes
from kamera_cli.operator.ranks import Worth, check_budget
from kamera_cli.options import CompileOptions, parse_budget
from kamera_cli.patches.report import describe, kv_bytes, why_not_auto
from kamera_cli.results import FormedPatch
from kamera_cli.window import Chain
from kamera_store.format.records import Record


@dataclass(frozen=True)
class PatchOptions(CompileOptions):
    """What was asked for, and what forming adds to it.

    With ``any_usable`` a stored patch that ``--reuse auto`` takes is enough, however it was asked for; so is a finer
    one.
    """

    learn: bool = False
    any_usable: bool = False
    worth: Worth | None = None

    @property
    def dtype(self) -> Precision:
        """Dtype of the factors; None lets `form` choose."""
        return FACTOR_DTYPES[self.factor_dtype]

    @property
    def request(self) -> dict:
        """What decides the factors; kept with a patch, so that the same request finds it done."""
        asked = {"rank": self.rank, "energy": self.energy, "factor_dtype": self.factor_dtype}
        return asked if self.budget is None else {**asked, "budget": self.budget}

    def budget_bytes(self, chunk: Record) -> int | None:
        """Bytes that the patch of a chunk may take."""
        return None if self.budget is None else parse_budget(self.budget).of(kv_bytes(chunk))

    def check_budget(self, chunk: Record, what: str) -> None:
        """Refuse a budget that leaves the patch of a chunk without any direction.

        Raises
        ------
        UsageError
        """
        if self.budget is None:
            return
        sizes = [
            direction_bytes(tensor.shape[0], math.prod(tensor.shape[1:]), self.dtype)
            for tensor in chunk.tensors
            if tensor.layer >= 0
        ]
        check_budget(parse_budget(self.budget), kv_bytes(chunk), min(sizes), what)


def find_formed(
    library: Library, chain: Chain, options: PatchOptions, numbers: dict[bytes, int]
) -> FormedPatch | None:
    """The stored patch of a chain, if there is one that serves the request."""
    record = library.find_patch(chain[-1], chain[:-1], "exact")
    if record is None or not serves(record, options):
        return None
    chunk = require_record(library, chain[-1], str(numbers.get(chain[-1].key, chain[-1].short_id)))
    return describe(record, chunk, numbers, "found", 0.0)


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
