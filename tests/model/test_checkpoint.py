"""A model that would answer wrongly, run foreign code, or fail late: refused by name before anything is written."""

from __future__ import annotations

import json
import shutil

import pytest

from kamera_cli.errors import NotFoundError, RefusedError, UsageError
from kamera_cli.model.checkpoint import fingerprint, open_checkpoint, read_contents
from kamera_store import KVStore


@pytest.fixture
def folder(checkpoints, tmp_path):
    """A Llama checkpoint that a test may break."""
    return shutil.copytree(checkpoints("llama"), tmp_path / "model")


def contents_of(checkpoint, tmp_path):
    with KVStore.open(tmp_path / "digests") as store:
        return read_contents(checkpoint, store, rehash=False, on_hash=lambda _name: None)


def edit(folder, **fields) -> None:
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def no_config(folder) -> None:
    (folder / "config.json").unlink()


def broken_config(folder) -> None:
    (folder / "config.json").write_bytes(b"\xff{")


def no_weights(folder) -> None:
    (folder / "model.safetensors").unlink()


def pickled_weights(folder) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def missing_shard(folder) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def setting(**fields):
    return lambda folder: edit(folder, **fields)


@pytest.mark.parametrize(
    ("break_it", "error", "message"),
    [
        (no_config, NotFoundError, "no config.json"),
        (broken_config, RefusedError, "not JSON"),
        (no_weights, RefusedError, "no model.safetensors"),
        (pickled_weights, RefusedError, "pickled weights are not read"),
        (missing_shard, RefusedError, "1 of 2 weight files missing.*00002"),
        (setting(model_type="phi3"), RefusedError, "'phi3' is not supported.*qwen2_5_vl"),
        (setting(model_type=None), RefusedError, "not supported"),
        (setting(auto_map={"AutoModelForCausalLM": "modeling.Own"}), RefusedError, "--trust-remote-code"),
        (setting(use_sliding_window=True), RefusedError, "sliding-window"),
        (setting(layer_types=["full_attention", "sliding_attention"]), RefusedError, "'sliding_attention'"),
        (setting(rope_parameters={"rope_type": "dynamic"}), RefusedError, "'dynamic' needs the number factor"),
        (setting(rope_parameters=None, rope_scaling={"type": "longrope"}), RefusedError, "'longrope'"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_cannot_be_used_is_refused_in_one_line(
    folder, open_engine, break_it, error, message
):
    break_it(folder)
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(str(folder))
    assert "\n" not in str(caught.value)
    engine = open_engine("llama", model=str(folder))
    with pytest.raises(error):
        engine.ingest([folder / "tokenizer.json"])
    assert not list(engine.store.iterate())


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/nowhere", "plain-name", "a/b/c"])
def test_a_name_that_is_no_folder_is_said_at_once(name):
    with pytest.raises(NotFoundError, match="no such folder"):
        open_checkpoint(name)


def test_a_hub_name_that_is_not_cached_asks_no_network(monkeypatch, tmp_path):
    import socket

    def connect(*_args):
        raise AssertionError("called out")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket.socket, "connect", connect)
    with pytest.raises(NotFoundError, match=r"nobody/nothing.*local cache") as caught:
        open_checkpoint("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_remote_code_runs_only_with_consent_and_counts_in_the_fingerprint(folder, tmp_path):
    edit(folder, auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    (folder / "configuration_own.py").write_text(f"open({str(tmp_path / 'marker.txt')!r}, 'w')")
    with pytest.raises(RefusedError, match="its own Python code"):
        open_checkpoint(str(folder))
    assert not (tmp_path / "marker.txt").exists()
    trusted = open_checkpoint(str(folder), trust_remote_code=True)
    prints = [fingerprint(trusted, contents_of(trusted, tmp_path), positions="p", dtype="float32")]
    (folder / "configuration_own.py").write_text("# another revision")
    prints.append(fingerprint(trusted, contents_of(trusted, tmp_path), positions="p", dtype="float32"))
    (folder / "parts").mkdir()
    (folder / "parts" / "own.py").write_text("# code that the first file imports")
    prints.append(fingerprint(trusted, contents_of(trusted, tmp_path), positions="p", dtype="float32"))
    assert len(set(prints)) == 3 and not (tmp_path / "marker.txt").exists()


def test_weights_that_do_not_fit_the_config_are_refused(folder, open_engine):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.self_attn.v_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefusedError, match=r"weights missing.*layers\.2\.self_attn\.v_proj"):
        assert open_engine("llama", model=str(folder)).runner


def test_a_truncated_weight_file_is_refused(folder, open_engine):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(RefusedError, match=r"model\.safetensors is damaged"):
        assert open_engine("llama", model=str(folder)).runner


def test_a_missing_tokenizer_is_refused(folder, open_engine):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(RefusedError, match="cannot be loaded"):
        assert open_engine("llama", model=str(folder)).runner


def test_cuda_without_a_device_is_an_error_and_auto_is_a_warning(open_engine, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="--device cuda"):
        assert open_engine("llama", device="cuda").runner
    for device, num_warnings in (("auto", 1), ("cpu", 0)):
        notes: list[str] = []
        assert open_engine("llama", device=device, warnings=notes).runner
        assert len([note for note in notes if "CPU" in note]) == num_warnings


def test_flash_attention_is_refused_where_it_cannot_run(open_engine):
    with pytest.raises((RefusedError, UsageError), match="flash"):
        assert open_engine("llama", attention="flash").runner
    assert open_engine("llama", attention="sdpa").runner.loaded.attention == "sdpa"


def test_remembered_weights_are_of_this_very_file(open_engine, folder, tmp_path):
    """Two folders never share a remembered hash, though their weight files have one name and one size."""
    first = open_engine("llama", model=str(folder))
    other = shutil.copytree(folder, tmp_path / "twin")
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (other / "model.safetensors").write_bytes(bytes(data))
    assert open_engine("llama", model=str(other)).fingerprint != first.fingerprint


def test_a_chat_template_in_the_processor_config_counts_in_the_fingerprint(checkpoints, tmp_path):
    """The preamble comes from it; pixel settings beside it shape chunk keys and are no other model."""
    folder = shutil.copytree(checkpoints("qwen2_5_vl"), tmp_path / "model")
    file = folder / "processor_config.json"
    whole, prints = json.loads(file.read_text()), []
    for change in ({}, {"chat_template": "{{ messages }}"}, {"image_seq_length": 7}):
        file.write_text(json.dumps({**whole, **change}))
        checkpoint = open_checkpoint(str(folder))
        prints.append(
            fingerprint(checkpoint, contents_of(checkpoint, tmp_path), positions="p", dtype="float32")
        )
    assert prints[0] != prints[1] and prints[0] == prints[2]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_model_that_changes_between_its_digest_and_its_load_is_refused(folder, open_engine, name):
    engine = open_engine("llama", model=str(folder))
    assert engine.context.contents
    data = (folder / name).read_bytes()
    changed = data + b" \n" if name.endswith("json") else data[:-1] + bytes([data[-1] ^ 1])
    (folder / name).write_bytes(changed)
    with pytest.raises(RefusedError, match="changed while it was in use"):
        assert engine.runner
