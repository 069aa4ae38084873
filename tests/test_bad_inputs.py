"""Bad inputs of the command line: one line that names them and exit code 2, soon, and nothing half done."""

import errno
import os
import shutil
import subprocess
import sys
import time

import pytest
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from elastic_memory import cli
from elastic_memory.data import load_tokenizer, prepare
from tests.conftest import small_model
from tests.test_cli import START, call

RECIPE = """
name: x
model: {preset: tiny}
training: {tokens: 128, length: 32, batch_tokens: 64, precision: fp32}
execution: {device: cpu}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Text, rows, a recipe, a model with its tokenizer, and a result."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("some words of a text " * 20)
    prepare(folder / "text", folder / "rows", tokenizer="bytes", length=32, shares=(1, 0, 0))
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "other.jsonl").write_text('{"content": "some words"}')
    load_tokenizer("bytes").save(folder / "model")
    small_model(vocab_size=256).save_pretrained(folder / "model")
    (folder / "results").mkdir()
    (folder / "results" / "t.md").write_text("**t**\n\n| a |\n| --- |\n" + "| 1 |\n" * 2000)
    os.mkfifo(folder / "pipe")
    return folder


EVALUATE = ["evaluate", "model", "--data", "rows", "--split", "train", "--limit", "1"]
PREPARE = ["prepare", "text", "--tokenizer", "bytes", "--length", "32", "--out", "new"]
PLAN = ["train", "recipe.yaml", "--plan"]
BAD = [
    (EVALUATE, ["--batch-size", "0"], "--batch-size 0: give 1 or more"),
    (EVALUATE, ["--limit", "0"], "--limit 0"),
    (EVALUATE, ["--stride", "0", "--protocol", "P1"], "--stride 0"),
    (EVALUATE, ["--points", "1000000000"], "--points 1000000000: give 1 to 100,000"),
    (EVALUATE, ["--order", "1000000000"], "--order 1000000000"),
    (EVALUATE, ["--recall-steps", "-1"], "--recall-steps -1"),
    (EVALUATE, ["--seed", "-1", "--corrupt", "0.5"], "--seed -1"),
    (EVALUATE, ["--alpha", "nan"], "--alpha nan"),
    (EVALUATE, ["--metric", "reconstruction", "--reconstruct", "1000000000"], "--reconstruct 1000000000"),
    (EVALUATE, ["--out", "rows"], "rows is a folder: name a file"),
    (EVALUATE, ["--out", "pipe"], "pipe is not a regular file"),
    (EVALUATE, ["--out", "rows/train.bin/x.json"], "Not a directory"),
    (["bench", "--memory", "none"], ["--rows", "-1"], "--rows -1"),
    (["bench", "--memory", "none"], ["--length", "0"], "--length 0"),
    (["bench", "--memory", "elastic"], ["--multiple", "1000000000"], "--multiple 1000000000"),
    (["demo", "--out", "d"], ["--tokens", "-5"], "--tokens -5"),
    (["prepare", "text", "--out", "new"], [], "--tokenizer is missing: a folder, a name on the hub, or bytes"),
    (["prepare", "text", "--tokenizer", "bytes"], [], "--out is missing"),
    (["prepare", "other.jsonl", *PREPARE[2:]], [], "name the field of the text with --text"),
    (["reproduce", "signals"], ["--out", "recipe.yaml"], "--out recipe.yaml is a file: name a folder"),
    (PREPARE, ["--workers", "-3"], "--workers -3"),
    (PREPARE, ["--workers", "0"], "--workers 0"),
    (["prepare", "/proc/self/mem", "--tokenizer", "bytes", "--out", "mem"], [], "/proc/self/mem cannot be read"),
    (PLAN, ["--devices", "0"], "--devices 0"),
    (PLAN, ["--price", "nan"], "--price nan"),
    (PLAN, ["--measured", "nowhere"], "--measured nowhere: no such folder"),
    (PLAN, ["--set", "model.config.num_hidden_layers=1000000000"], "num_hidden_layers"),
    (["report", "results"], ["--out", "rows"], "rows is a folder"),
    (["report", "results"], ["--out", "rows/train.bin/x.html"], "train.bin"),
    (["train", "recipe.yaml", "--data", "rows"], ["--out", "rows/train.bin"], "Not a directory"),
]


@pytest.mark.parametrize(
    ("command", "options", "message"), BAD, ids=lambda part: part if isinstance(part, str) else " ".join(part)
)
def test_one_line_and_exit_code_2(place, monkeypatch, capsys, command, options, message):
    monkeypatch.chdir(place)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    begin = time.monotonic()
    code, _, said = call(monkeypatch, capsys, *command, *options)
    assert time.monotonic() - begin < 20
    told = [line for line in said.splitlines() if line.startswith("elastic: ")]
    assert (code, len(told)) == (2, 1), said
    assert message in told[0]
    assert "Traceback" not in said
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/locked/file"), "/locked/file: Permission denied"),
        (OSError(errno.EROFS, "Read-only file system", "/cdrom/x"), "/cdrom/x: Read-only file system"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (StrictDataclassError("Validation error for field 'x':\n    TypeError: no"), "field 'x': TypeError: no"),
        (SafetensorError("header\ntoo large"), "header too large"),
        (KeyError("machine"), "'machine' is missing: a file is not as expected (found by"),
        (RecursionError("maximum recursion depth"), "nested too deeply"),
    ],
)
def test_errors_of_files_are_one_line(error, said, monkeypatch, capsys):
    def fail():
        raise error

    monkeypatch.setattr(cli, "app", fail)
    code, _, told = call(monkeypatch, capsys)
    assert code == 2
    assert told.startswith("elastic: ") and said in told and told.count("\n") == 1


def test_errors_of_our_own_keep_their_traceback(monkeypatch, capsys):
    def fail():
        raise AssertionError("a mistake of ours")

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(sys, "argv", ["elastic"])
    with pytest.raises(AssertionError, match="a mistake of ours"):
        cli.main()


@pytest.mark.parametrize(
    "command",
    [["evaluate", "model", "--metric", "recall"], ["bench"], ["explore", "model", "--text", __file__, "--no-open"]],
    ids=lambda command: command[0],
)
def test_where_nothing_can_be_written_is_said_before_the_work(command, tmp_path, monkeypatch, capsys):
    """To a folder that is not there yet, in one without permission: root may write anywhere, so that is imitated."""
    from elastic_memory.common import files

    asked = []

    def refuse(dir):
        asked.append(dir)
        raise PermissionError(errno.EACCES, "Permission denied", "tmp1234")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    code, _, told = call(monkeypatch, capsys, *command, "--out", "new/result")
    assert code == 2 and told == "elastic: new/result: Permission denied\n"
    assert asked == [tmp_path] and not (tmp_path / "new").exists()


def test_a_full_disk_under_a_report_is_one_line(place, tmp_path):
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    words = [sys.executable, "-c", limited + START, "report", str(place / "results"), "--out", str(tmp_path / "r.html")]
    result = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert f"{tmp_path / 'r.html'}: File too large" in result.stderr
    assert not list(tmp_path.iterdir())


DAMAGED = ["", "null", "[]", "5", '"x"', "{}", "[" * 100_000, "\0"]


@pytest.mark.parametrize("content", DAMAGED, ids=lambda text: repr(text[:4]))
@pytest.mark.parametrize("file", ["rows/manifest.json", "rows/train.jsonl", "model/config.json", "model/training.json"])
def test_damaged_json_is_one_line(place, tmp_path, monkeypatch, capfd, file, content):
    shutil.copytree(place, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("pipe"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / file).write_text(content)
    code, _, said = call(monkeypatch, capfd, *EVALUATE)
    told = [line for line in said.splitlines() if line.startswith("elastic: ")]
    assert (code, len(told)) == (2, 1), said
    assert file in told[0] or "model " in told[0]
    assert "Traceback" not in said
