"""All that a CUDA machine is to measure, in one command: self-test, TTFT and fidelity, bf16, each attention kernel.

Run: ``python tests/gpu/bench_gpu.py OUT [EPISODES]``. Writes ``OUT/<attention>-<geometry>/bench.json`` and report, and
prints one line per run. Ten minutes are enough.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path

from kamera_cli.bench import BenchOptions
from kamera_cli.bench.geometry import GEOMETRIES, write_checkpoint
from kamera_cli.bench.runner import run
from kamera_cli.engine import Engine
from kamera_cli.settings import Settings


def kernels() -> tuple[str, ...]:
    """Attention kernels that can run here."""
    return ("sdpa", "flash") if importlib.util.find_spec("flash_attn") else ("sdpa",)


def measure(out: Path, attention: str, geometry: str, episodes: int) -> dict:
    """Self-test of the model, then TTFT; fidelity too where the weights are trained."""
    with tempfile.TemporaryDirectory(prefix="kamera-gpu-") as folder:
        model = "kamera-tiny"
        if GEOMETRIES[geometry] is not None:
            write_checkpoint(GEOMETRIES[geometry], Path(folder) / "model", 0)
            model = str(Path(folder) / "model")
        chosen = {"device": "cuda", "dtype": "bf16", "attention": attention}
        settings = Settings(store=Path(folder) / "store", model=model, **chosen)
        with Engine(settings) as engine:
            checks = engine.self_test().checks
        suites = ["ttft"] if geometry != "tiny" else ["ttft", "fidelity", "store"]
        settings = Settings(store=Path(folder) / "store", model="kamera-tiny", **chosen)
        options = BenchOptions(out=out / f"{attention}-{geometry}", geometry=geometry, episodes=episodes)
        result = run(suites, settings, options)
    return {
        "self_test": {check.name: {"ok": check.ok, "detail": check.detail} for check in checks},
        "headlines": {suite.name: suite.headline for suite in result.suites},
    }


def main(arguments: list[str]) -> int:
    """Run every kernel and geometry; 1 if a self-test failed."""
    out = Path(arguments[0])
    episodes = int(arguments[1]) if len(arguments) > 1 else 100
    found = {}
    for geometry in ("tiny", "small", "base", "3b"):
        for attention in kernels():
            name = f"{attention}-{geometry}"
            found[name] = measure(out, attention, geometry, episodes)
            print(name, json.dumps(found[name]), flush=True)
            (out / "summary.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(not all(check["ok"] for each in found.values() for check in each["self_test"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
