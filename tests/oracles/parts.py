"""The parts of a Llama layer, for one sample, in float64, as plainly as they can be written."""

import torch


class Layer:
    """Weights of one layer of a model in float64, by their names there."""

    def __init__(self, model, index):
        prefix = f"model.layers.{index}."
        self.weights = {
            name.removeprefix(prefix): weight for name, weight in model.named_parameters() if name.startswith(prefix)
        }
        self.config = model.config

    def __getitem__(self, name):
        return self.weights[name]

    def norm(self, x, name):
        return rms(x, self.config.rms_norm_eps) * self[f"{name}.weight"]

    def heads(self, x, name):
        """[token, width] -> [head, token, dim], every group's keys and values once for each of its heads."""
        x = x @ self[f"self_attn.{name}.weight"].T
        x = x.view(len(x), -1, self.config.head_dim).transpose(0, 1)
        return x.repeat_interleave(self.config.num_attention_heads // len(x), dim=0)

    def qkv(self, x):
        normed = self.norm(x, "input_layernorm")
        return tuple(self.heads(normed, name) for name in ("q_proj", "k_proj", "v_proj"))

    def rope(self, x, positions):
        """[head, token, dim], turned to `positions`."""
        half = x.shape[-1] // 2
        frequency = self.config.rope_parameters["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.as_tensor(positions, dtype=torch.float64)[:, None] * frequency
        first, second = x[..., :half], x[..., half:]
        turned = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
        return torch.cat(turned, dim=-1)

    def finish(self, x, mixed):
        """Output projection, residual, MLP, residual; `mixed` is [head, token, dim]."""
        x = x + mixed.transpose(0, 1).flatten(1) @ self["self_attn.o_proj.weight"].T
        normed = self.norm(x, "post_attention_layernorm")
        gate, up = (normed @ self[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (gate * gate.sigmoid() * up) @ self["mlp.down_proj.weight"].T


def rms(x, epsilon=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()


def attend(query, key, value, mask=None):
    """softmax(q k^T / sqrt(d)) v where `mask` allows it."""
    scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ value


def causal(tokens, front=0):
    """Each token sees itself, those before it, and `front` columns before all of them."""
    return torch.ones(tokens, front + tokens).tril(front).bool()


def local(layer, query, key, value):
    """Attention inside one block, positions from 0."""
    positions = range(query.shape[1])
    return attend(layer.rope(query, positions), layer.rope(key, positions), value, causal(query.shape[1]))


def after_block_0(layer, x, mix):
    """What leaves a layer whose first block attends to itself alone, and each later one as `mix` says.

    `mix` gets the block's queries, keys and values, then the keys and values of all tokens before it.
    """
    outputs, size = [], layer.config.block_size
    _, all_keys, all_values = layer.qkv(x)
    for start in range(0, len(x), size):
        block = x[start : start + size]
        own = layer.qkv(block)
        mixed = mix(*own, all_keys[:, :start], all_values[:, :start]) if start else local(layer, *own)
        outputs.append(layer.finish(block, mixed))
    return torch.cat(outputs)


def hidden(model, embeds, memory_layer):
    """What leaves the last layer, for [token, width] that enters the first."""
    for index in range(model.config.num_hidden_layers):
        memory = model.memories.get(index)
        step = plain if memory is None else memory_layer
        embeds = step(Layer(model, index), embeds, memory)
    return embeds


def plain(layer, x, memory):
    """A layer without memory."""
    blocks = [x[start : start + layer.config.block_size] for start in range(0, len(x), layer.config.block_size)]
    return torch.cat([layer.finish(block, local(layer, *layer.qkv(block))) for block in blocks])
