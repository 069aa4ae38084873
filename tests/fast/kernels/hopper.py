"""Compile our kernels for an H100 or H200 on a machine without one: python -m tests.fast.kernels.hopper

Launches are caught and compiled instead, with the arguments, tiles and warps that they came with. Prints what the
assembler says of each as JSON: registers, bytes of them that had to go to memory, and bytes of shared memory. Without
TRITON_INTERPRET.
"""

import json
import re
import subprocess
import tempfile
from functools import partial

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import elastic_memory as em
from elastic_memory.fast import decoder
from elastic_memory.fast.kernels import cross_entropy, decoding, infini, sweeps

NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.int64: "i64", torch.bool: "i1"}


def compiled(kernel, args, known):
    """A kernel for these arguments; registers and spilled bytes."""
    options = {name: known[name] for name in ("num_warps", "num_stages") if name in known}
    signature, constants, attributes = {}, {}, {}
    given = dict(zip(kernel.arg_names, args, strict=False)) | {k: v for k, v in known.items() if k in kernel.arg_names}
    for place, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(place,)] = "constexpr", value
            continue
        pointer, whole = isinstance(value, torch.Tensor), isinstance(value, int)
        kind = f"*{NAMES[value.dtype]}" if pointer else "i32" if whole else "fp32"
        signature[parameter.name] = kind
        if pointer or (whole and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(result.asm["ptx"])
        file.flush()
        assembler = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(assembler, capture_output=True, text=True, check=True).stderr
    registers, spilled = (int(re.search(words, said)[1]) for words in (r"Used (\d+) reg", r"(\d+) bytes spill stores"))
    shared = result.metadata.shared
    return {"kernel": kernel.__name__, "registers": registers, "spilled": spilled, "shared": shared}


def main() -> None:
    found: list[dict] = []
    JITFunction.run = lambda self, *args, grid, warmup, **known: found.append(compiled(self, args, known))
    make = partial(torch.zeros, dtype=torch.bfloat16)
    for dim, features in ((64, 64), (96, 90), (128, 128)):
        tokens = make(1, 2, 8, 2048, dim)  # [batch, block, head, token, dim]
        matrix, normaliser, gate = torch.zeros(1, 2, 8, dim, dim), torch.zeros(1, 2, 8, dim), torch.zeros(8)
        for norm in (True, False):
            reading = (tokens, tokens, matrix, normaliser, gate, 1, features, norm)
            infini._mix(*reading)
            infini._mix_backward(tokens, *reading)
        infini._chain(matrix, matrix)
        infini._chain_backward(matrix, matrix, matrix)
        infini._fold(tokens, tokens, normaliser[:, :1])
        infini._fold_backward(matrix[:, :1], matrix[:, :1], tokens, tokens, normaliser[:, :1])
    cross_entropy.losses(make(8, 32000), torch.zeros(8, dtype=torch.int64), True)
    wide = partial(torch.zeros, dtype=torch.float64)
    sweeps.climb(wide(100, 64), wide(64), 2)
    sweeps.transitions(540, wide(4))
    decoder._kernels, decoding._early = lambda device: decoding, lambda x: {"EARLY": True, "launch_pdl": True}
    config = em.MemoryLlamaConfig.preset("100m", num_hidden_layers=1, memory_layers=[0], pad_heads=True, vocab_size=64)
    model = em.MemoryLlamaForCausalLM(config).bfloat16().eval()
    for rows in (1, 64):
        model(torch.zeros(rows, 1, dtype=torch.int64), past_key_values=em.MemoryCache(model, static=True))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
