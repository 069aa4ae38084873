"""The command line: a list of commands, help that teaches, errors of one line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_memory import cli


def elastic(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", "from elastic_memory.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


def call(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """The same in this process: exit code, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["elastic", *arguments])
    with pytest.raises(SystemExit) as exit_code:
        cli.main()
    return (exit_code.value.code or 0, *capsys.readouterr())


def test_help_lists_every_command_and_imports_none(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("elastic_memory.commands.")]:
        monkeypatch.delitem(sys.modules, name)
    code, shown, _ = call(monkeypatch, capsys, "--help")
    assert code == 0
    assert all(name in shown for name in cli.COMMANDS)
    assert not [name for name in sys.modules if name.startswith("elastic_memory.commands.")]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_explains_itself(name, monkeypatch, capsys):
    code, shown, _ = call(monkeypatch, capsys, name, "--help")
    assert code == 0
    assert shown.count(f"elastic {name}") > 1, "beside its usage line, the help holds an example"


def test_a_wrong_word_is_one_line_and_exit_code_2():
    result = elastic("reproduce", "signal")
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.fullmatch(r"elastic: table 'signal': did you mean 'signals'\? known: .*\n", result.stderr), result.stderr


def test_an_unknown_command_or_tier_is_refused(monkeypatch, capsys):
    assert call(monkeypatch, capsys, "remember")[0] == 2
    code, _, said = call(monkeypatch, capsys, "reproduce", "signals", "--tier", "huge")
    assert code == 2
    assert "'huge': smoke, small, paper" in said


def test_the_memory_at_work(tmp_path):
    from rich.console import Console

    from elastic_memory.commands.demo import memory_at_work

    console = Console(record=True, width=100)
    picture = memory_at_work(tmp_path, console)
    assert picture.stat().st_size > 10_000
    shares = {
        line.split("  ")[1].strip(): [float(cell.rstrip("%")) for cell in line.split() if cell.endswith("%")]
        for line in console.export_text().splitlines()
        if "%" in line
    }
    assert all(row == sorted(row) for row in shares.values())
    assert shares["20 sines"][-1] == 100
    assert shares["text, smoothed"][-1] > 90 > 20 > shares["noise"][-1]


def test_the_readmes_example_runs(tmp_path):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    example = text.split("```python\n")[1].split("```")[0]
    result = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "book.memory.safetensors").stat().st_size < 100_000
