"""The paper's main table: six models on three corpora, PPL and LongPPL, memory and parameters of the whole model."""

from elastic_memory.reproduction.experiment import Experiment

EXPERIMENT = Experiment(
    name="main",
    title="Language modelling",
    seeds={"proofs": 3},
    columns={
        "Mem. Size": {"shows": "memory"},
        "Add. Params": {"shows": "added"},
        "{books} PPL": {"corpus": "books", "shows": "ppl"},
        "{books} LongPPL": {"corpus": "books", "shows": "longppl"},
        "{proofs} PPL": {"corpus": "proofs", "shows": "ppl"},
        "{proofs} LongPPL": {"corpus": "proofs", "shows": "longppl"},
        "{edu} PPL": {"corpus": "edu", "shows": "ppl"},
        "{edu} LongPPL": {"corpus": "edu", "shows": "longppl"},
    },
    rows={
        "Transformer++": (
            {"memory": "none"},
            "0 & 0 & 11.232 & 15.955 & 3.322 & 3.866 & 12.897 & 29.882",
        ),
        "Mem. Transformer": (
            {"memory": "memorizing"},
            "0.8M & 96 & 11.050 & 15.794 & 3.305 & 3.843 & 12.924 & 29.963",
        ),
        "Infini-Transformer": (
            {"memory": "infini"},
            "0.8M & 96 & 10.907 & 9.588 & 2.950 & 2.736 & 12.736 & 24.417",
        ),
        "Melodi": (
            {"memory": "melodi"},
            "0.8M & 1.5M & 10.684 & 10.478 & 2.940 & 2.980 & 12.509 & 23.532",
        ),
        "Elastic Memory, uniform": (
            {"memory": "elastic", "sampling": "uniform"},
            "0.8M & 0 & 10.692 & 8.646 & 2.958 & 2.560 & 12.419 & 10.915",
        ),
        "Elastic Memory, exponential": (
            {"memory": "elastic", "sampling": "exponential"},
            "0.8M & 0 & 10.651 & 8.885 & 2.915 & 2.586 & 12.318 & 11.932",
        ),
    },
)  # fmt: skip
