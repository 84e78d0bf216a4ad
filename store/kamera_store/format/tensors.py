"""Torch tensors to bytes and back, bit for bit. The only file of the store that imports torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kamera_store.errors import UnsupportedDtypeError
from kamera_store.format.records import ITEM_BYTES, TensorBytes

_DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a torch dtype in the store; UnsupportedDtypeError if the format has no place for it."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise UnsupportedDtypeError(str(dtype).removeprefix("torch.")) from None


def to_bytes(name: str, tensor: torch.Tensor, layer: int = -1, *, codec: str = "auto") -> TensorBytes:
    """Bytes of a tensor; ``name``, ``layer`` and ``codec`` as in `TensorBytes`.

    Parameters
    ----------
    tensor : torch.Tensor
        Any shape, stride and device. A contiguous CPU tensor is not copied: do not write into it while the
        result is in use.

    Raises
    ------
    UnsupportedDtypeError
        If the dtype has no place in the format.
    """
    dtype = dtype_name(tensor.dtype)
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = plain.reshape(-1).view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)
    return TensorBytes(name, int(layer), dtype, tuple(tensor.shape), flat.numpy(), codec)


def to_torch(tensor: TensorBytes, *, copy: bool = True) -> torch.Tensor:
    """A CPU tensor with exactly these bits.

    Parameters
    ----------
    tensor : TensorBytes
        What the store returned, or what `to_bytes` made.
    copy : bool
        True: memory of its own. False: shares the bytes where they are writable, which saves a pass
        over memory; right for the result of a read that is used once.

    Raises
    ------
    UnsupportedDtypeError
        If the installed torch lacks the dtype.
    """
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise UnsupportedDtypeError(tensor.dtype)
    if not tensor.raw_bytes:
        return torch.empty(tensor.shape, dtype=dtype)
    flat = _flat(tensor)
    aligned = flat.ctypes.data % max(dtype.itemsize, 1) == 0
    if copy or not flat.flags.writeable or not aligned:
        flat = flat.copy()
    return torch.from_numpy(flat).view(dtype).reshape(tensor.shape)


def joined(tensors: Sequence[TensorBytes]) -> torch.Tensor:
    """Matrices of bytes of one width as one, (Σ m, N) uint8 on the CPU, in memory of its own.

    Raises
    ------
    ValueError
        Other dtypes, other dimensions, or several widths.
    """
    widths = {(tensor.dtype, *tensor.shape[1:]) for tensor in tensors}
    if len(widths) != 1 or not all(name == "uint8" and len(rest) == 1 for name, *rest in widths):
        raise ValueError(f"not matrices of bytes of one width: {sorted(map(str, widths))}")
    whole = np.concatenate([_flat(tensor) for tensor in tensors])
    return torch.from_numpy(whole).reshape(-1, tensors[0].shape[1])


def _flat(tensor: TensorBytes) -> np.ndarray:
    """The bytes themselves, not copied, (raw_bytes,) uint8."""
    data = tensor.data
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    return array.reshape(-1).view(np.uint8)
