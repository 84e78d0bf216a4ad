"""Read canonical KV and factors layer by layer and assemble them, with a clock on each stage."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from kamera_cli.library import Library, assembly_size
from kamera_cli.model.compat import DynamicCache
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.inputs import Segment
from kamera_cli.model.runner import ModelRunner
from kamera_cli.operator.assemble import assemble, joined_positions, place
from kamera_cli.operator.patch import LayerPatch
from kamera_cli.query.arrange import merged
from kamera_cli.results import Stages
from kamera_store.format.records import Record, TensorBytes


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
    batch = _Batch(library, [*records, *itertools.chain.from_iterable(patches)])
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
    return cache, end, Reading(stages, *_bytes(batch, patches))


def _layers(
    runner: ModelRunner,
    library: Library,
    batch: _Batch,
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


def _bytes(batch: _Batch, patches: Sequence[Sequence[Record]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Stored bytes per chunk, read and in memory."""
    of_patches = itertools.count(len(patches))
    read, hot = [], []
    for index, parts in enumerate(patches):
        sizes = [batch.stored_bytes(index), *(batch.stored_bytes(next(of_patches)) for _ in parts)]
        read.append(sum(size for size, _ in sizes))
        hot.append(sum(size for _, size in sizes))
    return tuple(read), tuple(hot)


class _Batch:
    """Records that are about to be read together: which are in memory, which must be read, and what is kept after.

    Attributes
    ----------
    cold : list of Record
        Those whose layers must be read, in the order given.
    """

    def __init__(self, library: Library, records: Sequence[Record]) -> None:
        self._library, self._records, self._hot = library, records, library.hot
        self._layers: list[Sequence[LayerKV | LayerPatch] | None] = [None] * len(records)
        self._positions_hot = [False] * len(records)
        if self._hot is not None:
            current = self._hot.check(library.store, (record.key for record in records))
            for index, record in enumerate(records):
                if current[record.key] == record.header_checksum:
                    version = library.version(record)
                    self._layers[index] = self._hot.get(version, "layers")
                    self._positions_hot[index] = self._hot.holds(version, "positions")
        self.cold = [record for record, layers in zip(records, self._layers, strict=True) if layers is None]
        self._made: list[list[LayerKV | LayerPatch]] = [[] for _ in self.cold]

    def restored(
        self, number: int, decoded: Sequence[Mapping[str, TensorBytes]]
    ) -> list[LayerKV | LayerPatch]:
        """One layer of every record, in the order given.

        Parameters
        ----------
        decoded : sequence of mapping
            Tensors by name of each cold record.
        """
        fresh = self._library.restored(self.cold, number, decoded)
        if self._hot is not None:
            for made, value in zip(self._made, fresh, strict=True):
                made.append(value)
        coming = iter(fresh)
        return [next(coming) if layers is None else layers[number] for layers in self._layers]

    def keep(self) -> None:
        """Keep what was read, once all layers were."""
        if self._hot is None or not self.cold:
            return
        for record, made in zip(self.cold, self._made, strict=True):
            self._hot.put(self._library.version(record), "layers", tuple(made))
        self._hot.check(self._library.store)

    def stored_bytes(self, index: int) -> tuple[int, int]:
        """Stored bytes of one record that had to be read, and that were in memory instead."""
        record = self._records[index]
        positions = record.tensor("positions").stored_bytes if record.kind == "chunk" else 0
        layers = assembly_size(record) - positions
        hot = layers * (self._layers[index] is not None) + positions * self._positions_hot[index]
        return layers + positions - hot, hot
