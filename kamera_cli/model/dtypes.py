"""Which compute dtype a model will have, told without loading torch where the settings alone decide it."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def dtype_name_for(device: str, dtype: str) -> str | None:
    """Full name of the compute dtype that ``--device`` and ``--dtype`` lead to; None if only the loaded model knows.

    Parameters
    ----------
    device : {"auto", "cpu", "cuda"}
    dtype : {"auto", "bf16", "fp16", "fp32"}
    """
    if dtype != "auto":
        return _NAMES[dtype]
    return "float32" if device == "cpu" or not cuda_possible() else None


def cuda_possible() -> bool:
    """Whether the installed torch may find a CUDA device: built with CUDA, and a driver is there. Loads no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version_file = Path(spec.origin).with_name("version.py")
    built = re.search(r"^cuda\b[^=]*=\s*['\"]", version_file.read_text(encoding="utf-8"), re.MULTILINE)
    return built is not None and os.path.exists("/dev/nvidiactl")
