"""Models compiled ahead, by two of their layers, are compiled."""

import json
import os
import subprocess
import sys

import pytest

from elastic_memory.evaluation import ahead
from elastic_memory.reproduction.tables import load

SCRIPT = """
import json, sys, torch
import elastic_memory as em
from elastic_memory.evaluation.ahead import compile_ahead
from elastic_memory.evaluation.throughput import evaluate_once, tensor_cores, train_once

if __name__ == "__main__":
    config = em.MemoryLlamaConfig.preset("tiny", memory=sys.argv[1], memory_multiple=int(sys.argv[2]))
    compile_ahead([config], rows=2, length=192, processes=1)
    model, ids = em.MemoryLlamaForCausalLM(config), torch.ones(2, 192, dtype=torch.long)
    model.compile_blocks()
    with tensor_cores():
        train_once(model, ids)
        evaluate_once(model, ids)
    counts = torch._dynamo.utils.counters["inductor"]
    print(json.dumps([counts["fxgraph_cache_hit"], counts["fxgraph_cache_miss"]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "multiple"), [("none", 1), ("elastic", 2), ("memorizing", 2), ("infini", 1)])
def test_the_whole_model_finds_everything(memory, multiple, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-W", "error::UserWarning:__main__", str(script), memory, str(multiple)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    hits, misses = json.loads(done.stdout.splitlines()[-1])
    assert hits > 5 and misses == 0


def test_what_fails_beside_others_is_compiled_alone(monkeypatch):
    """As one does for want of memory; what fails again is named."""
    tries = []

    def fail(config, rows, length):
        tries.append(config)
        return None if config == "good" or (config == "large" and tries.count("large") == 2) else f"no {config}"

    monkeypatch.setattr(ahead, "_failure", fail)
    with pytest.warns(UserWarning, match="not compiled ahead: no bad") as found:
        ahead.compile_ahead(["good", "large", "bad"], 1, 8)
    assert len(found) == 1
    assert sorted(tries) == ["bad", "bad", "good", "large", "large"]


def test_the_speed_table_compiles_each_model_once():
    speed = load("speed")
    configs = [speed._config(cell) for cell in speed._order(speed.PLANS["paper"])]
    assert len(configs) == 34
    assert len({str(config.to_dict() | {"sampling": None}) for config in configs}) == 27
    orders = {config.memory_order for config in configs if config.memory == "elastic" and config.hidden_size == 720}
    assert orders == {540, 1080, 2160, 4320, 8640}
