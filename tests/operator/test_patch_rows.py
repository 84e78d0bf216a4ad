"""Factors of one patch that come back as those of another, or that are packed otherwise than one by one."""

from __future__ import annotations

import pytest
import torch
from plain_factors import factorise

from kamera_cli.factors import LayerReader, packing_of, tensors_of
from kamera_cli.hot import tensor_bytes
from kamera_cli.operator.patch import FACTOR_DTYPES, Factors, LayerPatch
from kamera_cli.operator.quantise import as_written
from kamera_store.format.records import Record
from kamera_store.format.tensors import to_torch

NAMES = ("keys", "values")
WIDTHS = ((24, 16), (24, 24), (8, 16))
"""Of the rotary and of the plain tensor of each layer; some are equal to a number of tokens below."""


def random_patch(num_tokens: int, seed: int, dtype_name: str) -> list[LayerPatch]:
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for number, widths in enumerate(WIDTHS):
        rotary, plain = (
            factorise(torch.randn(num_tokens, width, generator=generator), (seed + number + at) % 4 + 1, 0.9,
                      FACTOR_DTYPES[dtype_name])[0]
            for at, width in enumerate(widths)
        )  # fmt: skip
        layers.append(LayerPatch(rotary, plain, 0.5, 0.5))
    # Layer 0 takes nothing in.
    nothing = factorise(torch.zeros(num_tokens, WIDTHS[0][0]), 1, 0.9, FACTOR_DTYPES[dtype_name])[0]
    layers[0] = LayerPatch(nothing, layers[0].plain, 0.5, 0.5)
    return layers


def stored(layers: list[LayerPatch], name: str) -> tuple[Record, list[dict]]:
    """A record as the store would give it, and its tensors by layer and name."""
    meta = {"energy": [0.5] * len(layers), "factors": packing_of(layers)}
    record = Record("patch", name.encode().ljust(16), b"", "", "", meta, (), 0.0, 0.0, 0, 0)
    named: list[dict] = [{} for _ in layers]
    for tensor in tensors_of(NAMES, layers):
        named[tensor.layer][tensor.name] = tensor
    return record, named


def rows_of(factors: Factors) -> tuple[torch.Tensor, torch.Tensor]:
    return factors.u, factors.v


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype_name", ["int8", "int6", "int4", "fp16", "fp32"])
def test_patches_read_together_are_those_that_were_written(dtype_name, apart):
    patches = [random_patch(size, seed, dtype_name) for seed, size in enumerate((24, 16, 24, 9))]
    records = [stored(patch, f"{index}") for index, patch in enumerate(patches)]
    reader = LayerReader(NAMES, torch.device("cpu"), apart=apart)
    for layer in range(len(WIDTHS)):
        read = reader.layers([record for record, _ in records], layer, [named[layer] for _, named in records])
        for found, patch in zip(read, patches, strict=True):
            for ours, theirs in ((found.rotary, patch[layer].rotary), (found.plain, patch[layer].plain)):
                assert ours.bits == theirs.bits
                torch.testing.assert_close(ours.u, theirs.u, rtol=1e-6, atol=0)
                torch.testing.assert_close(ours.v, theirs.v, rtol=1e-6, atol=0)
            own = sum(rows.nbytes for rows in (*rows_of(found.rotary), *rows_of(found.plain)))
            assert not apart or tensor_bytes(found) == own


@pytest.mark.parametrize("dtype_name", ["int8", "int4", "fp16"])
def test_packing_together_gives_the_bytes_of_packing_alone(dtype_name):
    layers = random_patch(24, 3, dtype_name)
    for tensor in tensors_of(NAMES, layers):
        name, side = tensor.name.split("_")
        factors = layers[tensor.layer].rotary if name == "keys" else layers[tensor.layer].plain
        alone = as_written(getattr(factors, side), factors.bits)
        assert torch.equal(to_torch(tensor), alone)
