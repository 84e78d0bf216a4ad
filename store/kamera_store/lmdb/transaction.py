"""Tables seen through one LMDB transaction, without a word of LMDB to whoever uses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

TABLES = ("format", "records", "segments", "ledger", "links", "state", "quarantine")


class Transaction:
    """A view of the tables at one moment; memory views from it end with it."""

    __slots__ = ("_raw", "_tables", "id")

    def __init__(self, raw: Any, tables: dict[str, object]) -> None:
        self._raw, self._tables, self.id = raw, tables, raw.id()

    def get(self, table: str, key: bytes) -> memoryview | None:
        """The value under a key, or None."""
        return self._raw.get(key, db=self._tables[table])

    def put(self, table: str, key: bytes, value: bytes | bytearray | memoryview) -> None:
        """Write a value, replacing any."""
        self._raw.put(key, value, db=self._tables[table])

    def delete(self, table: str, key: bytes) -> bool:
        """Delete a value; whether there was one."""
        return self._raw.delete(key, db=self._tables[table])

    def scan(
        self, table: str, prefix: bytes = b"", start: bytes | None = None
    ) -> Iterator[tuple[bytes, memoryview]]:
        """Keys and values in key order, from `start` or the prefix on, as long as keys have the prefix."""
        with self._raw.cursor(db=self._tables[table]) as cursor:
            first = prefix if start is None else start
            if not (cursor.set_range(first) if first else cursor.first()):
                return
            for key, value in cursor:
                key = bytes(key)
                if not key.startswith(prefix):
                    return
                yield key, value

    def keys(self, table: str, prefix: bytes = b"") -> Iterator[bytes]:
        """Keys with a prefix in order, values untouched."""
        with self._raw.cursor(db=self._tables[table]) as cursor:
            if not (cursor.set_range(prefix) if prefix else cursor.first()):
                return
            for key in cursor.iternext(values=False):
                key = bytes(key)
                if not key.startswith(prefix):
                    return
                yield key

    def count(self, table: str) -> int:
        """Number of keys in a table."""
        return self._raw.stat(self._tables[table])["entries"]

    def used_bytes(self) -> int:
        """Pages in use by all tables, in bytes, freed ones not counted."""
        pages, page_bytes = 0, 4096
        for table in self._tables.values():
            found = self._raw.stat(table)
            pages += found["branch_pages"] + found["leaf_pages"] + found["overflow_pages"]
            page_bytes = found["psize"]
        return pages * page_bytes
