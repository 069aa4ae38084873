"""How many threads to compute with, where a model is too small to need them all."""

import os
import time

import torch


def choose_threads() -> int:
    """One thread, or all that torch has: whichever is faster at present for small products.

    Tiny models on cores that others use too are up to six times slower with two threads than with one, because each
    product waits for the slower thread. OMP_NUM_THREADS decides where it is set.
    """
    most = torch.get_num_threads()
    if most == 1 or "OMP_NUM_THREADS" in os.environ:
        return most
    left, right = torch.randn(512, 64), torch.randn(64, 256)

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        begin = time.perf_counter()
        for _ in range(100):
            torch.nn.functional.silu(left @ right)
        return time.perf_counter() - begin

    # several short turns each: what else runs on the machine comes and goes
    turns = [(seconds(1), seconds(most)) for _ in range(5)]
    alone, together = (sum(column) for column in zip(*turns, strict=True))
    torch.set_num_threads(1 if alone <= together else most)
    return torch.get_num_threads()
