"""A finished model is loaded as it was written, or refused in one line."""

import json
import random
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

import elastic_memory as em
from elastic_memory.common.checksums import MANIFEST
from elastic_memory.data.tokenizers import load_tokenizer
from elastic_memory.evaluation.loading import load_model
from elastic_memory.evaluation.model_files import check_files
from tests.conftest import small_model
from tests.evaluation.conftest import llama
from tests.test_cli import call

LAYER = "model.layers.1."


@pytest.fixture(params=["sealed", "bare"])
def model(request, undisturbed, tmp_path):
    """The model of a finished run, with its checksums; or any model of ours, which has none."""
    shutil.copytree(undisturbed / "model", tmp_path / "model")
    if request.param == "bare":
        (tmp_path / "model" / MANIFEST).unlink()
    return tmp_path / "model"


def is_bare(folder):
    return not (folder / MANIFEST).exists()


def change(folder, action):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    action(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def drop_layer(tensors):
    for name in [name for name in tensors if name.startswith(LAYER)]:
        del tensors[name]


def rename(tensors):
    tensors["model.norm.gain"] = tensors.pop("model.norm.weight")


def add(tensors):
    tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(3)


def integers(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)


@pytest.mark.parametrize(
    ("action", "complaint"),
    [
        (drop_layer, r"missing weights: model\.layers\.1\."),
        (rename, r"missing weights: model\.norm\.weight"),
        (add, r"unexpected tensors: model\.layers\.7\.mlp"),
        (integers, r"model\.norm\.weight has type I32"),
    ],
)
def test_tensors_that_are_not_the_models_are_refused(model, action, complaint):
    change(model, action)
    with pytest.raises(ValueError, match=complaint if is_bare(model) else r"model\.safetensors: .* written"):
        load_model(str(model.parent))


def with_header(path, edit):
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = edit(content[8 : 8 + size].decode()).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + size :])


def test_a_tensor_that_is_there_twice_is_refused(model):
    path = model / "model.safetensors"

    def twice(header):
        norm = json.dumps(json.loads(header)["model.embed_tokens.weight"])
        return header.rstrip()[:-1] + f',"model.embed_tokens.weight":{norm}}}'

    with_header(path, twice)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load_model(str(model.parent))


def test_a_tensor_in_two_files_is_refused(model):
    save_file({"model.norm.weight": torch.zeros(64)}, model / "more.safetensors")
    with pytest.raises(ValueError, match=r"more\.safetensors"):
        load_model(str(model.parent))


@pytest.mark.parametrize("left", [0, 7, 100, -1])
def test_a_truncated_file_is_one_line(model, left, monkeypatch, capsys, corpus):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    code, _, said = call(monkeypatch, capsys, "evaluate", str(model.parent), "--data", str(corpus), "--split", "train")
    assert code == 2
    assert "model.safetensors" in said
    assert said.count("\n") == 1, said


def test_one_flipped_bit_of_a_finished_model_is_refused(undisturbed, tmp_path, monkeypatch, capsys, corpus):
    shutil.copytree(undisturbed / "model", tmp_path / "model")
    load_model(str(tmp_path))
    listed = json.loads((tmp_path / "model" / MANIFEST).read_text())["files"]
    assert {"model.safetensors", "config.json", "training.json", "bytes.json"} <= listed.keys()
    for name in listed:
        path = tmp_path / "model" / name
        content = bytearray(path.read_bytes())
        content[-2] ^= 1
        kept = path.read_bytes()
        path.write_bytes(content)
        code, _, said = call(monkeypatch, capsys, "evaluate", str(tmp_path), "--data", str(corpus), "--split", "train")
        assert (code, said.count("\n")) == (2, 1), said
        assert f"model/{name}: SHA-256 differs" in said
        path.unlink()
        code, _, said = call(monkeypatch, capsys, "evaluate", str(tmp_path), "--data", str(corpus), "--split", "train")
        assert (code, said.count("\n")) == (2, 1), said
        path.write_bytes(kept)
    (tmp_path / "model" / "README.md").write_text("a note of my own")
    load_model(str(tmp_path))


def test_an_adapter_put_beside_a_finished_model_is_refused(undisturbed, tmp_path):
    shutil.copytree(undisturbed / "model", tmp_path / "model")
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        load_model(str(tmp_path))


def test_a_model_that_was_saved_by_hand_still_loads(tmp_path):
    small_model("memorizing", vocab_size=256).save_pretrained(tmp_path, max_shard_size="20KB")
    load_tokenizer("bytes").save(tmp_path / "tokenizer")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    load_model(str(tmp_path))
    em.attach_memory(llama(), memory="memorizing", order=4, block_size=16).save_pretrained(tmp_path / "attached")
    assert load_model(str(tmp_path / "attached")).memories


def test_no_change_of_the_weights_of_a_finished_model_gets_through(undisturbed, tmp_path):
    """Flips, cuts, insertions and swaps anywhere in the file."""
    shutil.copytree(undisturbed / "model", tmp_path / "model")
    path, draw = tmp_path / "model" / "model.safetensors", random.Random(0)
    whole = path.read_bytes()
    for _ in range(200):
        changed, place = bytearray(whole), draw.randrange(len(whole))
        kind = draw.randrange(4)
        if kind == 0:
            changed[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[place : place + draw.randrange(1, 9)]
        elif kind == 2:
            changed[place:place] = draw.randbytes(4)
        else:
            changed[place : place + 4] = changed[place : place + 4][::-1]
        if changed == whole:
            continue
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            check_files(tmp_path / "model")
    path.write_bytes(whole)
    check_files(tmp_path / "model")
