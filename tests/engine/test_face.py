"""The face: its examples run, its names load no torch, and it speaks of options as the command line does."""

from __future__ import annotations

import dataclasses
import doctest
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import kamera_cli.engine
import kamera_cli.handle
from kamera_cli import Engine, Settings, Window
from kamera_cli.errors import UsageError
from kamera_cli.operator.patch import FACTOR_DTYPES
from kamera_cli.options import FactorDtype, QueryOptions

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def two_cards(tmp_path, monkeypatch):
    """A folder with two passages, as the examples name them, to work in."""
    monkeypatch.chdir(tmp_path)
    for colour in ("red", "blue"):
        (tmp_path / f"{colour}.txt").write_text(f"the card shows a {colour} circle\n", encoding="utf-8")


def public(kind: type) -> list[str]:
    return [name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")]


def test_every_example_runs_and_every_call_has_one(two_cards):
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    found = [*finder.find(kamera_cli.engine), *finder.find(kamera_cli.handle)]
    examples = {test.name.split(".", 2)[-1]: test for test in found if test.name.count(".") > 1}
    assert examples["Window"].examples
    assert [name for name in public(Engine) if not examples[f"Engine.{name}"].examples] == []
    with Engine(Settings(device="cpu", store=Path("filled"))) as first:
        first.ingest(["red.txt", "blue.txt"])
    for name, test in examples.items():
        shutil.copytree("filled", name)
        settings = dataclasses.replace(first.settings, store=Path(name))
        with Engine(settings, runner=first.runner) as test.globs["engine"]:
            assert runner.run(test).failed == 0, name


def test_the_names_of_the_package_load_no_torch():
    code = (
        "import sys\nfrom kamera_cli import Engine, Settings, Window\nEngine(Settings())\n"
        "print({'torch', 'transformers', 'av', 'numpy'} & {*sys.modules})"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "store")])}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "set()\n"


def test_settings_without_arguments_are_those_of_the_command_line():
    assert Settings() == Settings.from_environment(environ={})


@pytest.mark.parametrize(
    "wrong", [{"tenant": "a/b"}, {"device": "tpu"}, {"dtype": "fp8"}, {"model": " "}, {"quota_bytes": 10}]
)
def test_settings_are_checked_where_they_are_made(wrong):
    with pytest.raises(UsageError):
        Settings(**wrong)


def test_the_dtypes_of_factors_are_those_that_are_offered():
    assert tuple(FACTOR_DTYPES) == get_args(FactorDtype)


def test_keywords_change_the_options_that_were_handed_over(two_cards):
    with Engine(Settings(device="cpu", store=Path("store"))) as engine:
        engine.ingest(["red.txt"])
        asked = QueryOptions(reuse="none")
        assert engine.explain(asked).reuse == "none"
        assert engine.explain(asked, reuse="blind").reuse == "blind"
        with pytest.raises(TypeError, match="reus"):
            engine.explain(reus="blind")
        with pytest.raises(dataclasses.FrozenInstanceError):
            asked.reuse = "auto"


def test_a_window_takes_the_calls_of_its_engine(two_cards):
    assert (
        set(public(Window))
        == {"ingest", "query", "evict", "recall", "compile_patches"}
        <= set(public(Engine))
    )
