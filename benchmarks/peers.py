"""Training tokens/s and peak memory of other implementations, on one device, in one process, at our 100m shape.

    python benchmarks/peers.py --packages FOLDER --out benchmarks/results/peers.json     # on a GPU, about four minutes
    python benchmarks/peers.py --tiny --out peers.json                                   # on any machine, a trial

A step is forward, backward, clipping and AdamW on samples of 32,768 tokens in bfloat16 autocast: four at a time, or as
many as fit. FOLDER holds the peers, as `pip install --target FOLDER` would put them. A peer that is missing or fails is
recorded with the reason. The note of a row says where that peer differs from our shape.
"""

import argparse
import contextlib
import datetime
import gc
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import elastic_memory as em
from elastic_memory.common.environment import environment
from elastic_memory.common.files import write_json
from elastic_memory.memory import MEMORIES

BASE = "Transformer++"
LENGTHS, ROWS = {"100m": 32768, "tiny": 256}, {"100m": 4, "tiny": 2}
SAME = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "tie_word_embeddings")
STEPS, TIMED_SECONDS, PEER_SECONDS = 5, 12, 100  # at most so many timed steps; seconds of those; seconds in all

Backward = Callable[[Tensor], None]  # one token more than the sample: inputs and labels are shifts of it
Build = Callable[[str, bool], tuple[nn.Module, Backward]]  # from a preset's name, and whether a GPU is there


@dataclass(frozen=True)
class Peer:
    """How to build a peer: its model, and a function for forward and backward. Slow peers take fewer rows, warm-ups."""

    build: Build
    note: str
    package: str | None = None
    rows: int | None = None
    warmups: int = 2


def shape(preset: str) -> em.MemoryLlamaConfig:
    return em.MemoryLlamaConfig.preset(preset, memory="none")


def fields(preset: str, names: Iterable[str]) -> dict[str, Any]:
    """Our shape by the names of transformers' configurations."""
    return {name: getattr(shape(preset), name) for name in names}


def sizes(preset: str) -> dict[str, int]:
    """Our shape by the names that three of the packages share."""
    own = shape(preset)
    return {
        "num_tokens": own.vocab_size,
        "dim": own.hidden_size,
        "depth": own.num_hidden_layers,
        "heads": own.num_attention_heads,
        "dim_head": own.head_dim,
    }


def ours(**settings: Any) -> Build:
    def build(preset: str, cuda: bool) -> tuple[nn.Module, Backward]:
        model = em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset(preset, **settings, pad_heads=cuda))
        if cuda:
            model.compile_blocks()
        return model, labelled(model)

    return build


def labelled(model: nn.Module, **options: Any) -> Backward:
    """A model that takes labels the way transformers' models do, and shifts them itself."""

    def backward(ids: Tensor) -> None:
        sample = ids[:, :-1].contiguous()
        model(sample, labels=sample, **options).loss.backward()

    return backward


def llama(preset: str, cuda: bool) -> tuple[nn.Module, Backward]:
    names = (*SAME, "num_attention_heads", "max_position_embeddings", "rope_parameters", "rms_norm_eps")
    config = transformers.LlamaConfig(**fields(preset, names), attn_implementation="sdpa")
    model = transformers.LlamaForCausalLM(config)
    if cuda:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    return model, labelled(model, use_cache=False)


def infini(compiled: bool) -> Build:
    def build(preset: str, cuda: bool) -> tuple[nn.Module, Backward]:
        from infini_transformer_pytorch import InfiniTransformer, InfiniTransformerWrapper

        model = InfiniTransformer(**sizes(preset), use_mem_delta_rule=True)
        wrapper = InfiniTransformerWrapper(
            model, segment_length=shape(preset).block_size, detach_mems_every_num_segments=2
        )
        if compiled and cuda:
            for attention, feed_forward in model.layers:
                attention.compile(dynamic=False)
                feed_forward.compile(dynamic=False)
        return wrapper, lambda ids: wrapper(ids, backward=True)

    return build


def memorizing(preset: str, cuda: bool) -> tuple[nn.Module, Backward]:
    from memorizing_transformers_pytorch import MemorizingTransformer

    size = sizes(preset)
    layer = MEMORIES["memorizing"].info.layers(size["depth"])[0] + 1  # the package counts from one
    folder = tempfile.TemporaryDirectory(prefix="peers-")
    model = MemorizingTransformer(
        **size, memorizing_layers=layer, max_knn_memories=LENGTHS[preset],
        num_retrieved_memories=32, knn_memories_directory=folder.name, pad_id=-1,
    )  # fmt: skip
    model.folder = folder  # goes when the model goes

    def backward(ids: Tensor) -> None:
        count = LENGTHS[preset] // shape(preset).block_size
        with model.knn_memories_context(batch_size=len(ids)) as memories:
            for memory in memories:  # faiss takes float32 only
                memory.add = lambda new, add=memory.add: add(new.float())
                memory.search = lambda query, count, search=memory.search: search(query.float(), count)
            for segment, labels in zip(ids[:, :-1].chunk(count, 1), ids[:, 1:].chunk(count, 1), strict=True):
                (model(segment, labels=labels, knn_memories=memories) / count).backward()

    return model, backward


def recurrent(preset: str, cuda: bool) -> tuple[nn.Module, Backward]:
    from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer, RecurrentMemoryTransformerWrapper

    segment = shape(preset).block_size
    model = RecurrentMemoryTransformer(
        **sizes(preset), seq_len=segment, num_memory_tokens=segment // 16, use_flash_attn=True, use_xl_memories=False
    )
    wrapper = RecurrentMemoryTransformerWrapper(model)
    return wrapper, lambda ids: wrapper(ids, memory_replay_backprop=True)


def gated_deltanet(preset: str, cuda: bool) -> tuple[nn.Module, Backward]:
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    config = GatedDeltaNetConfig(**fields(preset, SAME), num_heads=6, head_dim=64, expand_v=2, use_cache=False)
    model = GatedDeltaNetForCausalLM(config)
    return model, labelled(model)


PADDED = "heads of 90 stored as 96, the zeros count as parameters; compiled"
UNTIED = "head not tied to the embedding (23M parameters more)"
MATERIALISED = "attention scores materialised; not compiled, as in its training script"
PEERS = {
    BASE: Peer(ours(memory="none"), f"blocks of 2,048 without memory; {PADDED}"),
    "Elastic 1x": Peer(ours(memory="elastic"), PADDED),
    "Infini": Peer(ours(memory="infini"), f"gradients through all segments; {PADDED}"),
    "Memorizing 1x": Peer(ours(memory="memorizing"), f"attention to a queue of 540 tokens, no search; {PADDED}"),
    "Full attention": Peer(ours(memory="none", local_attention="full"), PADDED),
    "transformers Llama": Peer(
        llama,
        "full attention, sdpa; layers compiled one by one (compiled whole, it would build the 32,768 x 32,768 mask)",
        "transformers",
    ),
    "infini-transformer-pytorch": Peer(
        infini(compiled=False),
        "its wrapper with segments of 2,048, gradients cut after every second, as in its training script; GEGLU with "
        f"biases; {UNTIED}; {MATERIALISED}",
        "infini-transformer-pytorch",
    ),
    "memorizing-transformers-pytorch": Peer(
        memorizing,
        "segments of 2,048, one backward each, as in its training script; 32 neighbours of all earlier tokens in layer "
        "9, found by faiss on the CPU, as the package does; one row at a time; one head of keys and values for all "
        f"queries, relative position bias, GELU of 2,880; {UNTIED}; {MATERIALISED}",
        "memorizing-transformers-pytorch", rows=1, warmups=1,
    ),
    "recurrent-memory-transformer-pytorch": Peer(
        recurrent,
        "segments of 2,048 and 128 memory tokens, replayed for backward (a second forward), as in its training "
        "script, but no keys of the last segment; the package leaves flash kernels to A100s; four residual streams, "
        f"learned positions, GEGLU; {UNTIED}; not compiled",
        "recurrent-memory-transformer-pytorch",
    ),
    "Gated DeltaNet": Peer(
        gated_deltanet,
        "6 heads of 64 for keys and 128 for values: as many parameters within 2%, powers of two for its kernels; "
        "short convolutions; the other sizes are ours; not compiled beyond its own fused kernels",
        "flash-linear-attention",
    ),
    "infini-transformer-pytorch, compiled": Peer(
        infini(compiled=True), "as above, but its layers compiled one by one", "infini-transformer-pytorch"
    ),
}  # fmt: skip


def measure(peer: Peer, preset: str, rows: int, device: str) -> dict[str, Any]:
    """Tokens/s with as many rows as fit, at most `rows`."""
    while True:
        with contextlib.suppress(torch.OutOfMemoryError):
            return timed(peer, preset, rows, device)
        if rows == 1:
            raise MemoryError("out of memory with one row")
        rows //= 2


def timed(peer: Peer, preset: str, rows: int, device: str) -> dict[str, Any]:
    cuda, length = device == "cuda", LENGTHS[preset]
    torch._dynamo.reset()  # graphs of earlier models would count against the limit on recompilation
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if cuda else 0
    model, backward = peer.build(preset, cuda)
    model.to(device).train()
    ids = torch.randint(shape(preset).vocab_size, (rows, length + 1), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=cuda)

    def step() -> float:
        start = clock(cuda)
        with torch.autocast(device, torch.bfloat16):
            backward(ids)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return clock(cuda) - start

    for _ in range(peer.warmups):
        step()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = [step()]
    while len(seconds) < STEPS and sum(seconds) + seconds[-1] < TIMED_SECONDS:
        seconds.append(step())
    median = statistics.median(seconds)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "rows": rows,
        "tokens_per_s": rows * length / median,
        "step_ms": 1000 * median,
        "steps": len(seconds),
        "peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30 if cuda else None,
    }


def clock(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # again every second, as a peer's code may catch the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| model | parameters | rows | tokens/s | ratio | step ms | peak GiB |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['name']} | {row['failed']} | | | | | |")
            continue
        peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        lines.append(
            f"| {row['name']} | {row['parameters'] / 1e6:.1f}M | {row['rows']} | {row['tokens_per_s']:,.0f} "
            f"| {row['ratio']:.3f} | {row['step_ms']:,.0f} | {peak} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, help="folder of the peers' packages, searched last")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS), help=f"{BASE} is always timed")
    parser.add_argument("--seconds", type=int, default=240, help="start no further peer after this time")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU, nothing compiled")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.packages:
        sys.path.append(str(args.packages.resolve(strict=True)))
    preset, cuda = "tiny" if args.tiny else "100m", torch.cuda.is_available() and not args.tiny
    if not cuda and not args.tiny:
        parser.error("no GPU here: --tiny tries the program on a CPU")
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # else it would silently run uncompiled
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "environment": environment() | {"transformers": transformers.__version__},
        "device": torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads",
        "preset": preset,
        "length": LENGTHS[preset],
        "segment": shape(preset).block_size,
        "peers": [],
    }
    begin, base = time.perf_counter(), None
    for name in [name for name in PEERS if name == BASE or name in args.only]:
        peer = PEERS[name]
        row: dict[str, Any] = {"name": name, "package": peer.package, "note": peer.note}
        try:
            if time.perf_counter() - begin > args.seconds:
                raise TimeoutError(f"not begun: {args.seconds} s were over")
            row["version"] = peer.package and metadata.version(peer.package)
            with time_limit(PEER_SECONDS):
                row |= measure(peer, preset, peer.rows or ROWS[preset], "cuda" if cuda else "cpu")
            base = base or row["tokens_per_s"]
            row["ratio"] = row["tokens_per_s"] / base
        except Exception as problem:
            row["failed"] = f"{type(problem).__name__}: {problem}".splitlines()[0]
        record["peers"].append(row)
        write_json(args.out, record)
        found = row.get("failed") or f"{row['tokens_per_s']:,.0f} tokens/s"
        print(f"{time.perf_counter() - begin:4.0f} s  {name}: {found}", flush=True)
    print(table(record["peers"]))


if __name__ == "__main__":
    main()
