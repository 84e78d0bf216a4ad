"""Help texts inside documents: ``<!-- help:query -->`` … ``<!-- /help -->`` blocks hold what ``--help`` prints.

``python tests/cli/help_blocks.py README.md`` writes the blocks of a document anew.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from kamera_cli.app import help_text

BLOCK = re.compile(r"(<!-- help(?::(?P<command>[^>]*?))? -->\n).*?(<!-- /help -->)", re.DOTALL)
WIDTH = 90


def refreshed(text: str) -> str:
    """``text`` with every help block as the program prints it now; ``<!-- help -->`` is the program itself."""

    def block(match: re.Match[str]) -> str:
        command = (match["command"] or "").strip()
        shown = " ".join(["kamera", *command.split(), "--help"])
        return f"{match[1]}\n```console\n$ {shown}\n{help_text(command, WIDTH).rstrip()}\n```\n\n{match[3]}"

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        document = Path(name)
        document.write_text(refreshed(document.read_text(encoding="utf-8")), encoding="utf-8")
