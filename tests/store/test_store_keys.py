"""Identity: no two contents share an entry, and keys never change between releases."""

from __future__ import annotations

import hashlib
import io
import warnings

import numpy as np
import pytest

from kamera_store import Identity, KVStore, TensorBytes, chunk_identity, patch_identity, source_identity
from kamera_store.errors import IdentityWarning
from kamera_store.format import keys


def pixels(image) -> TensorBytes:
    data = np.asarray(image)
    return TensorBytes("pixels", -1, "uint8", data.shape, data.copy())


def chunk(*inputs: TensorBytes, fingerprint: str = "m", tenant: str = "t", **extra) -> Identity:
    return chunk_identity(fingerprint=fingerprint, tenant=tenant, inputs=inputs, extra=extra)


def test_golden_values_of_the_encoding_do_not_change():
    ids = TensorBytes("token_ids", -1, "int64", (3,), np.array([1, 2, 3], np.int64))
    ident = chunk_identity(fingerprint="f" * 64, tenant="alice", inputs=[ids], extra={"layout": "gqa"})
    assert ident.id == "6e87b776e688c497f20cbd08841aa7b2"
    assert ident.digest.hex() == "186959d6165b717c023873cb47fe70976fc3300c5b2860d227196c48b6962763"
    patch = patch_identity(chunk=ident, antecedents=[ident], kind="exact", tenant="alice", extra={})
    assert patch.id == "ca1a6aeaff108a92be975bdf7a92532f"
    source = source_identity(
        content_sha256="0" * 64, parameters={"fps": 2.0}, fingerprint="f" * 64, tenant="alice"
    )
    assert source.id == "0c432c958feafbf152404f060a4e716f"
    assert (
        keys.fingerprint_digest({"a": 1, "b": None})
        == "984e3654e95251ae0e531e6f509f547a9782dbc42d09771823b2fdcaed0549df"
    )
    encoded = keys.encode("x", {"b": True, "a": [1, "é", 2.5, b"\x00", None]})
    assert encoded.hex() == (
        "5600000000000000126b616d6572612e656e636f64696e672e7631530000000000000001784d00000000000000025300"
        "00000000000001614c000000000000000549000000000000000131530000000000000002c3a946000000000000000840"
        "04000000000000590000000000000001004e00000000000000005300000000000000016242000000000000000101"
    )


def test_streamed_identity_equals_hashes_of_the_encoding():
    import xxhash

    fields = {"inputs": [pixels(np.zeros((2, 3), np.uint8))], "n": 3}
    ident, encoded = keys.identity("chunk", fields), keys.encode("chunk", fields)
    assert ident.key == xxhash.xxh3_128(encoded).digest()
    assert ident.digest == hashlib.sha256(encoded).digest()


def test_same_pixel_bytes_of_another_size_are_another_key():
    image = pytest.importorskip("PIL.Image")
    data = bytes(range(256)) * 53
    wide = image.frombytes("RGB", (30, 150), data[:13500])
    tall = image.frombytes("RGB", (150, 30), data[:13500])
    assert wide.tobytes() == tall.tobytes()
    assert chunk(pixels(wide)) != chunk(pixels(tall))


def test_same_palette_indices_with_another_palette_are_another_key():
    image = pytest.importorskip("PIL.Image")
    red, blue = image.new("P", (8, 8), 1), image.new("P", (8, 8), 1)
    red.putpalette([0, 0, 0, 255, 0, 0])
    blue.putpalette([0, 0, 0, 0, 0, 255])
    assert red.tobytes() == blue.tobytes()
    assert chunk(pixels(red.convert("RGB"))) != chunk(pixels(blue.convert("RGB")))


def test_option_glued_to_the_bytes_is_not_the_option(tmp_path):
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.new("RGB", (8, 8), (10, 200, 30)).save(buffer, "JPEG")
    plain, glued = tmp_path / "a.jpg", tmp_path / "b.jpg"
    plain.write_bytes(buffer.getvalue())
    glued.write_bytes(buffer.getvalue() + b"max_pixels=100")
    first = source_identity(
        content_sha256=keys.file_sha256(plain), parameters={"max_pixels": 100}, fingerprint="m", tenant="t"
    )
    second = source_identity(
        content_sha256=keys.file_sha256(glued), parameters={}, fingerprint="m", tenant="t"
    )
    assert first.key != second.key and first.digest != second.digest


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"a": "1"}, {"a": 1}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"a": True}),
        ({"a": None}, {"a": ""}),
        ({"a": b"x"}, {"a": "x"}),
        ({"a": ["x", "y"]}, {"a": ["xy"]}),
        ({"a": "xb", "c": ""}, {"a": "x", "bc": ""}),
        ({"a": []}, {"a": {}}),
        ({"a": [[1], 2]}, {"a": [1, [2]]}),
        ({"a": 0.0}, {"a": -0.0}),
        ({}, {"a": None}),
    ],
)
def test_different_fields_never_encode_alike(left, right):
    assert keys.encode("x", left) != keys.encode("x", right)
    assert keys.encode("x", left) != keys.encode("y", left)


def test_order_of_names_does_not_matter_but_order_of_inputs_does():
    assert keys.encode("x", {"a": 1, "b": 2}) == keys.encode("x", {"b": 2, "a": 1})
    a, b = pixels(np.zeros(3, np.uint8)), pixels(np.ones(3, np.uint8))
    assert chunk(a, b) != chunk(b, a)


def test_dtype_name_and_tenant_and_fingerprint_count():
    data = np.arange(4, dtype=np.int32)
    base = TensorBytes("ids", -1, "int32", (4,), data)
    variants = [
        chunk(base),
        chunk(TensorBytes("ids", -1, "float32", (4,), data)),
        chunk(TensorBytes("grid", -1, "int32", (4,), data)),
        chunk(TensorBytes("ids", -1, "int32", (2, 2), data)),
        chunk(base, tenant="u"),
        chunk(base, fingerprint="n"),
        chunk(base, seconds_per_grid=0.5),
    ]
    assert len({v.key for v in variants}) == len({v.digest for v in variants}) == len(variants)


def test_item_without_content_is_never_cached():
    with pytest.raises(ValueError, match="without model inputs"):
        chunk()


def test_orbit_forgets_the_order_of_antecedents_and_exact_keeps_it():
    a, b, c = (chunk(pixels(np.full(2, i, np.uint8))) for i in range(3))

    def patch(kind, antecedents):
        return patch_identity(chunk=c, antecedents=antecedents, kind=kind, tenant="t", extra={})

    assert patch("orbit", [a, b]) == patch("orbit", [b, a])
    assert patch("exact", [a, b]) != patch("exact", [b, a])
    assert patch("exact", [a]) != patch("orbit", [a])
    assert patch("exact", [(a.key, a.digest)]) == patch("exact", [a])
    with pytest.raises(ValueError, match="none of"):
        patch("other", [a])


@pytest.mark.parametrize("value", [object(), {1: 2}, {"a"}, 1j])
def test_what_has_no_canonical_encoding_is_refused(value):
    with pytest.raises(TypeError):
        keys.encode("x", {"a": value})


def test_nan_has_no_identity():
    with pytest.raises(ValueError, match="NaN"):
        keys.encode("x", {"a": float("nan")})


def test_large_tensor_views_are_hashed_by_content_not_by_stride():
    data = np.arange(24, dtype=np.int32).reshape(4, 6)
    with pytest.raises(ValueError, match="contiguous"):
        chunk(TensorBytes("x", -1, "int32", (6, 4), data.T))


class Constant:
    """A locator under which everything collides."""

    def update(self, piece) -> None: ...

    def digest(self) -> bytes:
        return b"\x07" * 16


def test_forced_key_collision_is_a_miss_with_a_warning_and_never_the_other_entry(folder, kit, monkeypatch):
    monkeypatch.setattr(keys, "new_locator", Constant)
    first, second = kit.identity_of(1), kit.identity_of(2)
    assert first.key == second.key and first.digest != second.digest
    with KVStore.open(folder) as store:
        mine = kit.tensors_of(1)
        assert store.put(first, tenant="t", unit="u", meta={}, tensors=mine, cost_ms=1)
        with pytest.warns(IdentityWarning, match="another content"):
            assert store.find(second, tenant="t") is None
        with pytest.warns(IdentityWarning):
            assert (
                store.put(second, tenant="t", unit="u", meta={}, tensors=kit.tensors_of(2), cost_ms=1)
                is False
            )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert kit.same_tensors(store, store.find(first, tenant="t"), mine)


def test_file_hash_reports_progress_to_the_end(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * ((1 << 20) * 2 + 5))
    seen = []
    digest = keys.file_sha256(path, lambda done, total: seen.append((done, total)))
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)
