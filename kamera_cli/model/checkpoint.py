"""A checkpoint on disk: where it is, whether it may be used, its fingerprint. A folder is judged without transformers.

The fingerprint is computed from files alone, so that a second ingest of a known source never loads the model.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kamera_cli.errors import NotFoundError, RefusedError
from kamera_cli.model import gguf
from kamera_cli.model.architectures import Architecture, architecture_of
from kamera_cli.model.config_rules import text_fields
from kamera_cli.model.foreign_code import code_files, refuse_foreign_code
from kamera_cli.model.weights import (
    expected_shapes,
    read_headers,
    refuse_dtypes,
    refuse_shapes,
    weight_files,
)
from kamera_cli.tiny import model_path
from kamera_store.format.keys import file_sha256, fingerprint_digest

if TYPE_CHECKING:
    from kamera_store.kvstore import KVStore

EMBEDDED = "kamera-tiny"
CAPTURE = "preamble-in-front"
"""Canonical KV is captured with the preamble in front and sliced off, so a chunk that stands first needs no patch."""

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_NOT_COMPUTED = {
    "transformers_version",
    "_name_or_path",
    "architectures",
    "torch_dtype",
    "dtype",
    "use_cache",
}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that may be used: supported architecture, complete weights, no remote code without consent.

    Attributes
    ----------
    path : Path
        The local folder, or one GGUF file.
    label : str
        What the user called it.
    config : dict
        Parsed ``config.json``, or what stands for it in a GGUF file.
    """

    path: Path
    label: str
    config: dict[str, Any]
    architecture: Architecture
    weight_files: tuple[Path, ...]

    @property
    def text(self) -> Mapping[str, Any]:
        """Fields of the language model in ``config.json``."""
        return text_fields(self.config, self.architecture.text)

    @property
    def num_layers(self) -> int | None:
        """Decoder layers by ``config.json``; None where it leaves them to the model's class."""
        return self.text.get("num_hidden_layers")

    @property
    def is_gguf(self) -> bool:
        """Whether config, weights and tokenizer come out of one GGUF file."""
        return self.weight_files == (self.path,)

    @property
    def is_quantised(self) -> bool:
        """Whether ``config.json`` says what integer or fp8 weights stand for."""
        return any(part.get("quantization_config") is not None for part in (self.config, self.text))


@dataclass(frozen=True)
class Contents:
    """Digests of a checkpoint's files, all taken at one time, so that a folder that changes meanwhile is noticed.

    Attributes
    ----------
    weights, config, tokenizer, code : str
        Of weight and adapter bytes, of the config fields that enter the computation, of tokenizer and chat template,
        and of Python files: they enter the model fingerprint.
    processor : str
        Of what turns pixels into model inputs: part of the source index only, since chunk keys hold its output.
    """

    weights: str
    config: str
    tokenizer: str
    code: str
    processor: str


def read_contents(
    checkpoint: Checkpoint, store: KVStore, *, rehash: bool, on_hash: Callable[[str], None]
) -> Contents:
    """Take all digests of a checkpoint; weight hashes are remembered in the store, see `weights_digest`."""
    installed = {name: version(name) for name in ("transformers", "pillow")}
    templates = {"processor": _processor_template(checkpoint.path)}
    return Contents(
        weights=weights_digest(checkpoint, store, rehash=rehash, on_hash=on_hash),
        config=config_digest(checkpoint),
        tokenizer=fingerprint_digest(
            {"files": _files_digest(checkpoint.path, _TOKENIZER_FILES), **templates}
        ),
        code=fingerprint_digest(code_files(checkpoint.path)),
        processor=fingerprint_digest(
            {"files": _files_digest(checkpoint.path, _PROCESSOR_FILES), **installed}
        ),
    )


def config_digest(checkpoint: Checkpoint) -> str:
    """Digest of the config fields that enter the computation."""
    kept = _without(checkpoint.config, _NOT_COMPUTED)
    return fingerprint_digest({"config": json.dumps(kept, sort_keys=True)})


def _files_digest(folder: Path, names: tuple[str, ...]) -> str:
    found = {name: file_sha256(folder / name) for name in names if (folder / name).is_file()}
    more = sorted((folder / "additional_chat_templates").glob("*")) if "chat_template.jinja" in names else []
    return fingerprint_digest(found | {f"{file.parent.name}/{file.name}": file_sha256(file) for file in more})


def _processor_template(folder: Path) -> str:
    """The chat template inside ``processor_config.json``, if it has one: it shapes the preamble and no pixels."""
    file = folder / "processor_config.json"
    if not file.is_file():
        return ""
    try:
        return json.dumps(json.loads(file.read_text(encoding="utf-8")).get("chat_template"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RefusedError(f"{file} is not JSON ({error})") from error


def open_checkpoint(model: str, *, trust_remote_code: bool = False) -> Checkpoint:
    """Find and check a checkpoint without loading it.

    Parameters
    ----------
    model : str
        ``kamera-tiny``, a folder, a GGUF file, or a hub id: cached, or downloaded unless HF_HUB_OFFLINE=1.

    Raises
    ------
    NotFoundError
        No such folder, and the hub id is not cached and cannot be fetched.
    RefusedError
        Unsupported architecture; remote code without ``--trust-remote-code`` or from another repository; weights that
        are missing, pickled, damaged, sharded over ranks, of mixed dtypes, or that contradict ``config.json``.
    """
    path = _locate(model)
    if path.is_file():
        config = gguf.read_config(model, path)
        return Checkpoint(path, model, config, architecture_of(config), (path,))
    config_file = path / "config.json"
    if not config_file.is_file():
        raise NotFoundError(f"model {model}: {path} has no config.json")
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise RefusedError(f"model {model}: config.json is not JSON ({error})") from error
    architecture = architecture_of(config)
    refuse_foreign_code(model, path, trusted=trust_remote_code, required=architecture.remote_code)
    checkpoint = Checkpoint(path, model, config, architecture, weight_files(model, path))
    tensors = read_headers(model, path, checkpoint.weight_files)
    refuse_dtypes(model, tensors, quantised=checkpoint.is_quantised)
    if not checkpoint.is_quantised:
        refuse_shapes(model, tensors, expected_shapes(checkpoint.text, architecture.family), checkpoint.text)
    return checkpoint


def _locate(model: str) -> Path:
    if model == EMBEDDED:
        return model_path()
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.suffix == gguf.SUFFIX and path.is_file():
        return path.absolute()
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise NotFoundError(f"model {model}: no such folder, and not a hub id of the form owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    wanted = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model", "*.tiktoken", "*.py"]
    try:
        return Path(snapshot_download(model, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = str(error).splitlines()[0]
        raise NotFoundError(
            f"model {model} is neither a folder nor in the local cache, and was not fetched: {reason}"
        ) from error


def weights_digest(
    checkpoint: Checkpoint, store: KVStore, *, rehash: bool, on_hash: Callable[[str], None]
) -> str:
    """Digest of weight and adapter bytes, remembered in the store per (device, inode, size, mtime, ctime in ns).

    The change time notices a file that was overwritten in place and given its old modification time back.
    """
    files = sorted({*checkpoint.weight_files, *checkpoint.path.glob("adapter_*")})
    digests = {}
    for file in files:
        stat = os.stat(file)
        name = "-".join(
            map(str, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
        )
        state = None if rehash else store.get_state("weights", name)
        if state is None:
            on_hash(file.name)
            digests[file.name] = file_sha256(file)
            store.put_state("weights", name, {"sha256": digests[file.name]}, expect="any")
        else:
            digests[file.name] = state.value["sha256"]
    return fingerprint_digest(digests)


def fingerprint(checkpoint: Checkpoint, contents: Contents, *, positions: str, dtype: str) -> str:
    """Model fingerprint (`docs/architecture.md`, "Identity"): SHA-256, hex, over all that shapes the KV of an input.

    Parameters
    ----------
    contents : Contents
        From `read_contents`.
    positions : str
        Digest of what the installed model's position function answers on fixed prompts
        (`kamera_cli.model.positions.probe`); a release that computes other positions gets another fingerprint.
    dtype : {"float32", "float16", "bfloat16"}
        Compute dtype.
    """
    return fingerprint_digest({
        "layout": f"{checkpoint.architecture.family}/pre-rope/1",
        "weights": contents.weights,
        "config": contents.config,
        "tokenizer": contents.tokenizer,
        "remote_code": contents.code,
        "positions": positions,
        "dtype": dtype,
        "capture": CAPTURE,
    })  # fmt: skip


def positions_memory(checkpoint: Checkpoint) -> str:
    """Name under which the probe of the installed model's position function is remembered in the store."""
    return fingerprint_digest({"transformers": version("transformers"), "config": config_digest(checkpoint)})


def dtype_name_for(device: str, dtype: str) -> str | None:
    """Full name of the compute dtype that ``--device`` and ``--dtype`` lead to; None if only the loaded model knows.

    Parameters
    ----------
    device : {"auto", "cpu", "cuda"}
    dtype : {"auto", "bf16", "fp16", "fp32"}
    """
    if dtype != "auto":
        return _DTYPES[dtype]
    return "float32" if device == "cpu" or not cuda_possible() else None


def cuda_possible() -> bool:
    """Whether the installed torch may find a CUDA device: built with CUDA, and a driver is there. Loads no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version_file = Path(spec.origin).with_name("version.py")
    built = re.search(r"^cuda\b[^=]*=\s*['\"]", version_file.read_text(encoding="utf-8"), re.MULTILINE)
    return built is not None and os.path.exists("/dev/nvidiactl")


def _without(value: object, names: set[str]) -> object:
    if isinstance(value, dict):
        return {key: _without(item, names) for key, item in value.items() if key not in names}
    return value
