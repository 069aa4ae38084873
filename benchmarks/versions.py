"""Two versions of the package on one device, interleaved: seconds of training steps and of decoding, before over after.

    python benchmarks/versions.py --before ../old --after . --preset 100m --out benchmarks/results/versions-h200.json

Each version and model has a process of its own, so that nothing is shared but the device. A round times every process
once, one at a time; the order changes from round to round, and a ratio is that of times in one round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

MODELS = {
    "none": ("none", 1),
    "elastic 1x": ("elastic", 1),
    "elastic 16x": ("elastic", 16),
    "infini": ("infini", 1),
    "melodi": ("melodi", 1),
}
DECODED = 1000  # tokens of one text


def worker(kind: str, name: str, preset: str, length: int) -> None:
    """Warm up, then read numbers of steps from standard input and print their seconds; `name` is one of `MODELS`."""
    import torch

    import elastic_memory as em
    from elastic_memory.fast import cuda_graph

    torch.set_float32_matmul_precision("high")
    memory, multiple = MODELS[name]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset(preset, memory=memory, memory_multiple=multiple))
    model = model.to(device)
    ids = torch.randint(model.config.vocab_size, (1, length), device=device)
    if device == "cuda":
        model.compile_blocks()
    if kind == "training":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=device == "cuda")

        def step(ids):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = model(ids, labels=ids).loss
            loss.backward()
            return loss.detach()

        captured = cuda_graph.Captured(step, model.parameters()) if cuda_graph.gains(model) else step

        def run(steps):
            for _ in range(steps):
                loss = captured(ids=ids)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            return float(loss)
    else:
        model = model.to(torch.bfloat16).eval()
        decode = by_generate if kind == "generate" else by_steps

        def run(steps):
            with torch.inference_mode():
                return [decode(em, model, ids[:, :1024]) for _ in range(steps)][-1]

    said = run(3)
    print(json.dumps({"ready": said, "package": str(Path(em.__file__).parent)}), flush=True)
    for line in sys.stdin:
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run(int(line))
        if device == "cuda":
            torch.cuda.synchronize()
        print(time.perf_counter() - begin, flush=True)


def by_generate(em, model, prompt) -> int:
    """transformers' loop; most of its time is Python's."""
    settings = {"do_sample": False, "cache_implementation": "static", "min_new_tokens": DECODED}
    return int(model.generate(prompt, max_new_tokens=DECODED, **settings).sum())


def by_steps(em, model, prompt) -> int:
    """The captured steps alone, on one token of the prompt after another."""
    cache = em.MemoryCache(model, static=True)
    model(prompt, past_key_values=cache, logits_to_keep=1)
    for token in prompt[:, :DECODED].split(1, dim=1):
        logits = model(token, past_key_values=cache).logits
    return int(logits.argmax())


def start(root: Path, kind: str, name: str, arguments: argparse.Namespace) -> subprocess.Popen:
    """A worker of the version under `root`, which runs this very file."""
    command = [sys.executable, __file__, "--worker", kind, name, arguments.preset, str(arguments.length)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/")


def ask(process: subprocess.Popen, steps: int) -> float:
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def compare(kind: str, names: list[str], arguments: argparse.Namespace) -> list[dict]:
    """One row for each model: what both versions computed, and how long."""
    roots = {"before": arguments.before, "after": arguments.after}
    workers = {(name, key): start(root, kind, name, arguments) for name in names for key, root in roots.items()}
    said = {}
    for which, process in workers.items():  # all warm up at once
        answer = process.stdout.readline()
        if not answer:
            raise SystemExit(f"{which[0]}, {which[1]}: the worker failed, see above")
        said[which] = json.loads(answer)
    seconds: dict[tuple[str, str], list[float]] = {which: [] for which in workers}
    order = list(workers)
    for _ in range(arguments.rounds):
        for which in order:
            ask(workers[which], 1)  # warm-up, as another process used the device before
            seconds[which].append(ask(workers[which], arguments.steps))
        order.reverse()
    for process in workers.values():
        process.stdin.close()
        process.wait()
    rows = []
    for name in names:
        old, new = seconds[name, "before"], seconds[name, "after"]
        ratio = statistics.median(a / b for a, b in zip(old, new, strict=True))
        row = {"kind": kind, "model": name, "speed_ratio": ratio, "before_seconds": old, "after_seconds": new}
        row |= {f"{key}_computed": said[name, key]["ready"] for key in roots}
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=lambda path: Path(path).resolve(), required=True)
    parser.add_argument("--after", type=lambda path: Path(path).resolve(), required=True)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--length", type=int, default=32768, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=3, help="training steps, or texts, that are timed together")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--kinds", nargs="+", default=["generate", "decoding", "training"])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--at-once", type=int, default=3, help="models on the device at the same time")
    parser.add_argument("--commits", nargs=2, default=["", ""], metavar=("BEFORE", "AFTER"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = []
    groups = [arguments.models[i : i + arguments.at_once] for i in range(0, len(arguments.models), arguments.at_once)]
    decoding = [("generate", ["elastic 1x"]), ("decoding", ["elastic 1x"])]
    for kind, names in [*decoding, *(("training", group) for group in groups)]:
        if kind not in arguments.kinds:
            continue
        rows += compare(kind, names, arguments)
        sys.path.insert(0, str(arguments.after))
        from elastic_memory.common.environment import environment

        content = {"commits": arguments.commits, "preset": arguments.preset, "length": arguments.length}
        arguments.out.write_text(json.dumps(content | {"rows": rows, "environment": environment()}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
    else:
        main()
