"""What the documents tell a reader to run gives what they say it gives."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, cwd: Path = ROOT) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "store")])}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_sliding_window_still_answers_through_a_chunk_that_left():
    printed = run("examples/sliding_window.py")
    assert printed.count("'seven' in") == 3
    assert "vision tower forwards since ingest: 0" in printed


def test_every_order_gives_the_expected_answer():
    printed = run("examples/reorder.py")
    expected = re.search(r"expected: (.*)\)", printed)[1]
    assert printed.count(f"'{expected}' in") == 12


def test_the_agent_in_a_small_window_gives_the_answers_of_one_that_encodes_again():
    printed = run("examples/agent_loop.py")
    rows = {line[:28].strip(): line[28:].split("  ") for line in printed.splitlines() if len(line) == 70}
    cells = {label: [cell.strip() for cell in cells if cell.strip()] for label, cells in rows.items()}
    count = re.match(r"(\d+) questions", printed)[1]
    assert cells["right answers"] == cells["same as re-encode"] == [f"{count} of {count}"] * 3
    assert cells["vision tower, forwards"] == ["0", count, "0"]


def test_the_snippet_of_the_readme_prints_what_its_comments_say(tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    printed = run("-c", code, cwd=tmp_path).splitlines()
    stated = [line for line in code.splitlines() if line.startswith("# ")]
    assert len(printed) == len(stated) == 2
    for line, comment in zip(printed, stated, strict=True):
        start, end = comment.removeprefix("# ").split(" … ")
        assert line.startswith(start) and line.endswith(end)


@pytest.mark.parametrize("command", ["compile-patches", "query", "evict", "recall", "ingest"])
def test_options_in_the_use_block_exist(command):
    from kamera_cli.app import help_text

    block = re.search(
        r"## Use\n\n```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )[1]
    for line in re.findall(rf"kamera {command} ([^#;\n]*)", block):
        for option in re.findall(r"--[a-z-]+", line):
            assert option in help_text(command, 90)
