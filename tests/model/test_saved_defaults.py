"""A saved model keeps the options it had, also those that were left to a default which has changed since."""

import json
from dataclasses import replace

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import elastic_memory as em
from elastic_memory.memory import MEMORIES
from elastic_memory.streaming.fingerprint import settings
from tests.conftest import small_model


def options_of(model):
    memory = next(iter(model.memories.values()))
    return memory.memory_norm, memory.first_gate, sorted(model.memories)


@pytest.fixture
def change_defaults(monkeypatch):
    """As a later version of this library might."""

    def change(memory="infini", layers=None, **values):
        kind = MEMORIES[memory]
        monkeypatch.setattr(kind.__init__, "__kwdefaults__", kind.__init__.__kwdefaults__ | values)
        if layers:
            monkeypatch.setattr(kind, "info", replace(kind.info, layers=lambda count: layers))

    return change


def attachable():
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, vocab_size=61)
    return LlamaForCausalLM(LlamaConfig(**shape, pad_token_id=0))


@pytest.mark.parametrize("auto", [False, True])
def test_later_defaults_do_not_alter_a_saved_model(auto, change_defaults, tmp_path, recwarn):
    saved = small_model("infini", memory_layers=None)
    saved.save_pretrained(tmp_path)
    change_defaults(memory_norm="output", first_gate=0.0, layers=[1])
    loader = AutoModelForCausalLM if auto else em.MemoryLlamaForCausalLM
    loaded = loader.from_pretrained(tmp_path)
    assert options_of(loaded) == ("none", -3.0, [0, 1, 2]) == options_of(saved)
    assert options_of(small_model("infini", memory_layers=None)) == ("output", 0.0, [1])
    loaded.save_pretrained(tmp_path / "again")
    assert options_of(loader.from_pretrained(tmp_path / "again")) == options_of(saved)
    assert not [str(item.message) for item in recwarn if "defaults" in str(item.message)]


def test_what_is_given_when_loading_counts(change_defaults, tmp_path):
    small_model("infini", memory_layers=None).save_pretrained(tmp_path)
    change_defaults(memory_norm="output", first_gate=0.0)
    config = AutoConfig.from_pretrained(tmp_path, memory_options={"memory_norm": "qk"})
    assert config.memory_options == {"memory_norm": "qk", "first_gate": -3.0}
    assert AutoConfig.from_pretrained(tmp_path, memory="melodi").memory_options is None


def test_named_settings_are_kept_too(change_defaults, tmp_path):
    em.MemoryLlamaConfig(memory="elastic").save_pretrained(tmp_path)
    change_defaults("elastic", order=7, points=3, sampling="uniform")
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert (loaded.memory_order, loaded.memory_points, loaded.sampling) == (540, 512, "exponential")
    again = em.MemoryLlamaConfig(**json.loads((tmp_path / "config.json").read_text()))
    assert (again.memory_order, again.memory_points, again.sampling) == (540, 512, "exponential")


@pytest.mark.parametrize("memory", MEMORIES)
def test_while_defaults_stay_nothing_is_added(memory, tmp_path):
    """The configuration, and with it what binds memory files to a model."""
    model = small_model(memory)
    model.save_pretrained(tmp_path)
    loaded = em.MemoryLlamaForCausalLM.from_pretrained(tmp_path)
    assert settings(loaded) == settings(model)


@pytest.mark.parametrize("auto", [False, True])
def test_a_model_saved_without_them_says_which_defaults_it_has(auto, tmp_path):
    small_model("infini").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    del values["memory_defaults"]
    file.write_text(json.dumps(values))
    loader = AutoConfig if auto else em.MemoryLlamaConfig
    with pytest.warns(UserWarning, match="this version are used: update='delta', memory_norm='none', first_gate=-3.0"):
        config = loader.from_pretrained(tmp_path)
    assert config.memory_options is None


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("delta", "memory_defaults"),
        ({"memory": "infini", "layers": None}, "memory_defaults"),
        ({"memory": "infini", "options": {}}, "memory_defaults"),
        ({"memory": "infini", "layers": None, "options": {"updat": "delta"}}, "did you mean 'update'"),
    ],
)
def test_damaged_records_are_refused(record, message):
    values = small_model("infini").config.to_dict()
    with pytest.raises(ValueError, match=message):
        em.MemoryLlamaConfig.from_dict(values | {"memory_defaults": record})


def test_attached_memories_keep_their_options(change_defaults, tmp_path):
    saved = em.attach_memory(attachable(), memory="infini", block_size=8)
    saved.save_pretrained(tmp_path)
    change_defaults(memory_norm="output", first_gate=0.0, layers=[1])
    loaded = em.attach_memory(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert options_of(loaded) == ("none", -3.0, [0, 1, 2]) == options_of(saved)
    other = em.attach_memory(AutoModelForCausalLM.from_pretrained(tmp_path), memory_norm="qk")
    assert options_of(other) == ("qk", -3.0, [0, 1, 2])
    detached = em.detach_memory(loaded)
    assert options_of(em.attach_memory(detached, memory="infini")) == ("output", 0.0, [1])


def test_an_attached_memory_saved_without_them_says_which_defaults_it_has(tmp_path):
    model = em.attach_memory(attachable(), memory="infini", block_size=8)
    del model.config.memory_defaults
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="this version are used: layers=.0, 1, 2., update='delta'"):
        em.attach_memory(AutoModelForCausalLM.from_pretrained(tmp_path))


def test_options_of_earlier_versions_are_read_by_their_new_names(tmp_path):
    model = small_model("elastic", memory_options={"algorithm": "direct"})
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    saved["memory_options"] = {"road": "direct"}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert AutoConfig.from_pretrained(tmp_path).memory_options == {"algorithm": "direct"}


def test_layers_of_a_deeper_model_are_not_those_of_this_one(tmp_path):
    small_model("elastic", memory_layers=None).save_pretrained(tmp_path)
    for layers in (2, 8):
        fresh = small_model("elastic", memory_layers=None, num_hidden_layers=layers)
        config = AutoConfig.from_pretrained(tmp_path, num_hidden_layers=layers)
        assert config.settings().layers() == fresh.config.settings().layers()
