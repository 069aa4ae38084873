"""Does a model remember what it was told, and how far back? Four synthetic tasks, learnt in minutes.

A sample is a row of blocks: something is *said* in one block, a cycle of filler words follows, and at the end it is
*asked* for. Distance is counted in blocks between the two, so that at any distance from 1 on a model without memory
can only guess. Tokens are plain numbers, so that any model with a large enough vocabulary can take part.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from elastic_memory.evaluation.losses import Model, block_size_of, streamed_logits
from elastic_memory.shapes import Int, Tensor

SAY, ASK, SET, END = range(4)
FILLER = range(4, 12)
SYMBOLS = range(12, 28)
VOCABULARY = SYMBOLS.stop


class Fact(NamedTuple):
    """What is said, how it is asked for, and the answer."""

    said: list[int]
    asked: list[int]
    answer: list[int]


def passkey(random: Random) -> Fact:
    """Two symbols, said twice; asked for both."""
    key = random.choices(SYMBOLS, k=2)
    return Fact([SAY, *key, SAY, *key], [ASK], key)


def associative(random: Random) -> Fact:
    """Four symbols, each followed by another one; asked what followed one of them."""
    names, values = random.sample(SYMBOLS, k=4), random.choices(SYMBOLS, k=4)
    said = [token for pair in zip(names, values, strict=True) for token in (SAY, *pair)]
    chosen = random.randrange(4)
    return Fact(said, [ASK, names[chosen]], [values[chosen]])


def copying(random: Random) -> Fact:
    """Eight symbols; asked for all of them in order."""
    span = random.choices(SYMBOLS, k=8)
    return Fact([SAY, *span, END], [ASK], span)


def variables(random: Random) -> Fact:
    """Assignments as in a program, one variable assigned anew; asked for the value a variable has at the end."""
    names = random.sample(SYMBOLS, k=3)
    lines = [(name, random.choice(SYMBOLS)) for name in [*names, random.choice(names)]]
    said = [token for name, value in lines for token in (SET, name, value, END)]
    name, value = random.choice(list(dict(lines).items()))
    return Fact(said, [ASK, name], [value])


TASKS: dict[str, Callable[[Random], Fact]] = {
    "passkey": passkey,
    "associative": associative,
    "copying": copying,
    "variables": variables,
}


@dataclass(frozen=True)
class Recall:
    """Share of questions answered without a mistake, and what guessing would reach."""

    task: str
    distance: int
    blocks: int
    accuracy: float
    chance: float


def sample(fact: Fact, distance: int, blocks: int, block_size: int, random: Random) -> list[int]:
    """A row of `blocks` blocks that says the fact somewhere in the block `distance` before the last, and asks last."""
    start, end = (blocks - 1 - distance) * block_size, blocks * block_size
    question = [*fact.asked, *fact.answer]
    if not 0 <= distance < blocks:
        raise ValueError(f"distance {distance} in a row of {blocks} blocks: choose from 0 to {blocks - 1}")
    room = block_size - len(fact.said) - (len(question) if distance == 0 else 0)
    if room < 0:
        raise ValueError(f"blocks of {block_size} tokens are too short to say {len(fact.said)} of them")
    phase = random.randrange(len(FILLER))
    row = [FILLER[(i + phase) % len(FILLER)] for i in range(end)]
    place = start + random.randint(0, room)
    row[place : place + len(fact.said)] = fact.said
    row[end - len(question) :] = question
    return row


def batch(
    task: str, distances: Iterable[int], blocks: int, block_size: int, random: Random
) -> tuple[Int[Tensor, "row token"], int]:
    """One row for each distance, and how many tokens at the end of every row are the answer."""
    if task not in TASKS:
        raise ValueError(f"task {task!r}: choose from {', '.join(TASKS)}")
    facts = [(TASKS[task](random), distance) for distance in distances]
    rows = [sample(fact, distance, blocks, block_size, random) for fact, distance in facts]
    return torch.tensor(rows), len(facts[0][0].answer)


def recall(
    model: Model, task: str, distances: Sequence[int], blocks: int | None = None, samples: int = 64, seed: int = 1
) -> list[Recall]:
    """Accuracy at each distance, in rows of `blocks` blocks (by default just long enough for the distance).

    Rows are streamed, so that lengths far beyond those trained on cost no memory.
    """
    size = block_size_of(model)
    results = []
    for distance in distances:
        length = blocks or distance + 1
        rows, answer = batch(task, [distance] * samples, length, size, Random(f"{seed} {task} {distance} {length}"))
        logits = [logits[:, -answer:] for _, logits in streamed_logits(model, rows[:, :-1], size)][-1]
        right = (logits.argmax(-1).cpu() == rows[:, -answer:]).all(dim=1)
        results.append(Recall(task, distance, length, float(right.float().mean()), len(SYMBOLS) ** -float(answer)))
    return results


def learn(
    model: Model,
    task: str,
    blocks: int = 9,
    steps: int = 600,
    *,
    rows: int = 32,
    learning_rate: float = 2e-3,
    seed: int = 0,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train on the answers of random samples at random distances.

    Lengths are random too, from 2 blocks to a bound that reaches `blocks` halfway: near things are learnt first, and
    not forgotten later.
    """
    device, size = next(model.parameters()).device, block_size_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    random = Random(seed)
    model.train()
    for step in range(steps):
        bound = min(blocks, 2 + 2 * (blocks - 1) * step // steps)
        length = random.randint(2, bound)
        ids, answer = batch(task, [random.randint(1, length - 1) for _ in range(rows)], length, size, random)
        ids = ids.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(ids[:, :-1], logits_to_keep=answer).logits
        loss = cross_entropy(logits.float().flatten(0, 1), ids[:, -answer:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report(step, float(loss.detach()))
    model.eval()
