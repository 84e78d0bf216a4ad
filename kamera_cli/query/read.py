"""Read canonical KV and factors layer by layer and assemble them, with a clock on each stage."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kamera_cli.library import Library
from kamera_cli.model.compat import DynamicCache
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.inputs import Segment
from kamera_cli.model.runner import ModelRunner
from kamera_cli.operator.assemble import assemble, joined_positions, place
from kamera_cli.operator.patch import LayerPatch
from kamera_cli.query.arrange import merged
from kamera_cli.query.batch import Batch
from kamera_cli.results import Stages
from kamera_store.format.records import Record


@dataclass(frozen=True)
class Reading:
    """Time per stage in ms, and for each chunk (its patch included) stored bytes that were read, and that were not
    because they were in memory."""

    stages: Stages
    bytes_read: tuple[int, ...]
    hot_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Ready:
    """A prompt whose last token has been computed, and how it was made.

    Attributes
    ----------
    cache : DynamicCache
        Of the whole prompt.
    logits : torch.Tensor
        (vocab,) after its last token.
    next_position : int
        Of the token that follows, on every axis.
    reading : Reading
    segments, captured : tuple
        After a whole prefill, of each chunk: what was prefilled, and its position-free KV as it is conditioned here.
    """

    cache: DynamicCache
    logits: torch.Tensor
    next_position: int
    reading: Reading
    segments: tuple[Segment, ...] = ()
    captured: tuple[list[LayerKV], ...] = ()


@dataclass
class _Clock:
    read: float = 0.0
    decompress: float = 0.0
    transfer: float = 0.0

    @property
    def total(self) -> float:
        return self.read + self.decompress + self.transfer


def read_and_assemble(
    runner: ModelRunner,
    library: Library,
    records: Sequence[Record],
    patches: Sequence[Sequence[Record]],
    rank: int | None = None,
) -> tuple[DynamicCache, int, Reading]:
    """A fresh cache of preamble and chunks at their places.

    Parameters
    ----------
    records : sequence of Record
        Chunks in prompt order.
    patches : sequence of sequence of Record
        What the patch of each is made of: nothing, one patch, or pairs.
    rank : int or None
        Use only the first directions of each patch.

    Returns
    -------
    DynamicCache
    int
        Position of the token that follows.
    Reading

    Raises
    ------
    DamagedError
        A stored byte is not what was written.
    """
    started = time.perf_counter()
    clock = _Clock()
    batch = Batch(library, [*records, *itertools.chain.from_iterable(patches)])
    positions = [library.positions(record) for record in records]
    sizes = [(runner.preamble.positions, runner.preamble.num_tokens)]
    sizes += [(ids, record.meta["num_tokens"]) for ids, record in zip(positions, records, strict=True)]
    placed, end = place(sizes)
    clock.read += time.perf_counter() - started
    layers = _layers(runner, library, batch, patches, clock)
    cache = assemble(runner.family, layers, joined_positions(placed), rank)
    batch.keep()
    runner.synchronize()
    assembled = time.perf_counter() - started - clock.total
    stages = Stages(
        read=1e3 * clock.read,
        decompress=1e3 * clock.decompress,
        transfer=1e3 * clock.transfer,
        assemble=1e3 * assembled,
    )
    return cache, end, Reading(stages, *batch.sizes(patches))


def _layers(
    runner: ModelRunner,
    library: Library,
    batch: Batch,
    patches: Sequence[Sequence[Record]],
    clock: _Clock,
) -> Iterator[list[tuple[LayerKV, LayerPatch | None]]]:
    for layer in range(runner.family.num_layers):
        started = time.perf_counter()
        fetched = library.store.fetch_layer(batch.cold, layer)
        read = time.perf_counter()
        decoded = [piece.decode() for piece in fetched]
        decompressed = time.perf_counter()
        restored = batch.restored(layer, decoded)
        canonical = [kv for kv in restored if isinstance(kv, LayerKV)]
        factors = (patch for patch in restored if isinstance(patch, LayerPatch))
        of_chunks = [merged([next(factors) for _ in parts], parts) for parts in patches]
        clock.read += read - started
        clock.decompress += decompressed - read
        clock.transfer += time.perf_counter() - decompressed
        yield [(runner.preamble_layers[layer], None), *zip(canonical, of_chunks, strict=True)]
