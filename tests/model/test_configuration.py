import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

import elastic_memory as em
from elastic_memory.memory import MEMORIES
from tests.conftest import small_model


def meta(**settings):
    with torch.device("meta"):
        return em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset(**settings))


@pytest.mark.parametrize("name, parameters", [("100m", 97_707_600), ("200m", 202_520_000), ("400m", 397_800_000)])
def test_sizes_of_the_paper(name, parameters):
    total = sum(p.numel() for p in meta(name=name, memory="none").parameters())
    config = em.MemoryLlamaConfig.preset(name)
    width, hidden = config.hidden_size, config.intermediate_size
    by_formula = 32000 * width + 12 * (4 * width**2 + 3 * width * hidden + 2 * width) + width
    assert total == by_formula
    assert abs(total - parameters) < 0.05e6


@pytest.mark.parametrize("multiple, floats", [(1, 777_600), (2, 1_555_200), (16, 12_441_600)])
def test_elastic_state_at_100m(multiple, floats):
    report = meta(name="100m", memory_multiple=multiple).memory_report()
    assert [entry["layer"] for entry in report] == [8]  # the 9th
    assert [entry["state_floats"] for entry in report] == [entry["carried_floats"] for entry in report] == [floats]
    assert [entry["extra_parameters"] for entry in report] == [0]


def test_elastic_adds_no_parameters():
    plain, elastic = meta(name="100m", memory="none"), meta(name="100m")
    assert {n: p.shape for n, p in plain.named_parameters()} == {n: p.shape for n, p in elastic.named_parameters()}


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(memroy="elastic"), "did you mean 'memory'"),
        (dict(memory="elastik"), "elastic"),
        (dict(local_attention="window"), "sliding"),
        (dict(memory="none", memory_order=5), "no option 'order'"),
        (dict(memory="none", sampling="uniform"), "no option 'sampling'"),
        (dict(memory="none", memory_layers=[1]), "leave the layers out"),
        (dict(memory_layers=[99]), "layers 0 to"),
        (dict(local_attention="full"), "memory='none'"),
        (dict(block_size=0), "block_size"),
        (dict(memory_options={"algoritm": "direct"}), "did you mean 'algorithm'"),
        (dict(memory_options={"road": "direct"}), "did you mean 'algorithm'"),
        (dict(memory_options={"algorithm": "scenic"}), "direct"),
        (dict(memory_options={"order": 5}, memory_order=5), "give it once"),
        (dict(memory_options={"detach_every": 0}), "detach_every"),
        (dict(sampling="unifrom"), "uniform"),
        (dict(sampling_options={"decay": 2.0}), "between 0 and 1"),
        (dict(memory="sampled", sampling_options={"decay": "0.9"}), "sampling 'exponential' .*'decay': '0.9'"),
        (dict(memory_order=0), "order"),
        (dict(memory_points=0), "points"),
    ],
)
def test_contradictions_are_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        em.MemoryLlamaConfig(**settings)


def test_wrong_types_are_errors():
    with pytest.raises(StrictDataclassError, match="block_size"):
        em.MemoryLlamaConfig(block_size="many")


@pytest.mark.parametrize("settings", [dict(name="50m"), dict(name="tiny", memory_multiple=0)])
def test_bad_presets(settings):
    with pytest.raises(ValueError):
        em.MemoryLlamaConfig.preset(**settings)


@pytest.mark.parametrize("memory", MEMORIES)
def test_every_memory_has_every_preset(memory):
    for name in ("tiny", "100m", "200m", "400m"):
        config = em.MemoryLlamaConfig.preset(name, memory=memory)
        assert em.MemoryLlamaConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


def test_output_projections_start_smaller():
    torch.manual_seed(0)
    model = em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset("tiny"))
    layer = model.model.layers[0]
    assert abs(layer.self_attn.q_proj.weight.std() - 0.02) < 0.002
    assert abs(layer.self_attn.o_proj.weight.std() - 0.02 / 8**0.5) < 0.0005


# -- files of other people ---------------------------------------------------------------------------------------------


def test_unknown_keys_of_a_file_are_kept_and_named(tmp_path):
    """A user's own note must not make a model unreadable; a misspelt setting must not go unnoticed."""
    config = em.MemoryLlamaConfig.preset("tiny")
    values = config.to_dict() | {"note": "trained on a Tuesday", "blok_size": 7}
    with pytest.warns(
        UserWarning, match=r"unknown keys in the configuration: blok_size \(did you mean 'block_size'\?\), note"
    ):
        loaded = em.MemoryLlamaConfig.from_dict(values)
    assert (loaded.note, loaded.blok_size, loaded.block_size) == ("trained on a Tuesday", 7, 64)
    loaded.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="unknown keys in the configuration: blok_size"):
        again, unused = em.MemoryLlamaConfig.from_pretrained(tmp_path, note="now", use=1, return_unused_kwargs=True)
    assert again.note == "now" and unused == {"use": 1}
    with pytest.raises(ValueError, match="no setting 'note'"):
        em.MemoryLlamaConfig(note="typed by hand")


def test_what_transformers_writes_is_known(tmp_path, recwarn):
    values = em.MemoryLlamaConfig.preset("tiny").to_dict() | {
        "auto_map": {"AutoConfig": "file.Class"},
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "num_labels": 3,
        "torch_dtype": "bfloat16",
    }
    loaded = em.MemoryLlamaConfig.from_dict(values)
    copied = em.MemoryLlamaConfig(**loaded.to_dict())
    for config in (loaded, copied):
        assert config.auto_map == values["auto_map"] and config.quantization_config == values["quantization_config"]
        assert config.num_labels == 3
    assert not recwarn.list


@pytest.mark.parametrize("memory", MEMORIES)
def test_quantised_models_are_saved_and_loaded(memory, tmp_path, ids):
    """The mixers and gates of memories are no linear layers, and stay as they are."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    small_model(memory).save_pretrained(tmp_path / "plain")
    how = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=how).eval()
    model.save_pretrained(tmp_path / "quantised")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "quantised").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
