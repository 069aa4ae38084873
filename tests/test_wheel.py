"""A wheel in an empty environment outside the clone does what the clone does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with an environment `env` that has the wheel, and sees the packages that are installed here."""
    place = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", place, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "env"], check=True)
    (wheel,) = place.glob("*.whl")
    install = ["install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run([sys.executable, "-m", "pip", "--python", place / "env" / "bin" / "python", *install], check=True)
    (packages,) = (place / "env" / "lib").glob("python*/site-packages")
    # paths in a .pth file add packages, but not the editable installation of this clone that lies beside them
    (packages / "present.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return place


def elastic(place, *arguments):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [place / "env" / "bin" / "elastic", *arguments], cwd=place, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_wheel_is_what_runs(installed):
    program = "import elastic_memory; print(elastic_memory.__file__)"
    python = [installed / "env" / "bin" / "python", "-I", "-c", program]
    assert str(installed) in subprocess.run(python, check=True, capture_output=True, text=True).stdout


def test_demo(installed):
    elastic(installed, "demo", "--tokens", "40960")
    assert "<img " in (installed / "demo" / "report.html").read_text()


def test_reproduce_signals(installed):
    assert "random noise" in elastic(installed, "reproduce", "signals")


def test_reproduce_main_and_train_from_a_packaged_recipe(installed):
    elastic(installed, "reproduce", "main", "--tier", "smoke")
    cells = json.loads((installed / "results" / "main-smoke.json").read_text())["cells"]
    assert all(cell["values"].get("ppl", 1) is not None for cell in cells)
    rows = installed / "results" / "work" / "data" / "stdlib-512"
    elastic(installed, "train", "smoke/elastic", "--data", str(rows), "--set", "training.tokens=40960")
    assert list((installed / "runs").glob("smoke-elastic-*/model/model.safetensors"))
