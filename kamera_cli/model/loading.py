"""Loading a checkpoint through the Auto classes: device, dtype, attention, and what is refused."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from safetensors import SafetensorError

from kamera_cli.errors import RefusedError, UsageError
from kamera_cli.model import compat
from kamera_cli.model.checkpoint import Checkpoint

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint in memory. ``attention`` is ``flash_attention_2`` or ``sdpa``; text models have no ``processor``."""

    checkpoint: Checkpoint
    model: torch.nn.Module
    tokenizer: object
    processor: object | None
    device: torch.device
    dtype: torch.dtype
    attention: str


def load(
    checkpoint: Checkpoint, *, device: str, dtype: str, attention: str, trust_remote_code: bool
) -> LoadedModel:
    """Load weights, tokenizer and processor.

    Parameters
    ----------
    device : {"auto", "cpu", "cuda"}
    dtype : {"auto", "bf16", "fp16", "fp32"}
        ``auto`` is bf16 on CUDA and fp32 on a CPU.
    attention : {"auto", "flash", "sdpa"}
        ``auto`` is flash-attn on CUDA where it is installed and the dtype allows it, SDPA otherwise.

    Raises
    ------
    UsageError
        CUDA was asked for and is not there.
    RefusedError
        flash-attn was asked for and cannot run, or the weights do not fit ``config.json``.
    """
    compat.quiet_loading()
    target = _device(device)
    compute = DTYPES[dtype] if dtype != "auto" else torch.bfloat16 if target.type == "cuda" else torch.float32
    kernel = _attention(attention, target, compute)
    vision = checkpoint.architecture.has_vision
    auto = compat.AutoModelForImageTextToText if vision else compat.AutoModelForCausalLM
    source = str(checkpoint.path)
    options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        model, info = auto.from_pretrained(
            source,
            dtype=compute,
            attn_implementation=kernel,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
        processor = compat.AutoProcessor.from_pretrained(source, **options) if vision else None
        tokenizer = processor.tokenizer if vision else compat.AutoTokenizer.from_pretrained(source, **options)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise RefusedError(
            f"model {checkpoint.label} cannot be loaded: {str(error).splitlines()[0]}"
        ) from error
    wrong = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if wrong:
        raise RefusedError(
            f"model {checkpoint.label}: {len(wrong)} weights missing or of another shape, first {wrong[0]}"
        )
    model.eval().requires_grad_(False).to(target)
    return LoadedModel(checkpoint, model, tokenizer, processor, target, compute, kernel)


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device; use --device cpu or auto")
    return torch.device(device)


def _attention(attention: str, device: torch.device, dtype: torch.dtype) -> str:
    installed = importlib.util.find_spec("flash_attn") is not None
    fits = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if attention == "flash" and not (installed and fits):
        missing = (
            "flash-attn is not installed"
            if not installed
            else f"it needs CUDA and bf16 or fp16, not {device.type} {dtype}"
        )
        raise RefusedError(f"--attention flash: {missing}; use --attention sdpa or auto")
    return "flash_attention_2" if attention != "sdpa" and installed and fits else "sdpa"
