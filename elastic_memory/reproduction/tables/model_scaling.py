"""The paper's table of model sizes: 1, 2 and 4 times the parameters on Proof-Pile, memory growing with the heads."""

from elastic_memory.reproduction.experiment import Experiment

EXPERIMENT = Experiment(
    name="model-scaling",
    title="Scaling the model",
    columns={
        f"{size} {title}": {"size": size, "shows": shows}
        for size in ("1x", "2x", "4x")
        for title, shows in (("Mem.", "memory"), ("PPL", "ppl"), ("LongPPL", "longppl"))
    },
    rows={
        "Transformer++": (
            {"memory": "none"},
            "0 & 3.322 & 3.866 & 0 & 3.226 & 3.757 & 0 & 3.206 & 3.730",
        ),
        "Mem. Transformer": (
            {"memory": "memorizing"},
            "0.8M & 3.305 & 3.843 & 1.2M & 3.213 & 3.715 & 1.6M & 3.187 & 3.689",
        ),
        "Infini-Transformer": (
            {"memory": "infini"},
            "0.8M & 2.950 & 2.736 & 1.2M & 2.796 & 2.484 & 1.6M & 2.772 & 2.410",
        ),
        "Melodi": (
            {"memory": "melodi"},
            "0.8M & 2.940 & 2.980 & 1.2M & 2.840 & 2.857 & 1.6M & 2.771 & 2.719",
        ),
        "Elastic, uniform": (
            {"memory": "elastic", "sampling": "uniform"},
            "0.8M & 2.958 & 2.560 & 1.2M & 2.824 & 2.335 & 1.6M & 2.764 & 2.238",
        ),
        "Elastic, exponential": (
            {"memory": "elastic", "sampling": "exponential"},
            "0.8M & 2.915 & 2.586 & 1.2M & 2.775 & 2.364 & 1.6M & 2.737 & 2.273",
        ),
    },
)  # fmt: skip
