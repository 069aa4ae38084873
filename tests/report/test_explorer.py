"""`elastic explore`: the numbers that the page gets are the library's."""

import base64
import json
import re
import socket
import struct
import sys
import threading
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch

import elastic_memory as em
from elastic_memory import cli
from elastic_memory.data import load_tokenizer
from elastic_memory.evaluation import perplexity
from elastic_memory.evaluation.reconstruction import keys_and_values
from elastic_memory.memory import MEMORIES
from elastic_memory.report import attention_view, explorer
from elastic_memory.report.explorer_server import Server
from elastic_memory.sampling import SAMPLINGS
from tests.memory.cases import with_blends

TEXT = "In the beginning was the word </script><script>alert(1)</script> & naïve café 漢字. " * 4
BLOCK = 32


def tiny(memory="elastic", **changes):
    torch.manual_seed(0)
    options = {"sampling": "exponential"} if "sampling" in MEMORIES[memory].__init__.__kwdefaults__ else {}
    config = em.MemoryLlamaConfig.preset("tiny", memory=memory, block_size=BLOCK, **{**options, **changes})
    return em.MemoryLlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def bytes_tokenizer():
    return load_tokenizer("bytes")


@pytest.fixture(scope="module")
def document(bytes_tokenizer):
    return explorer.document(tiny(), bytes_tokenizer, TEXT, "tiny", 200)


def unpacked(text):
    return np.frombuffer(base64.b64decode(text), dtype="<f4")


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_losses_are_those_of_the_protocols(document, bytes_tokenizer):
    ids = torch.from_numpy(bytes_tokenizer.encode(TEXT).astype("int64"))[None, :200]
    for name, protocol in (("kept", "P0"), ("erased", "P4")):
        assert np.mean(document[name]) == pytest.approx(perplexity(tiny(), ids, protocol).nll, rel=1e-4)
    first = slice(0, BLOCK - 1)
    assert document["kept"][first] == pytest.approx(document["erased"][first], rel=1e-4), "block 0 is the control"
    assert not document["whole"] and len(document["tokens"]) == 200 == len(document["kept"]) + 1


@pytest.mark.parametrize("memory", MEMORIES)
def test_any_memory_can_be_looked_at(memory, bytes_tokenizer):
    model = tiny(memory)
    found = explorer.document(model, bytes_tokenizer, TEXT, memory, 80)
    assert data_of(explorer.page([found]))["subjects"] == [found]
    tokens = [index for index, one in model.memories.items() if one.shares_softmax]
    assert [view["layer"] for view in found["layers"]] == tokens
    assert (memory in found["memory"]) or (memory == "none" and found["memory"] == "no memory")


def test_tokens_put_together_are_the_text(document, bytes_tokenizer):
    raw = TEXT.encode()[:200].decode(errors="replace")
    assert "".join(document["tokens"]) == raw
    broken = [0xE6, 0xBC, 0xA2, 0xFF, 0x41]
    assert explorer.texts_of(broken, bytes_tokenizer)[2] == "漢"


SCORED = {"mass": True, "query": "raw", "silent": True}


@pytest.mark.parametrize(
    ("memory", "options"), [*((name, {}) for name in MEMORIES if name != "none"), ("elastic", SCORED)]
)
@pytest.mark.parametrize("local", ["block", "sliding"])
def test_attention_is_what_the_layer_computes(memory, options, local, monkeypatch):
    """Weights times values are what enters the output projection, in every block."""
    if local == "sliding" and MEMORIES[memory].no_sliding:
        pytest.skip("undefined")
    model, ids = tiny(memory, local_attention=local, memory_options=options), torch.randint(256, (3 * BLOCK + 5,))
    with_blends(model)
    layers = {id(model.base_model.layers[i]): i for i, one in model.memories.items() if one.shares_softmax}
    mixed, values, before, caches = {}, {}, {}, []
    for index in layers.values():
        attention = model.base_model.layers[index].self_attn
        attention.o_proj.register_forward_pre_hook(lambda _, x, i=index: mixed.__setitem__(i, x[0][0]))
        attention.v_proj.register_forward_hook(lambda _, __, x, i=index: values.__setitem__(i, x[0]))
    original = attention_view.attention

    def checked(layer, *rest):
        weights, index = original(layer, *rest), layers[id(layer)]
        own = values[index].unflatten(1, (-1, layer.self_attn.head_dim)).transpose(0, 1)
        reading = caches[0].streams[index].reading
        parts = [reading[1][0]] if reading else []
        parts += [before[index]] if local == "sliding" and index in before else []
        all_values = torch.cat([*parts, own], dim=1).repeat_interleave(len(weights) // len(own), dim=0)
        output = (weights @ all_values).transpose(0, 1).flatten(1)
        torch.testing.assert_close(output, mixed[index], atol=1e-5, rtol=1e-4)
        if local == "sliding":
            before[index] = torch.cat((before.get(index, own[:, :0]), own), dim=1)[:, -layer.window :]
        return weights

    monkeypatch.setattr(attention_view, "attention", checked)
    monkeypatch.setattr(attention_view, "MemoryCache", lambda model: caches.append(em.MemoryCache(model)) or caches[0])
    found = attention_view.views(model, ids, BLOCK)
    assert [view.layer for view in found] == list(layers.values())
    for view in found:
        assert len(view.blocks) == 3 and len(view.shares) == len(ids) and set(view.shares[:BLOCK]) == {0.0}
        assert min(view.shares[BLOCK:]) > 0


def test_memory_tokens_stand_where_the_sampling_says(document):
    model = tiny()
    (layer,) = document["layers"]
    assert [block["seen"] for block in layer["blocks"]] == list(range(BLOCK, 200, BLOCK))
    for block in layer["blocks"]:
        (bank,) = {memory.retrieval for memory in model.memories.values()}
        assert block["places"] == pytest.approx((bank.sample_points(block["seen"]) * block["seen"]).tolist())
        heads = np.array(block["attention"])
        assert heads.shape == (model.config.num_attention_heads, bank.points) and 0 < heads.sum(1).max() < 1


def test_a_memory_of_raw_tokens_finds_them_again(bytes_tokenizer):
    """The nearest token to one that was kept as it is: itself, wholly alike."""
    document = explorer.document(tiny("sampled"), bytes_tokenizer, TEXT, "raw tokens", 80)
    for layer in document["layers"]:
        assert len(layer["blocks"]) == 2
        for block in layer["blocks"]:
            alike = np.array(block["similar"])[:, 0]
            assert alike == pytest.approx(np.ones(len(alike)), abs=2e-3)
            assert block["places"] == [near[0] for near in block["nearest"]] and max(block["places"]) < block["seen"]


@pytest.mark.parametrize("memory", ["clock", "dyadic"])
def test_points_that_are_not_of_the_whole_history_are_no_places_in_it(memory, bytes_tokenizer):
    document = explorer.document(tiny(memory), bytes_tokenizer, TEXT, memory, 80)
    assert {one["own"] for one in document["ages"]} == {None}
    for layer in document["layers"]:
        for block in layer["blocks"]:
            assert block["places"] == [near[0] for near in block["nearest"]]


def test_similarity_by_age(bytes_tokenizer):
    """A memory of as many coefficients as tokens gives all back; of one coefficient, nothing but the mean."""
    signal = torch.randn(48, 2, 5, dtype=torch.float64)
    edges = np.array([1, 5, 49])
    assert explorer.similarity(signal, 400, edges)[1] > 0.99
    state = em.hippo.compress(signal, 6)
    back = em.hippo.reconstruct(state, (torch.arange(48) + 0.5) / 48) - signal.mean(0)
    alike = torch.cosine_similarity(back, signal - signal.mean(0), dim=-1).mean(-1)
    expected = [alike[-4:].mean(), alike[:-4].mean()]
    torch.testing.assert_close(explorer.similarity(signal, 6, edges), torch.stack(expected))


def test_features_are_keys_and_values(document, bytes_tokenizer):
    ids = torch.from_numpy(bytes_tokenizer.encode(TEXT).astype("int64"))[:200]
    signals = keys_and_values(tiny(), ids)
    assert len(document["features"]) == explorer.FEATURES
    for feature in document["features"]:
        layer, part, head, place = re.fullmatch(
            r"layer (\d+) (\w+), head (\d+), feature (\d+)", feature["name"]
        ).groups()
        expected = signals[int(layer), part][:, int(head), int(place)]
        assert unpacked(feature["values"]) == pytest.approx(expected.float().numpy(), abs=1e-6)


@pytest.fixture
def memory_file(tmp_path):
    def write(name, ids, memory="elastic"):
        cache = em.MemoryCache(tiny(memory))
        cache.read(ids)
        cache.save(tmp_path / name)
        return tmp_path / name, cache

    return write


def test_memory_files_hold_their_coefficients(memory_file):
    one, cache = memory_file("one.memory.safetensors", torch.randint(256, (1, 100)))
    two, _ = memory_file("two.memory.safetensors", torch.randint(256, (1, 70)))
    first, second = explorer.memory_files([one, two])
    assert (first["name"], first["tokens"], first["open"]) == ("one", 96, 4)
    bank = next(iter(cache.model.memories.values())).retrieval
    assert (first["sampling"], first["points"]) == ("exponential", bank.points), "as its model reads it"
    assert [it["name"] for it in first["features"]] == [it["name"] for it in second["features"]], "to be compared"
    for feature in first["features"]:
        layer, part, head, place = re.fullmatch(
            r"layer (\d+) (\w+), head (\d+), feature (\d+)", feature["name"]
        ).groups()
        state = cache.streams[int(layer)].state[("key", "value").index(part)]
        assert unpacked(feature["state"]) == pytest.approx(state[0, int(head), :, int(place)].numpy(), abs=1e-6)


@pytest.mark.parametrize("memory", [name for name in MEMORIES if name not in ("none", "elastic")])
def test_other_memory_files_are_shown_as_far_as_they_can(memory_file, memory):
    path, cache = memory_file(f"{memory}.memory.safetensors", torch.randint(256, (1, 100)), memory)
    (subject,) = explorer.memory_files([path])
    polynomial = any(hasattr(one.retrieval, "order") for one in cache.model.memories.values())
    assert bool(subject["features"]) == polynomial
    assert data_of(explorer.page([subject]))["subjects"] == [subject]


def test_a_document_with_a_script_is_text(document):
    found = explorer.page([{**document, "name": "</script><script>alert(2)</script>"}], "<b>title</b>")
    assert "<script>alert" not in found and "<b>title" not in found and "&lt;b&gt;title" in found
    assert "</script><script>alert(1)</script>" in "".join(data_of(found)["subjects"][0]["tokens"])


def test_the_page_knows_every_sampling():
    found = explorer.page([])
    assert data_of(found)["samplings"] == list(SAMPLINGS)
    for name in SAMPLINGS:
        assert re.search(rf"^    {name}:", found, re.MULTILINE), f"hippo.js does not know {name}"


FAILURES = {
    "memory": RuntimeError("CUDA out of\nmemory"),
    "key": KeyError("layer"),
    "room": MemoryError(),
    "disk": ZeroDivisionError("by zero"),
    "os": OSError("no such device"),
}


@pytest.fixture
def server():
    def read(text):
        if not text:
            raise ValueError("nothing to read")
        if text in FAILURES:
            raise FAILURES[text]
        return [{"name": text}]

    serving = Server("<!doctype html>the page", read)
    thread = threading.Thread(target=serving.server.serve_forever)
    thread.start()
    yield serving
    serving.server.shutdown()
    thread.join()
    serving.server.server_close()


def ask(server, path="", data=None, **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(server.address + path, data, named)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_server_reads_text_for_its_own_page_alone(server):
    assert server.server.server_address[0] == "127.0.0.1"
    assert ask(server) == (200, "<!doctype html>the page")
    assert ask(server, "read", b'{"text": "a"}') == (200, '{"subjects": [{"name": "a"}]}')
    assert ask(server, "read", b'{"text": "a"}', Origin=server.address.rstrip("/"))[0] == 200
    for wrong in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "null"}):
        assert ask(server, "read", b'{"text": "a"}', **wrong)[0] == ask(server, **wrong)[0] == 403
    assert ask(server, "etc/passwd")[0] == 404
    for data in (b"{", b"[]", b'{"text": 1}', b'{"text": ""}', b"\xff"):
        status, told = ask(server, "read", data)
        assert status == 400 and json.loads(told)["error"]
    assert ask(server, "elsewhere", b"{}")[0] == 400


@pytest.mark.parametrize("text", FAILURES)
def test_whatever_fails_is_answered_in_one_line_and_the_server_goes_on(server, text, capfd):
    status, told = ask(server, "read", json.dumps({"text": text}).encode())
    said = json.loads(told)["error"]
    assert status == 500 and type(FAILURES[text]).__name__ in said and "\n" not in said
    assert ask(server, "read", b'{"text": "a"}')[0] == 200
    assert capfd.readouterr().err == ""


def test_a_browser_that_leaves_is_no_traceback(server, capfd):
    for content in (b"POST /read HTTP/1.1\r\nContent-Length: 100\r\n\r\n{", b"nonsense\r\n\r\n", b""):
        with socket.create_connection(server.server.server_address) as connection:
            connection.sendall(content)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends by a reset
    assert ask(server, "read", b'{"text": "a"}')[0] == 200
    assert capfd.readouterr().err == ""


def test_a_port_that_is_taken(server):
    with pytest.raises(ValueError, match=r"--port \d+: .* give another, or 0"):
        Server("", list, server.server.server_port)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["elastic", "explore", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code or 0


def test_the_command(monkeypatch, tmp_path, memory_file, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    path, _ = memory_file("one.memory.safetensors", torch.randint(256, (1, 100)))
    model, book, out = tmp_path / "model", tmp_path / "book.txt", tmp_path / "pages" / "explore.html"
    tiny().save_pretrained(model)
    (model / "bytes.json").write_text("{}")
    book.write_text(TEXT)
    assert run(monkeypatch, "--out", out) == 0
    assert opened == [out.as_uri()] and data_of(out.read_text())["subjects"] == []
    assert run(monkeypatch, path, model, "--text", book, "--tokens", 100, "--no-open", "--out", out) == 0
    document, memory = data_of(out.read_text())["subjects"]
    assert (document["kind"], document["name"], len(document["tokens"])) == ("document", "model", 100)
    assert (memory["kind"], memory["name"]) == ("memory", "one") and len(opened) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gone"], "gone: no such file or folder"),
        (["notes.txt"], "notes.txt: give a run or model folder, or a memory file"),
        (["--text", "notes.txt"], "name the model that shall read it"),
        (["folder"], "folder has nothing to read: give --text"),
        (["--serve"], "--serve: name the model"),
        (["--tokens", "1"], "--tokens 1: give 2 to"),
        (["--port", "70000"], "--port 70000: give 0 to"),
        (["folder", "--text", "latin1.txt"], "latin1.txt is not UTF-8 text"),
        (["broken.memory.safetensors"], "not a memory file"),
    ],
)
def test_what_cannot_work_is_refused(monkeypatch, tmp_path, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("buy milk")
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    (tmp_path / "broken.memory.safetensors").write_bytes(b"nothing")
    assert run(monkeypatch, *arguments, "--no-open") == 2
    assert said in capsys.readouterr().err and not (tmp_path / "explore.html").exists()


def test_a_text_of_one_token_is_refused(bytes_tokenizer):
    with pytest.raises(ValueError, match="a text of 1 tokens: give one of 2 or more"):
        explorer.document(tiny(), bytes_tokenizer, "a", "tiny", 100)
