"""`elastic attach`: a folder that every command reads like a finished run."""

import json
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import elastic_memory as em
from elastic_memory.commands.attach import attach
from elastic_memory.commands.evaluate import evaluate
from elastic_memory.commands.explore import explore
from elastic_memory.commands.generate import generate
from elastic_memory.commands.memory import read
from elastic_memory.data import load_tokenizer, prepare
from elastic_memory.evaluation.loading import load_model
from elastic_memory.memory import MEMORIES
from tests.model.test_attach import SHAPE

ATTACHED = dict(memory="elastic", layers=[1], order=11, points=5, block_size=16)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A random Llama of bytes in bfloat16, as people have theirs."""
    folder = tmp_path_factory.mktemp("llama") / "model"
    load_tokenizer("bytes").save(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE | {"vocab_size": 256})).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def attached(llama, tmp_path_factory):
    out = tmp_path_factory.mktemp("attached") / "with-memory"
    attach(str(llama), out, **ATTACHED, local="sliding", window=32)
    return out


def test_it_is_the_model_with_the_memory(llama, attached, ids, caplog, capsys):
    made = load_model(str(attached))
    assert "UNEXPECTED" not in caplog.text + "".join(capsys.readouterr())  # its memory is restored: nothing to report
    assert made.dtype == torch.bfloat16
    assert list(made.memories) == [1] and made.memories[1].geometry.block_size == 16
    assert made.model.layers[0].locality.kind == "sliding" and made.model.layers[0].locality.window == 32
    by_hand = em.attach_memory(load_model(str(llama)), layers=[1], order=11, points=5, block_size=16,
                               local_attention="sliding", window=32)  # fmt: skip
    with torch.no_grad():
        assert torch.equal(made(ids).logits, by_hand(ids).logits)
    assert (attached / "manifest.json").exists() and not list(attached.parent.glob(".*"))


def test_it_says_what_was_made_and_what_comes_next(llama, tmp_path, capsys):
    attach(str(llama), tmp_path / "out", **ATTACHED, dtype="float32")
    said = capsys.readouterr().out
    assert re.search(r"1 +elastic +352", said), said
    assert re.search(r"parameters in float32, \d+ MB", said)
    for command in ("prepare", "train", "evaluate", "generate"):
        assert f"elastic {command} " in said
    assert load_model(str(tmp_path / "out")).dtype == torch.float32


def test_every_command_reads_it(attached, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    text = tmp_path / "texts" / "book.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 40)
    prepare(tmp_path / "texts", tmp_path / "rows", tokenizer=str(attached), length=128, shares=(0, 0, 1))
    evaluate(str(attached), data=tmp_path / "rows", limit=2, out=tmp_path / "ppl.json", protocol=["P0", "P4"])
    assert "P4" in json.loads((tmp_path / "ppl.json").read_text())["metrics"]["ppl"]
    book = tmp_path / "book.memory.safetensors"
    generate(str(attached), prompt_file=text, memory=book, tokens=3)
    assert book.exists()
    read([text], model=str(attached), out=tmp_path / "memories")
    assert list((tmp_path / "memories").iterdir())
    explore([attached, book], text=text, out=tmp_path / "explore.html", show=False)
    assert (tmp_path / "explore.html").stat().st_size > 10_000


@pytest.mark.parametrize("memory", MEMORIES)
def test_every_memory_can_be_attached(memory, llama, tmp_path, ids):
    order = dict(order=11) if MEMORIES[memory].has_option("order") else {}
    attach(str(llama), tmp_path / "out", memory=memory, block_size=16, dtype="float32", **order)
    model = load_model(str(tmp_path / "out"))
    assert model.config.elastic_memory["memory"] == memory
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()


def test_options_of_the_memory(llama, tmp_path):
    options = ["sampling_options={decay: 0.9}", "algorithm=recurrent"]
    attach(str(llama), tmp_path / "out", **ATTACHED, sampling="exponential", set_=options)
    settings = load_model(str(tmp_path / "out")).config.elastic_memory
    assert settings["sampling_options"] == {"decay": 0.9}
    assert settings["memory_options"]["algorithm"] == "recurrent"


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(layers=[3]), "layers 0 to 2"),
        (dict(memory="elastik"), "did you mean 'elastic'"),
        (dict(local="window"), "local_attention='window'"),
        (dict(set_=["order=3"]), "order is given twice, or has an option of its own"),
        (dict(set_=["decay"]), "expected option=value"),
        (dict(set_=["orders=3"]), "orders"),
        (dict(dtype="int8"), "--dtype int8: known: bfloat16, float32"),
        (dict(window=32), "only 'sliding' has a window"),
        (dict(local="sliding", window=24), "give a multiple of block_size=16"),
        (dict(block_size=0), "--block-size 0: give 1"),
        (dict(set_=["mass=maybe"]), "mass='maybe': give True or False"),
        (dict(set_=["length=3"]), "length=3: give True or False"),
        (dict(set_=["silent=maybe"]), "silent='maybe': give True or False"),
        (dict(set_=["detach_every=1.5"]), r"detach_every=1\.5: give a whole number or None"),
        (dict(set_=["sampling_options=3"]), "sampling_options=3: give names and their values or None"),
        (dict(memory="dyadic", set_=["segments=true"]), "segments=True: give a whole number"),
        (dict(memory="clock", set_=["shortest=a"]), "shortest='a': give a whole number"),
        (dict(memory="recent", set_=["share=half"]), "share='half': give a number"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(changes, message, llama, tmp_path):
    with pytest.raises(ValueError, match=message):
        attach(str(llama), tmp_path / "out", **ATTACHED | changes)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(llama, attached, tmp_path):
    before = (attached / "manifest.json").read_bytes()
    with pytest.raises(ValueError, match="exists: name a new folder"):
        attach(str(llama), attached, **ATTACHED)
    assert (attached / "manifest.json").read_bytes() == before
    with pytest.raises(ValueError, match="already has a memory"):
        attach(str(attached), tmp_path / "again", **ATTACHED)
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "bare" / name).write_bytes((llama / name).read_bytes())
    with pytest.raises(ValueError, match="no tokenizer"):
        attach(str(tmp_path / "bare"), tmp_path / "again", **ATTACHED)


def test_a_write_that_fails_leaves_nothing(llama, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("elastic_memory.evaluation.attaching.write_manifest", full)
    with pytest.raises(OSError, match="No space"):
        attach(str(llama), tmp_path / "out", **ATTACHED)
    assert not list(tmp_path.iterdir())


def test_a_damaged_copy_is_refused(llama, tmp_path):
    attach(str(llama), tmp_path / "out", **ATTACHED)
    path = tmp_path / "out" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="SHA-256 differs"):
        load_model(str(tmp_path / "out"))


def test_from_a_gguf_file(tmp_path):
    """Weights unpacked, in bfloat16, and the file's own tokenizer."""
    gguf = pytest.importorskip("tests.evaluation.test_gguf")
    gguf.write(gguf.tiny(), tmp_path / "tiny.gguf")
    attach(str(tmp_path / "tiny.gguf"), tmp_path / "out", **ATTACHED)
    made, ids = load_model(str(tmp_path / "out")), torch.arange(12)[None]
    assert made.dtype == torch.bfloat16 and not hasattr(made.config, "quantization_config")
    with torch.no_grad():
        expected = gguf.tiny().to(torch.bfloat16)(ids).logits
        torch.testing.assert_close(made(ids.to(made.device)).logits.cpu(), expected, atol=0.01, rtol=0.01)
    tokenizer = load_tokenizer(str(tmp_path / "out"))
    assert tokenizer.sha256 == load_tokenizer(str(tmp_path / "tiny.gguf")).sha256
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
