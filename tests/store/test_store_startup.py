"""Listing commands load no library that they do not need."""

from __future__ import annotations

import ast
from pathlib import Path

import kamera_store
from kamera_store import KVStore

CODE = """
import sys
from kamera_store import KVStore
with KVStore.open(sys.argv[1], read_only=sys.argv[2] == "r") as store:
    stats = store.stats()
    ids = [record.id for record in store.iterate()]
assert len(ids) == 5 and stats.count == 5
heavy = {"torch", "numpy", "zstandard", "rich", "transformers", "subprocess"}
unneeded = {"kamera_store.verify", "kamera_store.rescue", "kamera_store.format.payload", "kamera_store.format.codec"}
print(sorted((heavy | unneeded) & set(sys.modules)))
"""


def test_listing_loads_neither_numpy_nor_torch_nor_what_encodes_and_repairs(folder, kit):
    with KVStore.open(folder) as store:
        for n in range(5):
            kit.put_chunk(store, n)
    for mode in "rw":
        done = kit.run_python(CODE, str(folder), mode)
        assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


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
