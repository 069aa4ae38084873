"""Train a tiny Llama with and without memory on text where memory must help, and compare them block by block.

Each document uses 4 of 64 letters, in random order. Which ones, a model can only learn by reading: without memory it
starts from nothing in every block of 16 tokens. The best possible perplexity is 4. In block 0 neither
model has a memory. After so little training the model with memory is worse there, and about twice as good in all
later blocks.

    python examples/train_tiny.py
"""

import torch

import elastic_memory as em

ALPHABET, USED, BLOCK, BLOCKS = 64, 4, 16, 8


def documents(count: int) -> torch.Tensor:
    """Rows of random letters, each row from a small alphabet of its own."""
    own = torch.rand(count, ALPHABET).topk(USED).indices
    return own.gather(1, torch.randint(USED, (count, BLOCK * BLOCKS)))


def train(memory: str, steps: int = 200) -> em.MemoryLlamaForCausalLM:
    """A model of 0.1M parameters, trained on fresh documents."""
    torch.manual_seed(0)
    shape = {"vocab_size": ALPHABET, "block_size": BLOCK, "num_hidden_layers": 2}
    if memory != "none":
        shape |= {"memory_order": 32, "memory_points": 32, "sampling": "uniform"}
    config = em.MemoryLlamaConfig.preset("tiny", memory=memory, **shape)
    model = em.MemoryLlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        ids = documents(16)
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"{memory:8} step {step:3}  loss {loss:.2f}")
    return model.eval()


def main() -> None:
    """Train both, then score the same unseen documents."""
    models = {name: train(name) for name in ("none", "elastic")}
    torch.manual_seed(1)
    rows = list(documents(64))
    print("\nperplexity by block   " + "".join(f"{block:>7}" for block in range(BLOCKS)))
    for name, model in models.items():
        found = em.evaluation.perplexity(model, rows, batch_size=64)
        print(f"{name:22}" + "".join(f"{ppl:7.2f}" for ppl in found.by_block))


if __name__ == "__main__":
    main()
