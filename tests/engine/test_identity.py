"""The worst failure: one input answered with another one's KV, or old KV mixed with a changed model."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
import torch
import transformers
from engine_setups import NUM_NEW, QUESTION, ingest, reference
from PIL import Image
from tiny_models import write_noise_image, write_noise_video, write_passage

from kamera_cli.errors import KameraError, RefusedError
from kamera_store.errors import IdentityWarning
from kamera_store.format import keys


def solid(path, colour: tuple[int, int, int], side: int = 336):
    Image.new("RGB", (side, side), colour).save(path)
    return path


def chunk_ids(result) -> list[str]:
    return [chunk.id for chunk in result.chunks]


def test_a_second_picture_is_not_answered_with_the_first_ones_kv(open_engine, tmp_path):
    """KV-1: both pictures have the same token ids."""
    engine = open_engine()
    red, blue = solid(tmp_path / "red.png", (255, 0, 0)), solid(tmp_path / "blue.png", (0, 0, 255))
    first, second = engine.ingest([red]), engine.ingest([blue])
    assert chunk_ids(first) != chunk_ids(second)
    answers = {}
    for number, name in (("1", "red"), ("2", "blue"), ("1", "red")):
        result = engine.query(QUESTION, chunks=[number], compare=True, max_new_tokens=NUM_NEW)
        assert result.answer == reference(engine, [number])[1] == answers.setdefault(name, result.answer)
        assert result.compare.kl <= 1e-9
    again = engine.ingest([red], window="again")
    assert chunk_ids(again) == chunk_ids(first) and again.sources[0].from_index


def test_pixels_of_another_shape_have_another_key(open_engine, tmp_path):
    """SEC-1 (a): the same 13,500 bytes as 30x150 and as 150x30."""
    data = np.random.default_rng(0).integers(0, 256, 13_500, dtype=np.uint8).tobytes()
    for name, size in (("tall", (30, 150)), ("wide", (150, 30))):
        Image.frombytes("RGB", size, data).save(tmp_path / f"{name}.png")
    result = open_engine().ingest([tmp_path / "tall.png", tmp_path / "wide.png"])
    assert len(set(chunk_ids(result))) == 2


def test_another_palette_has_another_key(open_engine, tmp_path):
    """SEC-1 (b): equal indices, other colours."""
    indices = np.arange(64, dtype=np.uint8).reshape(8, 8)
    for name, start in (("one", 0), ("two", 90)):
        image = Image.fromarray(indices, mode="P")
        image.putpalette([(start + 2 * value) % 256 for value in range(192)])
        image.save(tmp_path / f"{name}.png")
    result = open_engine().ingest([tmp_path / "one.png", tmp_path / "two.png"])
    assert len(set(chunk_ids(result))) == 2


def test_bytes_behind_a_picture_spell_no_option(open_engine, tmp_path):
    """SEC-1 (c): trailing bytes decode to the same pixels, so they give the same chunk; the options still count."""
    picture = tmp_path / "a.jpg"
    Image.open(write_noise_image(tmp_path / "a.png", 1)).save(picture, quality=90)
    engine = open_engine()
    plain = engine.ingest([picture])
    longer = tmp_path / "b.jpg"
    longer.write_bytes(picture.read_bytes() + b"max_pixels=3136")
    behind = engine.ingest([longer])
    smaller = engine.ingest([picture], max_pixels=28 * 28)
    assert not behind.sources[0].from_index and chunk_ids(behind) == chunk_ids(plain)
    assert behind.chunks[0].outcome == "found"
    assert chunk_ids(smaller) != chunk_ids(plain)


def test_options_and_contents_do_not_run_into_each_other(open_engine, tmp_path):
    """Fields of an identity are length-prefixed: the tenant's name is no part of what follows it."""
    picture = write_noise_image(tmp_path / "a.png", 1)
    ids = {open_engine(tenant=name).ingest([picture]).chunks[0].id for name in ("a", "ab", "b", "default")}
    assert len(ids) == 4


def test_a_collision_of_the_fast_hash_never_gives_the_other_entry(open_engine, tmp_path, monkeypatch):
    """SEC-1 (d): all keys are equal; the SHA-256 tells them apart, and the miss is said."""

    class Constant:
        def update(self, _data) -> None:
            pass

        def digest(self) -> bytes:
            return b"\x11" * 16

    red, blue = solid(tmp_path / "red.png", (255, 0, 0), 84), solid(tmp_path / "blue.png", (0, 0, 255), 84)
    engine = open_engine()
    monkeypatch.setattr(keys, "new_locator", Constant)
    with pytest.warns(IdentityWarning):
        engine.ingest([red])
    with pytest.warns(IdentityWarning), pytest.raises(KameraError, match="1111"):
        engine.ingest([blue])
    assert [entry.name for entry in engine.window().entries] == ["red.png"]
    assert engine.query(QUESTION, max_new_tokens=NUM_NEW).answer == reference(engine, ["1"])[1]


@pytest.mark.parametrize("twin", ["digest", "tenant"])
def test_a_window_entry_means_one_content(open_engine, tmp_path, twin):
    """A record that stands under the right key but is not what the window means is a miss."""
    from kamera_cli.errors import NotFoundError
    from kamera_cli.window import SPACE

    engine = open_engine()
    engine.ingest([write_noise_image(tmp_path / "a.png", 1)])
    state = engine.store.get_state(SPACE, "default/default")
    value = json.loads(json.dumps(dict(state.value)))
    if twin == "digest":
        value["entries"][0]["digest"] = "ab" * 32
        engine.store.put_state(SPACE, "default/default", value, expect=state.version)
        with pytest.warns(IdentityWarning), pytest.raises(NotFoundError, match="no longer"):
            engine.query(QUESTION)
    else:
        engine.store.put_state(SPACE, "guest/default", {**value, "tenant": "guest"}, expect=None)
        with pytest.raises(NotFoundError, match="no longer"):
            open_engine(tenant="guest").query(QUESTION)


def test_a_clip_at_other_rates_never_shares_an_entry_and_coarse_time_is_said_once(open_engine, tmp_path):
    """VID-7: two positions per second, two frames per step: above four frames per second steps fall together.

    transformers 5.17 cuts the seconds of a step to whole ones, so that there four frames per second are too many.
    """
    whole_seconds = transformers.__version__.startswith("5.17.")
    clip = write_noise_video(tmp_path / "clip.mp4", 5, seconds=4, fps=8)
    still = tmp_path / "still.mp4"
    _write_still(still)
    for source in (clip, still):
        seen: set[str] = set()
        for fps, coarse in ((1, False), (2, False), (4, whole_seconds), (8, True)):
            notes: list[str] = []
            engine = open_engine(warnings=notes)
            result = engine.ingest([source], window=f"{source.name}-{fps}", fps=fps, chunk_seconds=2)
            assert len([note for note in notes if "fall together" in note]) == coarse
            assert seen.isdisjoint(chunk_ids(result))
            seen |= set(chunk_ids(result))
            for chunk in result.chunks:
                assert engine.store.get(bytes.fromhex(chunk.id)).meta["fps"] == fps
            assert (
                open_engine()
                .ingest([source], window=f"again-{source.name}-{fps}", fps=fps, chunk_seconds=2)
                .sources[0]
                .from_index
            )


def _write_still(path) -> None:
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width = stream.height = 56
        stream.pix_fmt = "yuv420p"
        pixels = np.full((56, 56, 3), 90, dtype=np.uint8)
        for _ in range(32):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


# OPS-1: same name, other model


@pytest.fixture
def copied(checkpoints, tmp_path):
    """A checkpoint folder that a test may change, with a window of three chunks made by it."""
    return shutil.copytree(checkpoints("llama"), tmp_path / "model")


def change_weight(folder) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] += 1e-2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder, **fields) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def change_rope(folder) -> None:
    change_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 20000.0})


def change_tokenizer(folder) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["red"], vocabulary["blue"] = vocabulary["blue"], vocabulary["red"]
    file.write_text(json.dumps(content))


def add_template(folder) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}red")


def add_adapter(folder) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"other weights")


CHANGES = [change_weight, change_rope, change_tokenizer, add_template, add_adapter]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_at_the_same_path_finds_nothing_of_the_old_one(open_engine, copied, tmp_path, change):
    engine = open_engine(model=str(copied))
    ingest(engine, "llama", tmp_path)
    change(copied)
    changed = open_engine(model=str(copied))
    assert changed.fingerprint != engine.fingerprint
    for call in (lambda: changed.query(QUESTION), lambda: changed.recall(["1"]), changed.compile_patches):
        with pytest.raises(RefusedError, match="another model"):
            call()
    again = changed.ingest([tmp_path / "a.txt"], window="changed")
    assert not again.sources[0].from_index and again.chunks[0].outcome == "encoded"
    assert again.chunks[0].id != engine.window().entries[0].chunk


def test_another_dtype_is_another_model(open_engine, tmp_path):
    engine = open_engine("llama")
    ingest(engine, "llama", tmp_path)
    for dtype in ("bf16", "fp16"):
        other = open_engine("llama", dtype=dtype)
        with pytest.raises(RefusedError, match=r"as (bfloat16|float16)"):
            other.query(QUESTION)
        assert other.ingest([tmp_path / "a.txt"], window=dtype).chunks[0].outcome == "encoded"
    explicit = open_engine("llama", dtype="fp32")
    assert explicit.query(QUESTION).answer


def test_what_does_not_enter_the_computation_changes_nothing(open_engine, copied, tmp_path):
    engine = open_engine(model=str(copied))
    ingest(engine, "llama", tmp_path)
    change_config(copied, transformers_version="5.99.0", _name_or_path="elsewhere", use_cache=False)
    (copied / "README.md").write_text("a model card")
    moved = shutil.copytree(copied, tmp_path / "moved")
    answers = (one.query(QUESTION, reuse="none").answer for one in (open_engine(model=str(moved)), engine))
    assert next(answers) == next(answers)


def test_other_positions_of_an_installed_release_are_another_model(open_engine, tmp_path, monkeypatch):
    """TF-7: entries made under another position rule are not found."""
    from kamera_cli.context import POSITIONS
    from kamera_cli.model import checkpoint

    engine = open_engine()
    ingest(engine, "qwen2_5_vl", tmp_path)
    real = checkpoint.version
    monkeypatch.setattr(
        checkpoint, "version", lambda name: "5.99.0" if name == "transformers" else real(name)
    )
    same_rule = open_engine()
    assert same_rule.fingerprint == engine.fingerprint
    assert len(engine.store.list_state(POSITIONS)) == 2
    monkeypatch.setattr(
        checkpoint, "version", lambda name: "5.98.0" if name == "transformers" else real(name)
    )
    other_rule = open_engine()
    model = other_rule.runner.model.model
    own = model.get_rope_index
    monkeypatch.setattr(model, "get_rope_index", lambda *a, **k: (own(*a, **k)[0] * 2, None))
    assert other_rule.fingerprint != engine.fingerprint
    with pytest.raises(RefusedError, match="another model"):
        other_rule.query(QUESTION)


def test_weights_are_hashed_once_and_again_when_asked_or_touched(open_engine, copied, tmp_path):
    def hashed(**settings) -> list[str]:
        steps = []
        engine = open_engine("llama", model=str(copied), **settings)
        engine.context.progress = lambda step: steps.append(step.what)
        assert engine.fingerprint
        return [step for step in steps if step.startswith("hashing")]

    assert hashed() == ["hashing model.safetensors"]
    assert hashed() == []
    assert hashed(rehash=True) == ["hashing model.safetensors"]
    os.utime(copied / "model.safetensors", ns=(1, 1))
    assert hashed() == ["hashing model.safetensors"]


def test_text_that_differs_in_one_token_has_another_key(open_engine, tmp_path):
    engine = open_engine("qwen3")
    one, other = write_passage(tmp_path / "a.txt", 12, 1), tmp_path / "b.txt"
    other.write_text(one.read_text() + " red")
    same = tmp_path / "c.txt"
    same.write_text("  " + one.read_text() + "\n")
    ids = [engine.ingest([path], window="w").chunks[0].id for path in (one, other, same)]
    assert ids[0] != ids[1] and ids[0] == ids[2]


def test_video_frames_in_an_image_are_no_video(open_engine, tmp_path):
    """The kind is part of what the model sees: the same pixels as an image and as a clip of one step."""
    engine = open_engine()
    runner = engine.runner
    pixels = torch.full((56, 56, 3), 77, dtype=torch.uint8)
    image = runner.media_inputs("image", pixels, fps=None, max_pixels=None)
    video = runner.media_inputs("video", pixels[None].repeat(2, 1, 1, 1), fps=2.0, max_pixels=None)
    assert image.num_tokens == video.num_tokens
    assert engine.library.chunk_identity(image).key != engine.library.chunk_identity(video).key
