"""Memory for models that exist already."""

import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import elastic_memory as em
from elastic_memory.memory import MEMORIES

SHAPE = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=61, initializer_range=0.2, max_position_embeddings=256, head_dim=8, pad_token_id=0,
)  # fmt: skip
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama 3.1": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SHAPE,
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=500000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        )
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
}
MEMORY = dict(layers=[1], order=11, points=5, block_size=8)


@pytest.fixture(params=FAMILIES)
def pretrained(request):
    torch.manual_seed(0)
    model = FAMILIES[request.param]().eval()
    for parameter in model.parameters():  # biases and norms that do something
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
    return model


@torch.no_grad()
def test_inside_a_block_it_is_the_model_it_was(pretrained, ids):
    blocks = [pretrained(block).logits for block in ids.split(8, dim=1)]
    names = {name: p.data_ptr() for name, p in pretrained.named_parameters()}
    em.attach_memory(pretrained, **MEMORY, silent=False)
    assert {name: p.data_ptr() for name, p in pretrained.named_parameters()} == names
    logits = pretrained(ids).logits
    torch.testing.assert_close(logits[:, :8], blocks[0], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits[:, 8:16], blocks[1], atol=1e-3)


@torch.no_grad()
def test_with_no_memory_it_is_the_model_block_by_block(pretrained, ids):
    blocks = torch.cat([pretrained(block).logits for block in ids.split(8, dim=1)], dim=1)
    em.attach_memory(pretrained, memory="none", block_size=8)
    torch.testing.assert_close(pretrained(ids).logits, blocks, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_detached_it_is_exactly_the_model_it_was(pretrained, ids):
    kind, before, config = type(pretrained), pretrained(ids).logits, pretrained.config.to_dict()
    em.detach_memory(em.attach_memory(pretrained, **MEMORY))
    assert type(pretrained) is kind
    assert torch.equal(pretrained(ids).logits, before)
    assert pretrained.config.to_dict() == config


@torch.no_grad()
def test_it_streams_and_generates(pretrained, ids):
    em.attach_memory(pretrained, **MEMORY)
    cache = em.MemoryCache(pretrained)
    pieces = torch.cat([pretrained(x, past_key_values=cache).logits for x in ids.split([3, 20, 1, 21], dim=1)], dim=1)
    torch.testing.assert_close(pieces, pretrained(ids).logits, atol=1e-4, rtol=0)
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert torch.equal(pretrained.generate(ids, **options), pretrained.generate(ids, use_cache=False, **options))


def test_fine_tuned_saved_loaded(pretrained, ids, tmp_path):
    em.attach_memory(pretrained, sampling="uniform", **MEMORY).train()
    optimizer = torch.optim.AdamW(pretrained.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = pretrained(ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    pretrained.eval().save_pretrained(tmp_path)
    loaded = em.attach_memory(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert loaded.memories[1].bank == pretrained.memories[1].bank
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, pretrained(ids).logits)
    em.detach_memory(loaded)
    assert not hasattr(loaded.config, "elastic_memory")


@pytest.mark.parametrize("memory", MEMORIES)
@torch.no_grad()
def test_a_memory_with_parameters_comes_back_as_trained(memory, ids, tmp_path):
    options = dict(order=11) if MEMORIES[memory].has_option("order") else {}
    layers = [1] if memory != "none" else None
    model = em.attach_memory(FAMILIES["llama"]().eval(), memory=memory, layers=layers, block_size=8, **options)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    loaded = em.attach_memory(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_half_precision_and_training_mode_are_kept(ids):
    model = em.attach_memory(FAMILIES["llama"]().to(torch.bfloat16).eval(), **MEMORY)
    assert model.dtype == torch.bfloat16
    assert not model.model.layers[0].training
    assert torch.isfinite(model(ids).logits).all()


@torch.no_grad()
def test_a_model_with_a_window_of_its_own(ids):
    """Inside the window a block is what it was; sliding attention is what it was everywhere; more is refused."""
    windowed = lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8)).eval()  # noqa: E731
    torch.manual_seed(0)
    model = windowed()
    before = model(ids).logits
    em.attach_memory(model, memory="none", block_size=8, local_attention="sliding")
    torch.testing.assert_close(model(ids).logits, before, atol=1e-5, rtol=1e-5)
    for settings in (dict(block_size=9), dict(block_size=8, memory="none", local_attention="full")):
        with pytest.raises(ValueError, match="looks back 8 tokens"):
            em.attach_memory(windowed(), **settings)


def test_bad_input(ids):
    model = FAMILIES["llama"]()
    for call, message in [
        (lambda: em.detach_memory(model), "no attached memory"),
        (lambda: em.attach_memory(model, layers=[7]), "layers 0 to 2"),
        (lambda: em.attach_memory(model, memory="elastik"), "elastic"),
        (lambda: em.attach_memory(model, orders=5), "order"),
        (lambda: em.attach_memory(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2))), "llama, mistral"),
        (lambda: em.attach_memory(em.attach_memory(model)), "already"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_one_block_is_the_models_own(pretrained, dtype):
    ids = torch.randint(1, 61, (2, 8))
    with torch.no_grad(), torch.autocast("cpu", dtype):
        before = pretrained(ids).logits
        assert torch.equal(em.attach_memory(pretrained, **MEMORY)(ids).logits, before)


@pytest.mark.parametrize("algorithm", ["direct", "recurrent"])
def test_fine_tuning_under_autocast(pretrained, algorithm):
    """Norms of queries and keys leave them in another type than values."""
    ids = torch.randint(1, 61, (2, 45))
    model = em.attach_memory(pretrained, **MEMORY, algorithm=algorithm).train()
    model(ids, labels=ids).loss.backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad - exact[name]).norm() <= 0.2 * exact[name].norm() + 1e-4, name


# -- what was saved, what is given -------------------------------------------------------------------------------------


def saved(folder, memory="elastic", **settings):
    """A folder with a model whose memory was attached with these settings."""
    torch.manual_seed(0)
    model = em.attach_memory(FAMILIES["llama"]().eval(), memory=memory, **settings)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "given, expected",
    [
        (dict(block_size=2048), ("elastic", 2048, "sliding", 11)),
        (dict(local_attention="block"), ("elastic", 8, "block", 11)),
        (dict(memory="elastic"), ("elastic", 8, "sliding", 11)),
        (dict(order=7), ("elastic", 8, "sliding", 7)),
        (dict(memory="memorizing", local_attention="block"), ("memorizing", 2048, "block", None)),
        ({}, ("elastic", 8, "sliding", 11)),
    ],
)
def test_what_is_given_counts_and_the_rest_is_as_it_was_saved(given, expected, tmp_path):
    """Also where what is given is a default; another mechanism starts from its own defaults."""
    saved(tmp_path, **MEMORY, sampling="exponential", sampling_options={"decay": 0.9}, local_attention="sliding")
    loaded = em.attach_memory(AutoModelForCausalLM.from_pretrained(tmp_path), **given)
    settings = loaded.config.elastic_memory
    assert tuple(settings[name] for name in ("memory", "block_size", "local_attention", "memory_order")) == expected
    assert loaded.model.layers[1].locality.block_size == expected[1]
    em.detach_memory(loaded)
    fresh = em.attach_memory(loaded)
    assert fresh.model.layers[1].locality.block_size == 2048  # detaching forgets


def test_another_sampling_leaves_the_old_ones_options_behind(tmp_path):
    saved(tmp_path, **MEMORY, sampling="exponential", sampling_options={"decay": 0.9})
    em.attach_memory(AutoModelForCausalLM.from_pretrained(tmp_path), sampling="uniform")


def test_trained_memories_come_back_or_the_sizes_are_named(tmp_path):
    trained = saved(tmp_path, memory="melodi", order=3, block_size=8)
    same = em.attach_memory(AutoModelForCausalLM.from_pretrained(tmp_path), detach_every=2)
    assert torch.equal(same.memories[0].mixer.weight, trained.memories[0].mixer.weight)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"mixer.weight is \[3, 11\] in .* and \[3, 19\] with these settings"):
        em.attach_memory(model, block_size=16)
    assert type(model) is LlamaForCausalLM and type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"


def test_a_model_loaded_without_its_memory_says_so(tmp_path):
    saved(tmp_path, **MEMORY)
    code = f"from transformers import AutoModelForCausalLM as A; A.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "elastic_memory_attach_memory_restores_the_memory" in done.stderr + done.stdout
    model = em.attach_memory(AutoModelForCausalLM.from_pretrained(tmp_path))
    em.detach_memory(model).save_pretrained(tmp_path / "plain")
    with safe_open(tmp_path / "plain" / "model.safetensors", "pt") as stored:
        assert not any("attach_memory" in name for name in set(stored.keys()))


# -- nothing or all ----------------------------------------------------------------------------------------------------


class Quantised(torch.nn.Module):
    """A linear layer of integers, as quantisers put in the place of `nn.Linear`."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.weight = torch.nn.Parameter((linear.weight / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale.detach())

    def forward(self, x):
        return x @ (self.weight * self.scale).T.to(x.dtype)


def quantised(model):
    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, Quantised(child))
    return model


@pytest.mark.parametrize("memory", MEMORIES)
def test_quantised_models_get_a_memory(memory, ids):
    options = dict(order=11) if MEMORIES[memory].has_option("order") else {}
    model = quantised(FAMILIES["llama"]().eval())
    with torch.no_grad():
        before = model(ids[:, :8]).logits
        em.attach_memory(model, memory=memory, block_size=8, **options)
        torch.testing.assert_close(model(ids).logits[:, :8], before, atol=1e-5, rtol=1e-5)
        options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))
    model(ids, labels=ids).loss.backward()


@pytest.mark.parametrize("place", ["reset", "to"])
def test_what_fails_leaves_the_model_as_it_was(place, ids, monkeypatch):
    model = FAMILIES["llama"]().eval()
    before, config, layers = model(ids).logits, model.config.to_dict(), list(model.model.layers)

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(MEMORIES["melodi"], place, fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        em.attach_memory(model, memory="melodi", order=3, block_size=8)
    assert type(model) is LlamaForCausalLM and all(a is b for a, b in zip(model.model.layers, layers, strict=True))
    assert torch.equal(model(ids).logits, before) and model.config.to_dict() == config


def test_adapters_and_memory(ids):
    """A PeftModel is refused; the model inside it gets a memory, and its adapters go on being trained."""
    peft = pytest.importorskip("peft")
    options = dict(target_modules=["q_proj", "lm_head"], r=2, task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(FAMILIES["llama"](), peft.LoraConfig(**options)).eval()
    with pytest.raises(ValueError, match=r"attach_memory\(model.get_base_model\(\)"):
        em.attach_memory(model, **MEMORY)
    before = model(ids[:, :8]).logits
    em.attach_memory(model.get_base_model(), **MEMORY)
    torch.testing.assert_close(model(ids).logits[:, :8], before, atol=1e-5, rtol=1e-5)
    model.train()(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters() if p.requires_grad)
    with pytest.raises(ValueError, match=r"detach_memory\(model.get_base_model\(\)"):
        em.detach_memory(model)
    em.detach_memory(model.get_base_model())
    torch.testing.assert_close(model.eval()(ids[:, :8]).logits, before)


@pytest.mark.parametrize("bits", [8, 4])
def test_bitsandbytes(bits, ids, tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    FAMILIES["llama"]().save_pretrained(tmp_path)
    how = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=how).eval()
    before = model(ids[:, :8]).logits
    em.attach_memory(model, memory="melodi", order=3, block_size=8)
    torch.testing.assert_close(model(ids).logits[:, :8], before, atol=0.05, rtol=0.05)
