"""The command line: a list of commands, help that teaches, errors of one line."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers

from elastic_memory import cli
from tests.conftest import small_model

START = "from elastic_command import main; main()"  # what the installed program does


def elastic(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", START, *arguments],
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


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in cli.COMMANDS)], ids=" ".join)
def test_help_takes_less_than_half_a_second_of_cpu(arguments):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = elastic(*arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_help_has_no_line_breaks_inside_a_paragraph(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert "explains each command" in call(monkeypatch, capsys, "--help")[1]
    for name in ("train", "evaluate", "prepare", "reproduce"):
        shown = call(monkeypatch, capsys, name, "--help")[1].partition("Arguments")[0]
        broken = re.findall(r"^ ?\S.{0,80}[a-z,] *\n ?\S", shown, re.MULTILINE)
        assert not broken, broken


BEGUN = "import sys; sys.stdout.write('.'); sys.stdout.flush()\n"


PROGRAM, MODULE = ["-c", BEGUN + START], ["-m", "elastic_memory.cli"]  # they differ in the first moments only


@pytest.mark.parametrize(
    "start, delay", [*((PROGRAM, delay) for delay in (0.2, 0.5, 1.0, 2.0, 3.0)), (MODULE, 0.2), (MODULE, 0.5)]
)
def test_ctrl_c_while_it_starts_is_no_traceback(start, delay, tmp_path):
    """Whatever is being imported: typer, torch, transformers, our own modules."""
    (tmp_path / "sitecustomize.py").write_text(BEGUN)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, *start, "evaluate", "x", "--data", str(tmp_path)]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    process.stdout.read(1 + (start[0] == "-c"))
    delay += 0.3 * (start[0] == "-m")  # Python itself comes first
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "Traceback" not in said, said


def test_models_are_registered_whatever_is_imported_first(tmp_path):
    small_model().save_pretrained(tmp_path)
    load = f"AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})"
    ours, theirs = "import elastic_memory", "from transformers import AutoConfig, AutoModelForCausalLM"
    command = (
        "import elastic_command, sys, elastic_memory; assert 'torch' not in sys.modules\nimport elastic_memory.model"
    )
    for lines in ([ours, theirs, load], [theirs, ours, load], [command, theirs, load]):
        result = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr


def test_ctrl_c_ends_a_process_that_has_just_begun():
    """Between `begin` and the first command nothing catches a KeyboardInterrupt: the process ends without a word."""
    code = "import elastic_command, os, signal, time; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "elastic_command.begin(); os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_as_a_module_it_starts_without_torch_too():
    code = "import runpy, sys; sys.argv = ['-m', '--help']; sys.orig_argv = ['python', '-m', 'elastic_memory.cli']\n"
    code += "try: runpy.run_module('elastic_memory.cli', run_name='__main__', alter_sys=True)\n"
    code += "finally: assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "Usage" in result.stdout, result.stderr


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("elastic e", {"evaluate", "explore"}),
        ("elastic evaluate --corr", {"--corrupt", "--corrupt-layers"}),
        ("elastic memory j", {"join"}),
    ],
)
def test_a_shell_completes_commands_and_options_without_torch(line, offered):
    start = "import sys; sys.argv[0] = 'elastic'\ntry:\n from elastic_command import main; main()\n"
    start += "finally: assert 'torch' not in sys.modules"
    asked = {"_ELASTIC_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    result = subprocess.run([sys.executable, "-c", start], env=os.environ | asked, capture_output=True, text=True)
    assert set(result.stdout.split()) == offered, result.stderr


@pytest.mark.parametrize("name", [*cli.COMMANDS, "memory read", "memory join", "memory show"])
def test_every_command_shows_an_indented_example(name, monkeypatch, capsys):
    code, shown, _ = call(monkeypatch, capsys, *name.split(), "--help")
    assert code == 0
    assert re.search(rf"^     elastic {name}\b", shown, re.MULTILINE), shown


@pytest.mark.parametrize("name", [*cli.COMMANDS, "memory read", "memory join", "memory show"])
def test_examples_keep_their_indentation_in_80_columns(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    shown = call(monkeypatch, capsys, *name.split(), "--help")[1].partition("╭─")[0]
    after = re.findall(r"^     \S.*\n(.*)$", shown, re.MULTILINE)
    assert after and all(not line.strip() or line.startswith("     ") for line in after), shown


def test_the_doctor_knows_versions_machine_and_fast_paths(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 1.0, 1.0))
    code, shown, _ = call(monkeypatch, capsys, "doctor")
    assert code == 0
    for word in (torch.__version__, transformers.__version__, "Triton kernels", "models run on", "machine is busy"):
        assert word in shown, word
    assert ("they need a GPU" in shown) == ("Without a GPU" in shown) == (not torch.cuda.is_available())


def test_without_the_fast_folder_the_doctor_says_so(monkeypatch, capsys):
    monkeypatch.setattr("elastic_memory.common.speedups.find", lambda name: None)
    assert "the folder elastic_memory/fast was left out" in call(monkeypatch, capsys, "doctor")[1]


def test_a_wrong_word_is_one_line_and_exit_code_2():
    result = elastic("reproduce", "signal")
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.fullmatch(r"elastic: table 'signal': did you mean 'signals'\? known: .*\n", result.stderr), result.stderr


def test_an_unknown_command_or_tier_is_refused(monkeypatch, capsys):
    assert call(monkeypatch, capsys, "remember")[0] == 2
    code, _, said = call(monkeypatch, capsys, "reproduce", "signals", "--tier", "huge")
    assert code == 2
    assert "'huge': known: smoke, small, medium, paper" in said


def test_the_memory_at_work(tmp_path):
    from rich.console import Console

    from elastic_memory.commands.demo import memory_at_work

    console = Console(record=True, width=100)
    memory_at_work(tmp_path, console)
    assert (tmp_path / "memory.png").stat().st_size > 10_000
    shares = {
        line.split("  ")[1].strip(): [float(cell.rstrip("%")) for cell in line.split() if cell.endswith("%")]
        for line in console.export_text().splitlines()
        if "%" in line
    }
    assert all(row == sorted(row) for row in shares.values())
    assert shares["20 sines"][-1] == 100
    assert shares["text, smoothed"][-1] > 90 > 20 > shares["noise"][-1]


def test_the_readmes_examples_run(tmp_path):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = [part.split("```")[0] for part in text.split("```python\n")[1:]]
    assert len(blocks) > 1
    example = "\n".join(blocks)  # one after the other, as a reader types them
    result = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "book.memory.safetensors").stat().st_size < 100_000
