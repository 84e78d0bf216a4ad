"""Stored bytes: frames that lie, planes, headers that do not fit, exact round trips."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
import zstandard

from kamera_store import DamagedError, KVStore, NewerRecordError, TensorBytes, UnsupportedDtypeError
from kamera_store.format import codec
from kamera_store.format.keys import checksum64
from kamera_store.format.records import RAW, ZSTD, Plane, TensorInfo

KEY = b"k" * 16


def info_for(frame: bytes, raw_bytes: int, plane_codec: int = ZSTD) -> TensorInfo:
    """Table row that honestly describes the stored bytes, whatever they are."""
    planes = (Plane(0, 1, plane_codec, len(frame)),)
    return TensorInfo("x", -1, "uint8", (raw_bytes,), raw_bytes, 0, len(frame), checksum64((frame,)), planes)


def decode(frame: bytes, raw_bytes: int, plane_codec: int = ZSTD) -> np.ndarray:
    return codec.decode(KEY, info_for(frame, raw_bytes, plane_codec), np.frombuffer(frame, np.uint8).copy())


def test_thirteen_bytes_that_ask_for_a_terabyte_are_refused_before_any_allocation():
    frame = bytes.fromhex("28b52ffde06c06060663636363")
    with pytest.raises(DamagedError, match="frame"):
        decode(frame, 100)


@pytest.mark.parametrize("index_agrees", [False, True])
def test_frame_that_declares_a_terabyte_is_refused_even_if_the_index_agrees(index_agrees):
    frame = bytes.fromhex("28b52ffde0") + struct.pack("<Q", 1 << 40) + b"\x01\x00\x00"
    assert zstandard.frame_content_size(frame) == 1 << 40
    with pytest.raises(DamagedError):
        decode(frame, (1 << 40) if index_agrees else 4096)


def test_frame_without_a_size_is_a_bad_entry():
    data = b"abc" * 1000
    stream = zstandard.ZstdCompressor().compressobj()
    frame = stream.compress(data) + stream.flush()
    with pytest.raises(DamagedError, match="no declared size"):
        decode(frame, len(data))


def test_second_of_two_glued_frames_is_not_dropped_silently():
    one = zstandard.ZstdCompressor().compress(b"a" * 5000)
    with pytest.raises(DamagedError):
        decode(one + one, 5000)
    with pytest.raises(DamagedError):
        decode(one + one, 10000)


def test_cut_frame_is_no_short_result():
    data = np.random.default_rng(0).integers(0, 64, 100_000, np.uint8).tobytes()
    frame = zstandard.ZstdCompressor().compress(data)
    with pytest.raises(DamagedError):
        decode(frame[: len(frame) // 2], len(data))


def test_raw_plane_of_another_length_is_refused():
    with pytest.raises(DamagedError, match="raw plane"):
        decode(b"12345", 6, RAW)


def test_wrong_checksum_is_found_before_the_frame_is_looked_at():
    frame = zstandard.ZstdCompressor().compress(b"a" * 5000)
    row = info_for(frame, 5000)._replace(checksum=1)
    with pytest.raises(DamagedError, match="checksum"):
        codec.decode(KEY, row, np.frombuffer(frame, np.uint8).copy())


def test_own_writer_always_stores_the_size():
    tensor = TensorBytes("ids", -1, "int64", (1000,), np.zeros(1000, np.int64))
    encoded = codec.encode(tensor)
    assert encoded.planes[0].codec == ZSTD
    assert zstandard.frame_content_size(bytes(encoded.pieces[0])) == 8000


def round_trip(tensor: TensorBytes) -> bytes:
    encoded = codec.encode(tensor)
    stored = np.frombuffer(b"".join(bytes(p) for p in encoded.pieces), np.uint8).copy()
    out = codec.decode(KEY, encoded.info(tensor, 0), stored)
    assert out.flags.writeable
    return out.tobytes()


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "bfloat16", "int64", "uint8", "bool", "complex64"]
)
@pytest.mark.parametrize("num_items", [0, 1, 63, 1000, 70_001])
@pytest.mark.parametrize("wish", ["auto", "raw"])
def test_round_trip_is_exact(dtype, num_items, wish):
    from kamera_store.format.records import item_bytes

    rng = np.random.default_rng(num_items)
    if dtype == "bfloat16":
        data = (rng.standard_normal(num_items).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    elif dtype == "bool":
        data = rng.integers(0, 2, num_items).astype(np.uint8)
    else:
        data = (rng.standard_normal(num_items) * 100).astype(dtype)
    assert data.nbytes == num_items * item_bytes(dtype)
    tensor = TensorBytes("x", 0, dtype, (num_items,), data, wish)
    assert round_trip(tensor) == data.tobytes()


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float64", 8)])
def test_fast_merge_equals_the_plain_one(dtype, size):
    data = np.random.default_rng(1).integers(0, 256, size * 1003, np.uint8)
    layout = codec.LAYOUTS[dtype]
    parts = [np.frombuffer(part, np.uint8) for part in codec._split(data, size, layout)]
    fast, plain = np.empty_like(data), np.empty_like(data)
    codec.merge(parts, layout, size, fast)
    codec.merge_reference(parts, layout, size, plain)
    assert (fast == data).all() and (plain == data).all()


def test_byte_planes_compress_bf16_noise_where_plain_zstd_does_not():
    rng = np.random.default_rng(0)
    values = rng.standard_normal(1 << 18).astype(np.float32) * np.repeat(rng.uniform(0.1, 3, 64), 1 << 12)
    data = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    encoded = codec.encode(TensorBytes("keys", 0, "bfloat16", data.shape, data))
    planes = data.nbytes / encoded.stored_bytes
    whole = data.nbytes / len(zstandard.ZstdCompressor(level=3).compress(data))
    assert planes > 1.40 > 1.35 > whole


def test_what_does_not_compress_is_stored_as_it_is(kit):
    encoded = codec.encode(kit.noise(100_000))
    assert [plane.codec for plane in encoded.planes] == [RAW] and encoded.stored_bytes == 100_000


@pytest.mark.parametrize(
    "shapes",
    [
        {"keys": (7, 1, 24), "values": (7, 1, 8)},
        {"keys": (5, 2, 192), "values": (5, 2, 128)},
        {"latent": (1, 1, 7, 24), "k_rope": (1, 1, 7, 8)},
        {"keys": (1, 0, 4, 16), "values": (1, 0, 4, 16)},
        {"keys": (1,), "values": ()},
    ],
)
def test_keys_and_values_of_different_sizes_come_back_with_their_own(store, kit, shapes):
    rng = np.random.default_rng(0)
    tensors = []
    for layer in range(3):
        for name, shape in shapes.items():
            # Layers differ in size too.
            own = (*shape[:-1], shape[-1] * (layer + 1)) if shape else shape
            tensors.append(
                TensorBytes(name, layer, "float32", own, rng.standard_normal(own).astype(np.float32))
            )
    ident = kit.put_chunk(store, 1, tensors=tensors)
    record = store.find(ident, tenant="t")
    assert kit.same_tensors(store, record, tensors)
    for layer in range(3):
        for name, tensor in store.read_layer(record, layer).items():
            assert tensor.shape == record.tensor(name, layer).shape
            assert tensor.dtype == "float32"


def test_wrong_product_of_sizes_is_refused_before_any_view():
    with pytest.raises(ValueError, match="is 96 bytes, data has 92"):
        TensorBytes("keys", 0, "float32", (2, 12), bytes(92))


def test_header_whose_shape_does_not_fit_its_bytes_is_refused(kit):
    from kamera_store.format.header import decode_header, encode_header
    from kamera_store.format.payload import prepare

    prepared = prepare(
        kit.identity_of(1), tenant="t", unit="u", meta={}, tensors=kit.tensors_of(1), cost_ms=1, created_s=1.0
    )
    record = prepared.record
    assert decode_header(record.key, encode_header(record)).tensors == record.tensors
    first = record.tensors[0]
    bad_rows = [
        first._replace(shape=(9, 9, 9)),
        first._replace(raw_bytes=first.raw_bytes + 4),
        first._replace(offset=4),
        first._replace(planes=first.planes[:1] if len(first.planes) > 1 else (Plane(1, 3, RAW, 256),)),
        first._replace(planes=(Plane(0, 2, RAW, 100), Plane(1, 3, RAW, first.stored_bytes - 100))),
        first._replace(stored_bytes=first.stored_bytes + 1),
    ]
    for row in bad_rows:
        with pytest.raises(DamagedError):
            decode_header(record.key, encode_header(replace(record, tensors=(row, *record.tensors[1:]))))
    odd = first._replace(dtype="float13")
    with pytest.raises(NewerRecordError, match="float13"):
        decode_header(record.key, encode_header(replace(record, tensors=(odd, *record.tensors[1:]))))


def test_unknown_dtype_is_refused_by_name():
    with pytest.raises(UnsupportedDtypeError, match="float6"):
        TensorBytes("x", 0, "float6", (1,), b"1")


@pytest.mark.parametrize(
    "meta", [{"x": float("nan")}, {"x": float("inf")}, {"x": {1: 2}}, {"x": {1, 2}}, {"x": b"1"}]
)
def test_meta_that_is_no_strict_json_is_refused(store, kit, meta):
    with pytest.raises(ValueError):
        store.put(kit.identity_of(1), tenant="t", unit="u", meta=meta, tensors=[], cost_ms=1)
    assert store.stats().count == 0


def test_two_tensors_of_one_name_and_layer_are_refused(store, kit):
    tensor = kit.noise(10)
    with pytest.raises(ValueError, match="share"):
        store.put(kit.identity_of(1), tenant="t", unit="u", meta={}, tensors=[tensor, tensor], cost_ms=1)


def test_estimate_before_encoding_is_near_the_raw_size_and_real_sizes_are_reported(folder, kit):
    """Sizes for wide heads, latents and a minute of video, estimated and stored."""
    from kamera_store.format.segments import stored_bytes

    geometries = {
        "grouped queries, own head size": [
            (la, (n, (512, 2, 96))) for la in range(4) for n in ("keys", "values")
        ],
        "latents": [
            (la, item) for la in range(4) for item in (("latent", (512, 512)), ("k_rope", (512, 64)))
        ],
        "a minute of video": [(la, (n, (2048, 2, 64))) for la in range(2) for n in ("keys", "values")],
    }
    rng = np.random.default_rng(0)
    with KVStore.open(folder) as store:
        for number, (name, shapes) in enumerate(geometries.items()):
            tensors = []
            for layer, (tensor, shape) in shapes:
                data = (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
                tensors.append(TensorBytes(tensor, layer, "bfloat16", shape, data))
            raw = sum(t.raw_bytes for t in tensors)
            assert abs(stored_bytes(raw, 4096) - raw) < 0.1 * raw, name
            before = store.stats()
            ident = kit.put_chunk(store, number, tensors=tensors)
            record, after = store.find(ident, tenant="t"), store.stats()
            assert record.raw_bytes == raw
            assert 1.3 < record.raw_bytes / record.stored_bytes < 1.6
            real = after.used_bytes - before.used_bytes
            assert abs(after.stored_bytes - before.stored_bytes - real) < 0.1 * real
