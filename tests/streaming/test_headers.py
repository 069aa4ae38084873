"""Headers of memory files that say a thing twice, or more than any memory has to say."""

import pytest
import torch

import elastic_memory as em
from elastic_memory.streaming import memory_file


@pytest.fixture
def saved(model, ids, tmp_path):
    cache = em.MemoryCache(model)
    with torch.no_grad():
        model(ids[:, :30], past_key_values=cache)
    cache.save(tmp_path / "memory")
    return model, tmp_path / "memory"


def with_header(path, change):
    """The file with its header as `change` makes it of the old one; the tensors stay."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    text = change(raw[8 : 8 + length])
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"tokens":', b'"tokens":{"dtype":"I64","shape":[2,0],"data_offsets":[0,0]},"tokens":'),  # a tensor
        (b'"tokens":{', b'"tokens":{"dtype":"F32",'),  # in the description of one
        (rb"\"columns\":", rb"\"columns\": 5, \"columns\":"),  # in what the file says of itself
    ],
)
def test_what_is_said_twice_is_refused(old, new, saved):
    """JSON lets the last one count, safetensors too; another reader may take the first."""
    model, path = saved
    assert old in path.read_bytes()
    with_header(path, lambda header: header.replace(old, new, 1))
    with pytest.raises(ValueError, match="duplicate keys"):
        em.MemoryCache.load(path, model)


@pytest.mark.parametrize(("over", "refused"), [(0, False), (8, True)])
def test_headers_have_a_largest_size(over, refused, saved, monkeypatch):
    """Spaces at the end are as good as none, up to that size; more is refused before it is parsed."""
    model, path = saved
    with_header(path, lambda header: header.ljust(memory_file.LARGEST_HEADER + over))
    if not refused:
        em.MemoryCache.load(path, model)
        return
    monkeypatch.setattr(memory_file.json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(ValueError, match="its header claims 1,048,584 bytes"):
        em.MemoryCache.load(path, model)


@pytest.mark.parametrize("change", [lambda raw: raw[:-4], lambda raw: raw + b"more"])
def test_a_file_is_as_long_as_its_header_says(change, saved):
    model, path = saved
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=r"damaged: it has [\d,]+ bytes, its header describes"):
        em.MemoryCache.load(path, model)
