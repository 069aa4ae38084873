"""The number of threads for small models."""

import os
import time

import torch


def choose_threads(width: int = 64) -> int:
    """Set torch's threads to one or to all, whichever is now faster for matrix products of this width.

    On shared cores a tiny model can be six times slower with two threads than with one, because each product waits for
    the slower thread. If OMP_NUM_THREADS is set, it decides. Returns the number of threads.
    """
    most = torch.get_num_threads()
    if most == 1 or "OMP_NUM_THREADS" in os.environ:
        return most
    left, right = torch.randn(512, width), torch.randn(width, 4 * width)
    repeats = max(3, 100 * 64**2 // width**2)

    def run() -> float:
        begin = time.perf_counter()
        for _ in range(repeats):
            torch.nn.functional.silu(left @ right)
        return time.perf_counter() - begin

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        run()  # after a change the threads start anew, which takes longer than many products
        return run()

    # interleaved, as the load of the machine varies
    rounds = [(seconds(1), seconds(most)) for _ in range(5)]
    single, multiple = (sum(column) for column in zip(*rounds, strict=True))
    torch.set_num_threads(1 if single <= multiple else most)
    return torch.get_num_threads()
