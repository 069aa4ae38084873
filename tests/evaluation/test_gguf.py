"""A model in llama.cpp's format is read like any other."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from elastic_memory.evaluation.loading import load_config, load_model, tokenizer_of
from elastic_memory.evaluation.longppl import Settings, load_reference
from elastic_memory.evaluation.metrics import Evaluation, evaluate

gguf = pytest.importorskip("gguf", reason="comes with the dev extra")
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.layers": "blk",
}  # fmt: skip


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=10000.0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def write(model: LlamaForCausalLM, path) -> None:
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*map(chr, range(97, 123)), "ab", *(f"<{i}>" for i in range(12)), "<|endoftext|>"])
    writer.add_token_types([1] * 40)
    writer.add_token_merges(["a b"])
    for name, weight in model.state_dict().items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        values = weight.numpy()
        if "attn_q." in name or "attn_k." in name:  # llama.cpp keeps the two halves of a rotated pair side by side
            heads = config.num_attention_heads
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_the_model_it_was_written_from(tmp_path, monkeypatch):
    model, path = tiny(), tmp_path / "tiny.gguf"
    write(model, path)
    assert load_config(str(path)).num_hidden_layers == 2
    loaded = load_model(str(path))
    ids = torch.arange(20)[None]
    torch.testing.assert_close(loaded(ids.to(loaded.device)).logits.cpu(), model(ids).logits)
    assert loaded.name_or_path == "tiny.gguf"
    assert tokenizer_of(str(path)).tokenizer.convert_tokens_to_ids("c") == 2
    monkeypatch.chdir(tmp_path)
    assert load_config("tiny.gguf").vocab_size == 40


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"none\.gguf"):
        load_model(str(tmp_path / "none.gguf"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'elastic-memory\[gguf\]'"):
        load_model(str(tmp_path / "none.gguf"))


def test_a_file_is_not_loaded_again_when_all_its_key_tokens_are_known(tmp_path, monkeypatch):
    """Loading takes half a minute, in every process that measures a model."""
    write(tiny(), tmp_path / "tiny.gguf")
    model, tokenizer = tiny(), tokenizer_of(str(tmp_path / "tiny.gguf"))
    rows = list(torch.randint(0, 26, (3, 40), generator=torch.Generator().manual_seed(0)))
    settings = Settings(trunc_len=8, sliding_window=4, alpha=-1.0, beta=-20.0)

    def measured(keys):
        named = Evaluation(
            model=model, rows=rows, tokenizer=tokenizer, reference=str(tmp_path / "tiny.gguf"), settings=settings,
            keys=keys,
        )  # fmt: skip
        return evaluate(named, ["longppl"])["longppl"]

    first = measured(tmp_path / "keys")
    assert first.key_tokens and first == measured(tmp_path / "others")
    load_reference.cache_clear()
    monkeypatch.setitem(load_reference.__wrapped__.__globals__, "load_model", None)  # a second load would fail
    assert measured(tmp_path / "keys") == first
    with (tmp_path / "tiny.gguf").open("ab") as file:
        file.write(b"\0")  # another model
    with pytest.raises(TypeError):
        measured(tmp_path / "keys")
