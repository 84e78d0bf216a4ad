"""The table of supported models, from the one that the program goes by (`kamera_cli.model.architectures`)."""

from __future__ import annotations

import re

from kamera_cli.model.architectures import ARCHITECTURES, NOTES

BLOCK = re.compile(r"(<!-- models:begin -->\n).*?(<!-- models:end -->)", re.DOTALL)
_HEAD = ("`model_type`", "", "attention", "media", "RoPE", "verified", "")


def refreshed(text: str) -> str:
    """``text`` with the table between its markers as the program knows it now."""
    rows = [
        (
            f"`{entry.model_type}`",
            entry.name,
            entry.family,
            ", ".join(entry.media),
            entry.layout or "plain",
            entry.suite,
            entry.note,
        )
        for entry in ARCHITECTURES
    ]
    lines = [f"| {' | '.join(row)} |" for row in (_HEAD, ("---",) * len(_HEAD), *rows)]
    table = "\n".join(lines).replace("|  |", "| |").replace("|  |", "| |")
    notes = "\n".join(f"- {note}" for note in NOTES)
    return BLOCK.sub(lambda match: f"{match[1]}\n{table}\n\n{notes}\n\n{match[2]}", text)
