"""Hot chunks: what was read of recently used records, kept as tensors on the device under a budget.

A copy serves one writing of one record, for one tenant and one model. Before anything is taken from memory the store is
asked which writings stand, so a copy never outlives a purge, an eviction or a patch that was written anew, whoever did
that; what no longer stands is dropped. Tensors are handed out as they are kept and must not be written into: assembling
writes into memory of its own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar

import torch

from kamera_store.kvstore import KVStore

Part = Literal["layers", "positions", "segment"]
"""What is kept of a record: its KV or factors, the positions of its tokens, what a prefill starts from."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Version:
    """One writing of one record, as one model reads it; ``writing`` is the checksum that its header carries."""

    tenant: str
    fingerprint: str
    kind: str
    key: bytes
    digest: bytes
    writing: int


@dataclass
class _Held:
    parts: dict[Part, Any] = field(default_factory=dict)
    num_bytes: int = 0


class HotCache:
    """Parts of records by version, the least recently used record going first. Safe between threads.

    Parameters
    ----------
    limit_bytes : int
        Most bytes of tensors that are kept; a record that is larger by itself is not kept.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._held: OrderedDict[Version, _Held] = OrderedDict()
        self._held_bytes = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes of the tensors that are kept now."""
        return self._held_bytes

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, version: Version, part: Part) -> bool:
        """Whether a part is kept; does not count as a use."""
        with self._lock:
            return version in self._held and part in self._held[version].parts

    def get(self, version: Version, part: Part) -> Any | None:
        """A kept part, or None; its record becomes the most recently used one."""
        with self._lock:
            held = self._held.get(version)
            if held is None or part not in held.parts:
                return None
            self._held.move_to_end(version)
            return held.parts[part]

    def put(self, version: Version, part: Part, value: Any) -> None:
        """Keep a part, and let the least recently used records go until the budget holds."""
        num_bytes = tensor_bytes(value)
        with self._lock:
            held = self._held.setdefault(version, _Held())
            self._held.move_to_end(version)
            if part not in held.parts:
                held.parts[part] = value
                held.num_bytes += num_bytes
                self._held_bytes += num_bytes
            if held.num_bytes > self.limit_bytes:
                self._drop(version)
            while self._held_bytes > self.limit_bytes:
                self._drop(next(iter(self._held)))

    def record_keys(self) -> frozenset[bytes]:
        """Record keys of which something is kept."""
        with self._lock:
            return frozenset(version.key for version in self._held)

    def drop_all_but(self, current: Mapping[bytes, int | None]) -> None:
        """Drop copies of records whose writing is not the one given for their key; keys not given are left alone."""
        with self._lock:
            for version in list(self._held):
                if version.key in current and current[version.key] != version.writing:
                    self._drop(version)

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._held.clear()
            self._held_bytes = 0

    def check(self, store: KVStore, also: Iterable[bytes] = ()) -> dict[bytes, int | None]:
        """Drop what the store no longer has; the writing that stands for each kept key, and for ``also``."""
        current = store.writings({*self.record_keys(), *also})
        self.drop_all_but(current)
        return current

    def get_or_read(self, store: KVStore, version: Version, part: Part, read: Callable[[], _T]) -> _T:
        """A part from memory when its writing still stands; otherwise what ``read`` gives, which is kept."""
        current = store.writings([version.key])
        self.drop_all_but(current)
        found = self.get(version, part) if current[version.key] == version.writing else None
        if found is None:
            found = read()
            self.put(version, part, found)
            # After, not before: a purge between the read and this line must not leave a copy behind.
            self.drop_all_but(store.writings([version.key]))
        return found

    def _drop(self, version: Version) -> None:
        self._held_bytes -= self._held.pop(version).num_bytes


def tensor_bytes(value: object) -> int:
    """Bytes of the memory that the tensors in a value hold, each memory counted once."""
    storages = {}
    for tensor in _tensors(value):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for each in fields(value):
            yield from _tensors(getattr(value, each.name))
