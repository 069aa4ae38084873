"""Claims are judged by numbers: on tables made up so that the verdict is known."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from elastic_memory.reproduction import ledger
from elastic_memory.reproduction.ledger import HELD, INCOMPLETE, MISSING, NOT_HELD, UNDECIDED
from elastic_memory.reproduction.tables import experiments, speed

ROOT = Path(__file__).parents[2]
BEST = next(claim for claim in ledger.CLAIMS if claim.name == "beats-no-memory")


def cell(row: str, column: str, seeds: list[float], metric: str = "ppl", documents: dict | None = None) -> dict:
    runs = [
        {"run": f"{row}-{i}", "values": {metric: value}, "measured": {metric: {"by_document": documents or {}}}}
        for i, value in enumerate(seeds)
    ]
    return {"row": row, "column": column, "values": {metric: seeds[0]}, "runs": runs}


def judged(tmp_path, table: str, cells: list[dict]) -> dict[str, dict]:
    (tmp_path / f"{table}-small.json").write_text(json.dumps({"cells": cells}))
    return {entry["claim"]: entry for entry in ledger.judge(tmp_path, "small")}


def test_every_place_of_every_claim_exists():
    for claim in ledger.CLAIMS:
        for row, column, _ in (place for pair in claim.pairs for place in pair):
            if claim.table == "speed":
                assert column in speed.ROWS[row][1], (claim.name, row, column)
            else:
                table = experiments()[claim.table]
                assert row in table.rows and column in table.columns, (claim.name, row, column)


def test_every_section_of_experiments_has_claims():
    assert {claim.section for claim in ledger.CLAIMS} == {"3.2", "3.3", "3.4", "3.5", "3.6", "3.7", "B"}


def speeds(tmp_path, **ratios):
    """Elastic Memory at these ratios to Transformer++, Memorizing as fast as that; the samplings differ by 1%."""
    at = {"Transformer++|1x": 1.0, "Mem. Transformer|1x": 1.0}
    for column, ratio in ratios.items():
        at |= {f"{ledger.S_EXP}|{column}": ratio, f"{ledger.S_UNI}|{column}": ratio * 1.01}
    cells = {key: {"training_ratio": ratio} for key, ratio in at.items()}
    (tmp_path / ledger.SPEED).write_text(json.dumps({"cells": cells}))
    return {entry["claim"]: entry for entry in ledger.judge(tmp_path, "small")}


def test_speeds_are_decided_by_what_two_measurements_of_the_same_differ_by(tmp_path):
    even = dict.fromkeys(("2x", "4x", "8x"), 0.9)
    assert speeds(tmp_path, **{"1x": 1.0, "16x": 0.8}, **even)["memory-costs"]["verdict"] == HELD
    assert speeds(tmp_path, **{"1x": 0.8, "16x": 1.0}, **even)["memory-costs"]["verdict"] == NOT_HELD
    found = speeds(tmp_path, **{"1x": 0.97, "16x": 0.96}, **even)
    assert found["memory-costs"]["verdict"] == UNDECIDED and found["close-speed"]["verdict"] == HELD
    assert found["faster"]["verdict"] == MISSING
    assert speeds(tmp_path, **{"1x": 0.8, "16x": 0.8}, **even)["close-speed"]["verdict"] == NOT_HELD
    one = found["memory-costs"]["comparisons"][0]
    # Student's t of 5 degrees of freedom, 95% for two comparisons together
    margin = 3.163 * math.log(1.01) / math.sqrt(2) * math.sqrt(2)
    assert math.log1p(one["interval"][1]) - math.log1p(one["difference"]) == pytest.approx(margin, rel=0.01)
    with pytest.raises(ValueError, match="no table of tier small"):
        ledger.write(tmp_path, "small")


@pytest.mark.parametrize(
    ("none", "elastic", "verdict"),
    [
        ([9.0, 9.05], [8.0, 8.05], HELD),
        ([8.0, 8.05], [9.0, 9.05], NOT_HELD),
        ([8.0, 9.0], [8.1, 8.9], UNDECIDED),
        ([9.0], [8.0], UNDECIDED),  # nobody knows what a seed is worth
    ],
)
def test_a_verdict_follows_from_the_difference_and_what_seeds_are_worth(tmp_path, none, elastic, verdict):
    rows = {"Transformer++": none, ledger.EXP: elastic, ledger.UNI: elastic}
    cells = [cell(row, column, seeds) for row, seeds in rows.items() for column in ledger.MAIN_PPL]
    entry = judged(tmp_path, "main", cells)["beats-no-memory"]
    assert entry["verdict"] == verdict
    one = entry["comparisons"][0]
    mean = math.prod(elastic) ** (1 / len(elastic)) / math.prod(none) ** (1 / len(none)) - 1
    assert one["difference"] == pytest.approx(mean)
    if one["interval"]:
        assert one["interval"][0] < mean < one["interval"][1]


def test_a_claim_needs_all_its_comparisons(tmp_path):
    rows = {"Transformer++": [9.0, 9.01], ledger.EXP: [8.0, 8.01], ledger.UNI: [8.0, 8.01]}
    cells = [cell(row, "{proofs} PPL", seeds) for row, seeds in rows.items()]
    found = judged(tmp_path, "main", cells)
    assert found["beats-no-memory"]["verdict"] == INCOMPLETE
    assert {one["verdict"] for one in found["beats-no-memory"]["comparisons"]} == {HELD, MISSING}
    assert found["memory-ppl"]["verdict"] == MISSING


def test_readings_of_the_same_runs_are_compared_document_by_document(tmp_path):
    one = {str(i): [100.0 + i, 50] for i in range(20)}
    other = {str(i): [99.0 + i, 50] for i in range(20)}
    low, high = (cell("run", name, [1.0], documents=documents) for name, documents in (("a", other), ("b", one)))
    interval = ledger._paired(low, high, "ppl", 0.025)
    assert interval == pytest.approx([-1 / 50, -1 / 50])
    mixed = {str(i): [100.0 + i + 3 * math.sin(i), 50] for i in range(20)}
    wide = cell("run", "c", [1.0], documents=mixed)
    one_of_many, alone = (ledger._paired(wide, high, "ppl", tail) for tail in (0.025 / 9, 0.025))
    assert one_of_many[0] < alone[0] < alone[1] < one_of_many[1], "one of nine comparisons needs more than one alone"
    rows = {"uniform": one, "uniform, read exponential": other}
    cells = [
        cell(row, column, [8.0, 8.0], documents=documents) | {"row": row}
        for row, documents in rows.items()
        for column in ledger.INJECTED
    ]
    for entry in cells:
        entry["runs"] = [run | {"run": f"seed {i}"} for i, run in enumerate(entry["runs"])]
    assert judged(tmp_path, "injection", cells)["inject-ppl"]["verdict"] == HELD
    for entry in cells:
        entry["runs"] = entry["runs"][:1]
    assert judged(tmp_path, "injection", cells)["inject-ppl"]["verdict"] == UNDECIDED, "one run decides nothing"


def test_what_seeds_are_worth_differs_between_corpora(tmp_path):
    cells = []
    for corpus, apart in (("books", 1.001), ("edu", 1.001), ("proofs", 1.2)):
        for row, value in (("Transformer++", 9.0), (ledger.EXP, 8.0), (ledger.UNI, 8.0)):
            entry = cell(row, f"{{{corpus}}} PPL", [value, value * apart]) | {"corpus": corpus}
            for run in entry["runs"]:
                run["run"] += corpus
            cells.append(entry)
    found = judged(tmp_path, "main", cells)["beats-no-memory"]["comparisons"]
    verdicts = {one["lower"].partition("{")[2].partition("}")[0]: one["verdict"] for one in found}
    assert verdicts == {"books": HELD, "edu": HELD, "proofs": UNDECIDED}


def test_readings_on_which_seeds_disagree_are_undecided(tmp_path):
    documents = [{str(i): [level + i, 50] for i in range(20)} for level in (100.0, 97.0, 101.0)]
    cells = []
    for row, values, sums in (("uniform", [8.0, 8.0], [0, 0]), ("uniform, read exponential", [7.5, 8.1], [1, 2])):
        for column in ledger.INJECTED:
            entry = cell(row, column, values)
            for seed, run in enumerate(entry["runs"]):
                run |= {"run": f"seed {seed}", "measured": {"ppl": {"by_document": documents[sums[seed]]}}}
            cells.append(entry)
    found = judged(tmp_path, "injection", cells)["inject-ppl"]
    assert found["comparisons"][0]["interval"][1] < 0 and found["verdict"] == UNDECIDED


def test_models_under_noise_are_compared_by_what_seeds_are_worth_under_that_noise(tmp_path):
    """Seeds that agree as trained may differ under noise."""
    cells = []
    for column in ("Origin.", "hardly 25%", "hardly 50%", "hardly 75%"):
        apart = 1.001 if column == "Origin." else 1.2
        for row, value in (("Mem. Transformer", 9.0), (ledger.UNI, 8.0), (ledger.EXP, 8.0)):
            runs: list[dict] = [{"values": {}, "measured": {}} for _ in range(3)]
            entry: dict = {"row": row, "column": column, "values": {}, "runs": runs}
            for metric in ("ppl", "longppl"):
                entry["values"][metric] = value
                for seed, run in enumerate(entry["runs"]):
                    run["run"] = f"{row} {seed}"
                    run["values"][metric] = value * apart**seed
                    run["measured"][metric] = {"protocol": "P0" + (", corrupt=0.5 in all layers" * (apart > 1.1))}
            cells.append(entry)
    assert judged(tmp_path, "corruption", cells)["robust"]["verdict"] == UNDECIDED


def test_the_committed_ledger_is_what_the_committed_tables_say(tmp_path):
    for path in [*(ROOT / "results").glob("*-small.json"), ROOT / "results" / ledger.SPEED]:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    ledger.write(tmp_path, "small")
    for name in ("claims-small.json", "claims-small.md"):
        assert (tmp_path / name).read_bytes() == (ROOT / "results" / name).read_bytes()


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 40, 401])
@pytest.mark.parametrize("comparisons", [1, 2, 15, 30])
def test_quantiles_of_student(comparisons, freedom):
    probability = 1 - 0.025 / comparisons
    assert ledger.student(probability, freedom) == pytest.approx(stats.t.ppf(probability, freedom), rel=1e-9)


def test_equal_models_are_rarely_told_apart():
    """Of claims about equal models with noisy seeds, few may come out as not held."""
    random, wrong = np.random.default_rng(0), 0
    for _ in range(200):
        rows = ("Transformer++", ledger.EXP, ledger.UNI)
        cells = {
            (row, column): cell(f"{row}{column}", column, list(9 * np.exp(0.05 * random.standard_normal(2))))
            for row in rows
            for column in ledger.MAIN_PPL
        }
        noise = ledger.seed_noise(cells.values())
        wrong += ledger._verdict(BEST, cells, noise)["verdict"] == NOT_HELD
    assert wrong < 20


def test_an_empty_folder_writes_no_ledger(tmp_path):
    with pytest.raises(ValueError, match="no table of tier smoke"):
        ledger.write(tmp_path, "smoke")
    assert not list(tmp_path.iterdir())
