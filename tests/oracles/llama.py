"""Llama with Elastic Memory as Algorithm 1 is written: float64, one block after another, one token after another."""

import numpy as np
import torch

from tests.oracles import hippo


def logits(model, ids):
    """[batch, token] -> [batch, token, vocabulary], numpy float64."""
    return np.stack([_sample(model, row) for row in ids.tolist()])


def _sample(model, tokens):
    config = model.config
    weights = {name: value.double().numpy() for name, value in model.state_dict().items()}
    hidden = weights["model.embed_tokens.weight"][tokens]
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}."
        layer = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        hidden = _layer(config, layer, hidden, model.memories.get(index))
    return _norm(hidden, weights["model.norm.weight"], config) @ weights["lm_head.weight"].T


def _norm(x, gain, config):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * gain


def _rope(vector, position, config):
    half = len(vector) // 2
    angles = position / config.rope_parameters["rope_theta"] ** (np.arange(half) / half)
    first, second = vector[:half], vector[half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin))


def _layer(config, w, hidden, memory):
    normed = _norm(hidden, w["input_layernorm.weight"], config)
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    query, key, value = (
        (normed @ w[f"self_attn.{name}_proj.weight"].T).reshape(len(hidden), -1, dim) for name in "qkv"
    )
    mixed = np.zeros((len(hidden), heads, dim))
    size = config.block_size
    for head in range(heads):
        group = head // (heads // kv_heads)
        for start in range(0, len(hidden), size):
            block = slice(start, min(start + size, len(hidden)))
            memory_key, memory_value = np.zeros((0, dim)), np.zeros((0, dim))
            if memory is not None and start > 0:
                bank = memory.bank
                states = [
                    hippo.recur(np.zeros((bank.order, dim)), x[:start, group], 0) for x in (key, value)
                ]  # line 10, by the recurrence of eq. 4
                points = _points(bank.sampling, bank.points, start)
                read = np.stack([hippo.phi(n, points) for n in range(bank.order)], axis=1)  # eq. 10
                memory_key, memory_value = (read @ state for state in states)  # line 4
            rotated = np.stack([_rope(k, i, config) for i, k in enumerate(key[block, group])])
            keys = np.concatenate((memory_key, rotated))  # line 5
            values = np.concatenate((memory_value, value[block, group]))
            for i, q in enumerate(query[block, head]):
                scores = keys @ _rope(q, i, config) / np.sqrt(dim)  # line 6
                scores[len(memory_key) + i + 1 :] = -np.inf  # the trapezoidal mask
                share = np.exp(scores - scores.max())
                mixed[start + i, head] = share / share.sum() @ values  # line 7
    hidden = hidden + mixed.reshape(len(hidden), -1) @ w["self_attn.o_proj.weight"].T
    normed = _norm(hidden, w["post_attention_layernorm.weight"], config)
    gate = normed @ w["mlp.gate_proj.weight"].T
    up = normed @ w["mlp.up_proj.weight"].T
    return hidden + (gate / (1 + np.exp(-gate)) * up) @ w["mlp.down_proj.weight"].T


def _points(sampling, count, history):
    """The paper's two rules, as points of the history."""
    if sampling == "uniform":
        return np.arange(count) / count
    decay = float(history) ** (-1 / (count - 1)) if count > 1 else 0.5
    return 1 - decay ** np.arange(count - 1, -1, -1)


def assert_close(model, ids, tolerance):
    with torch.no_grad():
        ours = model(ids).logits.double().numpy()
    np.testing.assert_allclose(ours, logits(model, ids), atol=tolerance, rtol=0)
