"""The paper's table of corrupted local context, on Proof-Pile: does a model fall back on its memory? PPL / LongPPL."""

from elastic_memory.reproduction.experiment import Experiment

EXPERIMENT = Experiment(
    name="corruption",
    title="Corrupted local context, PPL / LongPPL",
    columns={
        "Origin.": {"shows": "both"},
        "25%": {"corrupt": 0.25, "shows": "both"},
        "50%": {"corrupt": 0.5, "shows": "both"},
        "75%": {"corrupt": 0.75, "shows": "both"},
        "hardly 25%": {"corrupt": 0.25, "corrupt_layers": "all", "shows": "both"},
        "hardly 50%": {"corrupt": 0.5, "corrupt_layers": "all", "shows": "both"},
        "hardly 75%": {"corrupt": 0.75, "corrupt_layers": "all", "shows": "both"},
    },
    rows={
        "Mem. Transformer": (
            {"memory": "memorizing"},
            "3.31 / 3.84 & 3.31 / 3.85 & 3.32 / 3.85 & 3.32 / 3.85 & 3.96 / 4.61 & 5.12 / 5.99 & 34.39 / 28.42",
        ),
        "Elastic Memory, uniform": (
            {"memory": "elastic", "sampling": "uniform"},
            "2.96 / 2.56 & 2.99 / 2.63 & 3.02 / 2.69 & 3.32 / 3.86 & 3.55 / 3.18 & 4.55 / 4.08 & 30.53 / 25.26",
        ),
        "Elastic Memory, exponential": (
            {"memory": "elastic", "sampling": "exponential"},
            "2.91 / 2.59 & 2.93 / 2.66 & 2.95 / 2.69 & 3.32 / 3.84 & 3.48 / 3.22 & 4.37 / 4.10 & 30.57 / 25.27",
        ),
    },
    note='Noise replaces keys and values of a share of each block, in the memory layer or ("hardly") in all layers.',
)
