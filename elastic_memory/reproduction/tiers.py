"""Sizes of models, data and evaluations by tier; recipes are in `elastic_memory/recipes`."""

from dataclasses import dataclass, field
from typing import Any

from elastic_memory.common.defaults import LONGPPL_REFERENCE

TITLES = {"pg19": "PG-19", "proof-pile": "Proof-Pile", "fineweb-edu": "FineWeb-Edu"}


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One scale at which all tables can be reproduced."""

    summary: str  # for help texts
    recipes: str  # folder of its recipes
    recipe: dict[str, Any] = field(default_factory=dict)  # keys to change in each
    sizes: dict[str, dict[str, Any]]  # keys for models of 1, 2 and 4 times the parameters
    corpora: dict[str, str]  # which folder of --data is used for books, proofs and edu
    seeds: tuple[int, ...]
    rows: int | None  # of the test split, evenly spread; None: all
    probed: int  # the same for reconstruction, which is slow
    batch: int  # rows evaluated at a time
    reference: str | None = None  # the model that finds LongPPL's key tokens, unless another is given
    text: str | None = None  # a corpus that is prepared as bytes if --data is not given
    caution: str = ""

    def title(self, corpus: str) -> str:
        """The name of a corpus in table headings."""
        return TITLES.get(self.corpora[corpus], self.corpora[corpus])


def _width(hidden: int, intermediate: int, heads: int) -> dict[str, Any]:
    keys = ("hidden_size", "intermediate_size", "num_attention_heads")
    return {f"model.config.{key}": value for key, value in zip(keys, (hidden, intermediate, heads), strict=True)}


PRESETS = {"1x": {}, "2x": {"model.preset": "200m"}, "4x": {"model.preset": "400m"}}
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
OWN = {corpus: corpus for corpus in ("proofs", "books", "edu")}

TIERS = {
    "smoke": Tier(
        summary="minutes on a CPU",
        recipes="smoke",
        recipe={"training.tokens": 49152},  # 12 steps
        sizes={"1x": {}, "2x": _width(96, 256, 6), "4x": _width(128, 512, 8)},
        corpora=OWN,
        seeds=(42,),
        rows=16,
        probed=2,
        batch=16,
        text="stdlib",
        caution="Tiny models, hardly trained: this shows that everything works, and the figures mean nothing. "
        "Without --data the sources of Python's standard library stand for every corpus.",
    ),
    "small": Tier(
        summary="one GPU",
        recipes="small",
        sizes={"1x": {}, "2x": _width(576, 1536, 9), "4x": _width(768, 2944, 12)},  # 34M, 66M, 134M parameters
        corpora=OWN,
        seeds=(1, 2, 3),
        rows=96,
        probed=4,
        batch=16,
        reference=SMOLLM2,
        caution="A third of the paper's parameters, a quarter of its lengths, and our own corpora in place of the "
        "paper's.",
    ),
    "medium": Tier(
        summary="the paper's sizes, 1% of its tokens",
        recipes="paper",
        recipe={
            "training.tokens": 400_000_000,  # 762 steps
            "training.corpus_tokens": None,
            "training.warmup": 0.04,
            "execution.micro_batch": 4,
        },
        sizes=PRESETS,
        corpora=OWN,
        seeds=(1,),
        rows=24,
        probed=4,
        batch=4,
        reference=SMOLLM2,
        caution="The paper's models and lengths, a hundredth of its tokens, and our own corpora in place of the "
        "paper's.",
    ),
    "paper": Tier(
        summary="the paper's training in full",
        recipes="paper",
        sizes=PRESETS,
        corpora={"proofs": "proof-pile", "books": "pg19", "edu": "fineweb-edu"},
        seeds=(42,),
        rows=None,
        probed=4,
        batch=4,
        reference=LONGPPL_REFERENCE,
    ),
}
