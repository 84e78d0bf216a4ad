"""docs/format.md says what is on disk: the store and a reader made from the text alone both read its example."""

from __future__ import annotations

import hashlib
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard

from kamera_store import KVStore, TensorBytes, chunk_identity, ledger
from kamera_store.format import codec
from kamera_store.format.header import VERSION, decode_header, encode_header

TEXT = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
IDS = TensorBytes("token_ids", -1, "int64", (32,), np.arange(32, dtype=np.int64) // 8)
KEYS = TensorBytes("keys", 0, "float32", (1, 2, 2), np.array([1.0, -2.0, 0.5, 3.0], np.float32))


def example() -> list[bytes]:
    """The hex blocks of the worked example, comments cut off."""
    blocks = re.findall(r"```hex\n(.*?)```", TEXT, re.S)
    return [
        bytes.fromhex("".join(re.split(r"  +", line)[0] for line in block.splitlines())) for block in blocks
    ]


def identity():
    return chunk_identity(fingerprint="f" * 64, tenant="t", inputs=[IDS], extra={})


def plain_read(header: bytes, segments: list[bytes]) -> dict[tuple[str, int], np.ndarray]:
    """A reader that knows nothing but docs/format.md."""
    assert header[:8] == b"KAMERAKV" and struct.unpack_from("<HHI", header, 8) == (1, 0, len(header))
    assert struct.unpack("<Q", header[-8:])[0] == xxhash.xxh3_64_intdigest(header[:-8])
    key, digest = header[16:32], header[32:64]
    raw, payload_bytes, num_segments, num_tensors, meta_bytes, num_words, _ = struct.unpack_from(
        "<QQIIIHH", header, 80
    )
    at, texts = 112, []
    for _ in range(3 + num_words):
        (length,) = struct.unpack_from("<H", header, at)
        texts.append(header[at + 2 : at + 2 + length].decode())
        at += 2 + length
    words = texts[3:]
    at += meta_bytes
    payload = b""
    assert len(segments) == num_segments
    for number, value in enumerate(segments):
        magic, index, length = struct.unpack_from("<4sII", value)
        assert (magic, index, value[12:28], value[28:32]) == (b"KSEG", number, key, digest[:4])
        assert not any(value[32 + length :])
        payload += value[32 : 32 + length]
    assert len(payload) == payload_bytes
    rows = [struct.unpack_from("<HHiBBHQQQQ", header, at + 44 * i) for i in range(num_tensors)]
    at += 44 * num_tensors
    out, total = {}, 0
    sizes_at, planes_at = at, at + 8 * sum(row[3] for row in rows)
    for name, dtype, layer, num_dimensions, num_planes, _, raw_bytes, offset, stored, checksum in rows:
        shape = struct.unpack_from(f"<{num_dimensions}Q", header, sizes_at)
        sizes_at += 8 * num_dimensions
        body = payload[offset : offset + stored]
        assert xxhash.xxh3_64_intdigest(body) == checksum
        numpy_dtype = {"bfloat16": "uint16"}.get(words[dtype], words[dtype])
        elements = np.zeros((int(np.prod(shape)), np.dtype(numpy_dtype).itemsize), np.uint8)
        for _ in range(num_planes):
            first, width, how, _, length = struct.unpack_from("<BBBBQ", header, planes_at)
            planes_at += 12
            piece, body = body[:length], body[length:]
            piece = zstandard.ZstdDecompressor().decompress(piece) if how else piece
            elements[:, first : first + width] = np.frombuffer(piece, np.uint8).reshape(-1, width)
        assert not body and elements.nbytes == raw_bytes
        total += raw_bytes
        out[words[name], layer] = elements.reshape(-1).view(numpy_dtype).reshape(shape)
    assert planes_at == len(header) - 8 and total == raw
    return out


def test_example_is_what_the_store_reads():
    header, segment, row = example()
    ident = identity()
    record = decode_header(ident.key, header)
    assert (record.digest, record.tenant, record.unit, record.meta) == (ident.digest, "t", "u", {"span": 32})
    assert (record.created_s, record.cost_ms) == (1.5, 2.0)
    assert encode_header(record) == header
    for info, tensor in zip(record.tensors, (IDS, KEYS), strict=True):
        stored = np.frombuffer(segment[32:], np.uint8)[info.offset : info.offset + info.stored_bytes].copy()
        assert codec.decode(ident.key, info, stored).tobytes() == bytes(tensor.view())
    usage = ledger.decode_usage(ident.key, row)
    assert (usage.last_used_s, usage.raw_bytes, usage.chunk) == (2.5, 272, None)


def test_example_is_read_by_a_reader_written_from_the_text():
    header, segment, _ = example()
    out = plain_read(header, [segment])
    assert out["token_ids", -1].tolist() == [0] * 8 + [1] * 8 + [2] * 8 + [3] * 8
    assert out["keys", 0].tolist() == [[[1.0, -2.0], [0.5, 3.0]]]


@pytest.mark.parametrize("num_bytes", [10, 1500, 300_000, 700_000])
def test_reader_written_from_the_text_reads_what_the_store_writes(folder, kit, raw, num_bytes):
    rng = np.random.default_rng(num_bytes)
    half = (rng.standard_normal(num_bytes // 2).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    tensors = [
        kit.noise(num_bytes),
        *kit.tensors_of(1, 2, num_tokens=num_bytes // 100),
        TensorBytes("values", 5, "bfloat16", half.shape, half),
        TensorBytes("none", 6, "float64", (0, 3), b""),
        TensorBytes("double", 6, "float64", (400,), rng.standard_normal(400)),
    ]
    with KVStore.open(folder) as store:
        ident = kit.put_chunk(store, 1, tensors=tensors)
    with raw(folder) as access:
        header = access.items("records")[ident.key]
        segments = [value for _, value in sorted(access.items("segments").items())]
    out = plain_read(header, segments)
    assert set(out) == {(t.name, t.layer) for t in tensors}
    for tensor in tensors:
        found = out[tensor.name, tensor.layer]
        assert found.tobytes() == bytes(tensor.view()) and found.shape == tensor.shape


def test_encoding_of_the_text_gives_the_key_of_the_example():
    def framed(tag, data):
        return tag + struct.pack(">Q", len(data)) + data

    def listed(*values):
        return b"L" + struct.pack(">Q", len(values)) + b"".join(values)

    shape = listed(framed(b"I", b"32"))
    described = listed(framed(b"S", b"token_ids"), framed(b"I", b"-1"), framed(b"S", b"int64"), shape)
    data = bytes(IDS.view())
    tensor = b"T" + described + struct.pack(">Q", len(data)) + data
    fields = {
        b"extra": b"M" + bytes(8),
        b"fingerprint": framed(b"S", b"f" * 64),
        b"inputs": listed(tensor),
        b"tenant": framed(b"S", b"t"),
    }
    body = b"".join(framed(b"S", name) + value for name, value in sorted(fields.items()))
    encoding = (
        framed(b"V", b"kamera.encoding.v1") + framed(b"S", b"chunk") + b"M" + struct.pack(">Q", 4) + body
    )
    assert xxhash.xxh3_128(encoding).digest() == identity().key
    assert hashlib.sha256(encoding).digest() == identity().digest


def test_the_text_names_the_current_version_and_every_dtype():
    from kamera_store.format.records import ITEM_BYTES
    from kamera_store.lmdb.binding import FORMAT_VERSION

    assert f"Version {FORMAT_VERSION}." in TEXT and VERSION == FORMAT_VERSION
    for name in ITEM_BYTES:
        assert f"`{name}`" in TEXT
