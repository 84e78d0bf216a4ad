"""The machine and the versions that a run was measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch

_PACKAGES = ("torch", "transformers", "av", "lmdb", "zstandard", "numpy", "pillow")


def environment() -> dict:
    """Processor, threads, device and versions; ``load_average`` tells how busy the machine was."""
    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(0) if cuda else None,
        "versions": {name: version(name) for name in _PACKAGES},
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def _processor() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        for line in listing.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
