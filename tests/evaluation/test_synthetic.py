"""MQAR and RULER: rows and prompts have the layout of the originals, and the scores are theirs."""

import re
from collections import Counter
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_memory.data import load_tokenizer
from elastic_memory.evaluation import mqar, ruler
from elastic_memory.evaluation.recall import fit
from elastic_memory.evaluation.words import words
from tests.conftest import small_model


@given(st.integers(1, 8), st.integers(0, 60), st.integers(0, 10**6))
@settings(max_examples=50)
def test_rows_of_mqar_are_laid_out_as_in_zoology(pairs, more, seed):
    length, vocabulary = 4 * pairs + 2 * more, 4 * pairs + 2 * more + 40
    rows, labels = mqar.examples(3, length, pairs, vocabulary, np.random.default_rng(seed))
    assert rows.shape == labels.shape == (3, length)
    for row, label in zip(rows.tolist(), labels.tolist(), strict=True):
        keys, values = row[: 2 * pairs : 2], row[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert all(1 <= key < vocabulary // 2 for key in keys)
        assert all(vocabulary // 2 <= value < vocabulary for value in values)
        asked = [place for place, value in enumerate(label) if value != -100]
        assert len(asked) == pairs and all(place >= 2 * pairs and place % 2 == 0 for place in asked)
        assert {row[place]: label[place] for place in asked} == dict(zip(keys, values, strict=True))


def test_gaps_of_mqar_follow_the_power_law():
    rows, labels = mqar.examples(4000, 64, 1, 100, np.random.default_rng(0))
    places = ((labels != -100).float().argmax(1) - 2) // 2
    expected = np.arange(1, 32) ** -0.99
    found = np.bincount(places.numpy(), minlength=31) / len(rows)
    assert np.abs(found - expected / expected.sum()).max() < 0.02


def test_what_does_not_fit_is_refused():
    for pairs, length, vocabulary in ((3, 10, 99), (2, 9, 99), (2, 64, 64)):
        with pytest.raises(ValueError, match=f"{pairs} pairs in rows of {length} tokens, vocabulary {vocabulary}"):
            mqar.examples(1, length, pairs, vocabulary, np.random.default_rng(0))
    with pytest.raises(ValueError, match="MQAR needs more tokens"):
        mqar.sizes(small_model(block_size=64))


class Oracle(torch.nn.Module):
    """Looks up what followed a token when it first came; small_model's configuration, to be measured as a model."""

    def __init__(self, vocabulary):
        super().__init__()
        self.config, self.weight = small_model(vocab_size=vocabulary).config, torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, **_):
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size)
        for row, ids in enumerate(input_ids.tolist()):
            for place, token in enumerate(ids):
                logits[row, place, ids[ids.index(token) + 1] if ids.index(token) + 1 < len(ids) else 0] = 1
        return type("Output", (), {"logits": logits})


def test_one_who_looks_up_keys_gets_all_of_mqar(monkeypatch):
    monkeypatch.setattr(mqar, "block_size_of", lambda model: 32)
    result = mqar.mqar(Oracle(300), 8, samples=8)
    assert result.accuracy > 0.9, "all but keys that random tokens repeat before their pair"
    assert (result.length, result.chance) == (128, 1 / 150)


def test_mqar_is_learnt_a_little_in_a_few_steps():
    model = small_model(vocab_size=100, block_size=8)
    losses = []
    fit(model, mqar.batches(model, 4, rows=4), report=lambda step, loss: losses.append(loss))
    assert len(losses) == 4 and not model.training
    assert 0 <= mqar.mqar(model, 4, samples=4).accuracy <= 1


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("bytes")


# RULER's templates; `_` stands for what its generators fill in.
TEMPLATES = {
    "niah": "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the number afterwards.\n_CONTEXT\nWhat is the special magic number for _KEY mentioned in the provided text? "
    "The special magic number for _KEY mentioned in the provided text is",
    "variables": "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n_CONTEXT\n"
    "Question: Find all variables that are assigned the value _KEY in the text above. Answer: According to the "
    "chain(s) of variable assignment in the text above, 5 variables are assigned the value _KEY, they are: ",
    "words": "Below is a numbered list of words. In these words, some appear more often than others. Memorize the "
    "ones that appear most often.\n_CONTEXT\nQuestion: What are the 10 most common words in the above list? Answer: "
    "The top 10 words that appear most often in the list are:",
}
EXAMPLES = {"niah": "", "variables": r"{}(?: [A-Z]{{3}}){{5}}\n\n", "words": r"{}(?: \d+\. [a-z-]+){{10}}\n"}


class Words:
    """A tokenizer of which every word is a token, about as long as those that RULER was made for."""

    name = "words"

    def encode(self, text):
        return text.split()


def parts(task, text):
    """What fills the blanks of the worked example, if there is one, and of the prompt."""
    template = re.escape(TEMPLATES[task]).replace("_CONTEXT", "(?P<context>.*)")
    template = template.replace("_KEY", r"(?P<key>[a-z-]+|\d{5})", 1).replace("_KEY", "(?P=key)")
    first = template.replace("(?P<", "(?P<first_").replace("(?P=", "(?P=first_")
    found = re.fullmatch(EXAMPLES[task].format(first) + template, text, re.DOTALL)
    assert found, text
    return found


@pytest.mark.parametrize("task", ruler.TASKS)
@pytest.mark.parametrize("length", [1500, 4096])
def test_prompts_are_those_of_ruler(task, length):
    """Compared with NVIDIA/RULER's own generators, run beside ours: docs/evaluation.md says what differs."""
    for prompt in ruler.prompts(task, length, 3, Words()):
        found = parts(task, prompt.text)
        if task == "niah":
            lines = found["context"].split("\n")
            assert sorted(lines, key=ruler.NOISE.__eq__)[1:] == [ruler.NOISE] * (len(lines) - 1)
        elif task == "variables":
            example = found["first_context"].split("\n")
            said = re.findall(r"VAR [A-Z]{3} = (?:\d{5}$|VAR [A-Z]{3} $)", found["first_context"], re.MULTILINE)
            assert len(said) == 5 and example.count(ruler.NOISE) == len(example) - 5
            assert 480 < len(found[0].partition("\n\nMemorize")[0].split()) <= 505, "500 tokens and the answers"
        else:
            often = [(10, 3), (30, 3)] if length >= 4096 else [(3, 1), (6, 1)]
            for name, counts in zip(("first_context", "context"), often, strict=True):
                listed = re.findall(r"(\d+)\. ([a-z-]+)", found[name])
                assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
                told = Counter(Counter(word for _, word in listed).values())
                assert told.keys() == set(counts) and told[counts[0]] == 10
            assert sum(told.values()) > 10


def test_needles_lie_at_every_depth():
    texts = [ruler.niah(20, Random(seed)).text.split("\n")[1:] for seed in range(400)]
    places = Counter(next(i for i, line in enumerate(lines) if line != ruler.NOISE) for lines in texts)
    assert set(places) == set(range(20)) and max(places.values()) < 45, "uniform: 20 each"


@pytest.mark.parametrize("task", ruler.TASKS)
@pytest.mark.parametrize("length", [3000, 9000])
def test_prompts_fill_their_length_and_hold_what_is_asked(task, length, tokenizer):
    made = list(ruler.prompts(task, length, 3, tokenizer))
    assert len({prompt.text for prompt in made}) == 3
    for prompt in made:
        size = len(tokenizer.encode(prompt.text)) + ruler.TASKS[task].answer
        assert length * 0.8 < size <= length
        assert all(answer in prompt.text for answer in prompt.answers)


def test_a_length_that_is_too_short_is_refused(tokenizer):
    for task, length in (("niah", 300), ("variables", 1500), ("words", 4500)):
        with pytest.raises(ValueError, match=f"RULER's {task} does not fit into {length:,} tokens of bytes"):
            next(ruler.prompts(task, length, 1, tokenizer))


def test_the_needle_stands_once_in_repeated_text():
    text, (value,) = ruler.niah(50, Random(0))
    first, *lines, last = text.split("\n")
    (needle,) = [line for line in lines if line != ruler.NOISE]
    key = re.fullmatch(r"One of the special magic numbers for ([a-z-]+) is: (\d{7})\.", needle)
    assert key[2] == value and len(lines) == 51
    assert first.startswith("A special magic number is hidden within the following text.")
    assert last.endswith(f"The special magic number for {key[1]} mentioned in the provided text is")


def test_variables_form_one_chain_in_order():
    text, names = ruler.variables(40, Random(1))
    _, _, asked = text.rpartition("Memorize and track")
    said = re.findall(r"^VAR (\w+) = (?:VAR )?(\w+) ?$", asked, re.MULTILINE)
    value = re.search(r"assigned the value (\d{5}) in the text above", asked)[1]
    assert said == [(new, old) for old, new in zip([value, *names], names, strict=False)]
    assert text.count("Question: ") == 2 and asked.endswith(f"5 variables are assigned the value {value}, they are: ")


@pytest.mark.parametrize("short", [False, True])
def test_ten_words_are_the_most_common(short):
    text, answers = ruler.common_words(60, Random(2), short=short)
    _, _, asked = text.rpartition("Below is a numbered list")
    counts = Counter(re.findall(r"\d+\. ([a-z-]+)", asked))
    assert {word for word, _ in counts.most_common(10)} == set(answers) and len(counts) == 60
    assert set(counts.values()) == ({6, 1} if short else {30, 3})


def test_there_are_words_enough():
    for count in (10, 400, 20_000):
        assert len(set(words(count, Random(0)))) == count
    with pytest.raises(ValueError, match="different words"):
        words(10**6, Random(0))


@pytest.mark.parametrize("task", ruler.TASKS)
def test_the_score_is_the_share_of_answers_said(task, tokenizer, monkeypatch):
    model = small_model(vocab_size=300)
    made = list(ruler.prompts(task, 6000, 2, tokenizer))
    answers = iter([" ".join(made[0].answers).upper(), " ".join(made[1].answers[: len(made[1].answers) // 2])])

    def generate(ids, **_):
        return torch.cat([ids, torch.tensor([tokenizer.encode(next(answers)).tolist()], dtype=torch.long)], dim=1)

    monkeypatch.setattr(model, "generate", generate)
    result = ruler.ruler(model, tokenizer, task, 6000, samples=2)
    half = len(made[1].answers) // 2 / len(made[1].answers)
    assert result.accuracy == pytest.approx((1 + half) / 2)


def test_a_model_answers(tokenizer):
    told = []
    model = small_model(vocab_size=300, block_size=64)
    result = ruler.ruler(model, tokenizer, "niah", 800, samples=1, advance=told.append)
    assert result.accuracy == 0 and told == [1]
    with pytest.raises(ValueError, match="task 'need': known"):
        next(ruler.prompts("need", 800, 1, tokenizer))
