"""Torch tensors come back bit for bit, whatever they hold and however they lie in memory."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kamera_store import TensorBytes, UnsupportedDtypeError  # noqa: E402
from kamera_store.format.tensors import joined, to_bytes, to_torch  # noqa: E402

WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(WIDTHS[tensor.dtype.itemsize])


def through_store(store, kit, tensor: torch.Tensor, number: int = 1) -> torch.Tensor:
    ident = kit.put_chunk(store, number, tensors=[to_bytes("x", tensor, 3)])
    return to_torch(store.read(store.find(ident, tenant="t"))[("x", 3)])


def odd_bf16() -> torch.Tensor:
    """-0.0, subnormals, the largest value, infinities, two NaN payloads."""
    patterns = [
        0x8000,
        0x0001,
        0x007F,
        0x8001,
        0x7F7F,
        0xFF7F,
        0x7F80,
        0xFF80,
        0x7FC0,
        0x7FA5,
        0xFFC1,
        0x3F80,
    ]
    return torch.tensor(patterns, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("repeat", [1, 5000])
def test_bf16_comes_back_bit_for_bit_with_its_oddities(store, kit, repeat):
    value = odd_bf16().repeat(repeat).reshape(-1, 4)
    back = through_store(store, kit, value)
    assert back.dtype == torch.bfloat16 and torch.equal(bits(back), bits(value))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "name",
    ["float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool",
     "float8_e4m3fn", "float8_e5m2"],
)  # fmt: skip
def test_every_dtype_keeps_its_bits(store, kit, name):
    dtype = getattr(torch, name)
    raw = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 4096, np.uint8))
    value = (raw > 127) if dtype == torch.bool else raw.view(dtype)
    back = through_store(store, kit, value)
    assert back.dtype == dtype
    assert torch.equal(bits(back), bits(value))


@pytest.mark.filterwarnings("error")
def test_strides_do_not_change_what_is_stored(store, kit):
    base = torch.randn(6, 8, 10, generator=torch.Generator().manual_seed(0))
    views = [
        base.transpose(0, 2),
        base[::2, 1:, 3],
        base.permute(1, 2, 0),
        base[:0],
        base[0, 0, 0],
        base.flip(1),
    ]
    for number, view in enumerate([*views, base.expand(2, 6, 8, 10)]):
        back = through_store(store, kit, view, number)
        assert back.shape == view.shape and torch.equal(back, view)


@pytest.mark.filterwarnings("error")
def test_writing_into_a_loaded_tensor_changes_nothing_stored(store, kit):
    value = torch.arange(1000, dtype=torch.float32)
    ident = kit.put_chunk(store, 1, tensors=[to_bytes("a", value), to_bytes("b", value, codec="raw")])
    record = store.find(ident, tenant="t")
    for copy in (True, False):
        for tensor in store.read(record).values():
            to_torch(tensor, copy=copy).fill_(-1.0)
    assert all(torch.equal(to_torch(tensor), value) for tensor in store.read(record).values())


@pytest.mark.filterwarnings("error")
def test_copies_are_fresh_and_read_only_bytes_do_not_warn():
    shared = TensorBytes("x", -1, "float32", (4,), bytes(16))
    one, two = to_torch(shared), to_torch(shared, copy=False)
    one.fill_(1.0)
    two.fill_(2.0)
    assert torch.equal(to_torch(shared), torch.zeros(4))


def test_dtypes_without_a_place_are_refused_by_name():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
    with pytest.raises(UnsupportedDtypeError, match="qint8"):
        to_bytes("x", quantised)


def test_gradients_conjugates_and_negatives_are_stored_as_values(store, kit):
    wanted = torch.randn(4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.equal(through_store(store, kit, wanted), wanted.detach())
    turned = torch.randn(4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).conj()
    assert torch.equal(through_store(store, kit, turned, 2), turned.resolve_conj())


def test_matrices_of_bytes_are_joined_in_order_and_nothing_else_is():
    parts = [to_bytes("u", torch.full((rows, 5), rows, dtype=torch.uint8)) for rows in (2, 0, 3)]
    whole = joined(parts)
    assert whole.shape == (5, 5) and whole[:, 0].tolist() == [2, 2, 3, 3, 3]
    whole.zero_()
    assert to_torch(parts[0]).tolist() == [[2] * 5] * 2
    for other in (torch.zeros(1, 4, dtype=torch.uint8), torch.zeros(1, 5), torch.zeros(5, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="one width"):
            joined([parts[0], to_bytes("v", other)])
    with pytest.raises(ValueError, match="one width"):
        joined([])
