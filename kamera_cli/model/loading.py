"""Loading a checkpoint through the Auto classes: device, dtype, attention, and what is refused."""

from __future__ import annotations

import importlib.util
import itertools
import threading
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import GenerationConfig

from kamera_cli.errors import RefusedError, UsageError
from kamera_cli.model import compat, gguf
from kamera_cli.model.checkpoint import Checkpoint
from kamera_cli.model.compat import Module
from kamera_cli.model.weights import decoder_layer

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_FAILURES = (
    OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, ArithmeticError, ImportError,
    SyntaxError, AssertionError, SafetensorError, StrictDataclassError,
)  # fmt: skip
"""What the Auto classes, and a model's own code that they run, raise over files that do not fit."""

_LOADING = threading.Lock()
"""Held while transformers reads a checkpoint: it switches off initialisation and weight tying for the whole process
meanwhile, and two threads that load at once would leave them off for good."""


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint in memory.

    ``attention`` is ``flash_attention_2``, ``sdpa`` or, for a model with its own code, ``eager``; text models have no
    ``processor``. The model always has a ``generation_config``.
    """

    checkpoint: Checkpoint
    model: Module
    tokenizer: Any
    processor: Any
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
        ``auto`` is flash-attn on CUDA where it is installed and the dtype allows it, otherwise SDPA, or the plain
        product of matrices for a model with its own code.
    trust_remote_code : bool
        Whether the user allowed the checkpoint's own Python code. The model itself runs it only where transformers has
        no class of its own for the architecture.

    Raises
    ------
    UsageError
        CUDA was asked for and is not there.
    RefusedError
        flash-attn was asked for and cannot run; the weights do not fit ``config.json``, are not all there, or are not
        in the wanted dtype; the checkpoint's processor or its own code does not load.
    """
    compat.quiet_loading()
    target = device_of(device)
    compute = DTYPES[dtype] if dtype != "auto" else torch.bfloat16 if target.type == "cuda" else torch.float32
    kernel = _attention(attention, target, compute, remote_code=checkpoint.architecture.remote_code)
    options = {"trust_remote_code": True} if trust_remote_code else {}
    try:
        with _LOADING:
            model, tokenizer, processor, info = _read(checkpoint, compute, kernel, options)
    except _FAILURES as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise RefusedError(f"model {checkpoint.label} cannot be loaded: {reason}") from error
    _require_whole(checkpoint, model, info, compute)
    if getattr(model, "generation_config", None) is None:
        model.generation_config = _generation_config(checkpoint, model)
    model.eval().requires_grad_(False).to(target)
    return LoadedModel(checkpoint, model, tokenizer, processor, target, compute, kernel)


def _read(
    checkpoint: Checkpoint, compute: torch.dtype, kernel: str, options: dict[str, bool]
) -> tuple[Module, Any, Any, dict]:
    if checkpoint.is_gguf:
        return _read_gguf(checkpoint, compute, kernel)
    architecture, source = checkpoint.architecture, str(checkpoint.path)
    auto = (
        compat.AutoModelForImageTextToText
        if architecture.auto == "image-text"
        else compat.AutoModelForCausalLM
    )
    model, info = auto.from_pretrained(
        source,
        dtype=compute,
        attn_implementation=kernel,
        use_safetensors=True,
        output_loading_info=True,
        local_files_only=True,
        # An architecture that transformers brings runs as it was verified, whatever code lies beside the weights.
        **(options if architecture.remote_code else {}),
    )
    if not architecture.has_vision:
        tokenizer = compat.AutoTokenizer.from_pretrained(source, local_files_only=True, **options)
        return model, tokenizer, None, info
    processor = compat.AutoProcessor.from_pretrained(source, local_files_only=True, **options)
    for part in ("tokenizer", "image_processor"):
        if getattr(processor, part, None) is None:
            raise RefusedError(
                f"model {checkpoint.label}: its processor has no {part}, so pictures cannot be read"
            )
    return model, processor.tokenizer, processor, info


def _read_gguf(checkpoint: Checkpoint, compute: torch.dtype, kernel: str) -> tuple[Module, Any, Any, dict]:
    with gguf.alone(checkpoint.path) as (folder, name):
        model, info = compat.AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=name,
            dtype=compute,
            attn_implementation=kernel,
            output_loading_info=True,
            local_files_only=True,
            **compat.dequantised(),
        )
        return (
            model,
            compat.AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True),
            None,
            info,
        )


def _require_whole(checkpoint: Checkpoint, model: Module, info: dict, compute: torch.dtype) -> None:
    """Refuse a model that is not, weight by weight, what its files and the wanted dtype say."""
    label = f"model {checkpoint.label}"
    wrong = sorted(map(_name, [*info["missing_keys"], *info["mismatched_keys"]]))
    if wrong:
        raise RefusedError(f"{label}: {len(wrong)} weights missing or of another shape, first {wrong[0]}")
    layers = checkpoint.num_layers
    unused = sorted(name for name in map(_name, info["unexpected_keys"]) if _is_of_a_layer(name, layers))
    if unused:
        raise RefusedError(
            f"{label}: config.json contradicts the weights, {len(unused)} of them have no place in the model, "
            f"first {unused[0]}"
        )
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise RefusedError(f"{label}: weight {name} was not loaded")
        if hasattr(tensor, "device_mesh"):
            raise RefusedError(f"{label}: weight {name} is one shard of a tensor-parallel model")
    if checkpoint.is_quantised:
        return
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    kept = {*kept, *(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    for name, parameter in model.named_parameters():
        stays = parameter.dtype == torch.float32 and any(part in name for part in kept)
        if parameter.is_floating_point() and parameter.dtype != compute and not stays:
            raise RefusedError(f"{label}: weight {name} is {parameter.dtype} in a model loaded as {compute}")


def _name(key: object) -> str:
    """Name of a weight in the loading report: mismatched ones come with both shapes."""
    return str(key[0]) if isinstance(key, tuple) else str(key)


def _is_of_a_layer(name: str, num_layers: int | None) -> bool:
    """Whether a weight belongs to a decoder layer that runs; layers beyond the last predict further tokens."""
    layer = decoder_layer(name)
    runs = layer is not None and (num_layers is None or layer[0] < num_layers)
    return runs and not name.endswith("inv_freq")


def _generation_config(checkpoint: Checkpoint, model: Module) -> GenerationConfig:
    """Settings of generation for a model class that has none of its own, as remote code often has not."""
    if (checkpoint.path / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(str(checkpoint.path), local_files_only=True)
    return GenerationConfig.from_model_config(model.config)


def device_of(device: str) -> torch.device:
    """The device that ``auto``, ``cpu`` or ``cuda`` stands for.

    Raises
    ------
    UsageError
        CUDA was asked for and is not there.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device; use --device cpu or auto")
    return torch.device(device)


def _attention(attention: str, device: torch.device, dtype: torch.dtype, *, remote_code: bool) -> str:
    installed = importlib.util.find_spec("flash_attn") is not None
    fits = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if attention == "flash" and not (installed and fits):
        missing = (
            "flash-attn is not installed"
            if not installed
            else f"it needs CUDA and bf16 or fp16, not {device.type} {dtype}"
        )
        raise RefusedError(f"--attention flash: {missing}; use --attention sdpa or auto")
    if attention != "sdpa" and installed and fits:
        return "flash_attention_2"
    # A model's own code need not know SDPA; the plain product of matrices it always has.
    return "eager" if remote_code and attention == "auto" else "sdpa"
