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


DOCUMENTS: dict[str, Callable[[], dict[Path, str]]] = {"models": _models, "measured": _measured}
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
