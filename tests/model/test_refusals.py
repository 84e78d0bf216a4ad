"""A checkpoint that cannot be computed with faithfully: one line, its exit code, nothing written, nothing run."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_backbones import save_backbone
from tiny_models import save, write_noise_video, write_passage

from kamera_cli.errors import RefusedError
from kamera_cli.model.checkpoint import open_checkpoint
from kamera_cli.model.loading import load
from kamera_store import KVStore

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
LOADING = {"device": "cpu", "dtype": "fp32", "attention": "auto", "trust_remote_code": False}


@pytest.fixture
def folder(checkpoints, tmp_path) -> Path:
    return shutil.copytree(checkpoints("llama"), tmp_path / "model")


@pytest.fixture(scope="session")
def latent(tmp_path_factory) -> Path:
    return save_backbone("deepseek_v3", tmp_path_factory.mktemp("latent") / "deepseek_v3")


@pytest.fixture
def program(tmp_path, capsys, monkeypatch) -> Callable[..., tuple[int, str]]:
    """Run the program on a model; its exit code and the last line on stderr, with nothing on stdout if it failed."""
    from kamera_cli.app import run

    monkeypatch.setenv("KAMERA_STORE", str(tmp_path / "store"))

    def call(folder: Path, *arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        code = run(["--device", "cpu", "--model", str(folder), *arguments])
        captured = capsys.readouterr()
        assert code == 0 or captured.out == ""
        return code, (captured.err.strip().splitlines() or [""])[-1]

    return call


@pytest.fixture
def refused(tmp_path, program) -> Callable[..., str]:
    """What ingest and check say of a folder that they refuse: one and the same line."""
    text = write_passage(tmp_path / "a.txt", 20, 0)

    def call(folder: Path, *options: str) -> str:
        lines = set()
        for command in (["ingest", str(text)], ["models", "check", str(folder)]):
            code, line = program(folder, *options, *command)
            assert code == 4, line
            lines.add(line.removeprefix(f"kamera: error: {text}: ").removeprefix("kamera: error: "))
        assert len(lines) == 1, lines
        assert not (tmp_path / "store").exists() or not records(tmp_path / "store")
        return lines.pop()

    return call


def records(store: Path) -> list:
    with KVStore.open(store) as opened:
        return list(opened.iterate())


def edit(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def shard(folder: Path, names: tuple[str, str] = ("model-00001-of-00002", "model-00002-of-00002")) -> None:
    """The same weights in two files and an index."""
    tensors = sorted(load_file(folder / ONE).items())
    parts = {f"{name}.safetensors": dict(tensors[at::2]) for at, name in enumerate(names)}
    for file, part in parts.items():
        save_file(part, folder / file, metadata={"format": "pt"})
    places = {name: file for file, part in parts.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / ONE).unlink()


def change(folder: Path, name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Another tensor in the place of a weight."""
    tensors = load_file(folder / ONE)
    tensors[name] = make(tensors[name])
    save_file(tensors, folder / ONE, metadata={"format": "pt"})


def lose_a_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def shards_of_ranks(folder: Path) -> None:
    (folder / ONE).rename(folder / "model-rank-0-part-0.safetensors")


def another_width(folder: Path) -> None:
    edit(folder, num_key_value_heads=4)


def fewer_layers(folder: Path) -> None:
    edit(folder, num_hidden_layers=2)


def mixed(folder: Path) -> None:
    change(folder, "model.layers.1.self_attn.k_proj.weight", torch.Tensor.bfloat16)


def own_code(folder: Path) -> None:
    edit(folder, auto_map={"AutoModelForCausalLM": "modeling_own.OwnModel"})
    (folder / "modeling_own.py").write_text(f"open({str(folder / 'marker.txt')!r}, 'w')")


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lose_a_shard, "1 of 2 weight files missing, first model-00002-of-00002.safetensors"),
        (shards_of_ranks, "model-rank-0-part-0.safetensors is a shard of a tensor-parallel run"),
        (another_width, "config.json contradicts the weights: model.layers.0.self_attn.k_proj.weight is"),
        (fewer_layers, "num_hidden_layers is 2, the weights have 3 layers"),
        (mixed, "mixed dtypes"),
        (own_code, "--trust-remote-code"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_ends_with_code_4_and_an_empty_store(
    folder, refused, break_it, reason
):
    break_it(folder)
    assert reason in refused(folder)
    assert not (folder / "marker.txt").exists()


@pytest.mark.parametrize(
    "name",
    ["model-rank-0-part-0.safetensors", "mp_rank_00_model_states.pt", "model.tp0.safetensors", "weights.tp_1.bin",
     "consolidated.00.pth", "consolidated.01.safetensors", "model0-mp8.safetensors", "rank0.safetensors"],
)  # fmt: skip
def test_shards_of_a_tensor_parallel_run_are_not_taken_for_a_model(folder, name):
    (folder / ONE).rename(folder / name)
    with pytest.raises(RefusedError, match=f"{name} is a shard"):
        open_checkpoint(str(folder))


def test_an_index_of_tensor_parallel_shards_is_refused(folder):
    shard(folder, ("model.tp0.of", "model.tp1.of"))
    with pytest.raises(RefusedError, match="tensor-parallel"):
        open_checkpoint(str(folder))


def test_leftovers_beside_a_whole_model_do_no_harm(folder):
    (folder / "consolidated.00.pth").write_bytes(b"")
    assert open_checkpoint(str(folder)).weight_files == (folder / ONE,)
    shard(folder)
    assert len(open_checkpoint(str(folder)).weight_files) == 2


def test_the_file_that_is_digested_is_the_file_that_is_loaded(folder):
    """Where one file and an index lie side by side, the Auto classes read the one file."""
    whole = (folder / ONE).read_bytes()
    shard(folder)
    (folder / ONE).write_bytes(whole)
    change(folder, "model.norm.weight", lambda tensor: tensor * 0 + 3)
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.weight_files == (folder / ONE,)
    assert load(checkpoint, **LOADING).model.model.norm.weight[0] == 3


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not JSON"),
        ("[]", "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": 3}}', "no weight_map"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "lists '../a.safetensors'"),
        ('{"weight_map": {"a": "/etc/a.safetensors"}}', "no safetensors file of this folder"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "no safetensors file of this folder"),
    ],
)
def test_an_index_that_is_damaged_or_leads_elsewhere_is_refused(folder, text, reason):
    (folder / ONE).unlink()
    (folder / INDEX).write_text(text)
    with pytest.raises(RefusedError, match=reason):
        open_checkpoint(str(folder))


def test_a_weight_that_is_not_where_the_index_puts_it_is_refused(folder):
    shard(folder)
    file = folder / INDEX
    index = json.loads(file.read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    index["weight_map"]["lm_head.weight"] = "model-00002-of-00002.safetensors"
    file.write_text(json.dumps(index))
    with pytest.raises(RefusedError, match="is not in model-0000"):
        open_checkpoint(str(folder))


def header(fields: object, num_bytes: int = 0) -> bytes:
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"123",
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 2) + b"{",
        struct.pack("<Q", 3) + b"{x}",
        header([]),
        header({"a": 3}),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, 4),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 4),
        header({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, 8),
        header({"a": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}}, 8),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}, 8),
        header({"a": {"dtype": None, "shape": [2], "data_offsets": [0, 8]}}, 8),
    ],
)
def test_a_damaged_weight_file_is_named_before_it_is_loaded(folder, content):
    (folder / ONE).write_bytes(content)
    with pytest.raises(RefusedError, match=rf"weight file {ONE} is damaged") as caught:
        open_checkpoint(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_weights_without_their_key_are_refused(folder, dtype):
    change(folder, "model.layers.0.mlp.up_proj.weight", lambda tensor: tensor.to(dtype))
    with pytest.raises(RefusedError, match=r"up_proj\.weight is (F8_E4M3|I8).*no quantization_config"):
        open_checkpoint(str(folder))


def test_a_norm_or_a_router_in_fp32_is_no_mixture(latent, tmp_path):
    folder = shutil.copytree(latent, tmp_path / "model")
    tensors = load_file(folder / ONE)
    kept = ("norm", "mlp.gate.")
    tensors = {name: t if any(part in name for part in kept) else t.bfloat16() for name, t in tensors.items()}
    save_file(tensors, folder / ONE, metadata={"format": "pt"})
    assert load(open_checkpoint(str(folder)), **LOADING).dtype == torch.float32


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kv_lora_rank": 16}, "kv_a_proj_with_mqa.weight is .32, 64."),
        ({"qk_rope_head_dim": 16}, "kv_a_proj_with_mqa.weight"),
        ({"v_head_dim": 16}, "kv_b_proj.weight"),
        ({"hidden_size": 128}, "kv_a_proj_with_mqa.weight"),
        ({"num_hidden_layers": 4}, "num_hidden_layers is 4, the weights have 3"),
    ],
)
def test_latents_of_another_shape_than_the_config_says_are_refused(latent, tmp_path, fields, reason):
    folder = shutil.copytree(latent, tmp_path / "model")
    edit(folder, **fields)
    with pytest.raises(RefusedError, match=reason):
        open_checkpoint(str(folder))


def test_layers_that_only_predict_further_tokens_may_follow(latent, tmp_path):
    folder = shutil.copytree(latent, tmp_path / "model")
    tensors = load_file(folder / ONE)
    more = {
        name.replace("layers.2.", "layers.3."): t.clone()
        for name, t in tensors.items()
        if "layers.2." in name
    }
    save_file(tensors | more, folder / ONE, metadata={"format": "pt"})
    with pytest.raises(RefusedError, match="the weights have 4"):
        open_checkpoint(str(folder))
    edit(folder, num_nextn_predict_layers=1)
    assert load(open_checkpoint(str(folder)), **LOADING).model


def test_a_bias_that_the_config_leaves_out_is_not_dropped_in_silence(folder):
    """The Auto classes only warn of weights that they have no place for."""
    edit(folder, attention_bias=False)
    with pytest.raises(RefusedError, match=r"contradicts the weights, 12 of them have no place.*bias"):
        load(open_checkpoint(str(folder)), **LOADING)


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "processor_config.json", "preprocessor_config.json"]
)
def test_code_for_the_tokenizer_or_the_processor_needs_consent_too(folder, refused, name):
    file = folder / name
    own = json.loads(file.read_text()) if file.is_file() else {}
    own["image_processor"] = {"auto_map": {"AutoImageProcessor": ["own.Slow", None]}}
    file.write_text(json.dumps(own))
    (folder / "own.py").write_text(f"open({str(folder / 'marker.txt')!r}, 'w')")
    assert f"auto_map in {name}" in refused(folder)
    assert open_checkpoint(str(folder), trust_remote_code=True)
    assert not (folder / "marker.txt").exists()


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("owner/repo--modeling.Own", "another repository"),
        ("modeling_gone.Own", "there is no modeling_gone.py"),
        ("../../etc.Own", "no class of a module"),
        ("own", "no class of a module"),
        (3, "no class of a module"),
    ],
)
def test_code_whose_revision_cannot_be_pinned_is_refused_with_the_flag_too(
    folder, refused, reference, reason
):
    edit(folder, auto_map={"AutoConfig": reference})
    assert reason in refused(folder, "--trust-remote-code")


def test_an_architecture_with_its_own_code_does_not_load_without_it(folder):
    edit(folder, model_type="kimi_vl", text_config={
        "model_type": "deepseek_v3", "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    })  # fmt: skip
    with pytest.raises(RefusedError, match="no auto_map"):
        open_checkpoint(str(folder), trust_remote_code=True)


@pytest.mark.parametrize(
    "body", ["raise OSError('gone wrong')", "import no_such_package", "def (:", "x = {}['y']"]
)
def test_code_of_a_checkpoint_that_fails_ends_in_one_line(folder, body, tmp_path, monkeypatch):
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    own = json.loads((folder / "tokenizer_config.json").read_text())
    own |= {
        "auto_map": {"AutoTokenizer": ["modeling_own.OwnTokenizer", None]},
        "tokenizer_class": "OwnTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    (folder / "modeling_own.py").write_text(body)
    with pytest.raises(RefusedError, match="cannot be loaded") as caught:
        load(open_checkpoint(str(folder), trust_remote_code=True), **LOADING | {"trust_remote_code": True})
    assert "\n" not in str(caught.value)


def test_code_beside_the_weights_does_not_take_the_place_of_a_verified_class(folder):
    """Public DeepSeek-V3 folders bring the code of an older release; what was verified is the class of transformers."""
    own_code(folder)
    checkpoint = open_checkpoint(str(folder), trust_remote_code=True)
    model = load(checkpoint, **LOADING | {"trust_remote_code": True}).model
    assert type(model).__module__.startswith("transformers.models.")
    assert not (folder / "marker.txt").exists()


def test_a_model_in_parts_or_in_another_dtype_is_noticed_after_loading(folder, monkeypatch):
    from transformers import AutoModelForCausalLM

    checkpoint, read = open_checkpoint(str(folder)), AutoModelForCausalLM.from_pretrained
    for make, reason in (
        (lambda weight: weight.to(torch.float64), "torch.float64 in a model loaded as torch.float32"),
        (lambda weight: weight.to("meta"), "was not loaded"),
    ):

        def changed(*args, make=make, **kwargs):
            model, info = read(*args, **kwargs)
            layer = model.model.layers[1].self_attn.k_proj
            layer.weight = torch.nn.Parameter(make(layer.weight.data), requires_grad=False)
            return model, info

        with monkeypatch.context() as patch, pytest.raises(RefusedError, match=reason):
            patch.setattr(AutoModelForCausalLM, "from_pretrained", changed)
            load(checkpoint, **LOADING)


def test_a_vision_model_without_a_part_that_reads_pictures_is_refused(checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints("qwen2_5_vl"), tmp_path / "model")
    (folder / "processor_config.json").unlink()
    with pytest.raises(RefusedError):
        load(open_checkpoint(str(folder)), **LOADING)


def test_a_video_for_a_model_without_a_video_part_is_refused(tmp_path, program):
    folder = save_backbone("deepseek_vl", tmp_path / "model")
    video = write_noise_video(tmp_path / "a.mp4", 0, seconds=1)
    code, line = program(folder, "ingest", str(video))
    assert code in (1, 2, 4)
    assert "it is video, and model" in line and "takes image, text" in line
    assert not records(tmp_path / "store")


def test_a_checkpoint_without_its_video_part_is_refused(checkpoints, tmp_path, program):
    folder = shutil.copytree(checkpoints("qwen2_5_vl"), tmp_path / "model")
    file = folder / "processor_config.json"
    parts = json.loads(file.read_text())
    del parts["video_processor"]
    file.write_text(json.dumps(parts))
    code, line = program(folder, "ingest", str(write_noise_video(tmp_path / "a.mp4", 0, seconds=1)))
    assert code == 4 and "video processor" in line
    assert not records(tmp_path / "store")


def test_a_check_that_passes_ends_with_code_0_and_an_empty_store(folder, program, tmp_path):
    code, _line = program(folder, "models", "check", str(folder))
    assert code == 0
    assert not records(tmp_path / "store")


def test_a_chunk_of_the_same_architecture_with_other_weights_is_not_used(open_engine, checkpoints, tmp_path):
    from kamera_cli.errors import KameraError

    source = write_passage(tmp_path / "a.txt", 20, 0)
    open_engine("llama").ingest([source])
    other = open_engine("llama", model=str(save("llama", tmp_path / "other", seed=1)))
    with pytest.raises(KameraError) as caught:
        other.query("which letter?")
    assert caught.value.exit_code == 4
