"""The Python blocks of the README and the guide run as they stand."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_memory.reproduction.tables import load

ROOT = Path(__file__).parent.parent
PREAMBLE = {"README.md": "import torch\nsignal = torch.randn(100, dtype=torch.float64)\n"}


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_examples_run(page, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    code = PREAMBLE.get(page, "") + "\n".join(blocks)
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
