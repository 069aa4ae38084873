"""Which learning rate the tier's recipes should have, by a short sweep; and full attention, as a check of the recipe.

Not in the paper. In block 0 a model of full attention is the same function as one without memory.
"""

from elastic_memory.reproduction.experiment import Experiment

EXPERIMENT = Experiment(
    name="learning-rate",
    title="Learning rates, PPL after 75M tokens",
    columns={f"{rate:g}": {"learning_rate": rate, "tokens": 75_000_000, "shows": "ppl"} for rate in (5e-4, 1e-3, 2e-3)},
    rows={
        "Transformer++": ({"memory": "none"}, "- & - & -"),
        "Elastic Memory, exponential": ({"memory": "elastic", "sampling": "exponential"}, "- & - & -"),
        "Full attention": ({"memory": "full"}, "skip & - & skip"),
    },
    seeds={"proofs": 1},
    tiers=("small",),
    note="Full attention has no memory: its figure in parentheses is what it loses when it sees no earlier block.",
)
