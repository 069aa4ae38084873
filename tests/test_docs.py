"""README and docs: every block runs or is checked, every link leads somewhere, every table is that of the record."""

import ast
import glob
import importlib.util
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import typer
import yaml
from typer.testing import CliRunner

import elastic_memory as em
from elastic_memory.cli import app
from elastic_memory.data import load_tokenizer
from elastic_memory.reproduction.tables import load
from tests.conftest import small_model

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


class Code(NamedTuple):
    """A fenced block: where it begins, its language, its text, and why it is not run, if it is not."""

    line: int
    language: str
    text: str
    skip: str | None


def blocks(page: str) -> list[Code]:
    """The fenced blocks of a page; `<!-- not run: why -->` on the line before a block takes it out."""
    text = (ROOT / page).read_text(encoding="utf-8")
    fences = re.finditer(r"^(?:<!-- not run: ([^\n]+) -->\n)?```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Code(text.count("\n", 0, f.start(3)), f[2], f[3], f[1]) for f in fences]


def commands(block: Code) -> list[tuple[int, list[str]]]:
    """The command lines of a shell block with their line numbers; comments go, continued lines are joined."""
    found, line = [], block.line
    for command in re.split(r"(?<!\\)\n", block.text.rstrip("\n")):
        found.append((line, shlex.split(command.replace("\\\n", " "), comments=True)))
        line += command.count("\n") + 1
    return [(line, words) for line, words in found if words]


def run_command(*words: str) -> None:
    """A command of a page, in this process where it is ours, as importing torch takes seconds."""
    program, *rest = [one for word in words for one in (sorted(glob.glob(word)) if "*" in word else [word])]
    if program == "torchrun":
        subprocess.run([sys.executable, "-m", "torch.distributed.run", *rest], check=True)
        return
    assert program == "elastic", f"{program}: pages run elastic and torchrun; mark the block as not run"
    result = CliRunner().invoke(app, rest)
    assert result.exit_code == 0, result.output


def program(page: str) -> str:
    """The blocks of a page as one program, each on its own lines, so that errors name the line of the page."""
    lines = [""] * len((ROOT / page).read_text(encoding="utf-8").splitlines())
    for block in blocks(page):
        if block.skip or block.language not in ("python", "sh"):
            continue
        if block.language == "python":
            lines[block.line : block.line + block.text.count("\n")] = block.text.splitlines()
        else:
            for line, words in commands(block):
                lines[line] = f"run_command(*{words!r})"
    return "\n".join(lines)


def run(code: str, name: str, folder: Path) -> None:
    """Import `code` as a module of this name: its errors then show the line."""
    file = folder / f"{name}.py"
    file.write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    module.run_command = run_command
    spec.loader.exec_module(module)


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """What pages suppose that a reader has: models, a text, memory files, results, a browser."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda address: None)
    for name in ("my-model", "another"):
        model = small_model(vocab_size=256)
        load_tokenizer("bytes").save(tmp_path / "runs" / name)
        model.save_pretrained(tmp_path / "runs" / name)
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 5)
    for name in ("one", "two"):
        cache = em.MemoryCache(model)
        cache.read(torch.randint(256, (1, 100)))
        cache.save(tmp_path / f"{name}.memory.safetensors")
    (tmp_path / "results").mkdir()
    shutil.copy(ROOT / "results" / "recall-small.json", tmp_path / "results")


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("page", [page for page in PAGES if program(page).strip()])
def test_the_code_of_a_page_runs(page, tmp_path):
    """In order, one block after the other, as a reader types them."""
    run(program(page), Path(page).stem, tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_what_is_not_run_is_still_valid(page):
    """No block escapes: its language is known, Python parses, and commands exist with the options they are given."""
    for block in blocks(page):
        where = f"{page}:{block.line}"
        assert block.language in ("python", "sh", "text"), f"{where}: say python, sh or text"
        if block.language == "python":
            ast.parse(block.text)
        for line, words in commands(block) if block.language == "sh" else ():
            if "elastic" in words:
                check_options(words[words.index("elastic") + 1 :], f"{page}:{line + 1}")


def check_options(words: list[str], where: str) -> None:
    """That a command of ours exists and has the options that it is given."""
    command = typer.main.get_command(app)
    while hasattr(command, "resolve_command"):
        context = command.make_context("elastic", [], resilient_parsing=True)
        known = command.list_commands(context)
        assert words[0] in known, f"{where}: no {words[0]} among {known}"
        _, command, words = command.resolve_command(context, words)
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        assert not word.startswith("--") or word in options | {"--help"}, f"{where}: {command.name} has no {word}"


def test_an_unknown_option_is_found():
    check_options(["memory", "join", "a", "--out", "b"], "here")
    with pytest.raises(AssertionError, match="here: join has no --outt"):
        check_options(["memory", "join", "a", "--outt", "b"], "here")
    with pytest.raises(AssertionError, match="here: no trian among"):
        check_options(["trian"], "here")


def test_links_lead_somewhere():
    for page in [*PAGES, "CONTRIBUTING.md", "examples/README.md"]:
        for target in re.findall(r"\]\(([^)#\s]+?)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"


def test_the_site_shows_every_page_once():
    def leaves(entry):
        return [entry] if isinstance(entry, str) else [leaf for part in entry for leaf in leaves(part)]

    def values(nav):
        return [values(value) if isinstance(value, list) else value for one in nav for value in one.values()]

    shown = leaves(values(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(f"docs/{page}" for page in shown) == [page for page in PAGES if page != "README.md"]


def test_the_readme_is_short():
    """One screen and a half; the tables that scripts write are not counted."""
    text = re.sub(r"<!-- results -->.*<!-- /results -->", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(text.splitlines()) < 100


def test_the_readmes_figures_link_to_their_records():
    from scripts import results

    sections = re.split(r"^\*\*(?=[\w ]+\.\*\*)", results.overview(ROOT), flags=re.MULTILINE)[1:]
    assert len(sections) == 4
    for section in sections:
        assert re.search(r"\]\((results|benchmarks)/", section), section


def test_the_readme_measures_nothing_without_a_link_to_its_record():
    text = re.sub(
        r"<!-- results -->.*<!-- /results -->|```.*?```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL
    )
    for sentence in re.split(r"\n\n|(?<=\.)\s", text):
        if re.search(r"\d%|\d (?:times|tokens/s|minutes|seconds|MiB|GiB)\b|[Cc]osts|faster", sentence):
            assert re.search(r"\]\((results|benchmarks)/", sentence), sentence


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_say_how_to_run_them(name):
    assert f"python examples/{name}" in ast.get_docstring(ast.parse((ROOT / "examples" / name).read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name, tmp_path):
    """Half a minute each."""
    subprocess.run([sys.executable, ROOT / "examples" / name], cwd=tmp_path, check=True)


def test_the_notebook_runs(tmp_path, monkeypatch):
    cells = json.loads((ROOT / "examples" / "walkthrough.ipynb").read_text(encoding="utf-8"))["cells"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    run("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"), "walkthrough", tmp_path)


def test_the_page_about_your_own_model_shows_the_example():
    shown = blocks("docs/own-model.md")[0].text
    layer = shown[shown.index("class ") :]
    assert layer in (ROOT / "examples" / "own_model.py").read_text()
    assert len([line for line in layer.splitlines() if line.strip()]) == 20, "as the page says"


@pytest.mark.parametrize(("kind", "name"), [("training", "speed"), ("inference", "inference")])
def test_speed_tables_are_those_of_the_record(kind, name):
    record = json.loads((ROOT / "results" / "speed-paper.json").read_text())
    assert (ROOT / "results" / f"{name}-paper.md").read_text() == load("speed").table(record, kind).markdown()


def test_what_the_pages_of_results_say_is_computed():
    from scripts import results

    typed = re.sub(r"\{.*?\}", "", results.INDEX + results.LANGUAGE)
    assert not re.search(r"\d%|\d(?:M| times)\b", typed), "typed, it would not follow the records"
    found, runs = results.known(ROOT), {}
    for path in (ROOT / "results" / "runs").glob("small-*-seed*.json"):
        record = json.loads(path.read_text())
        model = record["model"]
        if model["multiple"] == model["points"] == 1 and model["size"] == "1x" and not model["learning_rate"]:
            runs.setdefault((model["corpus"], model["memory"], model["sampling"]), []).append(record)
    firsts = {}
    for (corpus, *_), records in runs.items():
        ppl = [one["metrics"]["ppl"] for record in records for one in record["measured"] if "ppl" in one["metrics"]]
        starts = [math.log(one["P0"]["by_block"][0]) for one in ppl if "P4" in one]
        firsts.setdefault(corpus, []).append(sum(starts) / len(starts))
    spread = max(max(logs) - min(logs) for logs in firsts.values())
    assert found["block_0"] == pytest.approx(math.expm1(spread))
    alone = sum(len(records) == 1 for records in runs.values())
    assert found["seeds"].startswith(f"{alone} of {len(runs)} models") or not alone


def test_results_are_those_on_record():
    from elastic_memory.report import catalogue, speed
    from elastic_memory.reproduction import frozen_trunk
    from scripts import results

    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    assert page == speed.page(ROOT, page), "run python -m elastic_memory.report.speed"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text == catalogue.insert(text, results.overview(ROOT), "results"), "run python scripts/results.py"
    training = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    assert training == catalogue.insert(training, results.plan(ROOT), "plan"), "run python scripts/results.py"
    evaluation = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    assert evaluation == catalogue.insert(evaluation, results.recall_table(ROOT), "recall"), (
        "run python scripts/results.py"
    )
    attach = (ROOT / "docs" / "attach.md").read_text(encoding="utf-8")
    assert attach == catalogue.insert(attach, frozen_trunk.tables(ROOT), "frozen"), "run python scripts/results.py"
    assert (ROOT / "results" / "README.md").read_text() == results.index(ROOT), "run python scripts/results.py"


def test_what_the_readme_says_of_recall_is_on_record():
    accuracy: dict[str, dict[int, float]] = {}
    for cell in json.loads((ROOT / "results" / "recall-small.json").read_text())["rows"]:
        accuracy.setdefault(cell["row"], {})[cell["distance"]] = cell["accuracy"]
    lost, elastic = accuracy["Transformer++"], accuracy["Elastic, uniform"]
    assert max(lost.values()) < 0.05 and max(accuracy["Melodi"].values()) < 0.05
    assert elastic[8] > 0.9 > elastic[16] > elastic[32] > elastic[64]
    assert min(accuracy["Elastic, uniform, 8x at test time"].values()) > 0.95
    assert all(accuracy[name][1] - accuracy[name][64] < 0.1 for name in ("Infini", "Means"))


def test_what_the_page_on_attaching_says_of_designs_is_on_record():
    """The claims of "Which memory": the order of the designs, half the gain, and who recalls most."""
    from elastic_memory.report.speed import benchmark_records
    from elastic_memory.reproduction.real_measures import difference, recall_of

    for path in benchmark_records(ROOT, "frozen-trunk"):
        record = json.loads(path.read_text())
        if not record["plan"].get("adapted"):
            continue
        runs, gains = record["runs"], {}
        for design in runs.keys() - {"no memory"}:
            seeds = runs[design].keys() & runs["no memory"].keys()
            pairs = [[runs[name][seed]["documents"] for seed in sorted(seeds)] for name in (design, "no memory")]
            gains[design] = -difference(*pairs)[0]
        window = gains["wider window"]
        ours = {name: gain for name, gain in gains.items() if "merged" in name}
        assert window == max(gain for name, gain in gains.items() if name not in ours)
        assert all(gain < 0.005 for name, gain in gains.items() if name.startswith("elastic"))
        if "key-value means" in gains:
            means = gains["key-value means"]
            assert 0.4 < means / window < 0.6 and means > gains["elastic cells"]
            assert "half window half elastic" not in gains or means < gains["half window half elastic"] < window
        if ours:
            best = "half window half merged slow keys"
            assert best == max(gains, key=gains.get) and gains["merged slow keys"] > 0.9 * window
            middle, low, high = difference(*[[runs[name]["1"]["documents"]] for name in (best, "wider window")])
            assert low < middle < 0 < high
            for distance in record["plan"]["distances"]:
                recall = {name: recall_of(runs[name]["1"]["recall"][str(distance)]) for name in (best, "wider window")}
                assert recall[best] > recall["wider window"]
        if "cpu" not in path.name:
            assert set(map(len, runs.values())) == {3}
            far = {name: [recall_of(run["recall"]["8192"]) for run in runs[name].values()] for name in runs}
            assert min(far["key-value means"]) > max(far["wider window"])


def section(page: str, start: str, end: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    return text[text.index(start) + len(start) :].split(end)[0]


def test_typed_figures_of_speed_are_those_of_their_records():
    from elastic_memory.report.speed import newest

    said = section("docs/speed.md", "**Main results**", "**How ratios")
    cells = json.loads((ROOT / "results" / "speed-paper.json").read_text())["cells"]
    small, large = (cells[f"Elastic, exponential|{size}"]["training_ratio"] for size in ("1x", "16x"))
    assert f"at {small:.0%} of the throughput" in said and f"16 times the memory, {large:.0%}" in said
    peers = {row["name"]: row.get("tokens_per_s") for row in newest(ROOT, "peers")["peers"]}
    assert f"{peers['Transformer++'] / peers['transformers Llama']:.1f} times as fast" in said
    for rows, what in ((1, "{} times as many tokens/s"), (64, "{} times for 64 rows")):
        speeds = {
            run["way"]: run["tokens_per_s"] for run in newest(ROOT, "generate-h200")["runs"] if run["rows"] == rows
        }
        assert what.format(round(speeds["ours"] / speeds["transformers' Llama"])) in said
    first, *_, last = (row["decode_tokens_per_s"] for row in newest(ROOT, "streaming-h200")["runs"][0]["rows"])
    assert abs(last / first - 1) < 0.01 and f"at {round(last, -3):,.0f} tokens/s for one row" in said


def test_typed_figures_of_choices_are_those_of_their_records():
    cells = json.loads((ROOT / "results" / "learning-rate-small.json").read_text())["cells"]
    said = section("docs/choices.md", "### learning rate at tier small", "###")
    for cell in cells:
        if cell["row"] != "Full attention":
            assert f"{cell['values']['ppl']:.1f}" in said, cell["row"]
    record = json.loads((ROOT / "benchmarks" / "results" / "infini-gates-cpu-2026-11-16.json").read_text())
    found = {}
    for row in record["rows"]:
        found.setdefault((row["norm"], row["gate"], row["gate_lr_scale"]), []).append(f"{row['ppl']:.2f}")
    said = section("docs/choices.md", "### Infini-Transformer's norm and gates", "###").replace("**", "")
    for (norm, *_), figures in found.items():
        assert (" and " if norm is None else ", ").join(figures) in said, figures
