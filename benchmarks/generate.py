"""`model.generate` as users call it: tokens/s beside transformers' Llama of the same shape, interleaved in one process.

    python benchmarks/generate.py --preset tiny --tokens 20 --out benchmarks/results/generate-cpu.json
    python benchmarks/generate.py --preset 100m --rows 1 64 --long 1048576 --out ...       # on a GPU

For each batch: elastic memory as it comes; the same in transformers' own loop (no captured steps); Llama. Greedy, and
sampling with top_p. Then how long after its prefill a warm model gives the first two tokens, how many tokens/s a long
prompt is read with, and whether captured steps choose the tokens of the plain path (float32 and bf16).
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import elastic_memory as em
from elastic_memory.common.environment import environment
from elastic_memory.fast import generation

SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}


def seconds(call) -> float:
    """How long a call takes, GPU included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def continued(model, prompt, tokens: int, captured: bool = True, **options):
    """Call `generate` with an end-of-text token that is never sampled."""
    generation.DEVICES = ("cuda",) if captured else ()
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": model.config.vocab_size} | options
    return model.generate(prompt, max_new_tokens=tokens, **options)


def speeds(models: dict, rows: int, arguments: argparse.Namespace) -> list[dict]:
    """Tokens/s of each way to generate, from the differences of two lengths, so that prefills do not count."""
    vocabulary = models["ours"].config.vocab_size
    prompt = torch.randint(1, vocabulary, (rows, arguments.prompt), device=models["ours"].device)
    few = max(2, arguments.tokens // 8)
    ways = {
        "ours": (models["ours"], arguments.tokens, {}),
        "ours, sampling": (models["ours"], arguments.tokens, SAMPLED),
        "ours, transformers' loop": (models["ours"], few, {"captured": False}),
        "transformers' Llama": (models["llama"], few, {}),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(arguments.rounds + 1):
        for name, (model, tokens, options) in ways.items():
            more = seconds(lambda: continued(model, prompt, tokens + 2, **options))  # noqa: B023
            less = seconds(lambda: continued(model, prompt, 2, **options))  # noqa: B023
            if round_:  # the first warms up
                found[name].append(rows * tokens / (more - less))
    return [
        {"rows": rows, "way": name, "tokens_per_s": statistics.median(values), "each": values}
        for name, values in found.items()
    ]


def first_token(model, arguments: argparse.Namespace) -> dict:
    """Milliseconds that a warm model takes for a prompt, and for a prompt and two tokens."""
    prompt = torch.randint(1, model.config.vocab_size, (1, arguments.prompt), device=model.device)
    continued(model, prompt, 2)
    prefill = [seconds(lambda: model(prompt, use_cache=True, logits_to_keep=1)) for _ in range(5)]
    answer = [seconds(lambda: continued(model, prompt, 2)) for _ in range(5)]
    return {
        "prompt": arguments.prompt,
        "prefill_ms": 1e3 * statistics.median(prefill),
        "two_tokens_ms": 1e3 * statistics.median(answer),
    }


def reading(model, tokens: int) -> dict:
    """Tokens/s that one long prompt is read with by `generate`."""
    prompt = torch.randint(1, model.config.vocab_size, (1, tokens), device=model.device)
    taken = min(seconds(lambda: continued(model, prompt, 1)) for _ in range(3))
    return {"prompt": tokens, "seconds": taken, "tokens_per_s": tokens / taken}


def agreement(model, arguments: argparse.Namespace) -> dict:
    """Share of tokens before the first one that differs from the plain path's."""
    prompt = torch.randint(1, model.config.vocab_size, (4, arguments.prompt), device=model.device)
    shares = {}
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        for name, options in (("greedy", {}), ("sampled", SAMPLED)):
            results = []
            for captured in (False, True):
                torch.manual_seed(0)
                results.append(continued(model, prompt, 64, captured=captured, **options)[:, arguments.prompt :])
            same = (results[0] == results[1]).long().cumprod(dim=1)
            shares[f"{name}, {str(dtype).removeprefix('torch.')}"] = same.float().mean().item()
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens to generate; an eighth where steps are slow")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=int, default=0, help="also read one prompt of so many tokens")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = em.MemoryLlamaConfig.preset(arguments.preset, memory="elastic")
    shape = {name: getattr(config, name) for name in LlamaConfig().to_dict() if hasattr(config, name)}
    shape = {name: value for name, value in shape.items() if name not in ("model_type", "architectures")}
    ours = em.MemoryLlamaForCausalLM(config).to(device).eval()
    result = {
        "preset": arguments.preset,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "agreement": agreement(ours, arguments),
    }
    models = {
        "ours": ours.to(torch.bfloat16),
        "llama": LlamaForCausalLM(LlamaConfig(**shape)).to(device, torch.bfloat16).eval(),
    }
    result["first_token"] = first_token(models["ours"], arguments)
    if arguments.long:
        result["reading"] = reading(models["ours"], arguments.long)
    result["runs"] = []
    for rows in arguments.rows:
        result["runs"] += speeds(models, rows, arguments)
        arguments.out.write_text(json.dumps(result | {"environment": environment()}, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
