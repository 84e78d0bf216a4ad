"""A store in a dictionary: the smallest implementation of the verbs, made of the format alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from kamera_store.base import State, Store, is_same
from kamera_store.errors import ConflictError, DamagedError, MissingRecordError
from kamera_store.format import payload
from kamera_store.format.header import decode_header, parse_json, strict_json
from kamera_store.format.keys import Identity
from kamera_store.format.records import Record, TensorBytes


class MemoryStore(Store):
    """Headers and segments as the format has them, by key; gone when it is closed."""

    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}
        self.segments: dict[bytes, list[bytes]] = {}
        self.states: dict[tuple[str, str], tuple[bytes, int]] = {}

    def close(self) -> None:
        self.headers, self.segments, self.states = {}, {}, {}

    def put(self, identity: Identity, *, replace: bool = False, **item: Any) -> bool:
        try:
            record = self.get(identity.key)
            if record is not None and not (replace and is_same(record, identity, item["tenant"])):
                is_same(record, identity, item["tenant"])
                return False
        except DamagedError:
            pass
        prepared = payload.prepare(identity, **item)
        self.headers[identity.key] = prepared.header
        self.segments[identity.key] = [bytes(value) for value in prepared.segments()]
        return True

    def get(self, key: bytes) -> Record | None:
        header = self.headers.get(key)
        return None if header is None else decode_header(key, header)

    def iterate(self, kind: str | None = None, tenant: str | None = None) -> Iterator[Record]:
        for key in sorted(self.headers):
            record = self.get(key)
            if kind in (None, record.kind) and tenant in (None, record.tenant):
                yield record

    def read(
        self, record: Record, wanted: Iterable[tuple[str, int]] | None = None
    ) -> dict[tuple[str, int], TensorBytes]:
        now = self.get(record.key)
        if now is None:
            raise MissingRecordError(record.key)
        infos = now.tensors if wanted is None else [now.tensor(*name) for name in wanted]
        fetched = payload.fetch(now, infos, lambda index: memoryview(self.segments[now.key][index]))
        return {(info.name, info.layer): payload.decode(now, info, stored) for info, stored in fetched}

    def touch(self, keys: Iterable[bytes], now_s: float | None = None) -> None:
        """Nothing is ever evicted from here."""

    def delete(self, keys: Iterable[bytes]) -> int:
        freed = 0
        for key in keys:
            freed += len(self.headers.pop(key, b"")) + sum(map(len, self.segments.pop(key, ())))
        return freed

    def get_state(self, space: str, name: str) -> State | None:
        data, version = self.states.get((space, name), (None, 0))
        return None if data is None else State(parse_json(data, None, f"state {space}/{name}"), version)

    def put_state(
        self, space: str, name: str, value: Mapping[str, Any], *, expect: int | Literal["any"] | None
    ) -> int:
        if not space or not name or "\0" in space + name:
            raise ValueError(f"state {space!r}/{name!r} has no place")
        _, found = self.states.get((space, name), (None, None))
        if expect not in ("any", found):
            raise ConflictError(space, name, expect, found)
        self.states[space, name] = strict_json(value), (found or 0) + 1
        return (found or 0) + 1

    def list_state(self, space: str) -> list[str]:
        return sorted((name for one, name in self.states if one == space), key=str.encode)
