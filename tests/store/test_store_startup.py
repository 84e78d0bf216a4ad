"""Listing commands must not wait for libraries that they do not need."""

from __future__ import annotations

import ast
from pathlib import Path

import kamera_store
from kamera_store import KVStore

CODE = """
import sys, time
start = time.process_time()
from kamera_store import KVStore
with KVStore.open(sys.argv[1], read_only=sys.argv[2] == "r") as store:
    stats = store.stats()
    ids = [record.id for record in store.iterate()]
took = time.process_time() - start
assert len(ids) == 5 and stats.count == 5
heavy = {"torch", "numpy", "zstandard", "rich", "transformers", "subprocess"} & set(sys.modules)
print(took * 1000, sorted(heavy))
"""


def test_listing_loads_neither_torch_nor_numpy_and_is_quick(folder, kit):
    with KVStore.open(folder) as store:
        for n in range(5):
            kit.put_chunk(store, n)
    times = []
    for mode in "rwr":
        done = kit.run_python(CODE, str(folder), mode)
        assert done.returncode == 0, done.stderr
        took, heavy = done.stdout.split(" ", 1)
        assert heavy.strip() == "[]"
        times.append(float(took))
    assert min(times) < 150


def test_each_foreign_library_is_imported_in_one_file():
    found: dict[str, set[str]] = {}
    for path in Path(kamera_store.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for name in names:
                found.setdefault(name.split(".")[0], set()).add(path.name)
    assert found["torch"] == {"tensors.py"}
    assert found["lmdb"] == {"binding.py"}
    assert found["zstandard"] == {"codec.py"}
    assert found["xxhash"] == found["hashlib"] == {"keys.py"}
    assert not {"pickle", "marshal", "shelve", "dill", "typer", "rich", "transformers"} & set(found)


def test_every_public_name_exists():
    for name in kamera_store.__all__:
        assert getattr(kamera_store, name) is not None
    assert not (Path(kamera_store.__file__).parents[1] / "__init__.py").exists()
