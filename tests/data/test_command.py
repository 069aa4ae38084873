import json

import pytest
from typer.testing import CliRunner

from elastic_memory.cli import app
from elastic_memory.data import prepare
from tests.data.conftest import tree


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": f"d{i}", "text": f"document {i} " * 90}) + "\n" for i in range(40)))
    return path


def elastic(*arguments):
    return CliRunner().invoke(app, ["prepare", *map(str, arguments)])


def test_preparing_says_what_came_of_it(corpus, tmp_path):
    result = elastic(corpus, "--tokenizer", "bytes", "--length", "100", "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert "rows of 100 tokens" in result.output
    assert "licences: unknown (40)" in result.output
    assert "left out: nothing" in result.output


def test_inspecting_shows_counts_lengths_and_text_and_verifies(corpus, tmp_path):
    prepare(corpus, tmp_path / "out", tokenizer="bytes", length=100)
    result = elastic("--inspect", tmp_path / "out")
    assert result.exit_code == 0
    for words in ("train: checksums match; documents of 990 to 1,080 tokens, median", "starts with:\n\ndocument "):
        assert words in result.output
    content = bytearray((tmp_path / "out" / "train.bin").read_bytes())
    content[50] ^= 1
    (tmp_path / "out" / "train.bin").write_bytes(content)
    damaged = elastic("--inspect", tmp_path / "out")
    assert damaged.exit_code != 0
    assert "train.bin is damaged" in str(damaged.exception)


def test_shards_on_the_command_line(corpus, tmp_path):
    arguments = (corpus, "--tokenizer", "bytes", "--length", "100", "--shares", "50/25/25", "--out")
    for shard in ("1/2", "0/2"):
        result = elastic(*arguments, tmp_path / "shards", "--shard", shard)
        assert f"shard {shard} is done" in result.output
    elastic(*arguments, tmp_path / "shards")
    elastic(*arguments, tmp_path / "whole")
    assert tree(tmp_path / "shards") == tree(tmp_path / "whole")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no source given"),
        (["stdlib"], "--tokenizer is missing"),
        (["stdlib", "--out", "x"], "--tokenizer is missing"),
        (["stdlib", "--tokenizer", "bytes"], "--out is missing"),
        (["stdlib", "--out", "x", "--tokenizer", "bytes", "--shard", "2"], "'2': write it like --shard 0/8"),
        (["stdlib", "--out", "x", "--tokenizer", "bytes", "--shard", "2/2"], "shard 2/2"),
        (["stdlib", "--out", "x", "--tokenizer", "bytes", "--shares", "a/b/c"], "write it like --shares 90/5/5"),
        (["stdlib", "--out", "x", "--tokenizer", "bytes", "--shares", "0/0/0"], "leaves nothing"),
        (["stdlib", "--out", "x", "--tokenizer", "no/such", "--length", "9"], "no tokenizer 'no/such'"),
        (["--inspect", "nowhere"], "nowhere has no prepared rows"),
    ],
)
def test_wrong_options_are_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = elastic(*arguments)
    assert isinstance(result.exception, ValueError | FileNotFoundError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    assert not list(tmp_path.iterdir())
