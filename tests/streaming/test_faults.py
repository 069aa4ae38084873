"""Calls that fail leave a cache as it was; copies are independent; what does not fit is refused."""

import copy
import json
import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

import elastic_memory as em
from elastic_memory.memory import MEMORIES
from elastic_memory.streaming import memory_file
from tests.conftest import small_model

TOLERANCE = dict(atol=1e-4, rtol=0)
PARTS = ["embed_tokens", "layers.0.mlp", "layers.1.self_attn.v_proj", "layers.2.mlp", "norm"]


class Failure(BaseException):
    """Like Ctrl-C: not an Exception."""


def tokens(batch, length, seed=0):
    return torch.randint(1, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


def fail_at(model, name, call):
    """Make a part of the model fail at its n-th call from now on."""
    count = [0]

    def hook(*_):
        count[0] += 1
        if count[0] == call:
            raise Failure

    return model.get_submodule(name).register_forward_pre_hook(hook)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("memory", ["elastic", "melodi", "none"])
@given(
    read=st.lists(st.integers(1, 20), max_size=3),
    more=st.integers(1, 30),
    part=st.sampled_from(PARTS),
    at=st.integers(1, 4),
    padded=st.booleans(),
)
@settings(max_examples=15)
def test_a_call_that_fails_changes_nothing(memory, static, read, more, part, at, padded):
    """Wherever it fails: clocks stay, and the call made again gives what it would have given."""
    model, ids = small_model(memory), tokens(2, sum(read) + more)
    cache, mask = em.MemoryCache(model, static=static), torch.ones_like(ids)
    mask[1, :3] = 1 - padded
    with torch.no_grad():
        start = 0
        for length in read:
            new = slice(start, start + length)
            model(ids[:, new], attention_mask=mask[:, new], past_key_values=cache)
            start += length
        clock, columns = list(cache.clock), cache.columns
        expected = model(ids[:, start:], attention_mask=mask[:, start:], past_key_values=cache.fork()).logits
        hook = fail_at(model, f"model.{part}", at)
        try:
            model(ids[:, start:], attention_mask=mask[:, start:], past_key_values=cache)
        except Failure:
            assert (cache.clock, cache.columns) == (clock, columns)
            hook.remove()
            logits = model(ids[:, start:], attention_mask=mask[:, start:], past_key_values=cache).logits
            torch.testing.assert_close(logits, expected, **TOLERANCE)
        hook.remove()
        assert cache.holds(ids, mask)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("read", [7, 8, 9, 16])
def test_a_decoding_step_that_fails_changes_nothing(static, read, model):
    """Right before, at and after the end of a block, and in the head, where the cache has read the token already."""
    ids = tokens(1, read + 12)
    for name in ("model.layers.1.mlp", "model.norm", "lm_head"):
        cache = em.MemoryCache(model, static=static)
        with torch.no_grad():
            expected = model(ids).logits[:, -12:]
            logits = []
            model(ids[:, :read], past_key_values=cache)
            for place in range(read, read + 12):
                hook = fail_at(model, name, 1)
                with pytest.raises(Failure):
                    model(ids[:, place : place + 1], past_key_values=cache)
                hook.remove()
                assert cache.clock == [place] and cache.get_seq_length() == place
                logits.append(model(ids[:, place : place + 1], past_key_values=cache).logits)
        torch.testing.assert_close(torch.cat(logits, dim=1), expected, **TOLERANCE)


def test_a_long_call_that_fails_leaves_the_open_block(model):
    """What was read can still be taken back, and is saved as it was."""
    ids, cache = tokens(1, 60), em.MemoryCache(model)
    with torch.no_grad():
        model(ids[:, :13], past_key_values=cache)
        hook = fail_at(model, "lm_head", 1)
        with pytest.raises(Failure):
            model(ids[:, 13:], past_key_values=cache)
        hook.remove()
        cache.rollback(5)
        logits = model(ids[:, 8:], past_key_values=cache).logits
        torch.testing.assert_close(logits, model(ids).logits[:, 8:], **TOLERANCE)


def test_a_cache_that_was_to_be_forked_for_several_rows_stays_one_row(model):
    cache = em.MemoryCache(model)
    with torch.no_grad():
        model(tokens(1, 10), past_key_values=cache)
        hook = fail_at(model, "model.layers.2", 1)
        with pytest.raises(Failure):
            model(tokens(3, 10), past_key_values=cache)
        hook.remove()
    assert cache.clock == [10]


@pytest.mark.parametrize("static", [False, True])
def test_generation_that_fails_at_its_first_token_takes_nothing_back(static, model):
    """Exactly what was read is given again, so the newest token is taken back and read again, for its logits."""
    ids, cache = tokens(1, 20), em.MemoryCache(model, static=static)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    with pytest.raises(ValueError):
        model.generate(ids, past_key_values=cache, max_new_tokens=3, no_such_option=1)
    assert cache.clock == [20]
    hook = fail_at(model, "model.norm", 1)
    with pytest.raises(Failure):
        model.generate(ids, past_key_values=cache, max_new_tokens=3, pad_token_id=0)
    hook.remove()
    assert cache.clock == [20] and cache.get_seq_length() == 20
    following = tokens(1, 9, seed=3)
    with torch.no_grad():
        logits = model(following, past_key_values=cache).logits
        torch.testing.assert_close(logits, model(torch.cat((ids, following), 1)).logits[:, 20:], **TOLERANCE)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_are_forks(copied, model):
    ids, cache = tokens(1, 30), em.MemoryCache(model)
    with torch.no_grad():
        model(ids[:, :13], past_key_values=cache)
        other = copied(cache)
        assert other.model is model
        model(tokens(1, 9, seed=5), past_key_values=other)
        assert cache.clock == [13]
        logits = model(ids[:, 13:], past_key_values=cache).logits
        torch.testing.assert_close(logits, model(ids).logits[:, 13:], **TOLERANCE)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("shape", [(2, 9), (1, 10), (3, 10), (2, 0)])
def test_masks_that_do_not_cover_the_tokens_are_refused(cached, shape, model):
    cache = em.MemoryCache(model) if cached else None
    with pytest.raises(ValueError, match=r"attention_mask of shape .* for 2 rows of 10 tokens"):
        model(tokens(2, 10), attention_mask=torch.ones(shape), past_key_values=cache)


@pytest.mark.parametrize("shape", [(2, 9), (1, 10), (3, 10), (2, 12), (2, 15), (1, 17), (2, 18)])
def test_generation_on_a_warm_cache_refuses_masks_that_do_not_fit(shape, model):
    cache = em.MemoryCache(model)
    model(tokens(2, 7), past_key_values=cache)
    with pytest.raises(ValueError, match=r"attention_mask of shape .* for 2 rows of 10 tokens"):
        model.generate(tokens(2, 10), attention_mask=torch.ones(shape), past_key_values=cache, max_new_tokens=2)
    assert cache.clock == [7, 7]


@pytest.fixture
def saved(model, tmp_path):
    cache = em.MemoryCache(model)
    with torch.no_grad():
        model(tokens(2, 30), past_key_values=cache)
    cache.save(tmp_path / "memory")
    return model, cache, tmp_path / "memory"


def describe(path, change):
    """Change what safetensors' own header says of the tensors."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


@pytest.mark.parametrize(
    "about",
    [
        {"data_offsets": [0, "9"]},
        {"data_offsets": [0, None]},
        {"data_offsets": [0, [1]]},
        {"data_offsets": [0, 1e9]},
        {"data_offsets": [0, -1]},
        {"data_offsets": [0, True]},
        {"data_offsets": "09"},
        {"data_offsets": [0, 10**400]},
        {"shape": [[1]]},
        {"shape": ["a"]},
        {"shape": [None, 1]},
        {"shape": "12"},
        {"shape": [-1]},
        {"dtype": 3},
        {"dtype": ["F32"]},
        {"dtype": {}},
        {"more": 1},
    ],
)
@pytest.mark.parametrize("name", ["tokens", "layers.1.state.0", "one more"])
def test_crafted_descriptions_are_refused(about, name, saved):
    model, _, path = saved
    describe(path, lambda header: header.update({name: header.get(name, header["tokens"]) | about}))
    with pytest.raises(ValueError, match=r"memory file|damaged|do not fit"):
        em.MemoryCache.load(path, model)


@pytest.mark.parametrize("digest", ["\ud800", "x" * 32, "0" * 31, "0" * 10**5])
def test_crafted_digests_are_refused(digest, saved):
    model, _, path = saved

    def forge(header):
        about = json.loads(header["__metadata__"]["elastic_memory"])
        about["digests"] = [digest] * 2
        header["__metadata__"]["elastic_memory"] = json.dumps(about)

    describe(path, forge)
    with pytest.raises(ValueError, match="its token counts are impossible"):
        em.MemoryCache.load(path, model)


def test_what_is_no_file_is_refused_and_never_waited_for(model, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        with pytest.raises(ValueError, match="not a file"):
            em.MemoryCache.load(path, model)


def test_two_writers_do_not_share_a_temporary_file(saved, monkeypatch):
    """Both in the middle of a save at once: each finishes, and the file is one of the two, whole."""
    model, cache, path = saved
    both, replace, failed = threading.Barrier(2), os.replace, []
    monkeypatch.setattr(os, "replace", lambda *names: (both.wait(timeout=20), replace(*names)))

    def write():
        try:
            cache.fork().save(path)
        except BaseException as error:
            failed.append(error)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert not failed
    assert em.MemoryCache.load(path, model).clock == [30, 30]
    assert os.listdir(path.parent) == [path.name]


def test_a_file_is_on_disk_before_it_has_its_name(saved, monkeypatch):
    _, cache, path = saved
    events, fsync, replace = [], os.fsync, os.replace

    def synced(handle):
        is_folder = os.path.samestat(os.fstat(handle), os.stat(path.parent))
        events.append("folder" if is_folder else os.fstat(handle).st_size)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda *names: events.append("named") or replace(*names))
    cache.save(path)
    assert events == [path.stat().st_size, "named", "folder"]


def test_a_file_that_changes_while_it_is_read(saved, monkeypatch):
    """Replaced by another save between its header and its tensors: what was opened is what is read."""
    model, cache, path = saved
    model(tokens(2, 3), past_key_values=cache)
    check = memory_file._check_owner
    monkeypatch.setattr(memory_file, "_check_owner", lambda *args: cache.save(path) or check(*args))
    assert em.MemoryCache.load(path, model).clock == [30, 30]


def test_other_safetensors_with_our_note_are_refused(saved, tmp_path):
    model, *_ = saved
    (tmp_path / "foreign").write_bytes(save({"x": torch.zeros(3)}, metadata={"elastic_memory": "[]"}))
    with pytest.raises(ValueError, match="not a memory file"):
        em.MemoryCache.load(tmp_path / "foreign", model)


@pytest.mark.parametrize("memory", MEMORIES)
def test_every_memory_can_be_called_again(memory):
    """Several blocks at once, then the failure."""
    model, ids = small_model(memory), tokens(1, 50)
    cache = em.MemoryCache(model)
    with torch.no_grad():
        model(ids[:, :11], past_key_values=cache)
        hook = fail_at(model, "model.layers.2.mlp", 3)
        with pytest.raises(Failure):
            for place in (11, 24, 37):
                model(ids[:, place : place + 13], past_key_values=cache)
        hook.remove()
        logits = model(ids[:, cache.clock[0] :], past_key_values=cache).logits
        torch.testing.assert_close(logits[:, -1], model(ids).logits[:, -1], **TOLERANCE)
