"""Small records, and raw access around the store's API."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import numpy as np
import pytest
from store_room import ROOM

import kamera_store
from kamera_store import Identity, KVStore, Record, TensorBytes, chunk_identity, patch_identity
from kamera_store.lmdb.binding import TABLES

pytest.register_assert_rewrite("conformance")

SOURCE = str(Path(kamera_store.__file__).resolve().parents[1])


def identity_of(number: int, tenant: str = "t", fingerprint: str = "model") -> Identity:
    """Identity of a chunk that saw one token id."""
    ids = TensorBytes("token_ids", -1, "int64", (1,), np.array([number], np.int64))
    return chunk_identity(fingerprint=fingerprint, tenant=tenant, inputs=[ids], extra={})


def tensors_of(
    seed: int, num_layers: int = 2, num_tokens: int = 4, heads: int = 2, dim: int = 8
) -> list[TensorBytes]:
    """fp32 keys and values for some layers, seeded."""
    rng = np.random.default_rng(seed)
    shape = (num_tokens, heads, dim)
    return [
        TensorBytes(name, layer, "float32", shape, rng.standard_normal(shape).astype(np.float32))
        for layer in range(num_layers)
        for name in ("keys", "values")
    ]


def noise(num_bytes: int, seed: int = 0, name: str = "noise") -> TensorBytes:
    """A tensor that does not compress."""
    data = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
    return TensorBytes(name, -1, "uint8", (num_bytes,), data)


def put_chunk(
    store: KVStore, number: int, *, tenant: str = "t", unit: str | None = None, tensors=None, **kw
) -> Identity:
    """Put a chunk and return its identity."""
    ident = identity_of(number, tenant)
    kw.setdefault("cost_ms", 10.0)
    kw.setdefault("meta", {"n": number})
    tensors = tensors_of(number) if tensors is None else tensors
    assert store.put(ident, tenant=tenant, unit=unit or f"unit{number}", tensors=tensors, **kw)
    return ident


def put_patch(
    store: KVStore, chunk: Identity, antecedents: list[Identity], *, tenant="t", unit="p", kind="exact"
):
    """Put a patch of a chunk and return its identity."""
    ident = patch_identity(chunk=chunk, antecedents=antecedents, kind=kind, tenant=tenant, extra={})
    meta = {"chunk": chunk.id, "antecedents": [a.id for a in antecedents], "kind": kind}
    assert store.put(ident, tenant=tenant, unit=unit, meta=meta, tensors=tensors_of(99, 1), cost_ms=3.0)
    return ident


def same_tensors(store: KVStore, record: Record, tensors: list[TensorBytes]) -> bool:
    """Whether a record reads back as exactly these tensors."""
    return store.read(record) == {(t.name, t.layer): t for t in tensors}


class RawAccess:
    """The tables of a store that no one else has open in this process, read and written around the API."""

    def __init__(self, folder: Path) -> None:
        self.env = lmdb.open(str(folder), max_dbs=16, map_size=1 << 26)
        self.tables = {name: self.env.open_db(name.encode()) for name in TABLES}

    def items(self, table: str) -> dict[bytes, bytes]:
        with self.env.begin() as txn:
            return {bytes(k): bytes(v) for k, v in txn.cursor(db=self.tables[table])}

    def put(self, table: str, key: bytes, value: bytes) -> None:
        with self.env.begin(write=True) as txn:
            txn.put(key, value, db=self.tables[table])

    def delete(self, table: str, key: bytes) -> None:
        with self.env.begin(write=True) as txn:
            txn.delete(key, db=self.tables[table])


@pytest.fixture
def raw() -> Callable[[Path], RawAccess]:
    """Context manager factory for raw access to a closed store."""

    @contextmanager
    def open_raw(folder: Path) -> Iterator[RawAccess]:
        access = RawAccess(folder)
        try:
            yield access
        finally:
            access.env.close()

    return open_raw


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where a test's store goes."""
    with tempfile.TemporaryDirectory(prefix="kamera-test-", dir=ROOM) as made:
        yield Path(made) / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[KVStore]:
    """An open, empty store."""
    with KVStore.open(folder) as opened:
        yield opened


def run_python(code: str, *args: str, timeout: float = 120, **kw) -> subprocess.CompletedProcess:
    """Run code in another process that can import the store."""
    env = dict(os.environ, PYTHONPATH=SOURCE + os.pathsep + str(Path(__file__).parent), OMP_NUM_THREADS="1")
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **kw,
    )


@pytest.fixture
def kit():
    """The helpers of this file."""
    import types

    return types.SimpleNamespace(
        identity_of=identity_of, tensors_of=tensors_of, noise=noise, put_chunk=put_chunk, put_patch=put_patch,
        same_tensors=same_tensors, run_python=run_python, source=SOURCE,
    )  # fmt: skip


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen]]:
    """Start processes that can import the store and these helpers; none outlives the test."""
    children: list[subprocess.Popen] = []
    env = dict(os.environ, PYTHONPATH=SOURCE + os.pathsep + str(Path(__file__).parent), OMP_NUM_THREADS="1")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    def start(code: str, *args: str) -> subprocess.Popen:
        children.append(subprocess.Popen([sys.executable, "-c", code, *args], env=env, **pipes))
        return children[-1]

    yield start
    for child in children:
        if child.poll() is None:
            child.kill()
        for pipe in (child.stdin, child.stdout, child.stderr):
            pipe.close()
        child.wait()
