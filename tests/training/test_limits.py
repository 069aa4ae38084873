"""Bad values of a recipe are one line, at once, and leave nothing behind."""

import time

import pytest

from elastic_memory.training import limits
from elastic_memory.training.session import Resume, train
from tests.test_cli import call

from .conftest import QUICK, RECIPES

BAD = {
    "training.tokens=1e18": "training.tokens: '1000000000000000000', expected less than or equal to 1000000000000000",
    "training.tokens=1e14": "at most 200,000,000 are possible",
    "training.tokens=100": "training.tokens: 100, less than one step of 512 (training.batch_tokens): give more tokens",
    "training.batch_tokens=1e15": "training.batch_tokens",
    "training.length=1e12": "training.length",
    "training.seed=-1": "training.seed: '-1', expected greater than or equal to 0",
    "training.seed=1e30": "training.seed",
    "training.beta1=2": "training.beta1: '2', expected less than 1",
    "training.epsilon=-1": "training.epsilon: '-1', expected greater than 0",
    "training.weight_decay=-1": "training.weight_decay",
    "training.gate_lr_scale=-1": "training.gate_lr_scale",
    "training.learning_rate=1e300": "training.learning_rate",
    "stability.window=0": "stability.window",
    "stability.patience=0": "stability.patience",
    "stability.sigmas=-1": "stability.sigmas",
    "stability.restarts=-1": "stability.restarts",
    "execution.micro_batch=1e12": "execution.micro_batch",
    "execution.micro_batch=3": "cannot be split into 1 processes",
    "execution.report_to=[tensorboard]": "execution.report_to: 'tensorboard' is not installed",
    "execution.report_to=[nonsense]": "execution.report_to: 'nonsense' is not installed",
    "model.config.num_hidden_layers=1000000000": "1000000000, expected a whole number from 1 to 10,000",
    "model.config.num_hidden_layers=0": "num_hidden_layers: 0, expected a whole number",
    "model.config.hidden_size=-4": "model.config.hidden_size",
    "model.config.hidden_size=100000": "GB are available: choose a smaller model",
    "model.config.vocab_size=1e15": "model.config.vocab_size",
    "model.config.memory_order=1000000000": "model.config.memory_order",
    "model.memory_multiple=1000000000": "model.memory_multiple",
    "model.config.num_attention_heads=0": "model.config.num_attention_heads",
    "model.config.num_key_value_heads=3": "4 heads do not divide by num_key_value_heads 3",
    "model.config.hidden_act=nonsense": "model: cannot be built (KeyError: 'nonsense')",
    "model.config.dtype=nonsense": "model.config: module 'torch' has no attribute 'nonsense'",
    "model.config.pad_token_id=9999": "Padding_idx must be within num_embeddings",
    "model.config.tie_word_embeddings=maybe": "'tie_word_embeddings' expected bool, got str",
    "model.config.initializer_range=abc": "'initializer_range' expected float, got str",
}


@pytest.mark.parametrize("change", BAD)
def test_a_bad_value_is_one_line_at_once_and_leaves_nothing(change, corpus, tmp_path, monkeypatch, capfd):
    out = tmp_path / "runs"
    words = [word for key in [*QUICK, change] for word in ("--set", key)]
    begin = time.monotonic()
    recipe = str(RECIPES / "smoke" / "elastic.yaml")
    code, _, said = call(monkeypatch, capfd, "train", recipe, "--data", str(corpus), "--out", str(out), *words)
    assert time.monotonic() - begin < 10
    told = [line for line in said.splitlines() if line.startswith("elastic: ")]
    assert (code, len(told)) == (2, 1), said
    assert BAD[change] in told[0]
    assert "Traceback" not in said
    assert not list(out.glob("*")), "a folder that would stand in the way of the next try"


def test_a_run_with_checkpoints_is_never_removed_for_a_bad_value(quick, corpus, stopped_at_8):
    bad = quick.replace(**{"execution.micro_batch": 3})
    with pytest.raises(ValueError, match="cannot be split"):
        train(bad, corpus, stopped_at_8.parent, Resume(allowed=True, new_machine=True))
    assert train(quick, corpus, stopped_at_8.parent, Resume(allowed=True, new_machine=True))["steps"] == 12


def test_the_memory_of_all_devices_counts(quick, monkeypatch):
    large = quick.replace(**{"model.config.vocab_size": 100_000_000, "model.preset": "400m"})
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match=r"need 2,3\d\d GB or more"):
        limits.check(large)
    monkeypatch.setenv("WORLD_SIZE", "1000")
    limits.check(large)


def test_a_finished_run_is_found_on_a_machine_that_could_not_train_it(quick, corpus, undisturbed, monkeypatch):
    monkeypatch.setattr(limits.os, "sysconf", lambda name: 1)
    assert train(quick, corpus, undisturbed.parent)["steps"] == 12
    with pytest.raises(ValueError, match="GB or more, 0 GB are available"):
        train(quick.replace(**{"training.seed": 3}), corpus, undisturbed.parent)
