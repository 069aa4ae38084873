"""Time and peak memory of building the operators: closed forms beside the paper's matrix exponentials.

    python benchmarks/operators.py [--quick] [--out benchmarks/results]

On a CPU each run has a fresh process, so that peak memory is its own; of up to three the fastest counts.
"""

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch

from elastic_memory import hippo, operators
from elastic_memory.common.environment import environment
from elastic_memory.operators import Bank

BLOCK, BLOCKS, POINTS = 2048, 16, 512


def plan(order: int, device: str, algorithm: str | None = None) -> list[torch.Tensor]:
    chosen = Bank(order, POINTS, "exponential").plan(BLOCK, BLOCKS, device, algorithm=algorithm)
    return [tensor for part in chosen for tensor in (part if isinstance(part, tuple) else (part,))]


def exponentials(order: int, device: str, tokens: int) -> list[torch.Tensor]:
    """The paper's way: one matrix exponential per token, multiplied up into the transition and kernel of a block."""
    a, b = hippo.legs(order, device=device)
    carry, columns = torch.eye(order, dtype=torch.float64, device=device), []
    for k in range(tokens - 1, -1, -1):  # from the newest token back, so that `carry` is the product to its right
        time = BLOCK + k
        token = torch.linalg.matrix_exp(a * torch.log(torch.tensor(time / (time + 1), dtype=torch.float64)).item())
        columns.append(carry @ (b - token @ b).reshape(-1, 1))
        carry = carry @ token
    columns.reverse()
    return [carry, torch.linalg.solve_triangular(a, torch.cat(columns, 1), upper=False)]


def closed(order: int, device: str, tokens: int) -> list[torch.Tensor]:
    """The same two matrices in closed form."""
    return [
        hippo.transition(order, BLOCK, BLOCK + tokens, device=device),
        hippo.projection(order, BLOCK, BLOCK + tokens, device=device),
    ]


CASES: dict[str, Callable[[str], list[torch.Tensor]]] = {
    "bank of order 540, 16 blocks of 2048, 512 points": lambda device: plan(540, device),
    "the same, direct algorithm": lambda device: plan(540, device, "direct"),
    "bank of order 2160": lambda device: plan(2160, device),
    "transition of order 8640": lambda device: [hippo.transition(8640, 15, 16, device=device)],
    "bank of order 8640": lambda device: plan(8640, device),
    "256 tokens at order 64": lambda device: closed(64, device, 256),
    "256 tokens at order 64, by exponentials": lambda device: exponentials(64, device, 256),
    "32 tokens at order 540": lambda device: closed(540, device, 32),
    "32 tokens at order 540, by exponentials": lambda device: exponentials(540, device, 32),
}
QUICK = [name for name in CASES if "8640" not in name and "2160" not in name]


def measure(name: str, device: str) -> dict[str, float | str]:
    """Seconds and peak memory of one case, after a small warm-up run."""
    cuda = device == "cuda"
    for warm in (plan(8, device), closed(8, device, 8), exponentials(8, device, 8)):
        del warm
    for build in (operators._recurrent, operators._direct):
        build.cache_clear()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, work = time.perf_counter(), time.process_time()
    result = CASES[name](device)
    if cuda:
        torch.cuda.synchronize()
    seconds, work = time.perf_counter() - start, time.process_time() - work
    peak = torch.cuda.max_memory_allocated() if cuda else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    returned = sum(tensor.numel() * tensor.element_size() for tensor in result)
    return {
        "case": name,
        "seconds": round(seconds, 4),
        "cpu_seconds": round(work, 4),
        "returned_mb": round(returned / 1e6, 1),
        "peak_mb": round((peak - before) / 1e6, 1),
        "peak_over_returned": round((peak - before) / returned, 2),
    }


def machine(device: str) -> dict[str, str | int | float]:
    name = torch.cuda.get_device_name() if device == "cuda" else processor()
    return {
        "device": name,
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 1),
    }


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the cases that take seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()

    where = machine(arguments.device)
    context = multiprocessing.get_context("spawn")
    results = []
    for name in QUICK if arguments.quick else CASES:
        runs: list[dict] = []
        while len(runs) < 3 and sum(run["seconds"] for run in runs) < 10:
            if arguments.device == "cuda":  # which counts its own memory
                runs.append(measure(name, "cuda"))
                continue
            with context.Pool(1) as pool:
                runs.append(pool.apply(measure, (name, arguments.device)))
        results.append(min(runs, key=lambda run: run["seconds"]))
        print(json.dumps(results[-1]), flush=True)
    seconds = {row["case"]: row["seconds"] for row in results}
    ratios = {
        name: round(seconds[f"{name}, by exponentials"] / seconds[name], 1)
        for name in seconds
        if f"{name}, by exponentials" in seconds
    }
    today = datetime.date.today().isoformat()
    record = {
        "date": today,
        **where,
        "environment": environment(),
        "results": results,
        "exponentials_over_closed_form": ratios,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"operators-{arguments.device}-{today}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"by exponentials it takes {ratios} times as long; written to {path}")


if __name__ == "__main__":
    main()
