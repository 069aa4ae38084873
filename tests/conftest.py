import gc
import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels on the CPU; asked for when triton is imported, as here

# A shell's background jobs ignore Ctrl-C, and so would every process that a test sends it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from hypothesis import settings

import elastic_memory as em
from elastic_memory.memory import MEMORIES


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs CUDA")


settings.register_profile("here", deadline=None, derandomize=True)
settings.load_profile("here")

# Small, and with weights large enough that memory matters to the logits.
SMALL = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=61, block_size=8, initializer_range=0.3, memory_order=11, memory_points=5, memory_layers=[1],
)  # fmt: skip


def small_model(memory="elastic", seed=0, **overrides):
    """A model small enough for property tests, in eval mode."""
    values = SMALL | overrides
    if memory == "none":
        values = {name: value for name, value in values.items() if not name.startswith("memory_")}
    else:
        for option in ("points", "order"):
            if not MEMORIES[memory].has_option(option):
                del values[f"memory_{option}"]
    torch.manual_seed(seed)
    return em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset("tiny", memory=memory, **values)).eval()


@pytest.fixture
def model():
    return small_model()


@pytest.fixture
def ids():
    # 0 is left for padding.
    return torch.randint(1, 61, (2, 45), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def brief_collections(request, monkeypatch):
    """Runs collect garbage when they end; of a test session's many objects they need only look at the young ones."""
    if not request.node.get_closest_marker("faults"):  # where it is counted what stays
        collect = gc.collect
        monkeypatch.setattr(gc, "collect", lambda generation=1: collect(min(generation, 1)))


@pytest.fixture
def disturb(monkeypatch):
    """Disturb the n-th training pass (from 1) of the runs that follow; each disturbance happens once."""
    return disturber(monkeypatch)


def disturber(patch):
    """What the fixture `disturb` is, for as long as `patch` lasts."""
    from elastic_memory.training import session

    def at(calls, action):
        real, count = session.build_model, [0]

        def build(recipe):
            model = real(recipe)
            forward = model.forward

            def disturbed(*args, **kwargs):
                trains = "labels" in kwargs  # the norms of memory are measured by calls without
                count[0] += trains
                out = forward(*args, **kwargs)
                return action(model, out) if trains and count[0] in calls else out

            model.forward = disturbed
            return model

        patch.setattr(session, "build_model", build)

    return at


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model of bytes, its tokenizer beside it."""
    from elastic_memory.data import load_tokenizer

    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    load_tokenizer("bytes").save(folder)
    small_model(vocab_size=256, eos_token_id=None).save_pretrained(folder)
    return folder
