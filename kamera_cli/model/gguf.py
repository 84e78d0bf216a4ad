"""A model in one GGUF file: transformers' own reader gives its config, weights, tokenizer and chat template.

Importing this module loads neither torch nor transformers; reading a file loads both.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kamera_cli.errors import RefusedError

SUFFIX = ".gguf"
_NEEDED = ("gguf", "accelerate")
_NAME = "model.gguf"
_FAILURES = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    AssertionError,
    ImportError,
)


@contextmanager
def alone(file: Path) -> Iterator[tuple[str, str]]:
    """A folder that holds a link to the file and nothing else, and its name in there.

    transformers reads tokenizer and template files beside a GGUF too, which the fingerprint would not know.
    """
    with tempfile.TemporaryDirectory(prefix="kamera-gguf-") as folder:
        (Path(folder) / _NAME).symlink_to(file)
        yield folder, _NAME


def read_config(label: str, file: Path) -> dict[str, Any]:
    """What ``config.json`` would hold, from the file's metadata.

    Raises
    ------
    RefusedError
        The file is damaged or no GGUF; its architecture or its RoPE is not one that transformers reads; the packages of
        the extra ``gguf`` are not installed.
    """
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise RefusedError(f"model {label}: the file is no GGUF, it does not begin with that mark")
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise RefusedError(
            f"model {label}: reading a GGUF file needs {' and '.join(missing)}; pip install 'kamera-kv[gguf]'"
        )
    from gguf import GGUFReader
    from transformers import PreTrainedConfig

    try:
        reader = GGUFReader(file)
        with alone(file) as (folder, name):
            config, _ = PreTrainedConfig.get_config_dict(folder, gguf_file=name)
    except _FAILURES as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise RefusedError(f"model {label}: this GGUF file cannot be read: {reason}") from error
    _refuse_lost_rope(label, {*reader.fields, *(tensor.name for tensor in reader.tensors)}, config)
    return dict(config)


def _refuse_lost_rope(label: str, names: set[str], config: Mapping[str, Any]) -> None:
    """Refuse a file whose scaled RoPE is left out by transformers: it would answer as another model, without an error.

    Parameters
    ----------
    names : set of str
        Of metadata fields and of tensors.
    """
    scaling = sorted(n for n in names if n.endswith(".rope.scaling.factor") or n == "rope_freqs.weight")
    if scaling and not (config.get("rope_scaling") or config.get("rope_parameters")):
        raise RefusedError(
            f"model {label}: its RoPE is scaled ({scaling[0]}), which transformers does not read from a GGUF file; "
            "use the checkpoint's folder of safetensors"
        )
