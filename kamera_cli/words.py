"""Words, numbers and tables as people and programs read them (pure)."""

from __future__ import annotations

import math
import re
import shlex
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_SURROGATE = re.compile("[\ud800-\udfff]")

WHY_NOT_WORDS = {
    "no_patch": "no patch for this order yet",
    "max_kl": "measured KL of the patch too high",
    "low_energy": "patch captures too little",
    "damaged": "stored data damaged",
}
"""What people read for a `kamera_cli.results.WhyNot`; programs get the code."""


def to_json(result: object) -> dict[str, object]:
    """The fields of a result as JSON has them.

    A field goes by its own name, or by the one in its metadata under ``json``, where None leaves it out; seconds become
    ms. A result's ``extra_json`` adds what is derived from the fields.

    Parameters
    ----------
    result : dataclass instance
    """
    assert is_dataclass(result) and not isinstance(result, type), "results are dataclasses"
    named = ((each.metadata.get("json", each.name), getattr(result, each.name)) for each in fields(result))
    document = dict(in_ms(name, value) for name, value in named if name is not None)
    return document | (result.extra_json() if hasattr(result, "extra_json") else {})


def in_ms(name: str, value: object) -> tuple[str, object]:
    """A field of seconds, ``*_s``, as one of ms, ``*_ms``; any other field as it is."""
    if name.endswith("_s") and (value is None or isinstance(value, (int, float))):
        return f"{name[:-2]}_ms", None if value is None else value * 1000
    return name, value


def strict_json(value: object) -> object:
    """``value`` with only what strict JSON has: NaN and infinities become null, bad UTF-8 becomes ``\\xff``."""
    if is_dataclass(value):
        return strict_json(to_json(value))
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (str, PurePath)):
        return _valid_text(str(value))
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).hex()
    if isinstance(value, Mapping):
        return {_valid_text(str(key)): strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [
            strict_json(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)
        ]
    return value


def display(text: object) -> str:
    """``text`` safe for a terminal: control characters and bytes that are no UTF-8 are written as escapes."""
    return "".join(
        char if char.isprintable() or unicodedata.category(char) == "Zs" else _escape(char)
        for char in _valid_text(str(text))
    )


def one_line(text: str) -> str:
    """``text`` on one line, safe for a terminal."""
    return display(
        " ".join(part.strip() for part in text.splitlines() if part.strip()) if "\n" in text else text
    )


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def _valid_text(text: str) -> str:
    return _SURROGATE.sub(_escape_surrogate, text)


def _escape_surrogate(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


def format_bytes(count: int | None) -> str:
    """``1.2 MiB``; ``–`` for None."""
    if count is None:
        return "–"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_ms(duration_ms: float | None) -> str:
    """``12.4 ms``, ``3.1 s`` or ``2 min 5 s``; ``–`` for None and for what is not finite."""
    if duration_ms is None or not math.isfinite(duration_ms):
        return "–"
    if duration_ms < 100:
        return f"{duration_ms:.1f} ms"
    if duration_ms < 1000:
        return f"{duration_ms:.0f} ms"
    if duration_ms < 60_000:
        return f"{duration_ms / 1000:.1f} s"
    minutes, seconds = divmod(round(duration_ms / 1000), 60)
    return f"{minutes} min {seconds} s"


def format_number(value: float | None, digits: int = 2) -> str:
    """``1.2e-05`` in short; ``–`` for None and for what is not finite."""
    if value is None or not math.isfinite(value):
        return "–"
    text = f"{value:.{digits}g}"
    return text.replace("e-0", "e-").replace("e+0", "e+")


def short_id(identity: str) -> str:
    """The first ten characters of an id, as tables show it."""
    return identity[:10]


def count(number: int, noun: str) -> str:
    """``1 chunk``, ``3 chunks``, ``2 patches``, ``0 entries``."""
    stem, ending = (noun[:-1], "ies") if noun.endswith("y") else (noun, "es" if noun.endswith("ch") else "s")
    plural = stem + ending
    return f"{number} {noun if number == 1 else plural}"


def chunks_words(numbers: Iterable[int]) -> str:
    """``chunk 2``, ``chunks 2, 3``; ``?`` for 0, a chunk that the window does not know."""
    shown = [str(number) if number else "?" for number in numbers]
    return f"{'chunk' if len(shown) == 1 else 'chunks'} {', '.join(shown)}"


def brief_numbers(numbers: Sequence[int]) -> str:
    """``1 2 4``, ``1 2 3 … 9`` when there are many, ``?`` for a chunk that the window no longer knows."""
    shown = [str(number) if number else "?" for number in numbers]
    if len(shown) > 5:
        shown = [*shown[:3], "…", shown[-1]]
    return " ".join(shown) or "nothing"


def misses_words(misses: Iterable[tuple[int, str]]) -> str:
    """``chunks 2, 3: no patch for this order yet; chunk 4: stored data damaged`` of (number, why not)."""
    by_reason: dict[str, list[int]] = {}
    for number, why_not in misses:
        by_reason.setdefault(why_not, []).append(number)
    return "; ".join(
        f"{chunks_words(numbers)}: {WHY_NOT_WORDS[why_not]}" for why_not, numbers in by_reason.items()
    )


def compile_command(window: str, order: Sequence[int] | None) -> str:
    """The command that forms the patches of a window: of its own order for None."""
    named = ["--window", shlex.quote(window)] if window != "default" else []
    return " ".join(["kamera compile-patches", *map(str, order or ()), *named])


def advice(misses: Iterable[tuple[int, str]], window: str, order: Sequence[int] | None) -> str:
    """What would make chunks reusable that are not."""
    command = compile_command(window, order)
    if {why_not for _, why_not in misses} == {"max_kl"}:
        return f"raise --max-kl, or form better patches with: {command} --energy 0.9999"
    return f"form the patches with: {command}"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, header: bool = True) -> Table:
    """A plain table: a leading ``>`` in a column's name aligns it to the right; cells are made safe to print."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_header=header)
    for name in columns:
        grid.add_column(
            name.removeprefix(">"), justify="right" if name.startswith(">") else "left", overflow="fold"
        )
    for row in rows:
        grid.add_row(*(cell if isinstance(cell, Text) else Text(display(cell)) for cell in row))
    return grid
