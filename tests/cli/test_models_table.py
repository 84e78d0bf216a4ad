"""The table of supported models in the documents is the one that the program goes by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cli_fakes import Ran
from models_table import refreshed

from kamera_cli.model.architectures import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]


def test_the_documented_table_is_the_one_of_the_program() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert "<!-- models:begin -->" in text
    assert text == refreshed(text), "run: python docs/generate.py models"


def test_a_table_that_is_out_of_date_is_noticed() -> None:
    old = "a\n<!-- models:begin -->\nstale\n<!-- models:end -->\nb\n"
    new = refreshed(old)
    assert "stale" not in new
    assert "`llama`" in new
    assert refreshed(new) == new


def test_every_architecture_is_listed_for_people_and_for_programs(cli: Callable[..., Ran]) -> None:
    shown = "".join(cli("models").out.split())
    rows = cli("models", "--json").json["architectures"]
    assert [row["model_type"] for row in rows] == [entry.model_type for entry in ARCHITECTURES]
    for row in rows:
        assert row["verified"]
        assert row["rope"]
        assert isinstance(row["remote_code"], bool)
    assert "own code, a stand-in verified".replace(" ", "") in shown
