"""Sizes at the paper's settings: state as the paper counts it, state carried, parameters added."""

import pytest
import torch

import elastic_memory as em
from elastic_memory.memory import MEMORIES

MULTIPLES = (1, 2, 4, 8, 16)
MELODI = dict(zip(MULTIPLES, (1_519_560, 3_087_720, 6_369_840, 13_517_280, 30_144_960), strict=True))


def totals(memory, multiple=1, size="100m"):
    """(layers, floats as the paper counts, floats carried, parameters added, all parameters)"""
    with torch.device("meta"):
        config = em.MemoryLlamaConfig.preset(size, memory=memory, memory_multiple=multiple)
        model = em.MemoryLlamaForCausalLM(config)
    report = model.memory_report()
    sums = [sum(line[key] for line in report) for key in ("state_floats", "carried_floats", "extra_parameters")]
    return ([line["layer"] for line in report], *sums, sum(p.numel() for p in model.parameters()))


BASE = 97_707_600


@pytest.mark.parametrize("multiple", MULTIPLES)
@pytest.mark.parametrize(
    ("memory", "added"), [("elastic", 0), ("memorizing", 8), ("recent", 0), ("clock", 0), ("dyadic", 0)]
)
def test_one_layer_with_540_tokens_or_coefficients(memory, added, multiple):
    floats = 777_600 * multiple
    assert totals(memory, multiple) == ([8], floats, floats, added, BASE + added)


@pytest.mark.parametrize("multiple", MULTIPLES)
def test_sampled_carries_the_time_of_each_token_besides(multiple):
    assert totals("sampled", multiple) == ([8], 777_600 * multiple, 778_140 * multiple, 0, BASE)


@pytest.mark.parametrize("multiple", MULTIPLES)
def test_means_carries_two_lengths_of_each_slot_besides(multiple):
    assert totals("means", multiple) == ([8], 777_600 * multiple, 786_240 * multiple, 728, BASE + 728)


@pytest.mark.parametrize("multiple", MULTIPLES)
def test_merged_carries_the_number_of_tokens_of_each_slot_besides(multiple):
    assert totals("merged", multiple) == ([8], 777_600 * multiple, 781_920 * multiple, 0, BASE)


@pytest.mark.parametrize("multiple", MULTIPLES)
def test_outliers_carries_the_novelty_of_each_raw_token_besides(multiple):
    assert totals("outliers", multiple) == ([8], 777_600 * multiple, 779_760 * multiple, 0, BASE)


@pytest.mark.parametrize("multiple", MULTIPLES)
def test_melodi(multiple):
    added = MELODI[multiple]
    assert totals("melodi", multiple) == (list(range(12)), 777_600 * multiple, 388_800 * multiple, added, BASE + added)


def test_infini_and_none():
    assert totals("infini") == (list(range(12)), 777_600, 786_240, 96, BASE + 96)
    assert totals("none") == ([], 0, 0, 0, BASE)


@pytest.mark.parametrize(("size", "floats"), [("200m", 1_166_400), ("400m", 1_555_200)])
@pytest.mark.parametrize("memory", [name for name in MEMORIES if name != "none"])
def test_all_have_the_same_memory_at_every_size(memory, size, floats):
    assert totals(memory, size=size)[1] == floats


def test_infini_has_one_size():
    with pytest.raises(ValueError, match=r"memory_multiple=2.*heads"):
        em.MemoryLlamaConfig.preset("100m", memory="infini", memory_multiple=2)
