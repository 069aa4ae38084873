"""Does a model remember what it was told, and for how long? Four synthetic tasks, learned in minutes.

A sample is a row of blocks: something is *said* in one block, filler tokens follow, and the last block *asks* for it.
The distance is the number of blocks between the two; from distance 1 on, a model without memory can only guess. Tokens
are small ids, so that any model with a large enough vocabulary can take part.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from elastic_memory.common.defaults import RECALL_STEPS
from elastic_memory.common.names import suggest
from elastic_memory.evaluation.losses import Model, block_size_of, streamed_logits
from elastic_memory.memory.counts import GATES
from elastic_memory.shapes import Int, Tensor

SAY, ASK, SET, END = range(4)
FILLER = range(4, 12)
NAMES = range(12, 20)
VALUES = range(20, 36)
VOCABULARY = VALUES.stop
GATE_LR_SCALE = 10  # as in the recipes: gates start nearly closed
DISTANCES = (1, 2, 4, 8, 16, 32, 64)  # blocks between what is said and what is asked


class Question(NamedTuple):
    """A question, and its answer."""

    asked: list[int]
    answer: list[int]


class Fact(NamedTuple):
    """What is said, and the questions about it."""

    said: list[int]
    questions: list[Question]


def passkey(random: Random) -> Fact:
    """Two values, said twice; the question asks for both."""
    key = random.choices(VALUES, k=2)
    return Fact([SAY, *key, SAY, *key], [Question([ASK], key)])


def associative(random: Random) -> Fact:
    """Four names, each with a value; asks for each value, in another order."""
    pairs = {name: random.choice(VALUES) for name in random.sample(NAMES, k=4)}
    said = [token for name, value in pairs.items() for token in (SAY, name, value)]
    return Fact(said, [Question([ASK, name], [pairs[name]]) for name in random.sample(list(pairs), k=4)])


def copying(random: Random) -> Fact:
    """Eight values; asks for all of them in order."""
    span = random.choices(VALUES, k=8)
    return Fact([SAY, *span, END], [Question([ASK], span)])


def variables(random: Random) -> Fact:
    """Assignments as in a program, one variable assigned twice; asks for the final value of each."""
    names = random.sample(NAMES, k=3)
    lines = [(name, random.choice(VALUES)) for name in [*names, random.choice(names)]]
    said = [token for name, value in lines for token in (SET, name, value, END)]
    return Fact(said, [Question([ASK, name], [dict(lines)[name]]) for name in random.sample(names, k=3)])


TASKS: dict[str, Callable[[Random], Fact]] = {
    "passkey": passkey,
    "associative": associative,
    "copying": copying,
    "variables": variables,
}


@dataclass(frozen=True)
class Recall:
    """Share of questions answered without a mistake, beside that of guessing."""

    task: str
    distance: int
    blocks: int
    accuracy: float
    chance: float


def sample(fact: Fact, distance: int, blocks: int, block_size: int, random: Random) -> list[int]:
    """A row of blocks that says the fact `distance` blocks before the last, and ends with the questions."""
    if not 0 <= distance < blocks:
        raise ValueError(f"distance {distance} in a row of {blocks} blocks: choose from 0 to {blocks - 1}")
    asked = [token for question in fact.questions for part in question for token in part]
    room = block_size - len(fact.said) - (len(asked) if distance == 0 else 0)
    if room < 0 or len(asked) >= block_size:
        raise ValueError(
            f"blocks of {block_size} tokens: the task needs {len(fact.said) + len(asked)}, choose larger ones"
        )
    phase, end = random.randrange(len(FILLER)), blocks * block_size
    row = [FILLER[(i + phase) % len(FILLER)] for i in range(end)]
    place = (blocks - 1 - distance) * block_size + random.randint(0, room)
    row[place : place + len(fact.said)] = fact.said
    row[end - len(asked) :] = asked
    return row


def batch(
    task: str, distances: Iterable[int], blocks: int, block_size: int, random: Random
) -> tuple[Int[Tensor, "row token"], Int[Tensor, " tail"]]:
    """One row per distance; and for the last tokens of all rows the question they answer, -1 for none."""
    if task not in TASKS:
        raise ValueError(f"task {task!r}: {suggest(task, TASKS)}")
    facts = [(TASKS[task](random), distance) for distance in distances]
    rows = [sample(fact, distance, blocks, block_size, random) for fact, distance in facts]
    # All facts of a task have questions of the same form.
    answered = [
        mark
        for number, question in enumerate(facts[0][0].questions)
        for mark in [-1] * len(question.asked) + [number] * len(question.answer)
    ]
    return torch.tensor(rows), torch.tensor(answered)


def recall(
    model: Model, task: str, distances: Sequence[int], blocks: int | None = None, samples: int = 64, seed: int = 1
) -> list[Recall]:
    """Accuracy at each distance, in rows of `blocks` blocks (by default just long enough for the distance).

    Rows are streamed, so that lengths far beyond those trained on cost no memory.
    """
    size = _fitting_block_size(model)
    results = []
    for distance in distances:
        length = blocks or distance + 1
        rows, answered = batch(task, [distance] * samples, length, size, Random(f"{seed} {task} {distance} {length}"))
        tail = len(answered)
        for _, logits in streamed_logits(model, rows[:, :-1], size, keep=tail):
            last = logits[:, -tail:]
        hit = last.argmax(-1).cpu() == rows[:, -tail:]
        right = torch.stack([hit[:, answered == question].all(dim=1) for question in range(int(answered.max()) + 1)])
        chance = len(VALUES) ** -float((answered == 0).sum())
        results.append(Recall(task, distance, length, float(right.float().mean()), chance))
    return results


def learn(
    model: Model,
    task: str,
    blocks: int = 9,
    steps: int = RECALL_STEPS,
    *,
    rows: int = 32,
    learning_rate: float = 2e-3,
    seed: int = 0,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train on the answers of random samples at random distances.

    Lengths are random too: from 2 blocks to a bound that grows to `blocks` in the first half of the steps.
    """
    size, random = _fitting_block_size(model), Random(seed)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(steps):
            length = random.randint(2, min(blocks, 2 + 2 * (blocks - 1) * step // steps))
            ids, answered = batch(task, [random.randint(1, length - 1) for _ in range(rows)], length, size, random)
            yield ids[:, :-1], ids[:, -len(answered) :].masked_fill(answered < 0, -100)

    fit(model, batches(), learning_rate, report)


def fit(
    model: Model,
    batches: Iterable[tuple[Tensor, Tensor]],
    learning_rate: float = 2e-3,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train on batches of ids and of the labels of their last tokens, -100 for none."""
    device = next(model.parameters()).device
    gates = [weight for name, weight in model.named_parameters() if name.endswith(GATES)]
    others = [weight for name, weight in model.named_parameters() if not name.endswith(GATES)]
    groups: list[dict[str, Any]] = [{"params": others}]
    if gates:
        groups.append({"params": gates, "lr": GATE_LR_SCALE * learning_rate, "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    for step, (ids, labels) in enumerate(batches):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(ids.to(device), logits_to_keep=labels.shape[1]).logits
        loss = cross_entropy(logits.float().flatten(0, 1), labels.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report(step, float(loss.detach()))
    model.eval()


def _fitting_block_size(model: Model) -> int:
    if model.config.vocab_size < VOCABULARY:
        raise ValueError(f"a vocabulary of {model.config.vocab_size}: the recall tasks use {VOCABULARY} tokens")
    return block_size_of(model)
