"""The help texts: every command has one, the document shows the current ones, defaults are those of the engine."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from cli_fakes import Ran

from kamera_cli.app import command_names, help_text
from kamera_cli.options import CompileOptions, EvictOptions, IngestOptions, QueryOptions, RecallOptions

WRITTEN_WITH = "0.29."
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import generate  # noqa: E402

COMMANDS = (
    *(
        "ingest",
        "compile-patches",
        "query",
        "evict",
        "recall",
        "bench",
        "ls",
        "show",
        "stats",
        "verify",
        "compact",
    ),
    *("models", "models check"),
)


@pytest.mark.skipif(
    not typer.__version__.startswith(WRITTEN_WITH),
    reason=f"the document shows the help as Typer {WRITTEN_WITH} sets it",
)
def test_the_document_of_commands_is_what_the_program_prints() -> None:
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert text == generate.commands_page(), "run: python docs/generate.py commands"


def test_the_document_of_commands_holds_each_command_and_its_options() -> None:
    page = generate.commands_page()
    assert all(f"## {command}\n" in page and f"$ kamera {command} --help" in page for command in COMMANDS)
    assert "--max-kl NATS" in page and "| 6 | no room |" in page


def test_the_program_knows_its_commands() -> None:
    assert sorted(command_names()) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(cli: Callable[..., Ran], command: str) -> None:
    ran = cli(*command.split(), "--help")
    assert ran.code == 0
    assert f"Usage: kamera {command}" in ran.out
    assert "--tenant" not in ran.out, "global options are shown once, by kamera --help"
    assert max(len(line) for line in ran.out.splitlines()) <= 100


def test_the_list_of_commands_is_complete_and_not_cut_off() -> None:
    listing = help_text(width=80)
    assert all(f"\n  {command.split()[0]} " in listing for command in COMMANDS)
    assert "..." not in listing.split("Commands:")[1]


def test_the_three_variables_of_the_environment_are_named() -> None:
    assert all(name in help_text() for name in ("KAMERA_STORE", "KAMERA_MODEL", "KAMERA_TENANT"))


@pytest.mark.parametrize(
    ("command", "kind", "renamed"),
    [
        ("ingest", IngestOptions, {}),
        ("compile_patches", CompileOptions, {"dtype": "factor_dtype"}),
        ("query", QueryOptions, {}),
        ("evict", EvictOptions, {}),
        ("recall", RecallOptions, {}),
    ],
)
def test_a_default_of_a_command_is_the_default_of_the_engine(
    command: str, kind: type, renamed: dict[str, str]
) -> None:
    function = getattr(importlib.import_module(f"kamera_cli.commands.{command}"), command)
    offered = inspect.signature(function).parameters
    expected = {field.name: field.default for field in dataclasses.fields(kind)}
    shared = {name: renamed.get(name, name) for name in offered if renamed.get(name, name) in expected}
    assert len(shared) >= 3
    for name, option in shared.items():
        assert offered[name].default == expected[option], name


def test_every_option_of_a_query_is_offered_by_the_command() -> None:
    from kamera_cli.commands.query import query

    unseen = {field.name for field in dataclasses.fields(QueryOptions)} - {
        *inspect.signature(query).parameters
    }
    assert unseen == {"on_token"}
