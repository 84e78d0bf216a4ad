"""Every command over the embedded model and a real store, in one process."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
from cli_fakes import Ran
from PIL import Image

from kamera_cli.app import run
from kamera_cli.words import strict_json

Cli = Callable[..., Ran]
CPU = ("--device", "cpu")


def write_clip(path: Path, num_frames: int = 40, rate: int = 10) -> Path:
    """A 64x48 clip: red and green quarters on the left, changing blue on the right."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for index in range(num_frames):
            pixels = np.zeros((48, 64, 3), np.uint8)
            pixels[:24, :32], pixels[24:, :32], pixels[:, 32:] = (
                (255, 0, 0),
                (0, 255, 0),
                (0, 0, 8 * index % 256),
            )
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    write_clip(folder / "clip.mp4")
    Image.new("RGB", (60, 40), (200, 30, 20)).save(folder / "image.png")
    (folder / "note.txt").write_text("the card shows a red circle and the letter K\n", encoding="utf-8")
    (folder / "junk.mp4").write_bytes(bytes(range(256)) * 20)
    (folder / "empty.mp4").touch()
    clip = (folder / "clip.mp4").read_bytes()
    (folder / "cut.mp4").write_bytes(clip[: len(clip) // 2])
    with av.open(str(folder / "sound.m4a"), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.int16), format="s16", layout="mono")
        frame.sample_rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return folder


@pytest.fixture(scope="module")
def filled(media: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with three chunks in the window ``default``."""
    store = tmp_path_factory.mktemp("filled") / "store"
    sources = [str(media / name) for name in ("clip.mp4", "image.png", "note.txt")]
    assert run(["--store", str(store), *CPU, "-q", "ingest", *sources]) == 0
    return store


@pytest.fixture
def store(filled: Path, tmp_path: Path) -> Path:
    """A copy of the filled store at the place where commands look."""
    return Path(shutil.copytree(filled, tmp_path / "store"))


def test_the_whole_way_from_a_file_to_an_answer_and_back(cli: Cli, store: Path) -> None:
    first = cli(*CPU, "query", "what is on the card ?", "--json").json
    assert {chunk["used"] for chunk in first["chunks"]} <= {"canonical", "prefilled"}
    assert first["why_not"]
    assert len(first["patches_kept"]) == 2

    second = cli(*CPU, "query", "what is on the card ?", "--json", "--require-hit", "--compare").json
    assert [chunk["used"] for chunk in second["chunks"]] == ["canonical", "exact", "exact"]
    assert second["why_not"] == {}
    assert second["answer"] == first["answer"]
    assert second["compare"]["kl"] < 1e-2
    assert second["ttft_ms"] > 0
    assert second["tokens"]["reused"] == sum(chunk["num_tokens"] for chunk in second["chunks"])

    found = cli(*CPU, "compile-patches", "--json").json
    assert [patch["outcome"] for patch in found["patches"]] == ["found", "found"]

    evicted = cli("evict", "1", "--json").json
    assert [entry["number"] for entry in evicted["evicted"]] == [1]
    assert evicted["freed_bytes"] == 0
    assert {"file_bytes", "free_inside_bytes"} <= evicted.keys()
    assert [entry["number"] for entry in cli("recall", "--list", "--json").json["evicted"]] == [1]

    recalled = cli(*CPU, "recall", "1", "--json").json
    assert recalled["vision_calls"] == 0
    assert [entry["number"] for entry in recalled["chunks"]] == [2, 3, 1]
    assert len(recalled["cascade"]) == 2


def test_another_order_is_another_receipt(cli: Cli, store: Path) -> None:
    document = cli(*CPU, "query", "what is on the card ?", "--chunks", "3,note.txt#1", "--json")
    assert document.code == 2
    document = cli(
        *CPU, "query", "what is on the card ?", "--chunks", "3,1", "--reuse", "blind", "--json"
    ).json
    assert [(chunk["number"], chunk["used"]) for chunk in document["chunks"]] == [
        (3, "canonical"),
        (1, "blind"),
    ]


def test_ls_show_and_stats_agree(cli: Cli, store: Path) -> None:
    (window,) = cli("ls", "--json").json["windows"]
    chunks = window["chunks"]
    assert [(chunk["number"], chunk["kind"]) for chunk in chunks] == [(1, "video"), (2, "image"), (3, "text")]
    assert chunks[2]["conditioned_on"] == [chunks[0]["id"], chunks[1]["id"]]
    by_number, by_name, by_id = (
        cli("show", item, "--json").json for item in ("1", chunks[0]["name"], chunks[0]["id"][:8])
    )
    assert by_number == by_name == by_id
    assert by_number["stored_bytes"] == chunks[0]["stored_bytes"]
    assert by_number["meta"]["source"]["end_ms"] == 4000
    stats = cli("stats", "--json").json
    assert stats["kinds"]["chunk"]["count"] == 3
    assert stats["kinds"]["chunk"]["raw_bytes"] == sum(
        cli("show", str(number), "--json").json["raw_bytes"] for number in (1, 2, 3)
    )
    for text in (cli("ls").out, cli("stats").out, cli("show", "1").out):
        assert "clip.mp4" in text or "chunk" in text


def test_a_dry_run_writes_nothing_and_tells_the_true_size(cli: Cli, media: Path, tmp_path: Path) -> None:
    planned = cli(*CPU, "ingest", str(media / "clip.mp4"), "--dry-run", "--json").json
    assert planned["counts"] == {"encoded": 0, "found": 0, "planned": 1}
    done = cli(*CPU, "ingest", str(media / "clip.mp4"), "--json").json
    assert planned["raw_bytes"] == pytest.approx(done["raw_bytes"], rel=0.1)


@pytest.mark.parametrize("name", ["junk.mp4", "empty.mp4", "cut.mp4", "sound.m4a", "nowhere.mp4", "."])
def test_a_file_that_is_no_media_is_one_line(cli: Cli, media: Path, name: str) -> None:
    ran = cli(*CPU, "ingest", str(media / name))
    assert (ran.code, ran.out) == (1, "")
    assert str(media / name).rstrip("/.") in ran.error


def test_the_other_files_of_a_batch_are_done(cli: Cli, media: Path) -> None:
    sources = [str(media / name) for name in ("junk.mp4", "note.txt", "empty.mp4")]
    ran = cli(*CPU, "ingest", *sources, "--partial", "--json")
    assert ran.code == 0
    assert [Path(failure["path"]).name for failure in ran.json["failures"]] == ["junk.mp4", "empty.mp4"]
    assert [chunk["number"] for source in ran.json["sources"] for chunk in source["chunks"]] == [1]


def test_names_with_a_colon_a_newline_or_bad_utf8_work(
    cli: Cli, media: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["12:30 clip.txt", os.fsdecode(b"bad\xff\nname.txt"), 'naïve "日本".txt']
    for index, name in enumerate(names):
        (tmp_path / name).write_text(f"the letter number {index}\n", encoding="utf-8")
    ran = cli(*CPU, "ingest", *names, "--json")
    assert ran.code == 0
    assert [source["path"] for source in ran.json["sources"]] == strict_json(names)
    assert len(cli("ls").out.splitlines()) == 5
    assert len(cli("ls", "--json").json["windows"][0]["chunks"]) == 3


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["query", "x", "--window", "nope"], 3, "no window 'nope'"),
        (["query", "x", "--chunks", "9"], 3, "no chunk '9'"),
        (["query", ""], 2, "question is empty"),
        (["query", "the card " * 5000], 2, "context"),
        (["query", "x", "--require-hit"], 3, "--require-hit"),
        (["--dtype", "bf16", "query", "x"], 4, "another model"),
        (["--tenant", "ann", "query", "x"], 3, "no window"),
        (["--model", "/nowhere", "query", "x"], 3, "/nowhere"),
        (["compile-patches", "--rank", "5000"], 2, "rank 5000"),
        (["compile-patches", "7", "8"], 3, "no chunk '7'"),
        (["show", "zzz"], 3, "zzz"),
        (["evict", "77"], 3, "no chunk '77'"),
        (["evict", "--oldest", "9"], 2, "--oldest 9"),
        (["query", "x", "--chunks", "1,2,1"], 2, "named twice"),
        (["compile-patches", "2", "2"], 2, "named twice"),
        (["recall", "77"], 3, "no chunk '77'"),
        (["recall", "1"], 2, "already"),
        (["models", "check", "/nowhere"], 3, "/nowhere"),
        (["bench", "nope"], 2, "ttft"),
        (["bench", "store", "--geometry", "nope"], 2, "nope"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_requests_over_a_real_store(
    cli: Cli, store: Path, arguments: list[str], code: int, says: str
) -> None:
    ran = cli(*CPU, *arguments)
    assert (ran.code, ran.out) == (code, "")
    assert says in ran.error


def test_an_explicit_gpu_that_is_not_there_is_an_error(
    cli: Cli, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ran = cli("--device", "cuda", "query", "x")
    assert ran.code == 2
    assert "--device cpu" in ran.error


def test_no_gpu_is_said_once_by_what_loads_a_model_and_an_explicit_cpu_is_silent(
    cli: Cli, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli("--device", "cpu", "query", "x", "--json").err == ""
    for command in (["ls"], ["show", "1"], ["query", "x", "--explain"], ["evict", "3"]):
        assert "no GPU" not in cli(*command).err
    assert cli("query", "x", "--json").err.count("no GPU") == 1
    assert cli("query", "x", "--json").err == ""
    assert "on the CPU" in cli("query", "x", "--json", "-v").err


def test_store_wide_eviction_plans_first_and_never_takes_what_a_window_holds(cli: Cli, store: Path) -> None:
    held = cli("evict", "--to", "0", "--yes", "--json").json
    assert (held["units"], held["reached"], len(held["kept"])) == ([], False, 3)
    cli("evict", "--oldest", "3")
    planned = cli("evict", "--to", "0", "--dry-run", "--json").json
    assert len(planned["units"]) == 3
    assert planned["freed_bytes"] == 0
    assert cli("evict", "--to", "0").code == 2
    before = cli("stats", "--json").json
    assert before["kinds"]["chunk"]["count"] == 3
    assert {unit["name"] for unit in planned["units"]} == {"clip.mp4", "image.png", "note.txt"}
    assert "clip.mp4" in cli("evict", "--to", "0", "--dry-run").out
    assert "gone" not in cli("recall", "--list").out
    done = cli("evict", "--to", "0", "--yes", "--compact", "--json").json
    assert done["freed_bytes"] > 0
    assert done["compact"]["after_bytes"] < done["compact"]["before_bytes"] == before["file_bytes"]
    assert cli("stats", "--json").json["count"] == 0
    assert cli("recall", "--list").out.count("gone from the store") == 3
    assert [entry["in_store"] for entry in cli("recall", "--list", "--json").json["evicted"]] == [False] * 3


def test_purging_says_what_was_freed_inside_and_what_the_file_is(cli: Cli, store: Path) -> None:
    before = cli("stats", "--json").json
    purged = cli("evict", "1", "--purge", "--json").json
    assert purged["freed_bytes"] > 100_000
    assert purged["file_bytes"] == before["file_bytes"]
    assert purged["free_inside_bytes"] > before["free_inside_bytes"]
    ran = cli("compact", "--json").json
    assert ran["after_bytes"] < ran["before_bytes"] == before["file_bytes"]


def test_damage_is_found_moved_aside_and_said_in_the_exit_code(cli: Cli, store: Path) -> None:
    assert cli("verify", "--json").json["ok"] is True
    data = bytearray((store / "data.mdb").read_bytes())
    middle = len(data) // 2 // 4096 * 4096
    data[middle : middle + 4096] = bytes(4096)
    (store / "data.mdb").write_bytes(data)
    looked = cli("verify", "--dry-run", "--json")
    assert (looked.code, looked.json["ok"]) == (5, False)
    moved = cli("verify", "--json")
    assert (moved.code, moved.json["damaged"][0]["quarantined"]) == (5, True)
    assert cli("verify").code == 0
    assert cli(*CPU, "query", "x").code == 3


def test_a_data_file_that_was_cut_is_an_exit_code_and_not_a_signal(cli: Cli, store: Path) -> None:
    data = (store / "data.mdb").read_bytes()
    (store / "data.mdb").write_bytes(data[: len(data) // 2])
    for command in (["ls"], ["stats"], ["verify"], ["recall", "--list"]):
        ran = cli(*command)
        assert ran.code == 5
        assert "damaged" in ran.error


def test_what_is_sound_in_a_data_file_that_was_cut_can_be_rescued(
    cli: Cli, store: Path, tmp_path: Path
) -> None:
    whole = cli("stats", "--json").json["count"]
    data = (store / "data.mdb").read_bytes()
    (store / "data.mdb").write_bytes(data[: len(data) * 3 // 4])
    new = tmp_path / "rescued"
    ran = cli("verify", "--rescue", str(new), "--json")
    assert ran.json["rescued_to"] == str(new)
    assert ran.code == (0 if ran.json["ok"] else 5)
    assert ran.json["ok"] == (ran.json["num_records"] > 0 and not ran.json["lost"])
    assert cli("--store", str(new), "stats", "--json").json["count"] == ran.json["num_records"] <= whole
    assert cli("--store", str(new), "verify").code == 0
    assert (store / "data.mdb").stat().st_size == len(data) * 3 // 4
    assert cli("verify", "--rescue", str(new)).code == 4


def test_a_folder_of_something_else_is_left_alone(cli: Cli, tmp_path: Path, media: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    with sqlite3.connect(folder / "other.db") as database:
        database.execute("create table t (x)")
    before = sorted(path.name for path in folder.iterdir())
    for arguments in (["stats"], [*CPU, "ingest", str(media / "note.txt")]):
        assert cli(*arguments).code == 4
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_store_that_others_can_write_is_refused(cli: Cli, store: Path) -> None:
    store.chmod(0o777)
    ran = cli("ls")
    assert ran.code == 4
    assert "chmod" in ran.error


def test_what_does_not_fit_the_quota_is_refused_with_its_own_code(cli: Cli, media: Path) -> None:
    write_clip(media / "long.mp4", 200)
    ran = cli(*CPU, "--quota", "1MiB", "ingest", str(media / "long.mp4"), "--json")
    assert ran.code == 6
    assert "quota" in ran.error


def test_a_checkpoint_passes_its_self_test(cli: Cli) -> None:
    document = cli(*CPU, "models", "check", "kamera-tiny", "--json").json
    assert document["ok"] is True
    assert len(document["checks"]) >= 4
    assert "Qwen2.5-VL" in cli("models").out


def test_bench_prints_one_object_and_writes_its_files(cli: Cli, tmp_path: Path) -> None:
    document = cli(*CPU, "bench", "store", "--out", str(tmp_path / "out"), "--json").json
    assert document["schema"] == "kamera.bench.v1"
    assert document["total_ms"] > 0
    assert list(document["suites"]) == ["store"]
    assert document["files"]
    assert all((tmp_path / "out" / Path(name).name).exists() for name in document["files"])
