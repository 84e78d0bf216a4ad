"""A model in one GGUF file is the model of its folder; what the file's reader would leave out is refused."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import SIZES, randomise
from transformers import LlamaConfig, LlamaForCausalLM

from kamera_cli.errors import RefusedError
from kamera_cli.model import gguf
from kamera_cli.model.checkpoint import open_checkpoint
from kamera_cli.model.loading import load

needs_reader = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate")),
    reason="the packages of the extra gguf are not installed",
)
TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"


def byte_letters() -> list[str]:
    """The 256 letters that stand for bytes in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + at) for at in range(len(others))]


def tiny_llama() -> LlamaForCausalLM:
    return randomise(LlamaForCausalLM(LlamaConfig(vocab_size=259, bos_token_id=0, eos_token_id=1, **SIZES)))


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order of a GGUF file: the halves of each head alternate."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: LlamaForCausalLM, *, rope_factor: float | None = None) -> Path:
    from gguf import GGUFWriter, TokenType

    config, writer = model.config, GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if rope_factor is not None:
        writer.add_rope_scaling_factor(rope_factor)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["<s>", "</s>", *byte_letters(), "ab"])
    writer.add_token_types([TokenType.CONTROL] * 2 + [TokenType.NORMAL] * 257)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    tops = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        stem, weight = name.removesuffix(".weight"), parameter.detach().numpy().astype(np.float32)
        if stem.startswith("model.layers."):
            layer, part = stem.removeprefix("model.layers.").split(".", 1)
            short = names[part]
            weight = interleaved(weight, heads[short]) if short in heads else weight
            writer.add_tensor(f"blk.{layer}.{short}.weight", weight)
        else:
            writer.add_tensor(f"{tops[stem]}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@needs_reader
def test_a_gguf_file_answers_as_its_model_and_reuses_its_chunks(tmp_path: Path, open_engine):
    model = tiny_llama()
    file = write_gguf(tmp_path / "tiny.gguf", model)
    (tmp_path / "chat_template.jinja").write_text("not of this file")
    loaded = load(
        open_checkpoint(str(file)), device="cpu", dtype="fp32", attention="auto", trust_remote_code=False
    )
    ids = loaded.tokenizer("cab ab\n", add_special_tokens=False, return_tensors="pt")["input_ids"]
    assert loaded.tokenizer.decode(ids[0]) == "cab ab\n" and ids.shape[1] == 5
    assert loaded.tokenizer.chat_template == TEMPLATE
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits)
    engine = open_engine("llama", model=str(file), device="cpu")
    (tmp_path / "a.txt").write_text("words of a first text, ab " * 8)
    (tmp_path / "b.txt").write_text("another one follows it, abab " * 8)
    engine.ingest([tmp_path / "a.txt", tmp_path / "b.txt"], window="texts")
    assert engine.self_test().ok
    answer = engine.query("ab?", chunks=[2, 1], window="texts", reuse="blind", max_new_tokens=3)
    assert [chunk.used for chunk in answer.chunks] == ["canonical", "blind"]
    before = engine.fingerprint
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert open_engine("llama", model=str(file), device="cpu").fingerprint != before


@needs_reader
def test_a_scaled_rope_that_the_reader_leaves_out_is_refused(tmp_path: Path):
    file = write_gguf(tmp_path / "scaled.gguf", tiny_llama(), rope_factor=4.0)
    with pytest.raises(RefusedError, match=r"RoPE is scaled \(llama\.rope\.scaling\.factor\)"):
        open_checkpoint(str(file))


@needs_reader
@pytest.mark.parametrize("length", [6, 2000])
def test_a_damaged_gguf_is_refused_in_one_line(tmp_path: Path, length: int):
    file = write_gguf(tmp_path / "short.gguf", tiny_llama())
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(RefusedError, match="cannot be read") as caught:
        open_checkpoint(str(file))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path):
    (tmp_path / "text.gguf").write_text("words")
    with pytest.raises(RefusedError, match="is no GGUF"):
        open_checkpoint(str(tmp_path / "text.gguf"))


def test_a_missing_extra_is_said_with_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(RefusedError, match=r"needs gguf and accelerate; pip install 'kamera-kv\[gguf\]'"):
        open_checkpoint(str(tmp_path / "model.gguf"))
