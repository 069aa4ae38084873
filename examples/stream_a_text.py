"""Read a long text in constant memory, keep what was read in a small file, and ask about it later.

A tiny model first learns one skill, to repeat a two-token passkey on request, on rows of at most 8 blocks (half a
minute). It then reads rows eight times as long, piece by piece, and is asked for the passkey at the end.

    python examples/stream_a_text.py
"""

import tempfile
from pathlib import Path
from random import Random

import torch

import elastic_memory as em
from elastic_memory.evaluation.recall import VOCABULARY, batch

BLOCK, TRAINED, READ = 16, 8, 64  # tokens in a block; blocks in training and in the text to read


def main() -> None:
    """Learn, read, save, ask."""
    torch.manual_seed(0)
    config = em.MemoryLlamaConfig.preset(
        "tiny", memory="elastic", sampling="uniform", memory_order=64, memory_points=64, block_size=BLOCK,
        vocab_size=VOCABULARY,
    )  # fmt: skip
    model = em.MemoryLlamaForCausalLM(config)
    em.evaluation.learn(model, "passkey", blocks=TRAINED, steps=400, learning_rate=3e-3)

    # The history is eight times as long as in training. Order and points can grow with it, without retraining.
    model.set_retrieval(order=512, points=512)
    texts, answered = batch("passkey", [READ - 1] * 32, READ, BLOCK, Random(1))  # 32 texts, each with its own passkey
    question_at = texts.shape[1] - len(answered)
    history, question, answer = texts.tensor_split([question_at, question_at + 1], dim=1)

    cache = em.MemoryCache(model)
    with torch.no_grad():
        for piece in history.split(300, dim=1):
            model(piece, past_key_values=cache)
            size = cache.nbytes() / len(texts) / 1024
            print(f"{cache.get_seq_length():4} tokens read, {size:.0f} KiB per text")  # does not grow

    file = Path(tempfile.mkdtemp()) / "texts.memory.safetensors"
    cache.save(file)
    print(f"{file.stat().st_size / len(texts) / 1024:.0f} KiB per text in the file")

    again = em.MemoryCache.load(file, model)
    said = model.generate(question, past_key_values=again, max_new_tokens=2, do_sample=False)
    right = (said[:, -2:] == answer).all(dim=1).float().mean()
    print(f"passkeys recalled after {READ - 1} blocks: {right:.0%} (guessing: 0.4%)")


if __name__ == "__main__":
    main()
