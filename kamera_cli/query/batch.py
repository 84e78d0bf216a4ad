"""Records that are read together: which of them are in memory, which must be read, and what is kept afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from kamera_cli.library import Library, assembly_size
from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator.patch import LayerPatch
from kamera_store.format.records import Record, TensorBytes


class Batch:
    """The chunks of a prompt and their patches, chunks first.

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

    def sizes(self, patches: Sequence[Sequence[Record]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Stored bytes of each chunk with its patches, that had to be read, and that were in memory instead."""
        of_patches = itertools.count(len(patches))
        read, hot = [], []
        for index, parts in enumerate(patches):
            sizes = [self._stored_bytes(index), *(self._stored_bytes(next(of_patches)) for _ in parts)]
            read.append(sum(size for size, _ in sizes))
            hot.append(sum(size for _, size in sizes))
        return tuple(read), tuple(hot)

    def _stored_bytes(self, index: int) -> tuple[int, int]:
        """Stored bytes of one record that had to be read, and that were in memory instead."""
        record = self._records[index]
        positions = record.tensor("positions").stored_bytes if record.kind == "chunk" else 0
        layers = assembly_size(record) - positions
        hot = layers * (self._layers[index] is not None) + positions * self._positions_hot[index]
        return layers + positions - hot, hot
