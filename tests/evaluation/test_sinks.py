"""Attention sinks: against one plain call per token, and against full attention while everything is seen."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from elastic_memory.evaluation.losses import streamed_losses
from elastic_memory.evaluation.sinks import SINKS, sink_losses


def llama(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=50, initializer_range=0.5)  # fmt: skip
    return LlamaForCausalLM(config).double()


@pytest.mark.parametrize("window", [1, 3, 8])
def test_each_token_sees_what_a_cache_of_sinks_and_window_holds(window):
    """In one layer, keys depend on their token alone: a plain call over what the cache holds is exact."""
    model, ids = llama(1), torch.randint(50, (2, 40))
    wanted = torch.empty(2, 39)
    with torch.no_grad():
        for time in range(39):
            held = [*range(min(SINKS, max(time + 1 - window, 0))), *range(max(time + 1 - window, 0), time + 1)]
            logits = model(ids[:, held]).logits[:, -1]
            wanted[:, time] = torch.nn.functional.cross_entropy(logits, ids[:, time + 1], reduction="none")
    torch.testing.assert_close(sink_losses(model, ids, window), wanted, atol=1e-5, rtol=1e-5)
    assert model.config._attn_implementation == "sdpa"


def test_rotary_positions_that_scale_attention_are_refused():
    model = llama(1)
    model.model.rotary_emb.attention_scaling = 1.2
    with pytest.raises(ValueError, match="scale attention"):
        sink_losses(model, torch.zeros(1, 4, dtype=torch.long), 2)


def test_all_is_seen_until_the_cache_is_full():
    model, ids = llama(3), torch.randint(50, (2, 30))
    full, sinks = streamed_losses(model, ids, 30), sink_losses(model, ids, 16)
    torch.testing.assert_close(sinks[:, : 16 + SINKS], full[:, : 16 + SINKS], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(sinks[:, 16 + SINKS :], full[:, 16 + SINKS :])
