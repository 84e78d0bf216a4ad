"""What scripts rely on: one JSON object or nothing on stdout, one error line on stderr, the exit code."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

import pytest
from cli_fakes import FIRST, SECOND, FakeEngine, Ran, ingest_result, query_result

from kamera_cli.errors import KameraError, NotFoundError, RefusedError, UsageError
from kamera_cli.results import IngestResult, Progress, SourceFailure
from kamera_store.errors import (
    ConflictError,
    DamagedError,
    FormatVersionError,
    MissingRecordError,
    NoRoomError,
    NotAKameraEntryError,
    NotAStoreError,
    ReadOnlyError,
    StoreRefusedError,
    UnsupportedDtypeError,
)

Cli = Callable[..., Ran]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KameraError("failed"), 1),
        (UsageError("no sense"), 2),
        (NotFoundError("no chunk 7"), 3),
        (RefusedError("other model"), 4),
        (NotAStoreError("/s", "a folder of something else"), 4),
        (FormatVersionError(2, 1), 4),
        (StoreRefusedError("others can write it"), 4),
        (DamagedError(b"k" * 16, "checksum", 1, 2), 5),
        (NotAKameraEntryError(b"k" * 16, "checksum", 1, 2), 5),
        (MissingRecordError(b"k" * 16), 3),
        (UnsupportedDtypeError("fp8"), 4),
        (ReadOnlyError("opened for reading"), 1),
        (NoRoomError(2, 1), 6),
        (ConflictError("window", "default", 1, 2), 1),
        (OSError(errno.ENOSPC, "No space left on device", "/s/data.mdb"), 6),
        (PermissionError(errno.EACCES, "Permission denied", "/s"), 1),
        (MemoryError(), 6),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"), 6),
        (KeyboardInterrupt(), 130),
        (KeyError("surprise"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_error_is_one_line_with_its_exit_code(
    cli: Cli, engine: FakeEngine, error: BaseException, code: int
) -> None:
    engine.answers["query"] = error
    ran = cli("query", "Which?")
    assert ran.code == code
    assert ran.out == ""
    assert ran.error
    assert "Traceback" not in ran.err


def test_an_error_with_json_is_still_exactly_one_object(cli: Cli, engine: FakeEngine) -> None:
    engine.answers["query"] = RefusedError("the window belongs to another model")
    ran = cli("--json", "query", "Which?")
    assert ran.json == {
        "schema": "kamera.error.v1",
        "error": {"kind": "RefusedError", "message": "the window belongs to another model", "exit_code": 4},
    }
    assert ran.error == "the window belongs to another model"


def test_a_traceback_is_shown_with_v_alone(cli: Cli, engine: FakeEngine) -> None:
    engine.answers["query"] = ValueError("inner\ntrouble")
    assert "Traceback" not in cli("query", "Which?").err
    ran = cli("query", "Which?", "-v")
    assert "Traceback" in ran.err
    assert ran.error == "unexpected ValueError: inner trouble; run again with -v for the traceback"


def test_ctrl_c_says_that_finished_work_is_kept(cli: Cli, engine: FakeEngine) -> None:
    engine.answers["ingest"] = KeyboardInterrupt()
    ran = cli("ingest", "a.mp4")
    assert ran.code == 130
    assert "finished chunks are kept" in ran.error


@pytest.mark.parametrize(
    "arguments",
    [
        ["nope"],
        ["query"],
        ["query", "a", "b"],
        ["query", "x", "--no-such-option"],
        ["query", "x", "--rank", "0"],
        ["-q", "query", "x", "-v"],
        ["query", "x\udcff"],
        ["query", "x", "--window", ""],
        ["ingest", "a.mp4", "--window", "a/b"],
        ["ls", "--window", "n\nl"],
        ["recall", "1", "--window", "\udcff"],
        ["evict", "1", "--window", "w" * 300],
        ["ingest", "a.mp4", "--name", "\udcff"],
        ["ingest", ""],
        ["query", "x", "--rank", "two"],
        ["query", "x", "--max-kl", "-1"],
        ["query", "x", "--max-kl", "nan"],
        ["query", "x", "--chunks", "1,,2"],
        ["query", "x", "--reuse", "maybe"],
        ["--device", "tpu", "query", "x"],
        ["--quota", "10G", "query", "x"],
        ["--tenant", "a/b", "query", "x"],
        ["ingest"],
        ["ingest", "a.mp4", "--fps", "0"],
        ["ingest", "a.mp4", "--fps", "nan"],
        ["ingest", "a.mp4", "--chunk-seconds", "-1"],
        ["ingest", "a.mp4", "--max-pixels", "0"],
        ["compile-patches", "--rank", "0"],
        ["compile-patches", "--rank", "few"],
        ["compile-patches", "--energy", "0"],
        ["compile-patches", "--energy", "1.1"],
        ["compile-patches", "--kind", "sideways"],
        ["evict"],
        ["evict", "1", "--oldest", "2"],
        ["evict", "--oldest", "0"],
        ["evict", "1", "--to", "1GB"],
        ["evict", "--purge"],
        ["evict", "--to", "much", "--yes"],
        ["evict", "--older-than", "7", "--yes"],
        ["recall"],
        ["recall", "1", "--list"],
        ["recall", "1", "--at", "0"],
        ["bench", "nope"],
    ],
    ids=lambda arguments: ascii(" ".join(arguments))[1:60],
)
def test_a_request_that_makes_no_sense_is_one_line_and_code_2(
    cli: Cli, engine: FakeEngine, arguments: list[str]
) -> None:
    ran = cli(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.error
    assert not engine.calls


def test_a_misspelt_variable_of_the_environment_is_an_error(
    cli: Cli, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAMERA_MODLE", "x")
    ran = cli("query", "x")
    assert ran.code == 2
    assert "KAMERA_MODLE" in ran.error
    assert cli("--help").code == 0


@pytest.mark.parametrize("place", ["before", "after"])
def test_global_options_stand_before_or_after_the_command(cli: Cli, engine: FakeEngine, place: str) -> None:
    options = ["--json", "--tenant", "ann", "--device", "cpu", "--dtype", "fp32", "--quota", "1GB"]
    ran = cli(*options, "query", "x") if place == "before" else cli("query", "x", *options)
    assert ran.json["schema"] == "kamera.query.v1"
    settings = engine.settings
    assert (settings.tenant, settings.device, settings.dtype, settings.quota_bytes) == (
        "ann",
        "cpu",
        "fp32",
        10**9,
    )


def test_the_dtype_of_factors_is_not_the_dtype_of_the_model(cli: Cli, engine: FakeEngine) -> None:
    cli("--dtype", "bf16", "compile-patches", "--dtype", "fp16")
    assert engine.settings.dtype == "bf16"
    assert engine.calls[0][2]["options"].factor_dtype == "fp16"


def test_query_json_carries_the_whole_receipt(cli: Cli, engine: FakeEngine) -> None:
    engine.answers["query"] = query_result(compare=True, kl=float("nan"))
    document = cli("query", "Which?", "--json", "--compare").json
    assert document["schema"] == "kamera.query.v1"
    assert document["ttft_ms"] == 12.4
    assert list(document["stages"]) == ["lookup", "read", "decompress", "transfer", "assemble", "prefill"]
    assert document["tokens"] == {"reused": 250, "prefilled": 148, "new": 5}
    first, second, third = document["chunks"]
    assert (first["id"], first["used"], first["patch"]) == (FIRST, "canonical", None)
    assert (second["id"], second["rank"], second["kl"], second["bytes_read"]) == (SECOND, 8, None, 5120)
    assert document["why_not"] == {third["id"]: "no_patch"}
    assert document["compare"]["same_answer"] is True
    assert {"ttft_ms", "kl", "answer"} <= document["compare"].keys()


def test_people_get_the_answer_first_and_one_line_of_comparison(cli: Cli, engine: FakeEngine) -> None:
    engine.answers["query"] = query_result(compare=True)
    ran = cli("query", "Which?", "--compare")
    assert ran.out.splitlines()[0] == "The number is seven."
    assert "12.4 ms to the first token, against 310 ms re-encoding (25x), same answer, KL 1.2e-5" in ran.out
    assert "computed anew: no patch for this order yet" in ran.out


def test_quiet_takes_nothing_from_the_result(cli: Cli, engine: FakeEngine) -> None:
    engine.answers["query"] = lambda: engine.on_warning("CPU") or query_result()
    loud, quiet = cli("query", "Which?"), cli("-q", "query", "Which?")
    assert (quiet.out, quiet.err) == (loud.out, "")
    assert "computed anew" in quiet.out and "to the first token" in quiet.out
    assert "-q" in cli("query", "--help").out.split("Options:")[0]


def test_names_of_any_kind_leave_valid_json_and_safe_tables(cli: Cli, engine: FakeEngine) -> None:
    name = 'bad "quoted"\nname \udcff\x1b[31m.mp4'
    engine.answers["ingest"] = ingest_result(name=name)
    assert cli("ingest", name, "--json").json["sources"][0]["path"] == 'bad "quoted"\nname \\xff\x1b[31m.mp4'
    table = cli("ingest", name).out
    assert "\x1b" not in table
    assert 'bad "quoted"\\nname \\xff\\x1b[31m.mp4' in table


def test_no_bar_and_no_colour_without_a_terminal(cli: Cli, engine: FakeEngine) -> None:
    engine.answers["ingest"] = lambda: engine.on_progress(Progress("encoding", 1, 3)) or ingest_result()
    ran = cli("ingest", "clip.mp4")
    assert ran.err == ""
    assert "\x1b" not in ran.out
    assert "encoding: 1/3 chunks" in cli("ingest", "clip.mp4", "-v").err


def test_what_a_library_prints_never_lands_in_the_result(cli: Cli, engine: FakeEngine) -> None:
    engine.answers["query"] = lambda: sys.stdout.write("loading weights\n") and query_result()
    ran = cli("query", "Which?", "--json")
    assert ran.json["answer"]
    assert "loading weights" in ran.err


def test_warnings_go_to_stderr(cli: Cli, engine: FakeEngine) -> None:
    engine.answers["query"] = lambda: engine.on_warning("no GPU found") or query_result()
    ran = cli("query", "Which?", "--json")
    assert ran.err == "kamera: warning: no GPU found\n"
    assert ran.json


FAILURES = (SourceFailure("b.mp4", "no video stream"), SourceFailure("c.mp4", "c.mp4 is empty"))


@pytest.mark.parametrize(
    ("failures", "partial", "code", "errors"),
    [
        (FAILURES[:1], False, 1, ["b.mp4: no video stream"]),
        (FAILURES, False, 1, ["b.mp4: no video stream", "c.mp4 is empty"]),
        (FAILURES, True, 0, []),
    ],
)
def test_each_source_that_failed_is_a_line_and_the_rest_is_printed(
    cli: Cli, engine: FakeEngine, failures: tuple, partial: bool, code: int, errors: list[str]
) -> None:
    engine.answers["ingest"] = ingest_result(failures=failures)
    ran = cli("ingest", "a.mp4", "b.mp4", "--json", *(["--partial"] if partial else []))
    assert ran.code == code
    assert [failure["path"] for failure in ran.json["failures"]] == [failure.path for failure in failures]
    lines = [line.removeprefix("kamera: error: ") for line in ran.err.splitlines() if "error" in line]
    assert lines == errors


def test_partial_still_fails_when_nothing_went_in(cli: Cli, engine: FakeEngine) -> None:
    engine.answers["ingest"] = IngestResult("default", (), FAILURES[:1], 1.0)
    assert cli("ingest", "b.mp4", "--partial").code == 1


@pytest.mark.parametrize(
    "arguments", [["stats"], ["ls"], ["show", "1"], ["verify"], ["compact"], ["query", "x"]]
)
def test_looking_never_makes_a_store(cli: Cli, tmp_path, arguments: list[str]) -> None:
    ran = cli(*arguments)
    assert ran.code == 3
    assert "kamera ingest" in ran.error
    assert not (tmp_path / "store").exists()


def test_without_a_command_the_help_is_shown(cli: Cli) -> None:
    ran = cli()
    assert ran.code == 0
    assert "Commands:" in ran.out
