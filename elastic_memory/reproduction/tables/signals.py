"""Appendix B, "Synthetic Signal Reconstruction": what a memory gives back of sine waves and of noise.

The paper's convention puts the first token at time 1 and compares from edge to edge of the history; its sine errors are
misalignment, not compression. Ours puts the first token at time 0 and compares in the middle of each token.
"""

from pathlib import Path

from elastic_memory.common.environment import environment
from elastic_memory.common.files import write_json
from elastic_memory.common.progress import Bars
from elastic_memory.evaluation.signals import LENGTH, error, noise, sines
from elastic_memory.report import plots
from elastic_memory.report.tables import Table, number

# Signal, its values, order, discretisation, the paper's error as printed.
ROWS = (
    ("1 sine wave", sines(1), 32, "zoh", "1.2e-5"),
    ("3 sine waves", sines(3), 32, "zoh", "2.3e-4"),
    ("5 sine waves", sines(5), 32, "zoh", "9.8e-4"),
    ("5 sine waves", sines(5), 32, "forward", "3.3e-3"),
    ("5 sine waves", sines(5), 32, "backward", "2.9e-3"),
    ("5 sine waves", sines(5), 32, "bilinear", "4.8e-4"),
    ("random noise", noise(), 32, "zoh", "0.97"),
    ("random noise", noise(), 128, "zoh", "0.90"),
    ("random noise", noise(), 512, "zoh", "0.72"),
)


def run(tier: str, out: Path) -> Table:
    """All nine rows by both conventions; every tier is the whole table, which takes a second."""
    with Bars(transient=True) as progress:
        records = [
            {
                "signal": signal,
                "order": order,
                "method": method,
                "paper": float(printed),
                "paper_convention": error(values, order, method, "paper"),
                "ours": error(values, order, method, "ours"),
            }
            for signal, values, order, method, printed in progress.track(ROWS, description="signals")
        ]
    table = Table(
        title="Reconstruction of synthetic signals, mean squared error",
        columns=("signal", "order", "method", "paper", "its convention", "ours"),
        rows=[
            (r["signal"], str(r["order"]), r["method"], printed, number(r["paper_convention"]), number(r["ours"]))
            for r, (*_, printed) in zip(records, ROWS, strict=True)
        ],
        note=f"{LENGTH} tokens, float64. Its convention: first token at time 1, compared at linspace(0, 1). "
        "Ours: first token at time 0, compared at the middle of each token.",
    )
    out.mkdir(parents=True, exist_ok=True)
    facts = {"table": "signals", "tier": tier, "length": LENGTH, "environment": environment()}
    write_json(out / "signals.json", facts | {"rows": records})
    (out / "signals.md").write_text(table.markdown())
    plots.errors(
        [f"{r['signal']}, {r['method']}, order {r['order']}" for r in records],
        {
            "paper": [r["paper"] for r in records],
            "the paper's convention, this code": [r["paper_convention"] for r in records],
            "first token at time 0, midpoints": [r["ours"] for r in records],
        },
        out / "signals.png",
    )
    return table
