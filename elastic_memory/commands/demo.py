"""`elastic demo`: what the memory can do, shown on this machine in a few minutes, without a download."""

import contextlib
import io
import sys
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from elastic_memory.commands.options import check_range
from elastic_memory.common.progress import Bars

if TYPE_CHECKING:
    from torch import Tensor

    from elastic_memory.report.tables import Table

ORDERS = (8, 32, 128, 512)
SIGNAL_BLOCK, SIGNAL_BLOCKS = 512, 16

RECALL_STEPS = 600  # of training, on distances of at most 8 blocks
DISTANCES = (1, 4, 16, 64)
QUESTIONS = 48  # at each distance
GROWN = 8  # times the order and the sample points, after training
BOOKS = 20  # each read into a memory file
BOOK_BLOCKS = 9

BLOCK, LENGTH, STEP = 16, 512, 4096  # bytes of a block, of a row, and of an optimizer step
HELD_OUT_ROWS = 128
LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "without-memory": {"preset": "tiny", "memory": "none", "config": {"block_size": BLOCK}},
    "with-memory": {"preset": "tiny", "memory": "elastic", "sampling": "exponential", "memory_multiple": 4,
                    "config": {"block_size": BLOCK, "memory_points": 64}},
}  # fmt: skip


def demo(
    out: Annotated[Path, typer.Option(help="Folder for data, runs, plots and the report.")] = Path("demo"),
    tokens: Annotated[
        int, typer.Option(help="Bytes of text (tokens) that the language model is trained on.")
    ] = 1_228_800,
    seed: Annotated[int, typer.Option(help="Random seed of training and questions.")] = 0,
) -> None:
    """See the memory at work on this machine: two to four minutes on two cores, no download.

    1. Signals are compressed block by block and reconstructed.

    2. Two tiny models, with and without memory, learn to recall what was said some blocks ago. Then the memory is made
    larger, without training, and reaches further.

    3. Texts are read into memory files of a few KiB, loaded again, and asked about.

    4. Two language models, with and without memory, are trained on the source code of Python's standard library.

    All results are in one page, report.html. To resume after an interruption, repeat the command.

        elastic demo --out demo

        elastic demo --out demo-2 --seed 2
    """
    from transformers.utils import logging

    from elastic_memory.common.files import write_text
    from elastic_memory.common.threads import choose_threads
    from elastic_memory.report.page import page

    check_range(STEP, 10**12, tokens=tokens)
    check_range(0, seed=seed)
    _check_seed(out / "demo.json", seed)
    console = Console()
    logging.disable_progress_bar()  # of saving and loading models that take no time
    choose_threads()
    found = []
    _step(console, 1, "The memory alone: compress four signals and reconstruct them")
    found += memory_at_work(out / "results", console)
    _step(console, 2, "Recall: a passkey of two letters is given, and asked for some blocks later")
    found += _recall(out, seed, console)
    _step(console, 3, f"Memory files: read {BOOKS} texts, save what the model remembers, load it, ask")
    found += _ask_files(out, seed, console)
    _step(console, 4, f"Two language models of Python source code, in blocks of {BLOCK} bytes")
    run, seen = _language_model(out, tokens, seed, console)
    _conclude([*found, *seen], run, out, console)
    write_text(out / "report.html", page(out, "Elastic Memory: the demo"))


def _check_seed(file: Path, seed: int) -> None:
    """Refuse a folder of another seed: what is there would not be trained again."""
    from elastic_memory.common.files import write_json
    from elastic_memory.common.strict import read_json

    if file.exists() and (made := read_json(file)["seed"]) != seed:
        raise ValueError(f"--seed {seed}: {file.parent} was made with seed {made}; give another --out")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"seed": seed})


def memory_at_work(out: Path, console: Console) -> list[tuple[str, str]]:
    """Compress four signals; print and plot how much of their variance each order keeps."""
    from elastic_memory.common.files import write_text
    from elastic_memory.evaluation.signals import noise, sines, text
    from elastic_memory.report import plots
    from elastic_memory.report.tables import Table

    length = SIGNAL_BLOCK * SIGNAL_BLOCKS
    signals = {
        "20 sines": sines(20, length)[:, None],
        "text, smoothed": text(length, features=16, smooth=64),
        "text, raw": text(length, features=16),
        "noise": noise(length)[:, None],
    }
    panels, rows = {}, []
    for name, signal in signals.items():
        back = {order: _remember(signal, order) for order in ORDERS}
        kept = [1 - (signal - guess).square().mean() / signal.var(0, correction=0).mean() for guess in back.values()]
        rows.append((name, *(f"{100 * share.item():.1f}%" for share in kept)))
        shown = {f"order {order}": guess[:, 0].tolist() for order, guess in back.items() if order != ORDERS[0]}
        panels[name] = (signal[:, 0].tolist(), shown)
    table = Table(
        title=f"Share of the variance reconstructed from {length:,} tokens, read in {SIGNAL_BLOCKS} blocks",
        columns=("signal", *(f"order {order}" for order in ORDERS)),
        rows=rows,
        note="A memory of order N keeps N numbers per feature: a smooth signal is reconstructed in full, "
        f"of noise only about N/{length:,}.",
    )
    console.print(table.rich())
    picture = plots.reconstructions(panels, out / "memory.png")
    write_text(out / "memory.md", table.markdown())
    console.print(f"plot: {picture}")
    _, *shares = rows[1]
    return [(f"{length:,} tokens of smoothed text in {ORDERS[-2]} coefficients: variance kept", shares[-2])]


def _remember(signal: "Tensor", order: int) -> "Tensor":
    """Compress block by block, as a model does, then reconstruct every token from the final state."""
    import torch

    from elastic_memory.operators import Bank

    bank = Bank(order, points=len(signal), sampling="midpoints")
    state = torch.zeros(order, signal.shape[1], dtype=torch.float64)
    for start in range(0, len(signal), SIGNAL_BLOCK):
        step = bank.step(start, start + SIGNAL_BLOCK, "cpu", torch.float64)
        state = step.transition @ state + step.projection @ signal[start : start + SIGNAL_BLOCK]
    return bank.reconstruction(len(signal), "cpu", torch.float64) @ state


def _recall(out: Path, seed: int, console: Console) -> list[tuple[str, str]]:
    """Train both models unless done, and measure recall: without memory, with memory, and with the memory enlarged."""
    from elastic_memory.common.files import write_json, write_text
    from elastic_memory.common.strict import read_json
    from elastic_memory.report.tables import Table
    from elastic_memory.reproduction.tables.recall import TWO_MODELS

    file = out / "results" / "recall.json"
    names = {"without memory": "Transformer++", "elastic memory": "Elastic, uniform"}
    if not file.exists():
        records = []
        for name, row in names.items():
            model = _learned(out / "recall" / name.replace(" ", "-"), TWO_MODELS[row], seed, name)
            records += _asked(model, name, seed)
            if name != "without memory":
                config = model.config
                model.set_retrieval(order=GROWN * config.memory_order, points=GROWN * config.memory_points)
                records += _asked(model, f"the same, {GROWN} times as large, not trained again", seed)
        plan = {"task": "passkey", "steps": RECALL_STEPS, "questions": QUESTIONS, "seed": seed}
        write_json(file, {"table": "recall", "tier": "demo", "device": "cpu", "plan": plan, "rows": records})
    records = read_json(file)["rows"]
    right = {
        name: {it["distance"]: f"{it['accuracy']:.0%}" for it in records if it["row"] == name}
        for name in dict.fromkeys(it["row"] for it in records)
    }
    table = Table(
        title="Recall: share of right answers by distance in blocks",
        columns=["model", *map(str, DISTANCES)],
        rows=[[name, *shares.values()] for name, shares in right.items()],
        note=f"Trained for {RECALL_STEPS} steps on distances up to {BOOK_BLOCKS - 1} blocks; {QUESTIONS} questions a "
        "cell; guessing gets 0.4%.",
    )
    console.print(table.rich())
    write_text(out / "results" / "recall.md", table.markdown())
    last = " / ".join(shares[DISTANCES[-1]] for shares in right.values())
    return [(f"recall {DISTANCES[-1]} blocks back: without memory / with / {GROWN} times as large", last)]


def _learned(folder: Path, memory: dict[str, str], seed: int, name: str) -> Any:
    """A model trained on the recall task; loaded if an earlier call has saved it."""
    import elastic_memory as em
    from elastic_memory.evaluation.recall import learn
    from elastic_memory.reproduction.tables.recall import PLANS, build

    if (folder / "model.safetensors").exists():
        return em.MemoryLlamaForCausalLM.from_pretrained(folder).eval()
    model = build(memory, PLANS["smoke"]["model"] | {"memory_multiple": 1}, seed)
    with Bars() as progress:
        bar = progress.add_task(f"training {name}", total=RECALL_STEPS, unit="steps")
        learn(
            model, "passkey", BOOK_BLOCKS, RECALL_STEPS, rows=32, learning_rate=3e-3, seed=seed,
            report=lambda step, loss: progress.advance(bar),
        )  # fmt: skip
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    model.save_pretrained(unfinished)
    unfinished.rename(folder)  # whole or absent
    return model


def _asked(model: Any, name: str, seed: int) -> list[dict[str, Any]]:
    """Recall at each distance, as records of the recall table."""
    import dataclasses

    from elastic_memory.evaluation.recall import recall

    results = []
    with Bars(transient=True) as progress:
        for distance in progress.track(DISTANCES, description=f"asking {name}"):
            results += recall(model, "passkey", [distance], samples=QUESTIONS, seed=seed + 1)
    return [{"row": name, **dataclasses.asdict(result)} for result in results]


def _ask_files(out: Path, seed: int, console: Console) -> list[tuple[str, str]]:
    """Read texts into memory files; load each into a new cache, and ask for what was said in the first block."""
    import torch

    import elastic_memory as em
    from elastic_memory.evaluation.recall import ASK, passkey, sample

    model = em.MemoryLlamaForCausalLM.from_pretrained(out / "recall" / "elastic-memory").eval()
    random, right, size = Random(f"books {seed}"), 0, 0
    folder = out / "memories"
    folder.mkdir(exist_ok=True)
    for book in range(BOOKS):
        fact = passkey(random)
        row = sample(fact, BOOK_BLOCKS - 1, BOOK_BLOCKS, model.config.block_size, random)
        file, key = folder / f"book-{book}.memory.safetensors", fact.questions[0].answer
        cache = em.MemoryCache(model)
        with torch.no_grad():
            model(torch.tensor([row[: -len(key) - 1]]), past_key_values=cache)
        cache.save(file)
        loaded, asked = em.MemoryCache.load(file, model), torch.tensor([[ASK]])
        settings = {"max_new_tokens": len(key), "do_sample": False}
        answer = model.generate(asked, past_key_values=loaded, **settings)[0, 1:].tolist()
        right, size = right + (answer == key), size + file.stat().st_size
        if book < 3:
            said, heard = (_letters(one) for one in (key, answer))
            console.print(f"  {file.name}: said {said}, asked after loading, answered {heard}", highlight=False)
    console.print(
        f"  {right} of {BOOKS} right. Each file has {size / BOOKS / 1024:.1f} KiB, however long its text: here "
        f"{len(row)} tokens, the passkey in the first {model.config.block_size}.",
        highlight=False,
    )
    return [(f"texts asked through a file of {size / BOOKS / 1024:.0f} KiB: right answers", f"{right} of {BOOKS}")]


def _letters(values: list[int]) -> str:
    """A passkey as one would say it."""
    from elastic_memory.evaluation.recall import VALUES

    return "".join(chr(ord("A") + value - VALUES.start) if value in VALUES else "?" for value in values)


def _language_model(out: Path, tokens: int, seed: int, console: Console) -> tuple[Path, list[tuple[str, str]]]:
    """Train both models unless done, and measure perplexity on unseen packages, also with memory erased (P4)."""
    from elastic_memory.commands.evaluate import evaluate
    from elastic_memory.commands.prepare import prepare
    from elastic_memory.common.files import write_text
    from elastic_memory.common.strict import read_json

    with contextlib.redirect_stdout(io.StringIO()):  # it prints what a corpus is made of
        prepare(["stdlib"], tokenizer="bytes", length=LENGTH, out=out / "data")
    measured = {}
    for name in LANGUAGE_MODELS:
        run = _train(out, name, tokens, seed)
        file = out / "results" / f"{run.name}.json"
        if not file.exists():
            with contextlib.redirect_stdout(io.StringIO()):  # what it prints is said below
                protocols, data = ["P0", "P4"], out / "data"
                evaluate(str(run), data=data, limit=HELD_OUT_ROWS, batch_size=16, protocol=protocols, out=file)
        measured[name] = read_json(file)["metrics"]["ppl"]
    without, own = measured.values()
    table = _compared(own["P0"], own["P4"], without["P0"])
    console.print(table.rich())
    write_text(out / "results" / "language-models.md", table.markdown())
    seen = "perplexity is higher if its memory is erased", "perplexity is higher if trained without memory"
    return run, [
        (f"language model: {what}", f"{rise}, in {blocks} blocks")
        for what, (*_, rise, blocks) in zip(seen, table.rows[1:], strict=True)
    ]


def _compared(kept: dict[str, Any], erased: dict[str, Any], without: dict[str, Any]) -> "Table":
    """Perplexities with memory, with it erased, and of a model trained without."""
    from elastic_memory.report.tables import Table

    rows = []
    for name, found in (
        ("with memory", kept), ("the same, memory erased at every block", erased), ("trained without memory", without)
    ):  # fmt: skip
        first, *others = found["by_block"]
        higher = sum(ours < theirs for ours, theirs in zip(kept["by_block"][1:], others, strict=True))
        beside = ("", "") if found is kept else (f"{found['ppl'] / kept['ppl'] - 1:.1%}", f"{higher} of {len(others)}")
        rows.append((name, f"{found['ppl']:.3f}", f"{first:.3f}", *beside))
    return Table(
        title="Perplexity on packages that were not trained on",
        columns=["model", "PPL", "first block", "higher by", "in blocks"],
        rows=rows,
        note="Both models start from the same weights and are trained on the same bytes. The first block of a row has "
        "no memory: differences there are not memory's.",
    )


def _train(out: Path, name: str, tokens: int, seed: int) -> Path:
    """Train a language model unless done, and return its run folder."""
    from elastic_memory.training.recipe import Recipe
    from elastic_memory.training.runs import StoppedError
    from elastic_memory.training.session import Resume, train

    recipe = Recipe.parse(
        {
            "name": f"demo-{name}",
            "model": LANGUAGE_MODELS[name],
            "training": {"tokens": tokens, "length": LENGTH, "batch_tokens": STEP, "precision": "fp32", "seed": seed},
            "execution": {"device": "cpu", "micro_batch": STEP // LENGTH, "save_every": 50},
        },
        "demo",
    )  # fmt: skip
    try:
        # another number of threads only changes rounding: no reason to refuse a demo
        result = train(recipe, out / "data", out / "runs", Resume(allowed=True, or_start=True, new_machine=True))
    except StoppedError as error:
        print(f"elastic: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    return out / "runs" / result["name"]


def _step(console: Console, index: int, text: str) -> None:
    console.print(f"\n[bold]{index}. {text}[/bold]", highlight=False)


def _conclude(found: list[tuple[str, str]], run: Path, out: Path, console: Console) -> None:
    """What was seen, where the page is, and what to try next."""
    from elastic_memory import hippo
    from elastic_memory.report.tables import Table

    console.print()
    console.print(Table("What was seen", ["", ""], found, "").rich())
    console.print(f"report, with charts: {out / 'report.html'}", soft_wrap=True)
    console.print("try next:", highlight=False)
    for command in (
        f"elastic explore {run} --text {hippo.__file__}    # where memory helps, letter by letter",
        f"elastic generate {run} --prompt 'import os' --tokens 200",
        "elastic reproduce list                       # the tables of the paper, each by a command",
    ):
        console.print(f"  {command}", highlight=False, soft_wrap=True)
