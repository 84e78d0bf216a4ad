"""Media that a backbone cannot take: one line with the reason, its exit code, and nothing written."""

from __future__ import annotations

import pytest
from PIL import Image
from tiny_backbones import save_backbone
from tiny_models import write_noise_image, write_noise_video, write_passage

from kamera_store import KVStore

FIXED_SIZE = ("deepseek_vl", "deepseek_vl_hybrid", "internvl", "llava_onevision", "kimi_k25")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("backbones")

    def folder(name: str, **fields):
        found = root / "-".join([name, *map(str, fields.values())])
        return found if found.exists() else save_backbone(name, found, **fields)

    return folder


@pytest.fixture
def program(tmp_path, capsys, monkeypatch):
    """Run the program; exit code and lines on stderr, and what the store then holds."""
    from kamera_cli.app import run

    monkeypatch.setenv("KAMERA_STORE", str(tmp_path / "store"))

    def call(folder, *arguments: str) -> tuple[int, list[str], list]:
        capsys.readouterr()
        code = run(["--device", "cpu", "--model", str(folder), "-q", *map(str, arguments)])
        lines = [line for line in capsys.readouterr().err.splitlines() if "Traceback" in line or line.strip()]
        with KVStore.open(tmp_path / "store") as store:
            return code, lines, [record.kind for record in store.iterate()]

    return call


@pytest.mark.parametrize("name", ["deepseek_vl", "deepseek_vl_hybrid"])
def test_a_video_for_a_processor_without_a_video_part(folder_of, program, tmp_path, name):
    video = write_noise_video(tmp_path / "a.mp4", 1, seconds=1)
    code, lines, kept = program(folder_of(name), "ingest", video)
    assert code == 2 and len(lines) == 1 and "video" in lines[0] and kept == []


def test_a_picture_longer_than_the_context(folder_of, program, tmp_path):
    folder = folder_of("qwen2_vl", max_position_embeddings=6)
    code, lines, kept = program(
        folder, "ingest", write_noise_image(tmp_path / "a.png", 1, width=84, height=84)
    )
    assert code == 2 and len(lines) == 1 and "context" in lines[0] and kept == []


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_picture_of_an_aspect_that_the_processor_refuses(folder_of, program, tmp_path, name):
    Image.new("RGB", (4020, 10), (9, 99, 200)).save(tmp_path / "a.png")
    code, lines, kept = program(folder_of(name), "ingest", tmp_path / "a.png")
    assert code == 2 and len(lines) == 1 and "processor refuses" in lines[0] and kept == []


@pytest.mark.parametrize("name", FIXED_SIZE)
def test_a_bound_on_pixels_for_a_processor_of_fixed_size(folder_of, program, tmp_path, name):
    image = write_noise_image(tmp_path / "a.png", 1)
    code, lines, kept = program(folder_of(name), "ingest", image, "--max-pixels", "3136")
    assert code == 2 and len(lines) == 1 and "--max-pixels" in lines[0] and kept == []


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_vl"])
def test_a_chunk_of_the_same_architecture_with_other_weights(folder_of, program, tmp_path, name):
    """A window of the other weights is refused; the same file in a window of its own is encoded anew."""
    text = write_passage(tmp_path / "a.txt", 15, 1)
    one, other = folder_of(name), folder_of(name, seed=1)
    assert program(one, "ingest", text)[0] == 0
    for arguments in (["query", "which letter?"], ["ingest", text], ["compile-patches"]):
        code, lines, _ = program(other, *arguments)
        assert code == 4 and len(lines) == 1 and "another model" in lines[0]
    code, _, kept = program(other, "ingest", text, "--window", "own")
    assert code == 0 and kept.count("chunk") == 2
