"""Damaged or foreign bytes in the store: never an answer from them, never code from them, never more lost than they."""

from __future__ import annotations

import os
import pickle
import warnings

import pytest
import torch
import zstandard
from engine_setups import NUM_NEW, QUESTION, ingest, reference
from raw_store import flip_payload, raw_tables, replace_header

from kamera_cli.library import Library
from kamera_store.errors import DamagedError, DamagedRecordWarning

ORDER = ["3", "1", "2"]


@pytest.fixture
def store_folder(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def filled(open_engine, tmp_path):
    """Chunks and patches for one order; returns records by chunk number and their patches, and closes the store."""
    engine = open_engine("qwen2_5_vl")
    ingest(engine, "qwen2_5_vl", tmp_path)
    engine.compile_patches(ORDER, rank=10)
    chunks = {str(entry.number): bytes.fromhex(entry.chunk) for entry in engine.window().entries}
    patches = {
        number: [patch.key for patch in engine.store.patches_of(key)] for number, key in chunks.items()
    }
    expected = reference(engine, ORDER)[1]
    engine.close()
    return chunks, patches, expected


def payload_of_layers(store, key: bytes) -> int:
    """Offset in the only segment at which the first tensor of a layer begins, well inside its bytes."""
    record = store.get(key)
    return 200 + min(tensor.offset for tensor in record.tensors if tensor.layer >= 0)


def test_damaged_kv_of_a_chunk_is_answered_from_a_prefill_and_named(open_engine, filled, store_folder):
    chunks, _, expected = filled
    engine = open_engine("qwen2_5_vl")
    offset = payload_of_layers(engine.store, chunks["1"])
    engine.close()
    flip_payload(store_folder, chunks["1"], offset)
    notes: list[str] = []
    engine = open_engine("qwen2_5_vl", warnings=notes)
    for reuse, required in (("patched", False), ("blind", False), ("auto", True)):
        with pytest.raises(DamagedError, match=chunks["1"].hex()[:10]):
            engine.query(QUESTION, chunks=ORDER, reuse=reuse, require_hit=required)
    result = engine.query(QUESTION, chunks=ORDER, max_new_tokens=NUM_NEW)
    assert result.answer == expected and "damaged" in result.fallback
    assert [chunk.used for chunk in result.chunks] == ["prefilled"] * 3
    assert [chunk.why_not for chunk in result.chunks] == [None, "damaged", None]
    assert any(chunks["1"].hex()[:10] in note for note in notes)


def test_a_damaged_chunk_is_repaired_by_verify_and_another_ingest(
    open_engine, filled, store_folder, tmp_path
):
    chunks, _, expected = filled
    flip_payload(store_folder, chunks["1"])
    engine = open_engine("qwen2_5_vl")
    assert [entry.key for entry in engine.store.verify().damaged] == [chunks["1"]]
    result = engine.ingest([tmp_path / "a.mp4"])
    assert result.chunks[0].outcome == "encoded" and result.chunks[0].number == 1
    assert engine.query(QUESTION, chunks=ORDER, reuse="none", max_new_tokens=NUM_NEW).answer == expected
    assert engine.query(QUESTION, chunks=ORDER, max_new_tokens=NUM_NEW).answer


@pytest.mark.parametrize("part", ["payload", "header"])
def test_a_damaged_patch_is_replaced_by_what_the_prefill_gives(open_engine, filled, store_folder, part):
    _, patches, expected = filled
    key = patches["2"][0]
    if part == "payload":
        flip_payload(store_folder, key, 100)
    else:
        with raw_tables(store_folder) as (txn, tables):
            header = bytearray(txn.get(key, db=tables["records"]))
            header[40] ^= 1
            txn.put(key, bytes(header), db=tables["records"])
    engine = open_engine("qwen2_5_vl", warnings=[])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedRecordWarning)
        result = engine.query(QUESTION, chunks=ORDER, max_new_tokens=NUM_NEW)
    assert result.answer == expected
    assert [chunk.why_not for chunk in result.chunks] == [
        None,
        None,
        "damaged" if part == "payload" else "no_patch",
    ]
    assert key.hex() in result.patches_kept
    again = engine.query(QUESTION, chunks=ORDER, require_hit=True)
    assert again.chunks[2].patch == key.hex() and again.chunks[2].why_not is None
    assert not engine.store.verify().damaged


@pytest.mark.parametrize("loss", ["damaged", "purged"])
def test_a_good_patch_that_cannot_be_read_costs_no_answer_and_is_formed_again(
    open_engine, tmp_path, store_folder, monkeypatch, loss
):
    """A prefill leaves what `auto` would take as it is, but what it cannot read it has to form."""
    engine = open_engine("qwen2_5_vl")
    ingest(engine, "qwen2_5_vl", tmp_path)
    engine.compile_patches(ORDER, energy=1.0)
    first, second = [bytes.fromhex(chunk.patches[-1]) for chunk in engine.explain(chunks=ORDER).chunks[1:]]
    expected = reference(engine, ORDER)[1]
    engine.close()
    if loss == "damaged":
        flip_payload(store_folder, second, 100)
    engine = open_engine("qwen2_5_vl", warnings=[])
    if loss == "purged":
        engine.store.delete([first])
        read = Library.patch_layers

        def purged_before(library, record):
            engine.store.delete([second])
            return read(library, record)

        monkeypatch.setattr(Library, "patch_layers", purged_before)
    result = engine.query(QUESTION, chunks=ORDER, max_new_tokens=NUM_NEW)
    assert result.fallback is not None and result.answer == expected
    assert second.hex() in result.patches_kept
    assert engine.query(QUESTION, chunks=ORDER, require_hit=True).answer
    assert not engine.store.verify().damaged


def test_a_damaged_patch_is_formed_again_by_compile(open_engine, filled, store_folder):
    _, patches, _ = filled
    replace_header(store_folder, patches["2"][0], b"nothing of ours")
    engine = open_engine("qwen2_5_vl")
    with pytest.warns(DamagedRecordWarning, match="not a kamera entry"):
        result = engine.compile_patches(ORDER, rank=10)
    assert [patch.outcome for patch in result.patches] == ["found", "formed"]
    assert engine.query(QUESTION, chunks=ORDER, require_hit=True).answer


class Marker:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def foreign_values(folder, marker) -> dict[str, bytes]:
    """A pickle, a file of ``torch.save``, and a zstd frame around each."""
    plain = pickle.dumps(Marker(str(marker)))
    torch.save({"payload": Marker(str(marker))}, folder / "saved.pt")
    saved = (folder / "saved.pt").read_bytes()
    squeeze = zstandard.ZstdCompressor().compress
    return {"pickle": plain, "saved": saved, "zstd pickle": squeeze(plain), "zstd saved": squeeze(saved)}


@pytest.mark.parametrize("kind", ["pickle", "saved", "zstd pickle", "zstd saved"])
@pytest.mark.parametrize("where", ["records", "segments"])
def test_a_pickle_in_the_store_is_never_loaded(open_engine, filled, store_folder, tmp_path, kind, where):
    """SEC-3"""
    chunks, patches, _ = filled
    marker = tmp_path / "marker.txt"
    value = foreign_values(tmp_path, marker)[kind]
    with raw_tables(store_folder) as (txn, tables):
        for key in (chunks["1"], patches["2"][0]):
            for name, _ in list(txn.cursor(db=tables[where])):
                if name.startswith(key):
                    txn.put(name, value, db=tables[where])
    engine = open_engine("qwen2_5_vl", warnings=[])
    match = "not a kamera entry" if where == "records" else "damaged"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedRecordWarning)
        for call in (
            lambda: engine.query(QUESTION, chunks=ORDER),
            lambda: engine.compile_patches(["2", "1"], rank=2),
        ):
            with pytest.raises(DamagedError, match=match):
                call()
        engine.evict(["1"])
        with pytest.raises(DamagedError, match=match):
            engine.recall(["1"])
        assert engine.window().entries[0].number == 2 and len(engine.window().evicted) == 1
        report = engine.store.verify()
        assert {entry.key for entry in report.damaged} == {chunks["1"], patches["2"][0]}
        assert engine.query(QUESTION, chunks=["2", "3"]).answer
    assert not marker.exists()


def test_no_code_of_ours_loads_pickles():
    from pathlib import Path

    root = Path(__file__).resolve().parents[2]
    for file in [*(root / "kamera_cli").rglob("*.py"), *(root / "store").rglob("*.py")]:
        text = file.read_text(encoding="utf-8")
        assert "import pickle" not in text and "torch.load(" not in text, file


def test_a_chunk_that_is_gone_from_the_store_is_named_with_what_to_do(open_engine, filled):
    from kamera_cli.errors import NotFoundError

    chunks, _, _ = filled
    engine = open_engine("qwen2_5_vl")
    engine.store.delete([chunks["1"]])
    for call in (
        lambda: engine.query(QUESTION, chunks=ORDER),
        lambda: engine.compile_patches(["3", "2", "1"], rank=2),
    ):
        with pytest.raises(NotFoundError, match=r"chunk 1.*ingest its source again"):
            call()


def test_a_patch_evicted_between_plan_and_read_costs_a_prefill_and_no_answer(
    open_engine, filled, monkeypatch
):
    from kamera_cli.query import answer as query

    _, patches, expected = filled
    engine = open_engine("qwen2_5_vl", warnings=[])
    real = query.read_and_assemble

    def late(*arguments):
        engine.store.delete(patches["2"])
        return real(*arguments)

    monkeypatch.setattr(query, "read_and_assemble", late)
    result = engine.query(QUESTION, chunks=ORDER, max_new_tokens=NUM_NEW)
    assert result.answer == expected and "evicted" in result.fallback
    assert [chunk.why_not for chunk in result.chunks] == [None, None, "no_patch"]


def test_a_full_store_costs_the_patches_and_no_answer(open_engine, filled, monkeypatch):
    from kamera_store import write
    from kamera_store.errors import NoRoomError

    notes: list[str] = []
    engine = open_engine("qwen2_5_vl", warnings=notes)
    expected = reference(engine, ["2", "3", "1"])[1]

    def full(*_args, **_kwargs):
        raise NoRoomError(1000, 10)

    monkeypatch.setattr(write, "check_room", full)
    result = engine.query(QUESTION, chunks=["2", "3", "1"], max_new_tokens=NUM_NEW)
    assert result.answer == expected and result.patches_kept == ()
    assert any("no room" in note for note in notes)


def test_a_patch_that_finds_no_room_leaves_the_older_one(open_engine, filled, monkeypatch):
    from kamera_store import write
    from kamera_store.errors import NoRoomError

    _, patches, _ = filled
    engine = open_engine("qwen2_5_vl")

    def full(*_args, **_kwargs):
        raise NoRoomError(1000, 10)

    with monkeypatch.context() as patched:
        patched.setattr(write, "check_room", full)
        with pytest.raises(NoRoomError):
            engine.compile_patches(ORDER, rank="auto", energy=1.0)
    assert engine.store.get(patches["2"][0]) is not None
    assert engine.query(QUESTION, chunks=ORDER, reuse="patched").chunks[2].rank == 10
