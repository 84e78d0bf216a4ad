"""Work done twice, chunks half written, a batch that loses its good files to a bad one, a quota met after the work."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from engine_setups import NUM_NEW, QUESTION, content, reference
from tiny_models import (
    MAX_TOKENS,
    TEXT_FAMILIES,
    passage,
    write_noise_image,
    write_noise_video,
    write_passage,
)

from kamera_cli.errors import NotFoundError, UsageError
from kamera_cli.media.errors import MediaError
from kamera_store.errors import NoRoomError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clip(tmp_path):
    """Eight seconds: four chunks of two."""
    return write_noise_video(tmp_path / "clip.mp4", 3, seconds=8, fps=8)


def forbid(monkeypatch) -> None:
    """Any decoder, processor or forward raises."""
    import av

    def never(*_args, **_kwargs):
        raise AssertionError("decoded or encoded again")

    from kamera_cli.model.runner import ModelRunner

    monkeypatch.setattr(av, "open", never)
    for name in ("encode", "media_inputs", "text_inputs", "prefill", "prefill_captured", "__init__"):
        monkeypatch.setattr(ModelRunner, name, never)


def test_a_second_ingest_neither_decodes_nor_encodes(open_engine, clip, monkeypatch):
    first = open_engine().ingest([clip], chunk_seconds=2)
    assert [chunk.outcome for chunk in first.chunks] == ["encoded"] * 4
    forbid(monkeypatch)
    engine = open_engine()
    again = engine.ingest([clip], chunk_seconds=2)
    assert again.sources[0].from_index and [chunk.outcome for chunk in again.chunks] == ["found"] * 4
    assert [chunk.id for chunk in again.chunks] == [chunk.id for chunk in first.chunks]
    assert [chunk.number for chunk in again.chunks] == [1, 2, 3, 4]
    named = engine.ingest([clip], chunk_seconds=2, window="named", name="talk")
    assert [entry.name for entry in engine.window("named").entries] == [
        f"talk#{index}" for index in range(1, 5)
    ]
    assert [chunk.name for chunk in named.chunks] == [f"talk#{index}" for index in range(1, 5)]


def test_a_second_ingest_imports_no_torch_and_no_decoder(open_engine, clip, tmp_path):
    open_engine().ingest([clip], chunk_seconds=2)
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from kamera_cli.engine import Engine\n"
        "from kamera_cli.settings import Settings\n"
        "store, model, source = sys.argv[1:]\n"
        "with Engine(Settings(store=Path(store), model=model, device='cpu')) as engine:\n"
        "    result = engine.ingest([source], chunk_seconds=2)\n"
        "heavy = sorted({'torch', 'transformers', 'av', 'PIL'} & sys.modules.keys())\n"
        "print(json.dumps([result.sources[0].from_index, len(result.chunks), heavy]))\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'store'}"}
    model = str(open_engine().context.checkpoint.path)
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "store"), model, str(clip)],
        env=environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert json.loads(ran.stdout) == [True, 4, []]


def test_an_interrupted_ingest_goes_on_without_encoding_finished_chunks_again(open_engine, clip, monkeypatch):
    from kamera_cli.model.runner import ModelRunner

    encode, encoded = ModelRunner.encode, []

    def until_third(self, inputs):
        if len(encoded) == 2:
            raise KeyboardInterrupt
        encoded.append(inputs)
        return encode(self, inputs)

    engine = open_engine()
    engine.context.ensure_self_tested()
    monkeypatch.setattr(ModelRunner, "encode", until_third)
    with pytest.raises(KeyboardInterrupt):
        engine.ingest([clip], chunk_seconds=2)
    with pytest.raises(NotFoundError):
        engine.window()
    assert len(list(engine.store.iterate(kind="chunk"))) == 2
    monkeypatch.setattr(ModelRunner, "encode", encode)
    result = open_engine().ingest([clip], chunk_seconds=2)
    assert [chunk.outcome for chunk in result.chunks] == ["found", "found", "encoded", "encoded"]
    assert [chunk.number for chunk in result.chunks] == [1, 2, 3, 4]


def test_a_renamed_or_copied_file_is_known_by_its_content(open_engine, clip, tmp_path):
    engine = open_engine()
    engine.ingest([clip], chunk_seconds=2)
    moved = clip.rename(tmp_path / "talk: part 1.mp4")
    assert engine.ingest([moved], chunk_seconds=2).sources[0].from_index
    changed = tmp_path / "clip.mp4"
    write_noise_video(changed, 4, seconds=8, fps=8)
    assert not engine.ingest([changed], chunk_seconds=2, window="w").sources[0].from_index


@pytest.mark.parametrize(
    "options", [{"fps": 4}, {"chunk_seconds": 4}, {"max_pixels": 784}], ids=["fps", "seconds", "pixels"]
)  # fmt: skip
def test_other_sampling_is_another_source(open_engine, clip, options):
    engine = open_engine()
    first = engine.ingest([clip], chunk_seconds=2)
    other = engine.ingest([clip], window="other", **{"chunk_seconds": 2, **options})
    assert not other.sources[0].from_index
    assert {chunk.id for chunk in first.chunks}.isdisjoint(chunk.id for chunk in other.chunks)


def test_chunks_cut_apart_are_the_chunks_of_the_whole_clip(open_engine, clip):
    """A chunk knows nothing of its neighbours: its content, not its place, is its key."""
    engine = open_engine()
    engine.ingest([clip], chunk_seconds=2)
    starts = [
        engine.store.get(bytes.fromhex(entry.chunk)).meta["source"] for entry in engine.window().entries
    ]
    assert [(source["start_s"], source["index"]) for source in starts] == [(0, 0), (2, 1), (4, 2), (6, 3)]


@pytest.mark.parametrize("partial", [False, True])
def test_a_bad_file_in_a_batch_is_named_and_the_others_are_kept(open_engine, clip, tmp_path, partial):
    bad = tmp_path / "bad.mp4"
    bad.write_text("no video")
    picture = write_noise_image(tmp_path / "p.png", 1)
    engine = open_engine()
    result = engine.ingest([clip, bad, tmp_path / "gone.png", picture], chunk_seconds=2, partial=partial)
    assert [failure.path for failure in result.failures] == [str(bad), str(tmp_path / "gone.png")]
    assert all(failure.reason and "\n" not in failure.reason for failure in result.failures)
    assert [source.kind for source in result.sources] == ["video", "image"]
    assert len(list(engine.store.iterate(kind="chunk"))) == 5
    if partial:
        assert [entry.number for entry in engine.window().entries] == [1, 2, 3, 4, 5]
    else:
        with pytest.raises(NotFoundError):
            engine.window()
        assert all(chunk.number == 0 for chunk in result.chunks)
        again = engine.ingest([clip, picture], chunk_seconds=2)
        assert all(source.from_index for source in again.sources)


def test_a_single_bad_file_raises(open_engine, tmp_path):
    bad = tmp_path / "bad.mp4"
    bad.write_bytes(b"")
    with pytest.raises(MediaError, match=r"bad\.mp4.*empty"):
        open_engine().ingest([bad])


def test_a_text_model_names_a_video_in_a_batch_and_keeps_the_texts(open_engine, clip, tmp_path):
    engine = open_engine("llama")
    text = write_passage(tmp_path / "a.txt", 9, 1)
    result = engine.ingest([clip, text], partial=True)
    assert (
        len(result.failures) == 1
        and "text" in result.failures[0].reason
        and "video" in result.failures[0].reason
    )
    assert [entry.name for entry in engine.window().entries] == ["a.txt#1"]
    with pytest.raises(MediaError, match="video"):
        engine.ingest([clip])


def test_dry_run_counts_and_writes_nothing(open_engine, clip):
    engine = open_engine()
    planned = engine.ingest([clip], chunk_seconds=2, dry_run=True)
    assert [chunk.outcome for chunk in planned.chunks] == ["planned"] * 4 and planned.dry_run
    assert not list(engine.store.iterate())
    with pytest.raises(NotFoundError):
        engine.window()
    real = engine.ingest([clip], chunk_seconds=2)
    for plan, chunk in zip(planned.chunks, real.chunks, strict=True):
        assert (plan.id, plan.num_tokens, plan.stored_bytes) == (chunk.id, chunk.num_tokens, 0)
        assert plan.raw_bytes == pytest.approx(chunk.raw_bytes, rel=0.1)
    again = engine.ingest([clip], chunk_seconds=2, dry_run=True)
    assert [chunk.outcome for chunk in again.chunks] == ["found"] * 4


def test_a_chunk_above_the_quota_is_refused_before_it_is_encoded(open_engine, tmp_path, monkeypatch):
    from kamera_cli.model.runner import ModelRunner

    big = write_passage(tmp_path / "big.txt", 1600, 1)
    engine = open_engine("llama", quota_bytes=1 << 20)
    small = engine.ingest([write_passage(tmp_path / "small.txt", 40, 2)])
    monkeypatch.setattr(ModelRunner, "encode", lambda *_: pytest.fail("encoded"))
    with pytest.raises(NoRoomError) as caught:
        engine.ingest([big], chunk_tokens=1600)
    assert caught.value.needed_bytes > caught.value.room_bytes
    assert [entry.chunk for entry in engine.window().entries] == [chunk.id for chunk in small.chunks]
    assert engine.query(QUESTION, max_new_tokens=NUM_NEW).answer == reference(engine, ["1"])[1]


def test_a_quota_met_on_the_way_keeps_the_chunks_before(open_engine, tmp_path):
    text = write_passage(tmp_path / "long.txt", 1800, 1)
    engine = open_engine("llama", quota_bytes=1 << 20)
    with pytest.raises(NoRoomError):
        engine.ingest([text], chunk_tokens=300)
    kept = list(engine.store.iterate(kind="chunk"))
    assert 1 <= len(kept) < 6
    assert engine.store.stats() is not None
    roomy = open_engine("llama", quota_bytes=1 << 24)
    outcomes = [chunk.outcome for chunk in roomy.ingest([text], chunk_tokens=300).chunks]
    assert outcomes == ["found"] * len(kept) + ["encoded"] * (6 - len(kept))


def test_sources_of_one_batch_do_not_push_each_other_out(open_engine, tmp_path):
    """The window is written at the end: until then nothing pins what the first sources left in the store."""
    texts = [write_passage(tmp_path / f"{index}.txt", 400, index) for index in range(7)]
    engine = open_engine("llama", quota_bytes=1 << 20)
    with pytest.raises(NoRoomError, match="all sources"):
        engine.ingest(texts)
    for window in engine.windows():
        for entry in window.entries:
            assert engine.store.get(bytes.fromhex(entry.chunk)) is not None


def test_evicted_chunks_of_a_known_source_are_encoded_again(open_engine, clip):
    engine = open_engine()
    first = engine.ingest([clip], chunk_seconds=2)
    engine.evict(["2"], purge=True)
    again = engine.ingest([clip], chunk_seconds=2, window="again")
    assert [chunk.outcome for chunk in again.chunks] == ["found", "encoded", "found", "found"]
    assert [chunk.id for chunk in again.chunks] == [chunk.id for chunk in first.chunks]
    assert engine.ingest([clip], chunk_seconds=2, window="more").sources[0].from_index


def test_two_engines_that_ingest_one_file_at_once_store_it_once(open_engine, clip, checkpoints):
    engines, results, failures = [open_engine(), open_engine()], {}, []
    start = threading.Barrier(2)

    def work(index: int) -> None:
        try:
            assert engines[index].runner is not None
            start.wait()
            results[index] = engines[index].ingest([clip], chunk_seconds=2)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [chunk.id for chunk in results[0].chunks] == [chunk.id for chunk in results[1].chunks]
    assert len(list(engines[0].store.iterate(kind="chunk"))) == 4
    assert len(list(engines[0].store.iterate(kind="source"))) == 1
    assert [entry.number for entry in engines[0].window().entries] == [1, 2, 3, 4]


def test_two_processes_that_ingest_one_file_at_once_store_it_once(open_engine, clip, checkpoints, tmp_path):
    from soak import start

    running = [start("ingest", tmp_path / "store", checkpoints("qwen2_5_vl"), clip) for _ in range(2)]
    for process, _ in running:
        process.join(60)
    assert [process.exitcode for process, _ in running] == [0, 0]
    engine = open_engine()
    assert len(list(engine.store.iterate(kind="chunk"))) == 4
    assert [entry.number for entry in engine.window().entries] == [1, 2, 3, 4]
    other = open_engine(store=tmp_path / "other")
    other.ingest([clip], chunk_seconds=2)
    assert content(engine.store) == content(other.store)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_text_is_cut_by_tokens_and_answers_like_the_plain_model(open_engine, tmp_path, family):
    engine = open_engine(family)
    text = write_passage(tmp_path / "notes.txt", 45, 3)
    result = engine.ingest([text], chunk_tokens=20)
    ids = engine.runner.tokenize(passage(45, 3))
    assert [chunk.num_tokens for chunk in result.chunks] == [len(part) for part in ids.split(20)]
    first = engine.query(QUESTION, max_new_tokens=NUM_NEW)
    assert first.answer == reference(engine, [str(chunk.number) for chunk in result.chunks])[1]
    assert engine.query(QUESTION).fallback is None
    assert engine.ingest([text], chunk_tokens=20).sources[0].from_index


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"fps": 0}, UsageError),
        ({"fps": float("nan")}, UsageError),
        ({"chunk_seconds": -1}, UsageError),
        ({"chunk_seconds": 0.1}, UsageError),
        ({"max_pixels": 0}, UsageError),
        ({"chunk_tokens": 0}, UsageError),
    ],
)
def test_an_option_out_of_range_is_refused_before_any_work(open_engine, clip, options, error):
    engine = open_engine()
    with pytest.raises(error) as caught:
        engine.ingest([clip], **options)
    assert "\n" not in str(caught.value)
    assert not list(engine.store.iterate())


def test_no_source_or_one_name_for_two_is_refused(open_engine, clip):
    engine = open_engine()
    with pytest.raises(UsageError):
        engine.ingest([])
    with pytest.raises(UsageError, match="--name"):
        engine.ingest([clip, clip], name="x")


def test_a_text_without_a_token_is_named(open_engine, tmp_path):
    blank = tmp_path / "blank.txt"
    blank.write_text(" \n\n ")
    with pytest.raises(MediaError, match=r"blank\.txt"):
        open_engine("llama").ingest([blank])


def test_a_still_clip_is_one_chunk_and_the_repeat_is_said(open_engine, tmp_path):
    """Equal chunks have one key, and a window holds a chunk once; that must not go unsaid."""
    import av
    import numpy as np

    path = tmp_path / "still.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=4)
        stream.width = stream.height = 56
        stream.pix_fmt = "yuv420p"
        for _ in range(16):
            container.mux(
                stream.encode(av.VideoFrame.from_ndarray(np.full((56, 56, 3), 90, np.uint8), format="rgb24"))
            )
        container.mux(stream.encode())
    engine = open_engine()
    result = engine.ingest([path], chunk_seconds=2)
    assert len({chunk.id for chunk in result.chunks}) == 1 and len(engine.window().entries) == 1
    assert [chunk.number for chunk in result.chunks] == [1, 1]


def test_the_self_test_runs_once_and_stops_a_model_that_fails_it(open_engine, tmp_path, monkeypatch):
    from kamera_cli.errors import RefusedError
    from kamera_cli.model import self_test as selftest
    from kamera_cli.model.families.gqa import GQA

    text = write_passage(tmp_path / "a.txt", 9, 1)
    real = GQA.rotate
    monkeypatch.setattr(GQA, "rotate", lambda self, keys, rotation: real(self, keys, rotation).flip(2))
    engine = open_engine("llama")
    with pytest.raises(RefusedError, match=r"self-test.*nothing was written"):
        engine.ingest([text])
    assert not list(engine.store.iterate())
    monkeypatch.setattr(GQA, "rotate", real)
    open_engine("llama").ingest([text])
    monkeypatch.setattr(selftest, "self_test", lambda _runner: pytest.fail("tested again"))
    open_engine("llama").ingest([write_passage(tmp_path / "b.txt", 9, 2)])


def test_a_chunk_beyond_the_models_context_is_refused_before_it_is_encoded(open_engine, tmp_path):
    engine = open_engine("llama")
    text = write_passage(tmp_path / "long.txt", MAX_TOKENS + 1, 1)
    with pytest.raises(MediaError, match=f"{MAX_TOKENS + 2} tokens.*context.*{MAX_TOKENS}.*--chunk-tokens"):
        engine.ingest([text], chunk_tokens=2 * MAX_TOKENS)
    assert not list(engine.store.iterate(kind="chunk"))
    assert len(engine.ingest([text], chunk_tokens=MAX_TOKENS // 2).chunks) == 3


def test_a_picture_that_the_processor_refuses_is_named(open_engine, tmp_path):
    strip = write_noise_image(tmp_path / "strip.png", 1, width=600, height=2)
    good = write_noise_image(tmp_path / "good.png", 2)
    engine = open_engine()
    with pytest.raises(MediaError, match=r"strip\.png.*processor.*aspect ratio"):
        engine.ingest([strip])
    result = engine.ingest([strip, good], partial=True)
    assert [failure.path for failure in result.failures] == [str(strip)]
    assert [entry.name for entry in engine.window().entries] == ["good.png"]


@pytest.mark.parametrize("size", [(1, 1), (3, 200), (27, 27), (3000, 20)])
def test_pictures_of_any_size_take_a_whole_grid(open_engine, tmp_path, size):
    engine = open_engine()
    picture = write_noise_image(tmp_path / "p.png", 1, width=size[0], height=size[1])
    chunk = engine.ingest([picture], max_pixels=10**9).chunks[0]
    assert chunk.num_tokens >= 3 and engine.query(QUESTION, max_new_tokens=2).fallback is None


def test_a_clip_kept_in_part_is_still_damaged_the_next_time(open_engine, clip, monkeypatch):
    from kamera_cli.ingest import encode

    whole = encode.chunks

    def cut(path, *rest):
        for chunk in whole(path, *rest):
            if chunk.index == 2:
                raise MediaError(path, "it is damaged here")
            yield chunk

    engine = open_engine()
    with monkeypatch.context() as damaged:
        damaged.setattr(encode, "chunks", cut)
        part = engine.ingest([clip], chunk_seconds=2, partial=True).sources[0]
        assert len(part.chunks) == 2 and part.notes[-1] == "only the first 2 chunks: it is damaged here"
        with pytest.raises(MediaError, match="damaged here"):
            engine.ingest([clip], chunk_seconds=2)
    again = engine.ingest([clip], chunk_seconds=2).sources[0]
    assert [chunk.outcome for chunk in again.chunks] == ["found", "found", "encoded", "encoded"]


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_damage_at_the_end_is_found_however_many_processors_there_are(
    open_engine, tmp_path, monkeypatch, threads
):
    """Frame threads keep an error of the last packets to themselves."""
    from kamera_cli.media import container, video

    choose = container.choose_stream

    def choose_with_threads(path, opened):
        stream, notes = choose(path, opened)
        stream.codec_context.thread_count = threads
        return stream, notes

    monkeypatch.setattr(video, "choose_stream", choose_with_threads)
    clip = write_noise_video(tmp_path / "clip.mkv", 3, seconds=8, fps=8)
    data = bytearray(clip.read_bytes())
    middle = len(data) * 7 // 10
    data[middle : middle + 2000] = bytes(2000)
    clip.write_bytes(data)
    with pytest.raises(MediaError, match=r"damaged after 5\.25 s"):
        open_engine().ingest([clip], chunk_seconds=2)


def test_a_video_that_ends_before_its_header_says_is_noted(open_engine, tmp_path):
    clip = write_noise_video(tmp_path / "clip.mkv", 3, seconds=4, fps=8)
    data = bytearray(clip.read_bytes())
    duration = data.index(b"\x44\x89\x88") + 3
    data[duration : duration + 8] = struct.pack(">d", 8000.0)
    clip.write_bytes(data)
    source = open_engine().ingest([clip], chunk_seconds=2).sources[0]
    assert len(source.chunks) == 2 and "its header states 8.0 s" in source.notes[0]


def test_chunks_that_show_the_same_are_held_once_and_said_so(open_engine, tmp_path):
    import av
    import numpy as np

    still = tmp_path / "still.mkv"
    with av.open(str(still), "w") as container:
        stream = container.add_stream("ffv1", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        picture = np.full((48, 64, 3), 90, np.uint8)
        for _ in range(24):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    engine = open_engine()
    source = engine.ingest([still], chunk_seconds=2).sources[0]
    assert len(source.chunks) == 3 and "2 chunks show exactly what another one shows" in source.notes[-1]
    assert len(engine.window().entries) == 1


@pytest.mark.parametrize("name", ["qwen3_vl", "kimi_k25", "deepseek_v3"])
def test_an_estimate_that_forgets_what_a_backbone_keeps(open_engine, tmp_path, name):
    """Own head sizes, latents and deepstack features: the dry run's bytes are those that are written."""
    from tiny_backbones import MEDIA, save_backbone

    engine = open_engine(model=str(save_backbone(name, tmp_path / "model")))
    sources = [write_passage(tmp_path / "t.txt", 30, 1)]
    if "image" in MEDIA[name]:
        sources.append(write_noise_image(tmp_path / "a.png", 1))
    if "video" in MEDIA[name]:
        sources.append(write_noise_video(tmp_path / "b.mp4", 2, seconds=2))
    planned = engine.ingest(sources, dry_run=True)
    written = engine.ingest(sources)
    assert [chunk.raw_bytes for chunk in planned.chunks] == [chunk.raw_bytes for chunk in written.chunks]


def test_a_chunk_that_another_process_deletes_meanwhile_is_no_want_of_room(
    open_engine, tmp_path, monkeypatch
):
    from kamera_cli.errors import NotFoundError
    from kamera_cli.ingest import sources as job

    engine = open_engine("llama")
    check = job._refuse_pushed_out

    def deleted(engine, kept):
        engine.store.delete([kept[0].key])
        check(engine, kept)

    monkeypatch.setattr(job, "_refuse_pushed_out", deleted)
    with pytest.raises(NotFoundError, match="deleted from the store meanwhile"):
        engine.ingest([write_passage(tmp_path / "a.txt", 12, 0)])
