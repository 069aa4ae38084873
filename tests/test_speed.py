"""Speed guards: work that can be counted on any machine, and time on the kind of machine that has a record."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import elastic_memory as em
from elastic_memory.memory import MEMORIES
from elastic_memory.reproduction.tables import speed

RECORD = Path(__file__).parents[1] / "results" / "speed-paper.json"
# Of the preset tiny: products of a training step on 2 rows of 512 tokens, in millions, and operations that torch is
# asked for in that step, and for one more token of a stream. What falls may be written down lower.
WORK = {
    "none": (1502, 1155, 385),
    "elastic": (1526, 1364, 387),
    "memorizing": (1502, 1336, 394),
    "infini": (1573, 2863, 513),
    "melodi": (2131, 10619, 401),
    "sampled": (1502, 1330, 387),
    "recent": (1512, 1742, 387),
    "means": (1521, 2481, 387),
    "merged": (1610, 4347, 400),
    "recent_merged": (1566, 4732, 400),
    "clock": (1527, 1524, 387),
    "dyadic": (1514, 1544, 387),
    "outliers": (1517, 1774, 387),
}
MORE = 1.05, 1.15, 1.15  # releases of torch count a few operations differently
SLOWER = 0.95


class Operations(TorchDispatchMode):
    """Counts what reaches torch."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def work(memory):
    torch.manual_seed(0)
    model = em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset("tiny", memory=memory)).train()
    ids = torch.randint(1, 512, (2, 512))
    model(ids, labels=ids).loss.backward()  # builds operators
    with FlopCounterMode(display=False) as flops, Operations() as step:
        model(ids, labels=ids).loss.backward()
    cache = em.MemoryCache(model.eval())
    with torch.no_grad():
        model(ids[:, :200], past_key_values=cache)
        model(ids[:, 200:201], past_key_values=cache)
        with Operations() as token:
            model(ids[:, 201:202], past_key_values=cache)
    return flops.get_total_flops() / 1e6, step.counts.total(), token.counts.total()


@pytest.mark.parametrize("memory", MEMORIES)
def test_no_more_work_than_recorded(memory):
    found = work(memory)
    assert all(now <= more * then for now, then, more in zip(found, WORK[memory], MORE, strict=True)), found


def slower(row, record, plan):
    """Ratios, now and recorded, if training with a memory has lost more against Transformer++ than is allowed."""
    preset = plan["presets"]["1x"]
    models = {name: speed.build(speed._config((preset, name, "1x"))) for name in ("Transformer++", row)}
    now, _ = speed.timed(models, plan)
    then = record["cells"][f"{row}|1x"]
    return (
        (now.training_ratio, then["training_ratio"]) if now.training_ratio < SLOWER * then["training_ratio"] else None
    )


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["Elastic, exponential", "Infini-Transformer", "Mem. Transformer"])
def test_no_slower_than_recorded(row):
    record = json.loads(RECORD.read_text())
    if torch.cuda.get_device_name() != record["environment"]["device"]:
        pytest.skip(
            f"no record of {torch.cuda.get_device_name()}: that of {record['environment']['device']} is no measure"
        )
    assert slower(row, record, speed.PLANS["paper"]) is None


@pytest.mark.parametrize(("recorded", "found"), [(1e-6, False), (1e6, True)])
def test_the_guard_of_time_sees_what_is_slower(recorded, found):
    record = {"cells": {"Mem. Transformer|1x": {"training_ratio": recorded}}}
    plan = speed.PLANS["smoke"] | {"length": 128, "repeats": 1}
    assert (slower("Mem. Transformer", record, plan) is not None) == found
