"""Run ``kamera`` in this process or as a program, with an engine of our own making or with the real one."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_fakes import FakeEngine, Ran, default_answers

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("KAMERA_")]:
        monkeypatch.delenv(name)
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KAMERA_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'store'}")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the program in this process."""
    from kamera_cli.app import run

    def call(*arguments: str) -> Ran:
        capsys.readouterr()
        code = run(arguments)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@pytest.fixture
def program() -> Callable[..., Ran]:
    """Run ``python -m kamera_cli`` as a program of its own."""

    def call(*arguments: str | bytes, timeout: float = 120, **environment: str) -> Ran:
        ran = subprocess.run(
            [sys.executable, "-m", "kamera_cli", *arguments],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
        return Ran(ran.returncode, ran.stdout.decode(), ran.stderr.decode(errors="backslashreplace"))

    return call


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeEngine:
    """A fake engine in the place of the real one, over a store folder that exists."""
    (tmp_path / "store").mkdir(mode=0o700)
    fake = FakeEngine(answers=dict(default_answers()))
    module = types.ModuleType("kamera_cli.engine")
    module.Engine = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kamera_cli.engine", module)
    monkeypatch.setattr("kamera_cli.commands.evict.finish", lambda session, compact: {})
    return fake
