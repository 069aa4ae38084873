"""The blocks of the README and the guides, Python and commands, run as they stand."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_memory.reproduction.tables import load

ROOT = Path(__file__).parent.parent
PREAMBLE = {"README.md": "import torch\nsignal = torch.randn(100, dtype=torch.float64)\n"}
COMMANDS = """
def run_command(*words):
    import glob, subprocess, sys
    from typer.testing import CliRunner
    from elastic_memory.cli import app
    program, *words = [found for word in words for found in (sorted(glob.glob(word)) if "*" in word else [word])]
    if program == "torchrun":
        return subprocess.run([sys.executable, "-m", "torch.distributed.run", *words], check=True)
    assert program == "elastic", program
    result = CliRunner().invoke(app, words)
    print(result.output)
    assert result.exit_code == 0, result.exception
"""


def code_of(page):
    """All blocks of a page as one program; commands are called in its own process, as importing torch takes seconds."""
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    lines = [COMMANDS, PREAMBLE.get(page, "")]
    for language, block in blocks:
        commands = block.splitlines() if language == "sh" else []
        lines += [f"run_command(*{shlex.split(line)!r})" for line in commands] or [block]
    return "\n".join(lines)


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md", "docs/composing.md"])
def test_examples_run(page, tmp_path):
    code = code_of(page)
    assert code.count("import elastic_memory") > 0
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize(("kind", "name"), [("training", "speed"), ("inference", "inference")])
def test_speed_tables_are_those_of_the_record(kind, name):
    record = json.loads((ROOT / "results" / "speed-paper.json").read_text())
    assert (ROOT / "results" / f"{name}-paper.md").read_text() == load("speed").table(record, kind).markdown()


def test_results_are_those_on_record():
    from elastic_memory.report import catalogue, speed
    from scripts import results

    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    assert page == speed.page(ROOT, page), "run python -m elastic_memory.report.speed"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text == catalogue.insert(text, speed.operators(ROOT), "operators"), (
        "run python -m elastic_memory.report.speed"
    )
    assert text == catalogue.insert(text, results.overview(ROOT), "results"), "run python scripts/results.py"
    training = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    assert training == catalogue.insert(training, results.plan(ROOT), "plan"), "run python scripts/results.py"
    assert (ROOT / "results" / "README.md").read_text() == results.index(ROOT), "run python scripts/results.py"
