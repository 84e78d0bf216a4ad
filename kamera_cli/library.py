"""What the engine keeps in the store, as it is read: chunks and patches of one tenant and one model fingerprint.

A chunk keeps everything that is ever needed of it again: token ids, embeddings as the language model receives them,
relative positions and canonical KV. Nothing is decoded or seen by the vision tower a second time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from kamera_cli.errors import NotFoundError
from kamera_cli.factors import LayerReader, require_known_factors
from kamera_cli.hot import HotCache, Part, Version
from kamera_cli.model.families.family import LayerKV
from kamera_cli.model.inputs import ChunkInputs, Deepstack, Segment
from kamera_cli.model.positions import RelativePositions
from kamera_cli.operator.patch import LayerPatch
from kamera_cli.results import WindowEntry
from kamera_cli.trust import StoredKind
from kamera_cli.window import identity_of
from kamera_store.errors import DamagedError, DamagedRecordWarning
from kamera_store.format.keys import Identity, chunk_identity, patch_identity
from kamera_store.format.records import Record, TensorBytes, TensorInfo
from kamera_store.format.tensors import to_bytes, to_torch
from kamera_store.kvstore import KVStore

FindPatch = Callable[[Identity, Sequence[Identity], StoredKind], Record | None]
"""`Library.find_patch`, or one that answers the same faster."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Library:
    """Chunks and patches on top of a store. Making one reads nothing.

    Reading raises `DamagedError` where a stored byte is not what was written, and `MissingRecordError` where the record
    was removed meanwhile.

    Attributes
    ----------
    store : KVStore
    tenant : str
        Whose chunks are seen.
    fingerprint : str
        Of the model that the chunks belong to, 64 hex digits.
    device : torch.device
        Where tensors that are read back go.
    names : tuple of str
        What the family calls its rotary and its plain tensor.
    hot : HotCache or None
        Where what is read is kept in memory, if anywhere.
    """

    store: KVStore
    tenant: str
    fingerprint: str
    device: torch.device
    names: tuple[str, str]
    hot: HotCache | None = None

    def chunk_identity(self, inputs: ChunkInputs) -> Identity:
        """Key of a chunk from exactly what the model sees of it, and of nothing else."""
        tensors = {"token_ids": inputs.token_ids, "token_types": inputs.token_types, **inputs.tensors}
        tensors["positions"] = inputs.positions.ids
        return chunk_identity(
            fingerprint=self.fingerprint,
            tenant=self.tenant,
            inputs=[to_bytes(name, tensor) for name, tensor in sorted(tensors.items())],
            extra={"span": inputs.positions.span},
        )

    def find_chunk(self, entry: WindowEntry) -> Record | None:
        """The record of a window's chunk; None when it is gone, or is not the one that the window means."""
        return self.store.find(identity_of(entry), tenant=self.tenant)

    def segment(self, record: Record) -> Segment:
        """Stored embeddings and positions: what a conditioned forward starts from. Not to be written into."""
        return self._kept_or_read(record, "segment", lambda: self._read_segment(record))

    def _read_segment(self, record: Record) -> Segment:
        names = sorted(tensor.name for tensor in _of_segment(record))
        tensors = {
            name: to_torch(tensor)
            for (name, _), tensor in self.store.read(record, [(name, -1) for name in names]).items()
        }
        positions = RelativePositions(tensors["positions"], record.meta["span"])
        deepstack = (
            Deepstack(tensors["deepstack_at"], tensors["deepstack"].to(self.device))
            if "deepstack" in tensors
            else None
        )
        return Segment(tensors["embeddings"].to(self.device), positions, deepstack)

    def positions(self, record: Record) -> RelativePositions:
        """Stored positions, relative to the chunk's first token. Not to be written into."""
        return self._kept_or_read(record, "positions", lambda: self._read_positions(record))

    def _read_positions(self, record: Record) -> RelativePositions:
        tensors = self.store.read(record, [("positions", -1)])
        return RelativePositions(to_torch(tensors["positions", -1]), record.meta["span"])

    def layers(self, record: Record) -> list[LayerKV]:
        """Canonical KV of all layers of a chunk. Not to be written into."""
        return self._layers(record)

    def patch_identity(self, chunk: Identity, antecedents: Sequence[Identity], kind: StoredKind) -> Identity:
        """Key of a patch: the chunk, the chunks before it (in order for ``exact``), the kind."""
        return patch_identity(chunk=chunk, antecedents=antecedents, kind=kind, tenant=self.tenant)

    def find_patch(self, chunk: Identity, antecedents: Sequence[Identity], kind: StoredKind) -> Record | None:
        """The stored patch for exactly this conditioning; a damaged one is a miss with a warning.

        Raises
        ------
        UnknownFactorsError
            A newer kamera wrote it.
        """
        try:
            found = self.store.find(self.patch_identity(chunk, antecedents, kind), tenant=self.tenant)
        except DamagedError as error:
            warnings.warn(f"{error}; counted as a miss", DamagedRecordWarning, stacklevel=2)
            return None
        if found is None:
            return None
        require_known_factors(found)
        return found

    def patch_layers(self, record: Record) -> list[LayerPatch]:
        """All layers of a patch. Not to be written into."""
        return self._layers(record)

    def _layers(self, record: Record) -> list[Any]:
        return list(self._kept_or_read(record, "layers", lambda: self._read_layers(record)))

    def _read_layers(self, record: Record) -> tuple[LayerKV | LayerPatch, ...]:
        """Every layer of a record, read in one transaction."""
        named = [(info.name, info.layer) for info in record.tensors if info.layer >= 0]
        layers: dict[int, dict[str, TensorBytes]] = {}
        for (name, layer), tensor in self.store.read(record, named).items():
            layers.setdefault(layer, {})[name] = tensor
        return tuple(self.restored([record], layer, [layers[layer]])[0] for layer in sorted(layers))

    def restored(
        self, records: Sequence[Record], layer: int, tensors: Sequence[Mapping[str, TensorBytes]]
    ) -> list[LayerKV | LayerPatch]:
        """One stored layer of chunks and patches as tensors; see `LayerReader.layers`."""
        reader = LayerReader(self.names, self.device, apart=self.hot is not None)
        return reader.layers(records, layer, tensors)

    def version(self, record: Record) -> Version:
        """What a copy of a record in memory is good for."""
        return Version(
            record.tenant, self.fingerprint, record.kind, record.key, record.digest, record.header_checksum
        )

    def segment_bytes(self, record: Record) -> tuple[int, int]:
        """Stored bytes of a chunk that `segment` has to read, and that are in memory instead."""
        size = segment_size(record)
        hot = self.hot is not None and self.hot.holds(self.version(record), "segment")
        return (0, size) if hot else (size, 0)

    def _kept_or_read(self, record: Record, part: Part, read: Callable[[], _T]) -> _T:
        """From memory, or read and kept there."""
        return (
            read() if self.hot is None else self.hot.get_or_read(self.store, self.version(record), part, read)
        )


def _of_segment(record: Record) -> list[TensorInfo]:
    """The tensors of a chunk that a forward starts from."""
    names = ("embeddings", "positions", "deepstack_at", "deepstack")
    return [tensor for tensor in record.tensors if tensor.layer < 0 and tensor.name in names]


def segment_size(record: Record) -> int:
    """Stored bytes of a chunk that a forward starts from."""
    return sum(tensor.stored_bytes for tensor in _of_segment(record))


def assembly_size(record: Record) -> int:
    """Stored bytes of a chunk or patch that an assembled cache is made of: its layers, and a chunk's positions."""
    return sum(
        tensor.stored_bytes for tensor in record.tensors if tensor.layer >= 0 or tensor.name == "positions"
    )


def require_record(library: Library, identity: Identity, label: str) -> Record:
    """The record of a chunk.

    Raises
    ------
    NotFoundError
        It was evicted from the store.
    """
    record = library.store.find(identity, tenant=library.tenant)
    if record is None:
        raise NotFoundError(f"chunk {label} is no longer in the store; ingest its source again")
    return record
