"""Sliding attention with memory, token by token: what each token sees is listed, nothing is masked or shared."""

import torch

from elastic_memory import hippo
from tests.oracles import merged
from tests.oracles.parts import attend


def hidden(model, embeds):
    """What leaves the last layer, for [token, width] that enters the first."""
    from tests.oracles.parts import Layer

    for index in range(model.config.num_hidden_layers):
        embeds = layer(Layer(model, index), embeds, model.memories.get(index))
    return embeds


def layer(layer, x, memory):
    """A layer in which token t sees the newest `window` tokens and a memory of the blocks that are older than that."""
    query, key, value = layer.qkv(x)
    size, window = layer.config.block_size, layer.config.window or layer.config.block_size
    wider = raw_tokens(memory)
    mixed = []
    for token in range(len(x)):
        block = token // size
        written = max(0, (block - window // size + 1) * size)
        start = max(0, token - window - wider + 1)
        columns = [layer.rope(key[:, start : token + 1], range(start - block * size, token - block * size + 1))]
        held = [value[:, start : token + 1]]
        here = layer.rope(query[:, token : token + 1], [token - block * size])
        rest, past = getattr(memory, "rest", memory), (key[:, :written], value[:, :written])
        if hasattr(rest, "bank") and written:
            bank = rest.bank
            read = hippo.basis(bank.order, bank.sample_points(written)) @ hippo.projection(bank.order, 0, written)
            columns.insert(0, read @ past[0])
            held.insert(0, read @ past[1])
        if not (hasattr(rest, "slots") and written):
            own = attend(here, torch.cat(columns, 1), torch.cat(held, 1))
        else:
            known, means, counts = merged.means(layer, rest, size, *past)
            known = layer.rope(known, [size - window] * known.shape[1])  # memory lags behind the window
            scores = here @ torch.cat((known, *columns), 1).mT / here.shape[-1] ** 0.5
            scores[..., : known.shape[1]] += counts.log()
            own = scores.softmax(-1) @ torch.cat((means, *held), 1)
        if "self_attn.memory.gate" in layer.weights and written:
            newest = slice(max(0, written - memory.order), written)
            known, looking = key[:, newest], here
            if memory.positions == "none":
                looking = query[:, token : token + 1]
            elif memory.positions == "full":
                known = layer.rope(known, range(newest.start - block * size, newest.stop - block * size))
            gate = layer["self_attn.memory.gate"].sigmoid()[:, None, None]
            own = gate * attend(looking, known, value[:, newest]) + (1 - gate) * own
        mixed.append(own)
    return layer.finish(x, torch.cat(mixed, dim=1))


def raw_tokens(memory):
    """By how many tokens a queue in the softmax widens the window."""
    queue = getattr(memory, "queue", memory)
    return queue.order if hasattr(queue, "order") and queue.shares_softmax else 0
