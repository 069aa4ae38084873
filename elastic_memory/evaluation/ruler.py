"""Three tasks of RULER (arXiv 2404.06654, NVIDIA/RULER, Apache-2.0): its prompts and scores, words of our own.

niah        a number hidden in repeated text (niah_single_1)
variables   names that were assigned a value through a chain (vt), after a worked example
words       the ten most common words of a list (cwe), after a worked example
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from string import ascii_uppercase
from typing import Any, NamedTuple

import torch

from elastic_memory.common.names import suggest
from elastic_memory.data.tokenizers import Tokenizer
from elastic_memory.evaluation.losses import Model, empty_cache, evaluating
from elastic_memory.evaluation.words import word, words

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
HOPS = 4  # of a chain of variables
EXAMPLE = 500  # tokens of the worked example of such a chain
COMMON = 10  # words to be found
SAMPLES = 16


class Prompt(NamedTuple):
    """A prompt, and what a right continuation holds."""

    text: str
    answers: list[str]


def niah(size: int, random: Random) -> Prompt:
    """A number in `size` lines of repeated text."""
    key, value = word(random), str(random.randint(10**6, 10**7 - 1))
    lines = [NOISE] * size
    lines.insert(random.randrange(size), f"One of the special magic numbers for {key} is: {value}.")
    context = "\n".join(lines)
    return Prompt(
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        f"the number afterwards.\n{context}\nWhat is the special magic number for {key} mentioned in the provided "
        f"text? The special magic number for {key} mentioned in the provided text is",
        [value],
    )


def variables(size: int, random: Random, shown: int = HOPS + 1) -> Prompt:
    """A value and a chain of variables in `size` lines of repeated text, after an example in `shown` lines."""
    example = _chain(shown, random, letters=3)
    asked = _chain(size, random, letters=5)
    return Prompt(f"{example.text} {' '.join(example.answers)}\n\n{asked.text}", asked.answers)


def _chain(size: int, random: Random, letters: int) -> Prompt:
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(random.choices(ascii_uppercase, k=letters))
        names += [] if name in names else [name]
    value = str(random.randrange(10_000, 99_999))
    said = [
        f"VAR {names[0]} = {value}",
        *(f"VAR {new} = VAR {old} " for old, new in pairwise(names)),
    ]
    lines = [NOISE] * size
    for before, (place, line) in enumerate(zip(sorted(random.sample(range(size), len(said))), said, strict=True)):
        lines.insert(place + before, line)
    context = "\n".join(lines).replace(". \n", ".\n")
    return Prompt(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{context}\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: "
        "According to the chain(s) of variable assignment in the text above, "
        f"{len(names)} variables are assigned the value {value}, they are: ",
        names,
    )


def common_words(size: int, random: Random, short: bool = False) -> Prompt:
    """`size` different words, ten of which come ten times as often; `short` has fewer of each."""
    example = _listed(20, 3, 1, random) if short else _listed(40, 10, 3, random)
    asked = _listed(size, 6, 1, random) if short else _listed(size, 30, 3, random)
    shown = " ".join(f"{place}. {it}" for place, it in enumerate(example.answers, 1))
    return Prompt(f"{example.text} {shown}\n{asked.text}", asked.answers)


def _listed(size: int, often: int, seldom: int, random: Random) -> Prompt:
    chosen = words(size, random)
    listed = chosen[:COMMON] * often + chosen[COMMON:] * seldom
    random.shuffle(listed)
    context = " ".join(f"{place}. {it}" for place, it in enumerate(listed, 1))
    return Prompt(
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        f"appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The "
        "top 10 words that appear most often in the list are:",
        chosen[:COMMON],
    )


def _shown(tokenizer: Tokenizer) -> int:
    """Lines of the example of `variables`: as many as fit into `EXAMPLE` tokens."""
    return _most(HOPS + 1, lambda size: len(tokenizer.encode(_chain(size, Random(0), letters=3).text)) <= EXAMPLE)


class RulerTask(NamedTuple):
    """How prompts are made, the least size of one, how many tokens an answer may take, and options by prompt length."""

    make: Callable[..., Prompt]
    least: int
    answer: int
    options: Callable[[Tokenizer, int], dict[str, int]] = lambda tokenizer, length: {}


TASKS = {
    "niah": RulerTask(niah, 1, 128),
    "variables": RulerTask(variables, HOPS + 1, 30, lambda tokenizer, length: {"shown": _shown(tokenizer)}),
    "words": RulerTask(common_words, 11, 120, lambda tokenizer, length: {"short": length < 4096}),
}


@dataclass(frozen=True)
class Ruler:
    """Share of the answers that the model's continuations hold."""

    task: str
    length: int
    samples: int
    accuracy: float


def prompts(task: str, length: int, samples: int, tokenizer: Tokenizer, seed: int = 1) -> Iterator[Prompt]:
    """Prompts of as many lines or words as fit into `length` tokens together with an answer."""
    if task not in TASKS:
        raise ValueError(f"task {task!r}: {suggest(task, TASKS)}")
    make, least, answer, chosen = TASKS[task]
    options = chosen(tokenizer, length)

    def made(size: int, number: int) -> Prompt:
        return make(size, Random(f"{seed} {task} {length} {number}"), **options)

    def fits(size: int, number: int = 0) -> bool:
        return len(tokenizer.encode(made(size, number).text)) + answer <= length

    if not fits(least):
        raise ValueError(
            f"RULER's {task} does not fit into {length:,} tokens of {tokenizer.name}: give more (--ruler-length)"
        )
    most = _most(least, fits)
    for number in range(samples):
        size = most
        while size > least and not fits(size, number):  # its words may be longer than those of the first
            size = max(least, size * 99 // 100)
        yield made(size, number)


def _most(least: int, fits: Callable[[int], bool]) -> int:
    """The largest size that fits, or `least`."""
    low, high = least, 2 * least
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def ruler(
    model: Model, tokenizer: Tokenizer, task: str, length: int, samples: int = SAMPLES,
    advance: Callable[[int], None] = lambda count: None,
) -> Ruler:  # fmt: skip
    """The score that RULER gives: the share of the answers found in the greedy continuation, whatever their case."""
    shares = []
    for prompt in prompts(task, length, samples, tokenizer):
        ids = torch.tensor([tokenizer.encode(prompt.text).tolist()], device=next(model.parameters()).device)
        settings: dict[str, Any] = {"max_new_tokens": TASKS[task].answer, "do_sample": False, "pad_token_id": 0}
        with evaluating(model):
            said = model.generate(ids, past_key_values=empty_cache(model), **settings)[0, ids.shape[1] :]
        text = tokenizer.decode(said.tolist()).lower()
        shares.append(sum(answer.lower() in text for answer in prompt.answers) / len(prompt.answers))
        advance(1)
    return Ruler(task, length, samples, sum(shares) / len(shares))
