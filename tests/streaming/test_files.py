"""Checkpoints and memory files: what may be loaded, and what is refused before it is read."""

import json
import os
import random
import shutil

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import elastic_memory as em
from elastic_memory.streaming.memory_file import content_hash
from tests.conftest import small_model


@pytest.fixture
def saved(model, ids, tmp_path):
    """A model, a memory file of it, and what the model says next."""
    cache = em.MemoryCache(model)
    with torch.no_grad():
        model(ids[:, :30], past_key_values=cache)
        cache.save(tmp_path / "book.memory.safetensors")
        expected = model(ids[:, 30:], past_key_values=cache).logits
    return model, tmp_path / "book.memory.safetensors", expected


def test_a_file_that_is_refused_allocates_nothing(saved, monkeypatch):
    model, path, _ = saved
    other, devices = small_model(seed=1), []
    begin = em.MemoryCache.begin
    monkeypatch.setattr(
        em.MemoryCache, "begin", lambda self, n, device: devices.append(device) or begin(self, n, device)
    )
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(ValueError, match="damaged"):
        em.MemoryCache.load(path, model)
    with pytest.raises(ValueError, match="other weights"):
        em.MemoryCache.load(path, other)
    assert {device.type for device in devices} == {"meta"}


@pytest.mark.parametrize("local", ["block", "sliding"])
def test_a_stream_under_autocast_is_saved_exactly(local, ids, tmp_path):
    model = small_model(local_attention=local)
    cache = em.MemoryCache(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(ids[:, :30], past_key_values=cache)
        cache.save(tmp_path / "memory", exact=True)
        loaded = em.MemoryCache.load(tmp_path / "memory", model)
        expected = model(ids[:, 30:], past_key_values=cache).logits
        assert torch.equal(model(ids[:, 30:], past_key_values=loaded).logits, expected)


@pytest.mark.parametrize("local", ["block", "sliding"])
@pytest.mark.parametrize("exact", [False, True])
def test_an_open_block_without_tokens(local, exact, ids, tmp_path):
    """Taken back to where the block began; loaded and saved once more."""
    model = small_model(local_attention=local)
    cache, path = em.MemoryCache(model), tmp_path / "memory"
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        cache.rollback(4)
        for _ in range(2):
            cache.save(path, exact=exact)
            cache = em.MemoryCache.load(path, model)
        logits = model(ids[:, 16:], past_key_values=cache).logits
        torch.testing.assert_close(logits, model(ids).logits[:, 16:], atol=1e-4, rtol=0)
    padding = em.MemoryCache(model)
    model(ids, attention_mask=torch.zeros_like(ids), past_key_values=padding)
    with pytest.raises(ValueError, match="read nothing"):
        padding.save(path)


def test_saved_right_after_a_change_of_order(model, ids, tmp_path):
    cache = em.MemoryCache(model)
    with torch.no_grad():
        model(ids[:, :30], past_key_values=cache)
        model.set_retrieval(order=20)
        with pytest.warns(UserWarning, match="order raised"):
            cache.save(tmp_path / "memory")
        loaded = em.MemoryCache.load(tmp_path / "memory", model)
        logits = model(ids[:, 30:], past_key_values=cache).logits
        torch.testing.assert_close(model(ids[:, 30:], past_key_values=loaded).logits, logits, atol=1e-4, rtol=0)


def test_round_trip_of_a_model(model, ids, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is em.MemoryLlamaForCausalLM
    assert loaded.config.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        base = AutoModel.from_pretrained(tmp_path)
        torch.testing.assert_close(base(ids).last_hidden_state @ model.lm_head.weight.T, model(ids).logits)
    assert not [name for name in load_file(tmp_path / "model.safetensors") if "bank" in name or "operator" in name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision_of_a_checkpoint(dtype, model, ids, tmp_path):
    """It loads as declared; the memory state is float32 whatever the weights are."""
    model.to(dtype).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == dtype
    cache = em.MemoryCache(loaded)
    with torch.no_grad():
        logits = torch.cat([loaded(x, past_key_values=cache).logits for x in ids.split(20, dim=1)], dim=1)
        assert torch.isfinite(logits).all()
        torch.testing.assert_close(logits, loaded(ids).logits, atol=0.25, rtol=0.1)
    assert {part.dtype for part in cache.streams[1].state} == {torch.float32}


def test_a_checkpoint_of_mixed_precision(model, ids, tmp_path):
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    mixed = {name: w.bfloat16() if "mlp" in name else w for name, w in weights.items()}
    save_file(mixed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=0.2, rtol=0.1)


def test_a_memory_file_that_does_not_say_what_was_read(saved, ids):
    """As files once were: it goes on as any other, and takes all tokens for new."""
    model, path, expected = saved
    cache = em.MemoryCache.load(path, model)
    assert cache.holds(ids)

    def forget(header):
        del header["digests"]
        header["content"] = content_hash(header, load_file(path))

    rewrite(path, forget)
    cache = em.MemoryCache.load(path, model)
    assert not cache.holds(ids)
    with torch.no_grad():
        torch.testing.assert_close(model(ids[:, 30:], past_key_values=cache).logits, expected, atol=1e-5, rtol=0)


def test_a_memory_file_continues_where_it_stopped(saved, ids):
    model, path, expected = saved
    cache = em.MemoryCache.load(path, model)
    assert cache.clock == [30, 30]
    with torch.no_grad():
        torch.testing.assert_close(model(ids[:, 30:], past_key_values=cache).logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "other, message",
    [
        (dict(seed=5), "other weights"),
        (dict(memory_order=12), "another shape"),
        (dict(block_size=10), "block_size: 8 there, 10 here"),
        (dict(memory_layers=[2]), "another shape"),
        (dict(local_attention="sliding"), "local_attention"),
        (dict(memory="none"), "another shape"),
        (dict(num_hidden_layers=4), "another shape"),
    ],
)
def test_files_of_other_models_are_refused(saved, other, message):
    _, path, _ = saved
    with pytest.raises(ValueError, match=message):
        em.MemoryCache.load(path, small_model(**other))


def test_force_accepts_other_weights_of_equal_shape(saved):
    _, path, _ = saved
    assert em.MemoryCache.load(path, small_model(seed=5), force=True).clock == [30, 30]
    with pytest.raises(ValueError, match="another shape"):
        em.MemoryCache.load(path, small_model(memory_order=12), force=True)


@pytest.mark.parametrize("local", ["block", "sliding"])
@torch.no_grad()
def test_force_accepts_the_same_model_in_another_precision(local, tmp_path):
    """A window is always stored as numbers: in the precision of the model that read the text."""
    model, ids = small_model(local_attention=local), torch.randint(0, 60, (2, 35))
    cache = em.MemoryCache(model)
    model(ids[:, :29], past_key_values=cache)
    cache.save(tmp_path / "memory", exact=True)
    double = small_model(local_attention=local).double()
    loaded = em.MemoryCache.load(tmp_path / "memory", double, force=True)
    found = double(ids[:, 29:], past_key_values=loaded).logits.float()
    torch.testing.assert_close(found, model(ids[:, 29:], past_key_values=cache).logits, atol=1e-4, rtol=0)


def rewrite(path, change):
    """Change the header's own description of the file and write it back."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    about = json.loads(header["__metadata__"]["elastic_memory"])
    change(about)
    header["__metadata__"]["elastic_memory"] = json.dumps(about)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda h: h.update(version=1), "version 1; this release reads 2: read the text again"),
        (lambda h: h.update(version=3), "version 3"),
        (lambda h: h.pop("settings"), "other settings: the file does not list them"),
        (lambda h: h["settings"].update(rms_norm_eps=0.1), "other settings: rms_norm_eps: 0.1 there, 1e-05 here"),
        (lambda h: h.update(seen=[3, 3]), "token counts"),
        (lambda h: h.update(seen=[-8, -8]), "token counts"),
        (lambda h: h.update(opened=[9, 9]), "token counts"),
        (lambda h: h.update(seen=[24], opened=[6], digests=[""]), "do not fit"),
        (lambda h: h.update(digests=[""]), "token counts"),
        (lambda h: h.update(digests=[1, 2]), "token counts"),
        (lambda h: h.update(digests=None), "token counts"),
        (lambda h: h.update(columns="30"), "token counts"),
        (lambda h: h.pop("weights"), "other weights"),
        (lambda h: h.update(config=7), "another shape"),
        (lambda h: h.update(content="0"), "damaged"),
    ],
)
def test_impossible_headers_are_refused(saved, change, message):
    model, path, _ = saved
    rewrite(path, change)
    with pytest.raises(ValueError, match=message):
        em.MemoryCache.load(path, model)


def test_foreign_files_are_refused(saved, tmp_path, ids):
    model, _, _ = saved
    cases = {
        "empty": b"",
        "short": b"\x01\x02",
        "pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}\x94.",
        "text": b"once upon a time there was a book" * 9,
        "huge header": (2**40).to_bytes(8, "little") + b"{}",
        "deep": (5000).to_bytes(8, "little") + b"[" * 5000,
        "duplicate": (25).to_bytes(8, "little") + b'{"a": 1, "a": 2}         ',
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="not a memory file"):
            em.MemoryCache.load(tmp_path / name, model)
    save_file({"x": torch.zeros(3)}, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="not a memory file"):
        em.MemoryCache.load(tmp_path / "weights.safetensors", model)
    with pytest.raises(FileNotFoundError):
        em.MemoryCache.load(tmp_path / "nowhere", model)


def test_states_that_are_not_finite_are_refused(model, ids, tmp_path):
    cache = em.MemoryCache(model)
    model(ids, past_key_values=cache)
    cache.streams[1].state[0][0, 0, 0, 0] = float("nan")
    cache.save(tmp_path / "nan")
    with pytest.raises(ValueError, match="NaN"):
        em.MemoryCache.load(tmp_path / "nan", model)


def test_a_failed_save_leaves_the_old_file(saved, monkeypatch):
    model, path, _ = saved
    before = path.read_bytes()
    cache = em.MemoryCache.load(path, model)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        cache.save(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def fuzz(original, count, check):
    """`count` mutations: flips, cuts, insertions, swapped stretches."""
    dice = random.Random(0)
    for _ in range(count):
        content = bytearray(original)
        kind, place = dice.randrange(4), dice.randrange(len(content) if dice.random() < 0.3 else 600)
        if kind == 0:
            content[place] ^= 1 << dice.randrange(8)
        elif kind == 1:
            del content[place : place + dice.randrange(1, 20)]
        elif kind == 2:
            content[place:place] = dice.randbytes(dice.randrange(1, 20))
        else:
            content = content[:place]
        if content != original:
            check(bytes(content))


def check_memory_file(model, ids, path, expected):
    def check(content):
        path.write_bytes(content)
        try:
            cache = em.MemoryCache.load(path, model)
        except ValueError:
            return
        with torch.no_grad():
            logits = model(ids[:, 30:], past_key_values=cache).logits
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)

    return check


def check_weights(folder, weights):
    def check(content):
        (folder / "model.safetensors").write_bytes(content)
        try:
            loaded = load_file(folder / "model.safetensors")
        except SafetensorError:
            return
        # A flip among the numbers is not for the format to find: checkpoints of `elastic train` carry checksums.
        assert {name: w.shape for name, w in loaded.items()} == weights or set(loaded) != set(weights)

    return check


def test_mutated_memory_files(saved, ids):
    model, path, expected = saved
    fuzz(path.read_bytes(), 300, check_memory_file(model, ids, path, expected))


@pytest.mark.slow
def test_mutated_files_ten_thousand_times(saved, ids, tmp_path):
    model, path, expected = saved
    fuzz(path.read_bytes(), 7000, check_memory_file(model, ids, path, expected))
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    shapes = {name: w.shape for name, w in load_file(file).items()}
    fuzz(file.read_bytes(), 3000, check_weights(tmp_path / "model", shapes))


def many_files(count, model, tmp_path):
    """`count` memory files, restored in turn, each going on as it does alone."""
    ids = torch.randint(1, 61, (count, 30), generator=torch.Generator().manual_seed(0))
    first = em.MemoryCache(model)
    model(ids[:1, :20], past_key_values=first)
    solo = []
    for row in range(count):
        cache = em.MemoryCache(model)
        model(ids[row : row + 1, :20], past_key_values=cache)
        cache.save(tmp_path / f"{row}")
        solo.append(model(ids[row : row + 1, 20:], past_key_values=cache).logits)
    handles = len(os.listdir("/proc/self/fd"))
    caches = [em.MemoryCache.load(tmp_path / f"{row}", model) for row in range(count)]
    logits = [[] for _ in range(count)]
    for place in range(20, 30):
        for row, cache in enumerate(caches):
            if place == 25:
                caches[row] = cache = cache.fork()
            logits[row].append(model(ids[row : row + 1, place : place + 1], past_key_values=cache).logits)
    for row in range(count):
        torch.testing.assert_close(torch.cat(logits[row], dim=1), solo[row], atol=1e-4, rtol=0)
    assert len(os.listdir("/proc/self/fd")) == handles
    return sum(cache.nbytes() for cache in caches)


@torch.no_grad()
def test_many_memory_files_at_once(model, tmp_path):
    many_files(20, model, tmp_path)


@pytest.mark.slow
@torch.no_grad()
def test_a_thousand_memory_files_at_once(model, tmp_path):
    import psutil

    many_files(1000, model, tmp_path)
    assert psutil.Process().memory_info().rss < 5 * 2**30


def test_size_of_a_memory_file_at_100m(tmp_path):
    """About 3 MiB, inside a block too: the open block is stored as token ids."""
    config = em.MemoryLlamaConfig.preset("100m", num_hidden_layers=1, memory_layers=[0], vocab_size=128)
    model = em.MemoryLlamaForCausalLM(config)
    cache = em.MemoryCache(model)
    model(torch.randint(0, 128, (1, 2048 + 700)), past_key_values=cache, logits_to_keep=1)
    cache.save(tmp_path / "memory")
    assert (tmp_path / "memory").stat().st_size < 3.1 * 2**20
    shutil.rmtree(tmp_path)
