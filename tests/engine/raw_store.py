"""Access to a store's tables around its API, while no one else has it open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from kamera_store.lmdb.binding import TABLES


@contextmanager
def raw_tables(folder: Path) -> Iterator[lmdb.Transaction]:
    """A write transaction and the tables by name: ``with raw_tables(folder) as (txn, tables)``."""
    env = lmdb.open(str(folder), max_dbs=len(TABLES) + 1, map_size=1 << 27)
    try:
        tables = {name: env.open_db(name.encode()) for name in TABLES}
        with env.begin(write=True) as txn:
            yield txn, tables
    finally:
        env.close()


def replace_header(folder: Path, key: bytes, value: bytes) -> None:
    """Put any bytes in the place of a record's header."""
    with raw_tables(folder) as (txn, tables):
        assert txn.get(key, db=tables["records"]) is not None
        txn.put(key, value, db=tables["records"])


def flip_payload(folder: Path, key: bytes, at: int = -1) -> None:
    """Flip a bit of the last segment of a record: of its last layers by default."""
    with raw_tables(folder) as (txn, tables):
        names = [name for name, _ in txn.cursor(db=tables["segments"]) if name.startswith(key)]
        value = bytearray(txn.get(names[-1], db=tables["segments"]))
        value[at] ^= 16
        txn.put(names[-1], bytes(value), db=tables["segments"])
