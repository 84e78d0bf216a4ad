"""Read a chunk's keys out of a store without torch: headers, checksums and NumPy views only.

Run after an ingest: python examples/read_store.py PATH_OF_THE_STORE
"""

import sys

import numpy as np

from kamera_store import KVStore


def main(path: str) -> None:
    """Show every chunk's tensors and the size of its first layer's keys, computed from the bytes themselves."""
    with KVStore.open(path, create=False, read_only=True) as store:
        for record in store.iterate(kind="chunk"):
            print(
                f"{record.id[:10]}  {record.meta['name']}  {record.raw_bytes} -> {record.stored_bytes} bytes"
            )
            keys = store.read_layer(record, 0)["keys"]
            if keys.dtype == "float32":
                values = np.frombuffer(keys.data, dtype=np.float32).reshape(keys.shape)
                print(
                    f"    layer 0 keys {keys.shape} {keys.dtype}, root mean square {np.sqrt((values**2).mean()):.3f}"
                )
            else:
                print(f"    layer 0 keys {keys.shape} {keys.dtype}")
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main(*sys.argv[1:2] or sys.exit(__doc__))
