"""Appendix B, "Reconstruction quality vs. performance": what larger memories keep of keys and values, and their PPL."""

from elastic_memory.reproduction.experiment import Experiment

MODEL = {"memory": "elastic", "sampling": "exponential"}

EXPERIMENT = Experiment(
    name="reconstruction",
    title="Reconstruction and perplexity",
    columns={f"{multiple}x": {"multiple": multiple} for multiple in (1, 2, 4, 8, 16)},
    rows={
        "HiPPO dimension N": ({**MODEL, "shows": "order"}, "540 & 1080 & 2160 & 4320 & 8640"),
        "Reconstruction MSE": ({**MODEL, "shows": "mse"}, "0.45 & 0.41 & 0.35 & 0.31 & 0.27"),
        "PPL": ({**MODEL, "shows": "ppl"}, "2.92 & 2.86 & 2.82 & 2.78 & 2.75"),
    },
    corner="memory size",
    note="Exponential sampling; the error is the mean over raw keys and values of the memory layer.",
)
