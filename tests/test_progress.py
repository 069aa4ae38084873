"""Whatever takes long says how far it is, how fast, and how long still: in one style, by one helper."""

import hashlib
import io
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from elastic_memory.common import progress
from elastic_memory.common.progress import Bars, transformers_bars, watched_sha256
from tests.test_common import holding

PACKAGE = Path(progress.__file__).parents[1]
FOLDERS = [path.name for path in PACKAGE.iterdir() if path.is_dir()]
LEFT = r"\d+:\d\d:\d\d left"


class Clock:
    """Seconds, as many per call as it is told."""

    def __init__(self, step: float):
        self.now, self.step = 0.0, step

    def monotonic(self):
        self.now += self.step
        return self.now


@pytest.fixture
def screen(monkeypatch):
    """A function that makes a terminal of some width, and the text drawn on it."""

    def terminal(width):
        drawn = io.StringIO()
        console = Console(file=drawn, force_terminal=True, width=width, color_system=None)
        monkeypatch.setattr(progress, "console", console)
        return drawn

    return terminal


def frames(drawn):
    """What was drawn, without the codes that move the cursor."""
    return [line.strip() for line in re.split(r"\x1b\[[0-9?]*[A-Za-z]|\r|\n", drawn.getvalue()) if line.strip()]


def test_there_is_one_style_of_bars():
    names = r"rich\.progress import (?!TaskID\b)|\btqdm\b"
    assert holding(names, *FOLDERS) == ["common/progress.py"]


@pytest.mark.parametrize("width", [50, 80, 120])
def test_a_bar_shows_amount_rate_and_time_left_however_narrow(width, screen, monkeypatch):
    drawn = screen(width)
    monkeypatch.setattr(progress, "time", Clock(0.01))
    with Bars() as bars:
        task = bars.add_task("smoke-elastic-1a2b3c  loss 4.5678  123,456 tokens/s", total=40_000, unit="steps")
        for _ in range(3):
            bars.advance(task, 1000)
        bars.refresh()
        found = frames(drawn)[-1]
    assert re.search(rf"3,000/40,000 +[\d,.]+ steps/s +{LEFT}$", found), found
    assert len(found) <= width and found.startswith("smo")


@pytest.mark.parametrize(
    ("unit", "step", "shown"),
    [("tokens", 900, r"2,700/9,000  [\d,]+ tokens/s  0:00:\d\d left"), ("bytes", 3_000_000, r"9.0 MB/30.0 MB  .*MB/s"),
     ("", 1, r"3/10  \d\d s each  0:0\d:\d\d left")],
)  # fmt: skip
def test_a_log_gets_a_line_with_the_same_numbers(unit, step, shown, monkeypatch, capsys):
    monkeypatch.setattr(progress, "time", Clock(10 if step == 1 else 0.5))
    with Bars() as bars:
        task = bars.add_task("reading", total=10 * step, unit=unit)
        for _ in range(3):
            bars.advance(task, step)
        capsys.readouterr()
        bars.print_line(task)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"reading  {shown}.*", line), line


def test_a_log_gets_a_line_a_minute(monkeypatch, capsys):
    monkeypatch.setattr(progress, "time", Clock(1))
    with Bars() as bars:
        task = bars.add_task("reading", total=100)
        while bars.get_time() < 300:
            bars.advance(task)
    assert 3 <= len(capsys.readouterr().err.splitlines()) <= 4


def test_only_the_main_process_tells(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with Bars() as bars:
        bars.print_line(bars.add_task("reading", total=100))
    assert not capsys.readouterr().err


def test_bars_open_inside_others(screen):
    drawn = screen(80)
    with Bars() as outer:
        task = outer.add_task("outer", total=2)
        for _ in range(2):
            with Bars(transient=True) as inner:
                inner.advance(inner.add_task("inner", total=1))
                inner.refresh()
            outer.advance(task)
    assert any(line.startswith("inner") for line in frames(drawn)) and frames(drawn)[-1].startswith("outer")


def test_loading_and_saving_a_model_shows_our_bars(screen, tmp_path, capsys):
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    model = _llama()
    logging.enable_progress_bar()
    drawn = screen(80)
    with transformers_bars():
        model.save_pretrained(tmp_path)
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert any(line.startswith("loading weights") for line in frames(drawn)), drawn.getvalue()
    assert any(line.startswith("writing model shards") for line in frames(drawn))
    assert "Loading" not in capsys.readouterr().err
    assert logging.set_tqdm_hook(None) is None, "the hook was left behind"


def test_the_sum_of_a_large_file_shows_a_bar(screen, tmp_path, monkeypatch):
    (tmp_path / "weights").write_bytes(bytes(3 * 2**20 + 5))
    plain = watched_sha256(tmp_path / "weights")
    drawn = screen(80)
    monkeypatch.setattr(progress, "LARGE", 10)
    assert watched_sha256(tmp_path / "weights") == plain == hashlib.sha256(bytes(3 * 2**20 + 5)).hexdigest()
    assert re.search(r"checking weights .* 3\.1 MB/3\.1 MB", frames(drawn)[-1]), frames(drawn)


def _commands(tmp_path):
    """What takes long, as a command, and the bar that it shows."""
    return {
        "signals": (["reproduce", "signals", "--out", tmp_path], "signals"),
        "recall": (["reproduce", "recall", "--out", tmp_path], "training passkey: Elastic, uniform"),
        "speed": (["reproduce", "speed", "--out", tmp_path], "timing models"),
        "explore": (["explore", tmp_path / "model", "--text", __file__, "--out", tmp_path / "e.html", "--no-open"],
                    "model reads the text"),
        "attach": (["attach", tmp_path / "llama", "--out", tmp_path / "attached"], "loading weights"),
        "evaluate": (["evaluate", tmp_path / "model", "--metric", "ruler-niah", "--ruler-length", 600], "ruler-niah"),
    }  # fmt: skip


@pytest.mark.parametrize("name", _commands(Path()))
def test_what_takes_long_shows_a_bar(name, screen, tmp_path, monkeypatch, capsys):
    from elastic_memory.cli import main
    from elastic_memory.data import load_tokenizer
    from elastic_memory.reproduction.tables import recall, speed
    from tests.conftest import small_model

    for folder, model in (("model", small_model(vocab_size=300)), ("llama", _llama())):
        load_tokenizer("bytes").save(tmp_path / folder)
        model.save_pretrained(tmp_path / folder)
    capsys.readouterr()
    plan = recall.PLANS["smoke"] | {"steps": 2, "samples": 2}
    monkeypatch.setitem(recall.PLANS, "smoke", plan)
    monkeypatch.setattr(recall, "DISTANCES", (1, 2))
    monkeypatch.setattr(speed, "_order", lambda plan: [("tiny", "Transformer++", "1x")])
    monkeypatch.setattr(speed, "timed", lambda models, plan: (speed.Throughput("a", 1, 1, 1, 1, None), 1))
    command, shown = _commands(tmp_path)[name]
    drawn = screen(120)
    monkeypatch.setattr(sys, "argv", ["elastic", *map(str, command)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code, capsys.readouterr().err
    assert any(line.startswith(shown) for line in frames(drawn)), drawn.getvalue()
    assert "Loading weights" not in capsys.readouterr().err + drawn.getvalue()


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=300, **shape))
