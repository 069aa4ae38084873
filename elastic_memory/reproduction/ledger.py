"""The ledger: the claims of the paper's sections 3.2 to 3.7, checked against our tables.

A claim is a list of comparisons. A comparison says that one number is below another: it holds if the interval of the
difference of their logarithms, averaged over seeds, is below zero, does not hold if it is above, and is undecided
otherwise. A claim holds if all its comparisons hold, and does not hold if one does not. Intervals are 95% for all
comparisons of a claim together (Bonferroni). They come from

* two models: Student's t. The variance between seeds is pooled over all models with several seeds on that corpus and
  under those conditions; with fewer than three degrees of freedom, or one seed each, the comparison is undecided;
* two ways of reading the same runs: a bootstrap over documents. At least two runs are needed, and all must agree;
* two training speeds, at the paper's sizes: Student's t. The variance of a measured time is estimated from the two
  samplings of Elastic Memory, which run the same operations.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from elastic_memory.common.files import write_json, write_text
from elastic_memory.common.strict import read_json
from elastic_memory.report.tables import Table

HELD, NOT_HELD, UNDECIDED, MISSING = "held", "not held", "undecided at this scale", "no numbers yet"
INCOMPLETE = "numbers still missing"
SPEED = "speed-paper.json"  # used at every tier: speed does not depend on the weights
FREEDOM = 3  # the least degrees of freedom for an estimate of the variance between seeds

Place = tuple[str, str, str]  # row, column and metric of a table
Kind = tuple[str, str, str]  # a metric, on which corpus, and under which conditions it was measured


@dataclass(frozen=True)
class Claim:
    """A claim of the paper: `pairs` of places in one table, of which the first must be lower than `factor` times the
    second.
    """

    name: str
    section: str
    text: str
    table: str
    pairs: tuple[tuple[Place, Place], ...]
    factor: float = 1.0


EXP, UNI = "Elastic Memory, exponential", "Elastic Memory, uniform"
MAIN_OTHERS = ("Transformer++", "Mem. Transformer", "Infini-Transformer", "Melodi")
CORPUS_NAMES = ("books", "proofs", "edu")
SIZES = ("1x", "2x", "4x", "8x", "16x")


def _each(low: str, high: Iterable[str], columns: Iterable[str], metric: str) -> tuple[tuple[Place, Place], ...]:
    """The row `low` below each row of `high`, in each column."""
    return tuple(((low, column, metric), (other, column, metric)) for column in columns for other in high)


def _columns(names: Iterable[str], metric: str) -> list[str]:
    return [f"{{{name}}} {metric}" for name in names]


MAIN_PPL, MAIN_LONG = _columns(CORPUS_NAMES, "PPL"), _columns(CORPUS_NAMES, "LongPPL")
MEMORY_PPL, MEMORY_LONG = ([f"{size} {metric}" for size in SIZES] for metric in ("PPL", "Long."))
MODEL_PPL, MODEL_LONG = ([f"{size} {metric}" for size in SIZES[:3]] for metric in ("PPL", "LongPPL"))
INJECTED = ("{books}", "{proofs}", "{edu}", *(f"memory {size}" for size in SIZES[1:]), "model 2x", "model 4x")
S_EXP, S_UNI = "Elastic, exponential", "Elastic, uniform"
TIME, SPEEDS = "time of a step", ("1x", "200m", "400m")


def _faster(others: Iterable[str], columns: Iterable[str]) -> tuple[tuple[Place, Place], ...]:
    return tuple(pair for row in (S_EXP, S_UNI) for pair in _each(row, others, columns, TIME))


CLAIMS = (
    Claim(
        "best-ppl", "3.2", "Elastic Memory with exponential sampling has the best PPL on every corpus", "main",
        _each(EXP, (*MAIN_OTHERS, UNI), MAIN_PPL, "ppl"),
    ),
    Claim(
        "best-longppl", "3.2", "Elastic Memory with uniform sampling has the best LongPPL on every corpus", "main",
        _each(UNI, (*MAIN_OTHERS, EXP), MAIN_LONG, "longppl"),
    ),
    Claim(
        "beats-no-memory", "3.2", "Elastic Memory has a lower PPL than Transformer++ on every corpus", "main",
        _each(EXP, ("Transformer++",), MAIN_PPL, "ppl") + _each(UNI, ("Transformer++",), MAIN_PPL, "ppl"),
    ),
    Claim(
        "memory-ppl", "3.3", "Exponential sampling has the best PPL at every memory size", "memory-scaling",
        _each(S_EXP, ("MemT.", "Melodi", S_UNI), MEMORY_PPL, "ppl"),
    ),
    Claim(
        "one-beats-sixteen", "3.3", "At 1x Elastic Memory has a lower PPL than Memorizing Transformer at 16x",
        "memory-scaling", (((S_EXP, "1x PPL", "ppl"), ("MemT.", "16x PPL", "ppl")),),
    ),
    Claim(
        "half-of-melodi", "3.3", "Elastic Memory at 2x and 4x has a lower PPL than Melodi at 4x and 8x",
        "memory-scaling",
        (
            ((S_EXP, "2x PPL", "ppl"), ("Melodi", "4x PPL", "ppl")),
            ((S_EXP, "4x PPL", "ppl"), ("Melodi", "8x PPL", "ppl")),
        ),
    ),
    Claim(
        "memory-longppl", "3.3", "Uniform sampling has a lower LongPPL than exponential at every memory size",
        "memory-scaling", _each(S_UNI, (S_EXP,), MEMORY_LONG, "longppl"),
    ),
    Claim(
        "more-memory-helps", "3.3", "Each doubling of Elastic Memory lowers PPL and LongPPL", "memory-scaling",
        tuple(
            ((row, larger, metric), (row, smaller, metric))
            for row in (S_EXP, S_UNI)
            for names, metric in ((MEMORY_PPL, "ppl"), (MEMORY_LONG, "longppl"))
            for smaller, larger in pairwise(names)
        ),
    ),
    Claim(
        "model-ppl", "3.4", "Exponential sampling has the best PPL at every model size", "model-scaling",
        _each(S_EXP, (*MAIN_OTHERS, S_UNI), MODEL_PPL, "ppl"),
    ),
    Claim(
        "model-longppl", "3.4", "Uniform sampling has a lower LongPPL than exponential at every model size",
        "model-scaling", _each(S_UNI, (S_EXP,), MODEL_LONG, "longppl"),
    ),
    Claim(
        "inject-ppl", "3.5", "Reading by exponential sampling lowers the PPL of models trained with uniform sampling",
        "injection", _each("uniform, read exponential", ("uniform",), INJECTED, "ppl"),
    ),
    Claim(
        "inject-longppl", "3.5", "Reading by uniform sampling gives the lower LongPPL, however a model was trained",
        "injection",
        _each("uniform", ("uniform, read exponential",), INJECTED, "longppl")
        + _each("exponential, read uniform", ("exponential",), INJECTED, "longppl"),
    ),
    Claim(
        "robust", "3.6", "Under noise in all layers Elastic Memory keeps a lower PPL and LongPPL than Memorizing "
        "Transformer", "corruption",
        tuple(
            pair
            for row in (UNI, EXP)
            for metric in ("ppl", "longppl")
            for pair in _each(row, ("Mem. Transformer",), ("hardly 25%", "hardly 50%", "hardly 75%"), metric)
        ),
    ),
    Claim(
        "close-speed", "3.7",
        "At 1x Elastic Memory trains nearly as fast as Transformer++ and Memorizing Transformer (at most 10% slower)",
        "speed", _faster(("Transformer++", "Mem. Transformer"), SPEEDS[:1]), factor=1.1,
    ),
    Claim(
        "faster", "3.7", "Elastic Memory trains faster than Infini-Transformer and Melodi at every model size",
        "speed", _faster(("Infini-Transformer", "Melodi"), SPEEDS),
    ),
    Claim(
        "memory-costs", "3.7", "Elastic Memory trains more slowly at 16x than at 1x", "speed",
        tuple(((row, "1x", TIME), (row, "16x", TIME)) for row in (S_EXP, S_UNI)),
    ),
    Claim(
        "reconstruction", "B", "Reconstruction error and PPL both fall as the order grows", "reconstruction",
        tuple(
            ((row, larger, metric), (row, smaller, metric))
            for row, metric in (("Reconstruction MSE", "reconstruction"), ("PPL", "ppl"))
            for smaller, larger in pairwise(SIZES)
        ),
    ),
)  # fmt: skip


def judge(results: Path, tier: str) -> list[dict[str, Any]]:
    """Every claim with its verdict and numbers, from the tables' JSON in a folder of results."""
    tables = {}
    for name in dict.fromkeys(claim.table for claim in CLAIMS):
        path = results / f"{name}-{tier}.json"
        if name != "speed" and path.exists():
            tables[name] = {(cell["row"], cell["column"]): cell for cell in read_json(path)["cells"]}
    noise = seed_noise(cell for cells in tables.values() for cell in cells.values())
    if (results / SPEED).exists():
        tables["speed"] = _times(read_json(results / SPEED)["cells"])
        noise |= time_noise(tables["speed"])
    return [_verdict(claim, tables.get(claim.table, {}), noise) for claim in CLAIMS]


def _times(measured: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """The table of speeds as cells of one run each: the time of a training step, relative to Transformer++."""
    cells = {}
    for key, cell in measured.items():
        row, _, column = key.partition("|")
        run = {"run": key, "values": {TIME: 1 / cell["training_ratio"]}}
        cells[row, column] = {"values": run["values"], "runs": [run]}
    return cells


def time_noise(cells: Mapping[tuple[str, str], dict[str, Any]]) -> dict[Kind, tuple[float, int]]:
    """The standard deviation of the logarithm of a measured time, and its degrees of freedom.

    Both samplings run the same operations, so the difference of their times has twice the variance of one time.
    """
    both = [column for row, column in cells if row == S_EXP and (S_UNI, column) in cells]
    times = [[_logs(cells[row, column], TIME)[0] for row in (S_EXP, S_UNI)] for column in both]
    squares = [(one - other) ** 2 for one, other in times]
    return {(TIME, "", ""): (math.sqrt(statistics.fmean(squares) / 2), len(squares))} if squares else {}


def seed_noise(cells: Iterable[dict[str, Any]]) -> dict[Kind, tuple[float, int]]:
    """For each kind of number the standard deviation of its logarithm between seeds, and the degrees of freedom.

    Pooled over all models with several seeds on the same corpus, measured under the same conditions.
    """
    groups: dict[Kind, dict[tuple[str, ...], list[float]]] = {}
    for cell in cells:
        for metric in cell["values"]:
            runs = _runs_with(cell, metric)
            if len(runs) > 1:
                groups.setdefault(_kind(cell, metric), {})[tuple(run["run"] for run in runs)] = _logs(cell, metric)
    found = {}
    for kind, models in groups.items():
        freedom = sum(len(logs) - 1 for logs in models.values())
        squares = sum(statistics.variance(logs) * (len(logs) - 1) for logs in models.values())
        found[kind] = math.sqrt(squares / freedom), freedom
    return found


def _kind(cell: Mapping[str, Any], metric: str) -> Kind:
    """The group whose variance between seeds is pooled: metric, corpus, and corruption or sampling in the protocol."""
    measured = _runs_with(cell, metric)[0].get("measured", {}).get(metric, {})
    words = measured.get("protocol", "").split(", ")
    changed = (word for word in words if word.startswith(("corrupt=", "sampling=")))
    return metric, cell.get("corpus", ""), ", ".join(changed)


def student(probability: float, freedom: int) -> float:
    """The quantile of Student's t, for a probability above one half."""
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / sqrt(freedom)
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _within(middle, freedom) < 2 * probability - 1 else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """P(|t| < tan(angle) * sqrt(freedom)) for Student's t: a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    odd = freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for power in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power - 1) / power
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def _runs_with(cell: Mapping[str, Any], metric: str) -> list[dict[str, Any]]:
    return [run for run in cell["runs"] if run["values"].get(metric) is not None]


def _logs(cell: Mapping[str, Any], metric: str) -> list[float]:
    return [math.log(run["values"][metric]) for run in _runs_with(cell, metric)]


def _verdict(
    claim: Claim, cells: Mapping[tuple[str, str], dict[str, Any]], noise: Mapping[Kind, tuple[float, int]]
) -> dict[str, Any]:
    tail = 0.025 / len(claim.pairs)
    known = {kind: (sd, student(1 - tail, freedom)) for kind, (sd, freedom) in noise.items() if freedom >= FREEDOM}
    compared = [
        _compare(cells.get(low[:2]), cells.get(high[:2]), low, high, known, tail, claim.factor)
        for low, high in claim.pairs
    ]
    verdicts = {entry["verdict"] for entry in compared}
    if NOT_HELD in verdicts:
        verdict = NOT_HELD
    elif verdicts == {HELD}:
        verdict = HELD
    else:
        verdict = MISSING if verdicts == {MISSING} else INCOMPLETE if MISSING in verdicts else UNDECIDED
    return {
        "claim": claim.name,
        "section": claim.section,
        "text": claim.text,
        "table": claim.table,
        "verdict": verdict,
        "comparisons": compared,
    }


def _compare(
    low: dict[str, Any] | None,
    high: dict[str, Any] | None,
    place: Place,
    other: Place,
    noise: Mapping[Kind, tuple[float, float]],
    tail: float,
    factor: float,
) -> dict[str, Any]:
    """One comparison: the relative difference, its interval, and the verdict."""
    metric = place[2]
    ours, theirs = (_logs(cell, metric) if cell else [] for cell in (low, high))
    entry: dict[str, Any] = {"lower": " | ".join(place[:2]), "than": " | ".join(other[:2]), "metric": metric}
    if not ours or not theirs:
        return entry | {"verdict": MISSING}
    difference = statistics.fmean(ours) - statistics.fmean(theirs)
    entry |= {
        "values": [math.exp(statistics.fmean(logs)) for logs in (ours, theirs)],
        "seeds": [len(ours), len(theirs)],
        "difference": math.expm1(difference),
    }
    assert low and high
    names = [[run["run"] for run in _runs_with(cell, metric)] for cell in (low, high)]
    kinds, agree = [_kind(cell, metric) for cell in (low, high)], True
    if names[0] == names[1] and metric in ("ppl", "longppl"):
        logs = _paired(low, high, metric, tail)
        agree = len({one < other for one, other in zip(ours, theirs, strict=True)}) == 1
    elif all(kind in noise for kind in kinds):
        (sd, quantile), (other_sd, other_quantile) = (noise[kind] for kind in kinds)
        margin = max(quantile, other_quantile) * math.sqrt(sd**2 / len(ours) + other_sd**2 / len(theirs))
        logs = [difference - margin, difference + margin]
    else:
        return entry | {"interval": None, "verdict": UNDECIDED}
    interval = [math.expm1(value) for value in logs]
    verdict = HELD if interval[1] < factor - 1 else NOT_HELD if interval[0] > factor - 1 else UNDECIDED
    if not agree or (metric != TIME and len(ours) + len(theirs) < 3):
        verdict = UNDECIDED  # seeds disagree, or there is only one
    return entry | {"interval": interval, "verdict": verdict}


def _paired(low: dict[str, Any], high: dict[str, Any], metric: str, tail: float, draws: int = 10_000) -> list[float]:
    """Bootstrap interval, over documents, of the loss difference between two ways of reading the same runs.

    `tail` is the share of draws below it, and that above it.
    """
    sums = []
    for cell in (low, high):
        documents = [run["measured"][metric]["by_document"] for run in _runs_with(cell, metric)]
        names = sorted(documents[0])
        sums.append(np.array([[found[name] for name in names] for found in documents]).sum(0))
    weights = np.random.default_rng(0).multinomial(len(names), np.full(len(names), 1 / len(names)), size=draws)
    drawn = [(weights @ total[:, 0]) / (weights @ total[:, 1]) for total in sums]
    return np.quantile(drawn[0] - drawn[1], [tail, 1 - tail]).tolist()


def summary(judged: list[dict[str, Any]], tier: str) -> Table:
    """The ledger as a table, one line per claim."""
    rows = []
    for entry in judged:
        verdicts = [one["verdict"] for one in entry["comparisons"]]
        counts = [verdicts.count(verdict) for verdict in (HELD, NOT_HELD, UNDECIDED, MISSING)]
        rows.append([f"{entry['section']}: {entry['text']}", entry["verdict"], " / ".join(map(str, counts))])
    note = (
        f"Tier {tier}. Comparisons held / not held / undecided / not measured yet. A difference between two models "
        "must exceed the variation between seeds, so single runs decide nothing. A difference between two readings of "
        f"one model must exceed the variation between documents (95%). Speeds (3.7) are those of `{SPEED}`; they must "
        "differ by more than two measurements of the same operations. "
        f"Made by `elastic reproduce claims --tier {tier}`."
    )
    return Table("The paper's claims, checked", ["claim", "verdict", "comparisons"], rows, note)


def write(results: Path, tier: str) -> Table:
    """Judge all claims and write `claims-<tier>.json` and the ledger's table."""
    judged = judge(results, tier)
    if all(entry["verdict"] == MISSING for entry in judged if entry["table"] != "speed"):
        raise ValueError(
            f"{results} has no table of tier {tier} with numbers: run `elastic reproduce main --tier {tier}`"
        )
    write_json(results / f"claims-{tier}.json", {"tier": tier, "claims": judged})
    table = summary(judged, tier)
    write_text(results / f"claims-{tier}.md", table.markdown())
    return table
