"""The recall suite: its samples say and ask what they claim, and a memory learns what a model without cannot."""

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import elastic_memory as em
from elastic_memory.evaluation import learn, recall
from elastic_memory.evaluation.metrics import Evaluation, evaluate
from elastic_memory.evaluation.recall import FILLER, SAY, SET, TASKS, VOCABULARY, batch, sample
from tests.evaluation.conftest import llama, model_with


@given(task=st.sampled_from(list(TASKS)), distance=st.integers(0, 5), more=st.integers(0, 3), seed=st.integers(0, 999))
def test_a_sample_says_it_once_at_its_distance_and_asks_last(task, distance, more, seed):
    random, blocks = Random(seed), distance + 1 + more
    fact = TASKS[task](random)
    row = sample(fact, distance, blocks, 32, random)
    assert len(row) == blocks * 32 and max(row) < VOCABULARY
    asked = [token for question in fact.questions for token in (*question.asked, *question.answer)]
    assert row[len(row) - len(asked) :] == asked
    said = [i for i, token in enumerate(row[: len(row) - len(asked)]) if token not in FILLER]
    assert [row[i] for i in said] == fact.said
    assert {i // 32 for i in said} == {blocks - 1 - distance}


@given(seed=st.integers(0, 999))
def test_answers_follow_from_what_was_said(seed):
    said, ((_, answer),) = TASKS["passkey"](Random(seed))
    assert said == [SAY, *answer, SAY, *answer]

    said, questions = TASKS["associative"](Random(seed))
    pairs = {said[i + 1]: said[i + 2] for i in range(0, len(said), 3)}
    assert {asked[1]: answer[0] for asked, answer in questions} == pairs and len(pairs) == 4

    said, ((_, answer),) = TASKS["copying"](Random(seed))
    assert said[1:-1] == answer and len(answer) == 8

    said, questions = TASKS["variables"](Random(seed))
    values = {}
    for i in range(0, len(said), 4):
        assert said[i] == SET
        values[said[i + 1]] = said[i + 2]
    assert {asked[1]: answer[0] for asked, answer in questions} == values and len(said) == 16


@pytest.mark.parametrize("task", TASKS)
def test_the_tokens_that_are_scored_are_the_answers(task):
    rows, answered = batch(task, [1, 2, 0], 3, 32, Random(5))
    random = Random(5)
    facts = [TASKS[task](random) for _ in range(3)]
    for row, fact in zip(rows, facts, strict=True):
        for number, question in enumerate(fact.questions):
            assert row[-len(answered) :][answered == number].tolist() == question.answer


def test_accuracy_counts_whole_answers():
    class Oracle(torch.nn.Module):
        """Knows the row, and gets the answers of every other row wrong in one token."""

        def __init__(self, task, distance, rows):
            super().__init__()
            self.config = type("Config", (), {"vocab_size": VOCABULARY})()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            size = 2048
            self.rows, _ = batch(
                task, [distance] * rows, distance + 1, size, Random(f"1 {task} {distance} {distance + 1}")
            )
            self.seen = 0

        def forward(self, ids, past_key_values=None, **kwargs):
            targets = self.rows[:, self.seen + 1 : self.seen + 1 + ids.shape[1]].clone()
            self.seen += ids.shape[1]
            targets[::2, -1] = 0
            logits = torch.nn.functional.one_hot(targets, VOCABULARY).float()
            return type("Output", (), {"logits": logits, "past_key_values": ()})()

    (result,) = recall(Oracle("copying", 2, 10), "copying", [2], samples=10)
    assert result.accuracy == 0.5 and result.blocks == 3
    assert result.chance == pytest.approx(16**-8)


def test_an_untrained_model_guesses_whatever_the_length():
    model = model_with(vocab_size=VOCABULARY, block_size=16)
    results = recall(model, "variables", [1, 64], samples=32) + recall(model, "variables", [1, 3], blocks=5, samples=32)
    assert [(r.distance, r.blocks) for r in results] == [(1, 2), (64, 65), (1, 5), (3, 5)]
    assert all(r.accuracy < 0.4 for r in results)


def tiny(memory):
    torch.manual_seed(0)
    extra = {"memory_order": 64, "memory_points": 64, "sampling": "uniform"} if memory != "none" else {}
    config = em.MemoryLlamaConfig.preset("tiny", memory=memory, vocab_size=VOCABULARY, block_size=16, **extra)
    return em.MemoryLlamaForCausalLM(config)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["elastic", "none"])
def test_a_passkey_8_blocks_back_is_learnt_with_memory_only(memory):
    model = tiny(memory)
    learn(model, "passkey", blocks=9, steps=400, learning_rate=3e-3)
    (result,) = recall(model, "passkey", [8], samples=256)
    if memory == "none":
        assert result.accuracy < 0.03  # chance is 1/256
    else:
        assert result.accuracy > 0.8
        # Four times as far as ever trained: a larger state, without further training, sees it again.
        (blurred,) = recall(model, "passkey", [32], samples=256)
        model.set_retrieval(order=512, points=512)
        (sharp,) = recall(model, "passkey", [32], samples=256)
        assert sharp.accuracy > 0.8 and blurred.accuracy < 0.6


def test_a_passkey_1_block_back_is_learnt_in_seconds():
    model = tiny("elastic")
    losses = []
    learn(model, "passkey", blocks=2, steps=100, learning_rate=3e-3, report=lambda step, loss: losses.append(loss))
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


def test_a_model_trained_for_a_metric_is_afterwards_as_it_was():
    model = model_with(vocab_size=100, block_size=16).train()
    before = [weight.clone() for weight in model.parameters()]
    evaluate(Evaluation(model=model, rows=[], recall_steps=1), ["mqar"])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert model.training and all(weight.grad is None for weight in model.parameters())


def test_bad_input_is_named():
    model = llama(VOCABULARY)
    with pytest.raises(ValueError, match="'poem': known: passkey"):
        recall(model, "poem", [1])
    with pytest.raises(ValueError, match="a vocabulary of 20"):
        recall(llama(20), "passkey", [1])
    with pytest.raises(ValueError, match="distance 5 in a row of 3 blocks"):
        recall(model, "passkey", [5], blocks=3)
    with pytest.raises(ValueError, match=r"blocks of 8 tokens: the task needs [0-9]+, choose larger ones"):
        recall(model_with(vocab_size=VOCABULARY), "copying", [1])
