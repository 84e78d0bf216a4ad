"""The program as a process: streams, signals, terminals, start-up, and two of them at once."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from cli_fakes import Ran

Program = Callable[..., Ran]
KAMERA = (sys.executable, "-m", "kamera_cli")

SLOW_INGEST = """
import sys, time, types
from kamera_cli.results import IngestResult, Progress

class Engine:
    def __init__(self, settings, *, on_progress, on_warning):
        self.on_progress, self.on_warning = on_progress, on_warning
    def __enter__(self): return self
    def __exit__(self, *exc): return None
    def ingest(self, sources, options):
        for done in range({steps}):
            self.on_progress(Progress("encoding", done, {steps}, "chunks", "clip.mp4"))
            time.sleep(0.05)
        print("a library that talks")
        self.on_warning("something to know")
        return IngestResult("default", (), (), 1.0)

sys.modules["kamera_cli.engine"] = types.SimpleNamespace(Engine=Engine)
from kamera_cli.app import main
sys.exit(main(["--json", "ingest", "clip.mp4", *sys.argv[1:]]))
"""


@pytest.fixture
def notes(tmp_path: Path, program: Program) -> list[str]:
    """Text files with names of every kind."""
    names = [f"note {index}.txt" for index in range(3)] + [os.fsdecode(b"bad\xff\nname.txt")]
    for index, name in enumerate(names):
        (tmp_path / name).write_text(f"the letter of card number {index}\n", encoding="utf-8")
    return [str(tmp_path / name) for name in names]


def in_terminal(arguments: Sequence[str], typed: bytes = b"", **environment: str) -> tuple[int, str, str]:
    """Run with stdin and stderr on a terminal and stdout in a pipe; returns the exit code and both."""
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        arguments, env=os.environ | environment, stdin=inner, stdout=subprocess.PIPE, stderr=inner
    )
    os.close(inner)
    os.write(outer, typed)
    shown = b""
    while True:
        ready, _, _ = select.select([outer], [], [], 60)
        try:
            piece = os.read(outer, 65536) if ready else b""
        except OSError:
            piece = b""
        if not piece:
            break
        shown += piece
    out = process.stdout.read() if process.stdout else b""
    os.close(outer)
    return process.wait(60), out.decode(), shown.decode(errors="replace")


def test_bars_are_drawn_on_a_terminal_and_stdout_stays_one_object() -> None:
    code, out, shown = in_terminal(
        [sys.executable, "-c", SLOW_INGEST.format(steps=12)], TERM="xterm", COLUMNS="120"
    )
    assert code == 0
    assert json.loads(out)["schema"] == "kamera.ingest.v1"
    assert "encoding" in shown
    assert "/12 chunks" in shown
    assert "chunks/s" in shown
    assert "kamera: warning: something to know" in shown
    assert "a library that talks" in shown


def test_no_color_is_honoured_on_a_terminal() -> None:
    arguments = [sys.executable, "-c", SLOW_INGEST.format(steps=4)]
    _, _, coloured = in_terminal(arguments, TERM="xterm-256color", COLUMNS="120")
    _, _, plain = in_terminal(arguments, TERM="xterm-256color", COLUMNS="120", NO_COLOR="1")
    assert "\x1b[38;5" in coloured or "\x1b[3" in coloured
    assert "\x1b[38;5" not in plain
    assert "\x1b[32m" not in plain


def test_many_files_do_not_fill_the_terminal_with_bars() -> None:
    from io import StringIO

    from kamera_cli.output.progress import MAX_BARS, Bars
    from kamera_cli.results import Progress

    with Bars(StringIO()) as bars:
        for index in range(20):
            bars(Progress(f"/a/long/path/{index}/clip.mp4", 1, None, "chunks"))
        assert len(bars.progress.tasks) == MAX_BARS


@pytest.mark.parametrize(("typed", "code", "chunks"), [(b"y\n", 0, 0), (b"\n", 1, 3)])
def test_deleting_is_asked_for_on_a_terminal(
    notes: list[str], cli: Program, program: Program, typed: bytes, code: int, chunks: int
) -> None:
    assert cli("--device", "cpu", "ingest", *notes[:3]).code == 0
    assert cli("evict", "--oldest", "3").code == 0
    ended, _, shown = in_terminal([*KAMERA, "evict", "--to", "0"], typed)
    assert "delete 3 sources" in shown
    assert ended == code
    assert program("stats", "--json").json["kinds"].get("chunk", {"count": 0})["count"] == chunks


def test_nothing_is_drawn_without_a_terminal() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SLOW_INGEST.format(steps=3)], capture_output=True, text=True, check=True
    )
    assert "encoding" not in ran.stderr
    assert "\x1b" not in ran.stderr
    assert json.loads(ran.stdout)


def test_ctrl_c_ends_with_130_and_one_line() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_INGEST.format(steps=4000), "-v"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr.readline() == "kamera: encoding: 0/4000 chunks clip.mp4\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert json.loads(out)["error"]["exit_code"] == 130
    said = [line for line in err.splitlines() if not line.startswith("kamera: encoding: ")]
    assert said == ["kamera: error: interrupted; finished chunks are kept, run it again to go on"]


@pytest.mark.parametrize("arguments", [["--help"], ["models"], ["models", "--json"]], ids=" ".join)
def test_a_closed_pipe_ends_quietly(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [*KAMERA, *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        check=False,
    )
    os.close(writer)
    assert process.returncode in (0, 141)
    assert process.stderr == b""


def test_a_listing_piped_to_head_ends_quietly(notes: list[str], cli: Program) -> None:
    assert cli("--device", "cpu", "ingest", *notes).code == 0
    assert cli("evict", "1", "2", "3").code == 0
    command = f"{sys.executable} -m kamera_cli recall --list | head -1; echo ${{PIPESTATUS[0]}}"
    ran = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        check=True,
    )
    assert ran.stderr == ""
    assert ran.stdout.splitlines()[-1] in ("0", "141")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_stdout_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run([*KAMERA, "models"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (6, "kamera: error: 'stdout': No space left on device\n")


def test_closed_streams_do_not_crash(program: Program) -> None:
    command = f"{sys.executable} -m kamera_cli models >&- 2>&-; echo $?"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert ran.stdout == "0\n"


def test_two_ingests_of_one_file_at_once_store_it_once(notes: list[str], program: Program) -> None:
    command = [*KAMERA, "--device", "cpu", "--json", "ingest", *notes]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    results = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    stats = program("stats", "--json").json
    assert stats["kinds"]["chunk"]["count"] == len(notes)
    (window,) = program("ls", "--json").json["windows"]
    assert [chunk["number"] for chunk in window["chunks"]] == [1, 2, 3, 4]
    assert program("verify", "--json").json["ok"] is True


AUDIT = """
import sys
import socket
attempts = []
def refuse(*arguments, **options):
    attempts.append(arguments)
    raise OSError(101, "Network is unreachable")
socket.socket.connect = socket.socket.connect_ex = socket.create_connection = socket.getaddrinfo = refuse
from kamera_cli.app import run
code = run(sys.argv[1:])
heavy = sorted({"torch", "transformers", "torchvision"} & set(sys.modules))
sys.stderr.write(f"code={code} heavy={heavy} attempts={len(attempts)}")
"""


def audited(*arguments: str, **environment: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", AUDIT, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
        timeout=240,
    )
    return ran.stderr


def test_all_works_offline_and_what_needs_no_model_loads_no_torch(notes: list[str]) -> None:
    for arguments in (["ingest", *notes[:2]], ["query", "which letter ?", "--compare"]):
        said = audited("--device", "cpu", *arguments)
        assert "code=0" in said, said
        assert "attempts=0" in said, said
    for arguments in (
        ["--device", "cpu", "ingest", notes[0]],
        ["ls"],
        ["show", "1"],
        ["stats"],
        ["verify"],
        ["evict", "1"],
        ["recall", "--list"],
        ["compact"],
    ):
        assert "code=0 heavy=[] attempts=0" in audited(*arguments), arguments


@pytest.mark.parametrize("offline", ["1", "0"])
def test_a_model_that_is_not_cached_is_one_line_and_not_asked_for_again_and_again(
    notes: list[str], offline: str
) -> None:
    said = audited("--model", "owner/not-cached", "ingest", notes[0], HF_HUB_OFFLINE=offline)
    assert "code=3" in said, said
    assert "owner/not-cached" in said
    assert said.count("\n") == 1
    attempts = int(said.rsplit("attempts=", 1)[1])
    assert attempts == 0 if offline == "1" else attempts <= 2, said


@pytest.mark.parametrize("arguments", [["--help"], ["query", "--help"], ["models"]], ids=" ".join)
def test_start_up_loads_no_library_that_it_does_not_need(arguments: list[str]) -> None:
    """Time at start goes into imports: numbers, media, models, the store's engine and tables for people come later."""
    ran = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments], capture_output=True, text=True, check=True
    )
    loaded = set(ran.stderr.split())
    heavy = {
        "torch", "transformers", "torchvision", "numpy", "av", "PIL", "safetensors", "huggingface_hub", "lmdb",
        "zstandard", "xxhash", "matplotlib",
    }  # fmt: skip
    assert not loaded & heavy
    assert "rich" not in loaded or arguments == ["models"]


LOADED = """
import sys
from kamera_cli.app import run
run(sys.argv[1:])
sys.stderr.write(" ".join({name.split(".")[0] for name in sys.modules}))
"""
