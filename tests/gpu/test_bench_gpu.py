"""The prepared CUDA run, short; ``bench_gpu.py`` beside it is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize("geometry", ["tiny", "small"])
@pytest.mark.parametrize("attention", ["sdpa", "flash"])
def test_bench_runs_on_cuda_and_the_self_test_holds(tmp_path: Path, attention: str, geometry: str) -> None:
    from bench_gpu import kernels, measure

    if attention not in kernels():
        pytest.skip("flash-attn is not installed")
    found = measure(tmp_path, attention, geometry, episodes=5)
    assert all(check["ok"] for check in found["self_test"].values()), found["self_test"]
    assert (tmp_path / f"{attention}-{geometry}" / "bench.json").is_file()
