"""A HiPPO memory in a torch model of your own: no transformers, a layer of 20 lines.

The task: one of 16 secrets is shown in the first block and asked for at the end, 9 blocks later. Attention stays
inside blocks, so without memory the model can only guess (1 in 16, 6%).

    python examples/own_model.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from elastic_memory.attention import trapezoidal
from elastic_memory.operators import Bank

BLOCK, BLOCKS, SECRETS = 16, 10, 16
FILLER, QUESTION = SECRETS, SECRETS + 1


class MemoryAttention(nn.Module):
    """Causal attention inside blocks; everything before a block is read back as a few memory tokens in front of it."""

    def __init__(self, width: int, heads: int, order: int, points: int):
        super().__init__()
        self.heads, self.bank = heads, Bank(order, points, sampling="uniform")
        self.project, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor, remember: bool = True) -> torch.Tensor:
        """[batch, token, width] to the same; a state is [key or value, batch, head, order, dim]."""
        outputs, state = [], None
        for start, block in zip(range(0, hidden.shape[1], BLOCK), hidden.split(BLOCK, dim=1), strict=True):
            parts = self.project(block).unflatten(-1, (3, self.heads, -1))  # [batch, token, 3, head, dim]
            query, key, value = parts.permute(2, 0, 3, 1, 4)
            signal = torch.stack((key, value))
            if state is not None and remember:
                memory = self.bank.reconstruction(start, hidden.device) @ state  # read: R C
                key, value = (torch.cat((old, new), dim=2) for old, new in zip(memory, signal, strict=True))
            outputs.append(self.output(trapezoidal(query, key, value).transpose(1, 2).flatten(2)))
            step = self.bank.step(start, start + BLOCK, hidden.device)  # write: C <- P C + K F
            state = step.projection @ signal + (0 if state is None else step.transition @ state)
        return torch.cat(outputs, dim=1)


class Model(nn.Module):
    """One layer: enough to find a secret."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.embed = nn.Embedding(SECRETS + 2, width)
        self.attention = MemoryAttention(width, heads=4, order=64, points=64)
        self.head = nn.Linear(width, SECRETS)

    def forward(self, ids: torch.Tensor, remember: bool = True) -> torch.Tensor:
        """Logits of the secret, from the last token."""
        hidden = self.embed(ids)
        return self.head((hidden + self.attention(hidden, remember))[:, -1])


def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of filler with a secret somewhere in the first block and a question at the end; and the secrets."""
    ids, secret = torch.full((count, BLOCK * BLOCKS), FILLER), torch.randint(SECRETS, (count,))
    ids[torch.arange(count), torch.randint(BLOCK, (count,))] = secret
    ids[:, -1] = QUESTION
    return ids, secret


def main() -> None:
    """Train with and without memory, and compare."""
    for remember in (False, True):
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(120):
            ids, secret = samples(32)
            loss = cross_entropy(model(ids, remember), secret)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ids, secret = samples(512)
        with torch.no_grad():
            right = (model(ids, remember).argmax(-1) == secret).float().mean()
        print(f"{'with' if remember else 'without'} memory: {right:.0%} of secrets recalled")


if __name__ == "__main__":
    main()
