"""The wheel as it is shipped: built, installed into a folder, and run where there is no checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def finished(arguments: list[str], **options: object) -> str:
    """What a process printed; it must end well."""
    ran = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=240, check=False, **options
    )
    assert ran.returncode == 0, f"{arguments}: {ran.stdout}{ran.stderr}"
    return ran.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the wheel holds, and nothing that it depends on."""
    pytest.importorskip("hatchling", reason="the wheel is built by hatchling, of the extra 'dev'")
    built, folder = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("installed")
    pip = ["-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    finished([*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", str(built), str(ROOT)])
    (wheel,) = built.glob("*.whl")
    finished([*pip, "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)])
    return folder


@pytest.fixture
def python(installed: Path, tmp_path: Path):
    """Run Python in an empty folder, with the installed files before everything else."""
    return lambda *arguments: finished(
        list(arguments), cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(installed)}
    )


def test_the_wheel_holds_both_packages_and_their_types(installed: Path) -> None:
    assert (installed / "kamera_cli" / "py.typed").is_file()
    assert (installed / "kamera_store" / "py.typed").is_file()
    shipped = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert shipped - {"bin"} == {"kamera_cli", "kamera_store"}


def test_the_installed_face_is_found_and_loads_no_torch(python, installed: Path) -> None:
    code = (
        "import sys, kamera_cli, kamera_store; from kamera_cli import Engine, Settings, Window\n"
        "print('torch' in sys.modules, kamera_cli.__file__, kamera_store.__file__)"
    )
    loaded, *homes = python("-c", code).split()
    assert loaded == "False"
    assert all(Path(home).is_relative_to(installed) for home in homes)


def test_the_installed_program_stores_a_text_and_answers_from_it(python, tmp_path: Path) -> None:
    assert python("-m", "kamera_cli", "--version").startswith("kamera 0.")
    assert "Qwen2.5-VL" in python("-m", "kamera_cli", "models")
    (tmp_path / "red.txt").write_text("the letter of the red card is K\n")
    python("-m", "kamera_cli", "ingest", "red.txt")
    answer = json.loads(python("-m", "kamera_cli", "query", "what is on the card ?", "--json"))
    assert [chunk["name"] for chunk in answer["chunks"]] == ["red.txt#1"]
    assert answer["answer"]
