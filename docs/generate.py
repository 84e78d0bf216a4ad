"""Documents and parts of documents that are made from something else; a test asks that they are up to date.

    python docs/generate.py                       write all of them anew
    python docs/generate.py measured              one of them
    python docs/generate.py record SUITE...       keep what the documents need of a run of `kamera bench`

`record` takes ``--from bench.json`` for a run that was made already; without it the suites are run, with the options
that follow ``--``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HELP_WIDTH = 90
COMMANDS_HEAD = """# Commands

Made from the program itself by `python docs/generate.py commands`.

The result stands on stdout and nothing else does; progress, warnings and errors go to stderr. With `--json` the result
is one strict JSON object with `"schema": "kamera.<command>.v1"`: bytes are whole numbers, times are in ms, keys only
grow.
"""
sys.path.insert(0, str(ROOT / "docs"))

import measured_tables  # noqa: E402
import models_table  # noqa: E402


def _models() -> dict[Path, str]:
    path = ROOT / "docs" / "models.md"
    return {path: models_table.refreshed(path.read_text(encoding="utf-8"))}


def _measured() -> dict[Path, str]:
    readme = ROOT / "README.md"
    return {
        ROOT / "docs" / "measured.md": measured_tables.page(),
        readme: measured_tables.with_headline(readme.read_text(encoding="utf-8")),
    }


def _commands() -> dict[Path, str]:
    return {ROOT / "docs" / "commands.md": commands_page()}


def commands_page() -> str:
    """What ``--help`` prints, of the program and of each of its commands."""
    from kamera_cli.app import EXIT_CODES, command_names, help_text

    def block(command: str) -> str:
        shown = " ".join(["kamera", *command.split(), "--help"])
        return f"```console\n$ {shown}\n{help_text(command, HELP_WIDTH).rstrip()}\n```\n"

    codes = "\n".join(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())
    parts = [COMMANDS_HEAD, f"| exit code | |\n|---|---|\n{codes}\n", block("")]
    parts += [f"## {name}\n\n{block(name)}" for name in command_names()]
    return "\n".join(parts)


DOCUMENTS: dict[str, Callable[[], dict[Path, str]]] = {
    "models": _models,
    "measured": _measured,
    "commands": _commands,
}
"""By name, what each file is to hold."""


def main(argv: list[str] | None = None) -> None:
    """Write documents, or record a run."""
    arguments = argparse.ArgumentParser(description="Make documents anew.")
    arguments.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(DOCUMENTS)}; or record and suites"
    )
    arguments.add_argument("--from", dest="source", type=Path, metavar="JSON", help="bench.json of a run")
    words = sys.argv[1:] if argv is None else argv
    own, options = (
        (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    )
    given = arguments.parse_args(own)
    wanted = given.names or list(DOCUMENTS)
    if wanted[0] == "record":
        measured_tables.record(wanted[1:], given.source, options)
        wanted = ["measured"]
    for name in wanted:
        for path, text in DOCUMENTS[name]().items():
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
