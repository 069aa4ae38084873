"""An option that would have no effect is refused, before anything is loaded or written."""

import sys

import pytest

from elastic_memory import cli
from elastic_memory.data import prepare

CASES = [
    ("explore --port 8000", "--port has no effect without --serve"),
    ("explore --port 0", "--port has no effect without --serve"),
    ("explore --tokenizer bytes", "--tokenizer has no effect without a model"),
    ("explore --tokens 100", "--tokens has no effect without a model"),
    ("explore folder --serve --out page.html", "--out has no effect with --serve"),
    ("prepare text.txt --inspect rows", "SOURCES has no effect with --inspect"),
    ("prepare --inspect rows --length 16", "--length has no effect with --inspect"),
    (
        "prepare stdlib --tokenizer bytes --out new --text body",
        "--text) has no effect on the corpus stdlib",
    ),
    ("prepare text.txt --tokenizer bytes --out new --text body", "--text) has no effect on plain text"),
    ("prepare split --tokenizer bytes --out new --length 4 --shares 80/10/10", "the corpus has splits of its own"),
    ("train smoke/elastic --plan --data rows", "--data has no effect with --plan"),
    ("train smoke/elastic --plan --resume", "--resume has no effect with --plan"),
    ("train smoke/elastic --data rows --devices 8", "--devices has no effect without --plan"),
    ("train smoke/elastic --data rows --weights-only", "--weights-only has no effect without --resume"),
    ("train smoke/elastic --data rows --new-machine", "--new-machine has no effect without --resume"),
    ("train smoke/elastic --data rows --requeue --resume", "--resume has no effect with --requeue"),
    ("evaluate model --data rows --alpha 2", "--alpha has no effect without --metric longppl"),
    ("evaluate model --data rows --reference x --metric ppl", "--reference has no effect without --metric longppl"),
    ("evaluate model --data rows --reconstruct 8", "--reconstruct has no effect without --metric reconstruction"),
    ("evaluate model --data rows --recall-steps 600", "--recall-steps has no effect without --metric recall"),
    ("evaluate model --data rows --metric spectrum --protocol P4", "--protocol has no effect without --metric ppl"),
    ("evaluate model --data rows --stride 8", "--stride has no effect without --protocol P1"),
    ("evaluate model --data rows --seed 1", "--seed has no effect without --corrupt"),
    ("evaluate model --data rows --corrupt-layers all", "--corrupt-layers has no effect without --corrupt"),
    ("evaluate model --metric recall --limit 3", "--limit has no effect without --data"),
    ("evaluate model --metric recall --batch-size 2", "--batch-size has no effect without --metric ppl"),
    ("generate model --prompt a --temperature 0 --seed 1", "--seed has no effect with --temperature 0"),
    ("generate model --prompt a --temperature 0 --top-p 0.5", "--top-p has no effect with --temperature 0"),
    ("generate model --prompt a --force", "--force has no effect without a --memory"),
    ("reproduce list --tier small", "--tier has no effect on list"),
    ("reproduce status --minutes 5", "--minutes has no effect on status"),
    ("reproduce signals --parallel 2", "table 'signals' does not use --parallel"),
    ("reproduce signals --keep-weights", "table 'signals' does not use --keep-weights"),
    ("reproduce main --minutes 0 --parallel 2", "--parallel has no effect with --minutes 0"),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.txt").write_text("some text " * 10)
    (tmp_path / "split").mkdir()
    for name in ("train", "test"):
        (tmp_path / "split" / f"{name}.jsonl").write_text('{"text": "one two three"}\n')
    return tmp_path


@pytest.mark.parametrize(("words", "said"), CASES, ids=[words for words, _ in CASES])
def test_it_is_refused(words, said, here, monkeypatch, capsys):
    before = sorted(here.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["elastic", *words.split()])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2 and said in capsys.readouterr().err
    assert sorted(here.rglob("*")) == before


def test_a_corpus_with_splits_is_prepared_without_shares(here):
    assert set(prepare(here / "split", here / "new", tokenizer="bytes", length=4)["splits"]) == {"train", "test"}
