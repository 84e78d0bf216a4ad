"""Names, numbers and JSON as they are printed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kamera_cli.words import display, format_bytes, format_ms, format_number, one_line, strict_json


def test_json_never_holds_nan_infinity_or_bad_utf8() -> None:
    value = {
        "kl": math.nan,
        "ttft": [math.inf, 1.5],
        "name": "bad\udcff\nname",
        "key": b"\x01",
        "at": Path("a"),
    }
    text = json.dumps(strict_json(value), allow_nan=False, ensure_ascii=False)
    text.encode("utf-8")
    assert json.loads(text) == {
        "kl": None,
        "ttft": [None, 1.5],
        "name": "bad\\xff\nname",
        "key": "01",
        "at": "a",
    }


def test_names_cannot_write_control_sequences_to_a_terminal() -> None:
    assert display("a\x1b[31m\nb\u202ec\udcff") == "a\\x1b[31m\\nb\\u202ec\\xff"
    assert display("naïve 日本\u3000.mp4") == "naïve 日本\u3000.mp4"


def test_an_error_stays_on_one_line() -> None:
    assert one_line("first\n  second\n") == "first second"


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**40, "5.0 TiB"), (None, "–")]
)
def test_bytes(value: int | None, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(12.44, "12.4 ms"), (310.2, "310 ms"), (3100, "3.1 s"), (125_000, "2 min 5 s"), (math.nan, "–")],
)
def test_times(value: float, text: str) -> None:
    assert format_ms(value) == text


def test_numbers() -> None:
    assert [format_number(value) for value in (1.2e-5, 0.0, None, math.inf)] == ["1.2e-5", "0", "–", "–"]
