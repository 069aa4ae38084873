"""Both of the paper's tables of injected bias: trained with one sampling, read with another. PPL / LongPPL.

Their common column, Proof-Pile at 1x, stands here once; the others are more corpora, more memory, larger models.
"""

from elastic_memory.reproduction.experiment import Experiment

EXPERIMENT = Experiment(
    name="injection",
    title="Sampling injected at test time, PPL / LongPPL",
    columns={
        "{books}": {"corpus": "books", "shows": "both"},
        "{proofs}": {"shows": "both"},
        "{edu}": {"corpus": "edu", "shows": "both"},
        "memory 2x": {"multiple": 2, "shows": "both"},
        "memory 4x": {"multiple": 4, "shows": "both"},
        "memory 8x": {"multiple": 8, "shows": "both"},
        "memory 16x": {"multiple": 16, "shows": "both"},
        "model 2x": {"size": "2x", "shows": "both"},
        "model 4x": {"size": "4x", "shows": "both"},
    },
    rows={
        "uniform": (
            {"memory": "elastic", "sampling": "uniform"},
            "10.69 / 8.65 & 2.96 / 2.56 & 12.42 / 10.92 & 2.91 / 2.39 & 2.86 / 2.28 & 2.81 / 2.19 & 2.78 / 2.14 "
            "& 2.82 / 2.34 & 2.76 / 2.24",
        ),
        "uniform, read exponential": (
            {"memory": "elastic", "sampling": "uniform", "read": "exponential"},
            "10.66 / 8.97 & 2.93 / 2.61 & 12.38 / 12.15 & 2.88 / 2.44 & 2.84 / 2.33 & 2.80 / 2.25 & 2.77 / 2.18 "
            "& 2.80 / 2.39 & 2.75 / 2.28",
        ),
        "exponential": (
            {"memory": "elastic", "sampling": "exponential"},
            "10.65 / 8.89 & 2.92 / 2.59 & 12.32 / 11.93 & 2.86 / 2.43 & 2.82 / 2.31 & 2.78 / 2.22 & 2.75 / 2.15 "
            "& 2.78 / 2.36 & 2.74 / 2.27",
        ),
        "exponential, read uniform": (
            {"memory": "elastic", "sampling": "exponential", "read": "uniform"},
            "10.70 / 8.60 & 2.97 / 2.57 & 12.52 / 11.45 & 2.91 / 2.42 & 2.86 / 2.30 & 2.82 / 2.21 & 2.79 / 2.14 "
            "& 2.82 / 2.35 & 2.78 / 2.26",
        ),
    },
    note="The columns memory and model are of the corpus of the second column.",
)
