"""Names of folders that are not there."""

import pytest

from elastic_memory.data import load_tokenizer
from elastic_memory.data.places import missing_folder
from elastic_memory.evaluation.loading import load_config, load_model, tokenizer_of


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "runs" / "small-elastic-1a2b3c" / "model").mkdir(parents=True)
    (tmp_path / "runs" / "small-none-4d5e6f").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name, said",
    [
        ("runs/small-elastc-1a2b3c", "did you mean runs/small-elastic-1a2b3c?"),
        ("runs/small-elastic", "did you mean runs/small-elastic-1a2b3c?"),
        ("rnus/small-none-4d5e6", "did you mean runs/small-none-4d5e6f?"),
        ("./rnus/small-none-4d5e6f", "did you mean runs/small-none-4d5e6f?"),
        ("rnus/small-none-4d5e6f/modle", "the nearest folder is runs/small-none-4d5e6f"),
        ("runs/small-none-4d5e6f/model/x", "the nearest folder is runs/small-none-4d5e6f"),
        ("runs/zzz", "the nearest folder is runs"),
        ("../nowhere/at/all", "the nearest folder is .."),
        ("file", "file is a file: give a folder"),
        ("a/b/c", "the nearest folder is ."),
        ("name with spaces", "the nearest folder is ."),
        ("", "give a folder"),
    ],
)
def test_what_looks_like_a_folder_and_is_none(name, said, here, monkeypatch):
    import socket

    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("it asked the network"))
    assert said in (missing_folder(name) or "")
    for load in (load_model, load_config, tokenizer_of):
        with pytest.raises(FileNotFoundError) as error:
            load(name)
        assert str(error.value) == missing_folder(name)
    with pytest.raises(ValueError, match="no tokenizer") as error:
        load_tokenizer(name)
    assert said in str(error.value)


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.1-8B", "runs", "runs/small-none-4d5e6f", "./runs", "."])
def test_folders_and_names_on_the_hub(name, here):
    assert missing_folder(name) is None
    assert missing_folder(str(here / "runs")) is None
