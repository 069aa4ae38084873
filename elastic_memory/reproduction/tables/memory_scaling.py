"""The paper's table of memory sizes: 1 to 16 times the memory on Proof-Pile, with the parameters that it costs.

The paper does not say how many memory tokens M are read at larger orders N. The first rows read as many at every size,
the last two, ours, read M in proportion to N.
"""

from elastic_memory.reproduction.experiment import Experiment

OURS = " & ".join(["-"] * 15)

EXPERIMENT = Experiment(
    name="memory-scaling",
    title="Scaling memory",
    columns={
        f"{multiple}x {title}": {"multiple": multiple, "shows": shows}
        for multiple in (1, 2, 4, 8, 16)
        for title, shows in (("Add.", "added"), ("PPL", "ppl"), ("Long.", "longppl"))
    },
    rows={
        "MemT.": (
            {"memory": "memorizing"},
            "96 & 3.31 & 3.84 & 96 & 3.28 & 3.76 & 96 & 3.12 & 3.22 & 96 & 3.01 & 2.86 & 96 & 2.94 & 2.48",
        ),
        "Melodi": (
            {"memory": "melodi"},
            "1.5M & 2.94 & 2.98 & 3.1M & 2.93 & 2.97 & 6.4M & 2.88 & 2.84 & 13.5M & 2.84 & 2.67 & 30.1M & 2.84 & 2.63",
        ),
        "Elastic, uniform": (
            {"memory": "elastic", "sampling": "uniform"},
            "0 & 2.96 & 2.56 & 0 & 2.91 & 2.39 & 0 & 2.86 & 2.28 & 0 & 2.81 & 2.19 & 0 & 2.78 & 2.14",
        ),
        "Elastic, exponential": (
            {"memory": "elastic", "sampling": "exponential"},
            "0 & 2.92 & 2.59 & 0 & 2.86 & 2.43 & 0 & 2.82 & 2.31 & 0 & 2.78 & 2.22 & 0 & 2.75 & 2.15",
        ),
        "Elastic, uniform, M ~ N": ({"memory": "elastic", "sampling": "uniform", "points_with_memory": True}, OURS),
        "Elastic, exponential, M ~ N": (
            {"memory": "elastic", "sampling": "exponential", "points_with_memory": True}, OURS,
        ),
    },
)  # fmt: skip
