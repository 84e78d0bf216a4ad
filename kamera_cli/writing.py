"""What is written of chunks and patches; `kamera_cli.library` reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kamera_cli.factors import packing_of, tensors_of
from kamera_cli.library import Library
from kamera_cli.model.inputs import ChunkInputs
from kamera_cli.model.runner import EncodedChunk
from kamera_cli.operator.patch import LayerPatch
from kamera_cli.operator.ranks import weighted_energy
from kamera_cli.trust import StoredKind
from kamera_store.errors import MissingRecordError
from kamera_store.format.keys import Identity
from kamera_store.format.records import Record
from kamera_store.format.tensors import to_bytes


@dataclass(frozen=True)
class NewPatch:
    """A patch that is to be written.

    Attributes
    ----------
    chunk : Record
        What it is a patch of.
    antecedents : sequence of Identity
        In order for ``exact``; the order does not matter for ``orbit``.
    layers : list of LayerPatch
    meta : mapping
        What was measured and asked for; strict JSON.
    cost_ms : float
        What it took to form.
    """

    chunk: Record
    antecedents: Sequence[Identity]
    kind: StoredKind
    layers: list[LayerPatch]
    meta: Mapping[str, Any]
    cost_ms: float


def put_chunk(
    library: Library,
    identity: Identity,
    inputs: ChunkInputs,
    encoded: EncodedChunk,
    *,
    unit: str,
    meta: Mapping[str, Any],
) -> bool:
    """Write a chunk; False when it was there already.

    Parameters
    ----------
    unit : str
        The media unit that it is evicted with.
    meta : mapping
        What is known of its source; strict JSON.

    Raises
    ------
    NoRoomError
        Quota or disk are full, even after eviction.
    """
    tensors = [
        to_bytes("token_ids", inputs.token_ids),
        to_bytes("positions", inputs.positions.ids),
        to_bytes("embeddings", encoded.segment.embeddings),
    ]
    if (deepstack := encoded.segment.deepstack) is not None:
        tensors += [to_bytes("deepstack_at", deepstack.at), to_bytes("deepstack", deepstack.features)]
    for layer, kv in enumerate(encoded.layers):
        pair = zip(library.names, (kv.rotary, kv.plain), strict=True)
        tensors += [to_bytes(name, tensor, layer=layer) for name, tensor in pair]
    described = {
        "kind": inputs.kind,
        "num_tokens": inputs.num_tokens,
        "span": inputs.positions.span,
        "num_layers": len(encoded.layers),
        "fingerprint": library.fingerprint,
        **meta,
    }
    cost_ms = encoded.vision_ms + encoded.prefill_ms
    return library.store.put(
        identity, tenant=library.tenant, unit=unit, meta=described, tensors=tensors, cost_ms=cost_ms
    )


def put_patches(library: Library, patches: Sequence[NewPatch]) -> list[Record]:
    """Write patches in one transaction, each in place of an older one for the same conditioning; their records.

    Raises
    ------
    NoRoomError
        Quota or disk are full, even after eviction.
    MissingRecordError
        Another process removed one at once.
    """
    items = [_item(library, patch) for patch in patches]
    library.store.put_all(items, replace=True)
    return [_written(library, item["identity"]) for item in items]


def _written(library: Library, identity: Identity) -> Record:
    record = library.store.find(identity, tenant=library.tenant)
    if record is None:
        raise MissingRecordError(identity.key)
    return record


def restate(library: Library, record: Record, meta: Mapping[str, Any]) -> None:
    """Change what a stored patch says of itself; its factors stay as they are, byte for byte.

    Raises
    ------
    MissingRecordError
        It was removed meanwhile, or formed anew.
    """
    current = library.store.get(record.key)
    if current is None or library.version(current) != library.version(record):
        raise MissingRecordError(record.key)
    library.store.put(
        Identity("patch", record.key, record.digest),
        tenant=record.tenant,
        unit=record.unit,
        meta={**record.meta, **meta},
        tensors=library.store.read(record).values(),
        cost_ms=record.cost_ms,
        created_s=record.created_s,
        replace=True,
    )


def _item(library: Library, new: NewPatch) -> dict[str, Any]:
    """What the store is given of a patch."""
    chunk, layers = new.chunk, new.layers
    of_chunk = Identity("chunk", chunk.key, chunk.digest)
    identity = library.patch_identity(of_chunk, new.antecedents, new.kind)
    weighted = weighted_energy(
        [part for patch in layers for part in ((patch.rotary_worth, patch.rotary_energy),
                                               (patch.plain_worth, patch.plain_energy))]
    )  # fmt: skip
    meta = {
        "chunk": of_chunk.id,
        "antecedents": [antecedent.id for antecedent in new.antecedents],
        "kind": new.kind,
        "ranks": [patch.rank for patch in layers],
        "energy": [min(patch.rotary_energy, patch.plain_energy) for patch in layers],
        "energy_weighted": weighted,
        "split": [[patch.rotary.rank, patch.plain.rank] for patch in layers],
        "factors": packing_of(layers),
        "fingerprint": library.fingerprint,
        **new.meta,
    }
    return {
        "identity": identity,
        "tenant": library.tenant,
        "unit": chunk.unit,
        "meta": meta,
        "tensors": tensors_of(library.names, layers),
        "cost_ms": new.cost_ms,
    }
