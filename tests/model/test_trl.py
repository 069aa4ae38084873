"""TRL's trainers on our models, with rows longer than a block: SFT, DPO and GRPO."""

import math

import pytest
import torch

from elastic_memory.memory import MEMORIES
from tests.model.conftest import text


@pytest.fixture
def trl():
    return pytest.importorskip("trl")


@pytest.fixture
def rows():
    return pytest.importorskip("datasets").Dataset.from_dict


@pytest.fixture
def arguments(tmp_path):
    return dict(
        output_dir=str(tmp_path / "out"), report_to=[], use_cpu=True, max_steps=3, logging_steps=1,
        per_device_train_batch_size=2, learning_rate=1e-2, lr_scheduler_type="constant", bf16=False, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("memory", MEMORIES)
def test_sft(memory, packing, trl, rows, folder, tokenizer, arguments):
    """The first loss is the model's own, of documents that know nothing of each other, packed or not; then it falls."""
    texts = [text(0), text(1)]
    config = trl.SFTConfig(**arguments, packing=packing, max_length=64)
    trainer = trl.SFTTrainer(folder(memory), config, train_dataset=rows({"text": texts}), processing_class=tokenizer)
    ids = torch.tensor([[*tokenizer(one).input_ids, tokenizer.eos_token_id] for one in texts])
    with torch.no_grad():
        expected = trainer.model(ids, labels=ids).loss.item()
    trainer.train()
    losses = logged(trainer, "loss")
    assert losses[0] == pytest.approx(expected, abs=1e-4) and losses[-1] < expected - 0.5


def test_dpo(trl, rows, folder, tokenizer, arguments):
    """At first the model is its own reference, so that the loss is ln 2; then what is chosen becomes likelier."""
    parts = ("prompt", "chosen", "rejected")
    data = {name: [f" {text(seed + 10 * n)}" for seed in range(2)] for n, name in enumerate(parts)}
    config = trl.DPOConfig(**arguments)
    trainer = trl.DPOTrainer(folder(), args=config, train_dataset=rows(data), processing_class=tokenizer)
    trainer.train()
    losses, margins = logged(trainer, "loss"), logged(trainer, "rewards/margins")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3) and losses[-1] < losses[0]
    assert margins[-1] > 0


def test_grpo(trl, rows, folder, tokenizer, arguments):
    """Completions are generated, scored, and what scored more becomes likelier."""
    data = rows({"prompt": [text(seed) for seed in range(2)]})
    arguments |= dict(max_steps=8, per_device_train_batch_size=8)
    config = trl.GRPOConfig(**arguments, num_generations=8, max_completion_length=20)
    scores = []

    def reward(completions, **_):
        scores.append([float(one.split().count("a")) for one in completions])
        return scores[-1]

    trainer = trl.GRPOTrainer(
        folder(), reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer
    )
    trainer.train()
    assert len(scores) == 8 and sum(scores[-1]) > 2 * sum(scores[0])
