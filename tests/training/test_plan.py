import json

import pytest

from elastic_memory.model.parameters import count_parameters
from elastic_memory.training.build import build_config, flops_per_token, peak_flops
from elastic_memory.training.plan import make_plan, measurements
from elastic_memory.training.recipe import load_recipe, variants
from tests.test_cli import call

from .conftest import RECIPES

PAPER = RECIPES / "paper" / "elastic.yaml"


@pytest.mark.parametrize(("preset", "count"), [("100m", 97_707_600), ("200m", 202_548_600), ("400m", 397_798_560)])
def test_parameters_are_counted_without_padding(preset, count):
    assert count_parameters(build_config(load_recipe(PAPER, [f"model.preset={preset}"]))) == count


def test_operations_per_token_are_those_counted_by_hand():
    """Products of 131,072 tokens in TFLOP: qkv, output, gate and up, down, head; and half a block of attention."""
    by_hand = 14.68 + 4.89 + 26.09 + 13.05 + 18.12 + 13.9
    assert flops_per_token(build_config(load_recipe(PAPER)), 32768) * 131072 / 1e12 == pytest.approx(by_hand, rel=1e-3)
    full = load_recipe(RECIPES / "small" / "full.yaml")
    blocks = load_recipe(RECIPES / "small" / "none.yaml")
    attention = 12 * 12 * 384 * (8192 - 512) / 2
    assert flops_per_token(build_config(full), 8192) - flops_per_token(build_config(blocks), 8192) == attention
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("cpu") is None


def test_time_and_cost_follow_from_what_was_measured(tmp_path):
    small = load_recipe(RECIPES / "small" / "elastic.yaml")
    result = {
        "recipe": small.to_dict(), "tokens_per_second": 2e6, "machine": {"device": "NVIDIA H200", "processes": 2},
    }  # fmt: skip
    (tmp_path / "small.json").write_text(json.dumps(result))
    (tmp_path / "other.json").write_text('{"ppl": 3.0}')
    (tmp_path / "cpu.json").write_text(json.dumps({**result, "machine": {"device": "cpu", "processes": 1}}))
    (measured,) = measurements(tmp_path)
    assert measured.tokens_per_second == 1e6

    same = make_plan(small, [measured], devices=4, price=3.0)
    assert same.hours == pytest.approx(small.training.tokens / 4e6 / 3600)
    assert same.cost == pytest.approx(same.hours * 12)
    plans = [make_plan(recipe, [measured], 8, 2.5) for recipe in variants(PAPER)]
    work = {plan.tokens_per_second * flops_per_token(build_config(plan.recipe), 32768) for plan in plans}
    assert max(work) == pytest.approx(min(work)), "a larger model is slower in proportion to its work"
    assert make_plan(load_recipe(RECIPES / "paper" / "melodi.yaml"), [measured], 8, 2.5).hours is None
    assert plans[0].gigabytes == pytest.approx((16 * 97_707_600 + 65536 * 12 * 2 * (8 * 720 + 3 * 1920)) / 1e9)


def test_unknown_costs_are_not_summed_to_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COLUMNS", "150")
    (tmp_path / "none").mkdir()
    recipe = str(RECIPES / "smoke" / "elastic.yaml")
    code, shown, _ = call(monkeypatch, capsys, "train", recipe, "--plan", "--measured", str(tmp_path / "none"))
    assert code == 0
    (total,) = [line for line in shown.splitlines() if " all 1 " in line]
    assert total.count("?") == 2 and " 0 " not in total
