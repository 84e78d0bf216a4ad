"""Every backbone as a user meets it: ingest files, ask in any order, slide, recall; against the plain model's prefill.

The reference is the model's ordinary forward over token ids and pixels, without position ids, mask or cache of ours.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from engine_setups import NUM_NEW, QUESTION, first_logits, model_inputs, reference
from plain_model import kl, whole_prompt
from tiny_backbones import BACKBONES, MEDIA, save_backbone
from tiny_models import write_noise_image, write_noise_video, write_passage
from transformers.video_utils import VideoMetadata

from kamera_cli.engine import Engine
from kamera_cli.errors import UsageError
from kamera_cli.media.source import Sampling, chunks, inspect
from kamera_cli.model import compat
from kamera_cli.settings import Settings

VISION = tuple(name for name in BACKBONES if MEDIA[name])
VIDEO = tuple(name for name in BACKBONES if "video" in MEDIA[name])
EXACT = 1e-6
"""KL to the cold prefill, in nats, of what is equal but for rounding in fp32."""

every_backbone = pytest.mark.parametrize("name", BACKBONES)
every_vision_backbone = pytest.mark.parametrize("name", VISION)


@pytest.fixture(scope="module")
def runners_by_backbone(tmp_path_factory):
    """Folder and loaded model of each backbone: a model keeps no state, so tests can share it."""
    return tmp_path_factory.mktemp("backbones"), {}


@pytest.fixture
def open_backbone(runners_by_backbone, tmp_path):
    """Make engines over one fresh store of a backbone; the model is loaded once for all tests."""
    root, loaded = runners_by_backbone
    opened = []

    def make(name: str) -> Engine:
        folder = root / name if (root / name).exists() else save_backbone(name, root / name)
        settings = Settings(store=tmp_path / "store", device="cpu", model=str(folder))
        engine = Engine(settings, runner=loaded.get(name))
        loaded[name] = engine.runner
        opened.append(engine)
        return engine

    yield make
    for engine in opened:
        engine.close()


def write_sources(name: str, folder: Path) -> list[Path]:
    """An image, a clip where the backbone takes one, a picture of another shape and a passage; texts for the others."""
    if not MEDIA[name]:
        return [write_passage(folder / f"{stem}.txt", 14 + 3 * seed, seed) for seed, stem in enumerate("abc")]
    sources = [write_noise_image(folder / "a.png", 1, width=84)]
    if "video" in MEDIA[name]:
        sources.append(write_noise_video(folder / "b.mp4", 2, seconds=2))
    return [
        *sources,
        write_noise_image(folder / "c.png", 3, width=56, height=56),
        write_passage(folder / "d.txt", 12, 4),
    ]


@contextmanager
def tower_calls(runner):
    """Counts forwards of every vision tower of a model, and holds kamera's own counter against it."""
    calls: list[str] = []
    towers = [
        module
        for path, module in runner.model.named_modules()
        if path.rsplit(".", 1)[-1] in ("visual", "vision_tower", "vision_model", "high_res_vision_model")
    ]
    assert bool(towers) == (runner.processor is not None)
    handles = [tower.register_forward_hook(lambda *_: calls.append("called")) for tower in towers]
    before = runner.vision_calls
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
    assert (runner.vision_calls > before) == bool(calls)


@contextmanager
def prefilled_logits(engine):
    """Collects the logits of the last token of each cold prefill of a whole prompt."""
    runner, seen = engine.runner, []
    prefill = runner.prefill

    def spy(segments):
        found = prefill(segments)
        seen.append(found[1].clone())
        return found

    runner.prefill = spy
    try:
        yield seen
    finally:
        del runner.prefill


def numbers(engine) -> list[str]:
    return [str(entry.number) for entry in engine.window().entries]


@every_backbone
def test_a_query_whose_answer_is_not_the_cold_prefills(open_backbone, tmp_path, name):
    engine = open_backbone(name)
    sources = write_sources(name, tmp_path)
    engine.ingest(sources)
    order = numbers(engine)
    assert len(order) == len(sources)
    for asked in (None, order[1:] + order[:1]):
        logits, answer = reference(engine, asked or order)
        with first_logits(engine) as assembled, prefilled_logits(engine) as cold:
            first = engine.query(QUESTION, chunks=asked, max_new_tokens=NUM_NEW)
            # Random experts flip, and auto would refuse some of these patches; what they are worth is asked here.
            second = engine.query(QUESTION, chunks=asked, max_new_tokens=NUM_NEW, max_kl=10.0)
        assert {chunk.used for chunk in first.chunks} == {"prefilled"} and first.answer == answer
        assert len(cold) == 1 and kl(logits, cold[0]) <= EXACT
        assert [chunk.used for chunk in second.chunks] == ["canonical", *["exact"] * (len(order) - 1)]
        assert second.fallback is None and second.patches_kept == ()
        assert second.prefilled_tokens == engine.runner.question_ids(QUESTION).numel()
        assert kl(logits, assembled[-1]) <= 1.01 * second.chunks[-1].kl + 1e-9


def processed(runner, sources: list[Path]) -> dict[str, torch.Tensor]:
    """What the checkpoint's processor makes of all sources and the question in one call."""
    decoded = [chunk for path in sources for chunk in chunks(str(path), inspect(str(path)), Sampling())]
    items = [
        {"type": "text", "text": f"{chunk.text} "} if chunk.kind == "text" else {"type": chunk.kind}
        for chunk in decoded
    ]
    frames = {"image": [], "video": []}
    for chunk in decoded:
        if chunk.kind != "text":
            frames[chunk.kind].append(torch.from_numpy(chunk.frames).movedim(-1, -3))
    message = {"role": "user", "content": [*items, {"type": "text", "text": QUESTION}]}
    text = runner.processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    options = {"text_kwargs": {"add_special_tokens": False}, "return_tensors": "pt"}
    if frames["video"]:
        clips = [
            VideoMetadata(total_num_frames=len(clip), fps=2.0, frames_indices=list(range(len(clip))))
            for clip in frames["video"]
        ]
        options |= {
            "videos": frames["video"],
            "videos_kwargs": {"do_sample_frames": False, "video_metadata": clips},
        }
    return dict(runner.processor(text=[text], images=frames["image"], **options))


@every_vision_backbone
def test_a_prompt_that_is_not_the_one_the_processor_makes_of_all_items(open_backbone, tmp_path, name):
    engine = open_backbone(name)
    sources = write_sources(name, tmp_path)
    engine.ingest(sources)
    whole = processed(engine.runner, sources)
    ids, inputs = whole_prompt(engine.runner, model_inputs(engine, numbers(engine)), QUESTION)
    assert torch.equal(ids, whole.pop("input_ids")[0])
    whole.pop("attention_mask")
    assert whole.keys() == inputs.keys()
    for tensor, expected in whole.items():
        ours = inputs[tensor][None] if tensor == "mm_token_type_ids" else inputs[tensor]
        assert torch.equal(ours, torch.as_tensor(expected)), tensor


@every_backbone
def test_a_patch_of_every_direction_that_is_not_exact(open_backbone, tmp_path, name):
    engine = open_backbone(name)
    engine.ingest(write_sources(name, tmp_path))
    order = numbers(engine)[::-1]
    engine.compile_patches(order, energy=1.0, factor_dtype="fp32")
    logits, answer = reference(engine, order)
    with first_logits(engine) as assembled:
        patched = engine.query(QUESTION, chunks=order, reuse="patched", max_new_tokens=NUM_NEW)
        engine.query(QUESTION, chunks=order, reuse="blind", max_new_tokens=NUM_NEW)
    assert patched.answer == answer and patched.fallback is None
    assert kl(logits, assembled[0]) <= EXACT
    # The patches do something: without them the answer starts otherwise.
    assert kl(logits, assembled[1]) > 1e-4


@every_backbone
def test_a_window_that_slid_and_took_its_first_chunk_back(open_backbone, tmp_path, name):
    engine = open_backbone(name)
    sources = write_sources(name, tmp_path)
    engine.ingest(sources)
    first, *kept = numbers(engine)
    slid, back = reference(engine, kept), reference(engine, [*kept, first])
    for source in sources:
        source.unlink()
    with tower_calls(engine.runner) as calls:
        engine.evict(oldest=1)
        short = engine.query(QUESTION, max_new_tokens=NUM_NEW)
        recalled = engine.recall([first])
        engine.compile_patches(energy=1.0, factor_dtype="fp32")
        with first_logits(engine) as assembled:
            whole = engine.query(QUESTION, require_hit=True, max_new_tokens=NUM_NEW)
    assert calls == [] and recalled.vision_calls == 0
    assert short.answer == slid[1] and numbers(engine) == [*kept, first]
    assert whole.answer == back[1] and kl(back[0], assembled[0]) <= EXACT


@every_backbone
def test_a_second_ingest_that_encodes_again(open_backbone, tmp_path, name):
    engine = open_backbone(name)
    sources = write_sources(name, tmp_path)
    with tower_calls(engine.runner) as calls:
        first = engine.ingest(sources)
    assert bool(calls) == bool(MEDIA[name])
    again = open_backbone(name)
    with tower_calls(again.runner) as calls:
        found = again.ingest(sources, window="again")
    assert calls == [] and all(source.from_index for source in found.sources)
    assert [chunk.id for chunk in found.chunks] == [chunk.id for chunk in first.chunks]
    assert {chunk.outcome for chunk in first.chunks} == {"encoded"}
    assert {chunk.outcome for chunk in found.chunks} == {"found"}


@every_vision_backbone
def test_the_same_pixels_in_another_file_that_are_encoded_again(open_backbone, tmp_path, name):
    from PIL import Image

    engine = open_backbone(name)
    picture = write_noise_image(tmp_path / "a.png", 1, width=84)
    first = engine.ingest([picture])
    Image.open(picture).save(tmp_path / "b.png", compress_level=0)
    with tower_calls(engine.runner) as calls:
        found = engine.ingest([tmp_path / "b.png"], window="again")
    assert calls == [] and not found.sources[0].from_index
    assert [(chunk.id, chunk.outcome) for chunk in found.chunks] == [(first.chunks[0].id, "found")]


STAMPS = {
    "qwen3_vl": r"<([0-9.]+)seconds>",
    "qwen3_vl_moe": r"<([0-9.]+)seconds>",
    "kimi_k25": r"([0-9]+:[0-9]+:[0-9.]+)<",
}
"""How a backbone writes the time of a grid step; the others write none."""


def write_still(path: Path, *, seconds: float, fps: int = 8, size: int = 56) -> Path:
    """A lossless clip whose frames are all equal."""
    import av
    import numpy as np

    cells = np.random.default_rng(9).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    pixels = np.kron(cells, np.ones((size // 4, size // 4, 1), dtype=np.uint8))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=fps)
        stream.width, stream.height, stream.pix_fmt = size, size, "bgr0"
        for _ in range(round(seconds * fps)):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


def stamps(name: str, runner, token_ids: torch.Tensor) -> list[str]:
    return re.findall(STAMPS[name], runner.tokenizer.decode(token_ids).replace(" ", ""))


@pytest.mark.parametrize("name", [name for name in VIDEO if name in STAMPS])
def test_a_time_stamp_that_counts_from_the_chunk_and_not_from_the_video(open_backbone, tmp_path, name):
    engine = open_backbone(name)
    runner = engine.runner
    result = engine.ingest([write_still(tmp_path / "a.mkv", seconds=6)], chunk_seconds=2)
    assert len({chunk.id for chunk in result.chunks}) == 3
    one, two, three = model_inputs(engine, ["1", "2", "3"])
    assert torch.equal(one.tensors["pixel_values_videos"], two.tensors["pixel_values_videos"])
    frames = torch.zeros(12, 3, 56, 56, dtype=torch.uint8)
    metadata = VideoMetadata(total_num_frames=12, fps=2.0, frames_indices=list(range(12)))
    options = {"do_sample_frames": False, "video_metadata": [metadata]}
    whole = runner.processor(
        text=[runner.prompt.blocks["video"]], videos=[frames], videos_kwargs=options, return_tensors="pt"
    )
    written = [stamp for chunk in (one, two, three) for stamp in stamps(name, runner, chunk.token_ids)]
    assert written == stamps(name, runner, whole["input_ids"][0]) and len(set(written)) == len(written) > 2
    logits, answer = reference(engine, ["1", "2", "3"])
    with prefilled_logits(engine) as cold:
        assert engine.query(QUESTION, max_new_tokens=NUM_NEW).answer == answer
    assert kl(logits, cold[0]) <= EXACT


@pytest.mark.parametrize("name", [name for name in VIDEO if name not in STAMPS])
def test_equal_frames_without_a_time_stamp_that_are_kept_twice(open_backbone, tmp_path, name):
    engine = open_backbone(name)
    result = engine.ingest([write_still(tmp_path / "a.mkv", seconds=6)], chunk_seconds=2)
    assert [chunk.outcome for chunk in result.chunks] == ["encoded", "found", "found"]
    assert len({chunk.id for chunk in result.chunks}) == 1 and numbers(engine) == ["1"]


def test_a_clip_on_a_release_whose_kimi_fails_on_it(open_backbone, tmp_path, monkeypatch):
    if "kimi_k25" not in BACKBONES:
        pytest.skip("this release has no Kimi K2.5")
    engine = open_backbone("kimi_k25")
    monkeypatch.setattr(compat, "installed_release", "5.23.0")
    with pytest.raises(UsageError, match=r"kimi_k25 needs transformers 5\.24, here is 5\.23\.0"):
        engine.ingest([write_noise_video(tmp_path / "a.mp4", 1, seconds=2)])
    assert not list(engine.store.iterate()) and engine.windows() == ()
    assert len(engine.ingest([write_noise_image(tmp_path / "b.png", 1)]).chunks) == 1
