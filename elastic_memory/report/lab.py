"""Where a table's numbers come from: what a cell needs is found, or trained and measured now.

Runs are named by what they train and keep their own measurements, so that tables share both and an interrupted one
goes on: OUT/runs/small-elastic-1a2b3c4d5e/evaluations/ppl-6f7a8b9c0d.json. Key tokens of LongPPL lie in OUT/keys.
"""

import gc
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

import elastic_memory as em
from elastic_memory.data import Samples, prepare, samples
from elastic_memory.evaluation.loading import load_config, load_model
from elastic_memory.evaluation.longppl import Settings
from elastic_memory.evaluation.metrics import Conditions, Task
from elastic_memory.evaluation.record import with_progress, write_record
from elastic_memory.evaluation.rows import Spread
from elastic_memory.training.build import build_config
from elastic_memory.training.corpus import data_hash, fit
from elastic_memory.training.recipe import Recipe, Training, load_recipe
from elastic_memory.training.runs import Run
from elastic_memory.training.session import Resume, train
from elastic_memory.training.strict import read_json

RECIPES = Path(__file__).parents[2] / "recipes"


@dataclass(frozen=True, kw_only=True)
class Tier:
    """How large the tables of a tier are: what its recipes, in `recipes/<tier>`, do not say."""

    recipe: dict[str, Any] = field(default_factory=dict)  # keys to change in every recipe
    sizes: dict[str, dict[str, Any]]  # keys that make a model of twice and of four times the parameters
    rows: int | None  # of the test split, spread over it; None: all
    probed: int  # the same for reconstruction, which takes long
    batch: int
    reference: str | None = None  # a recipe whose model finds LongPPL's key tokens where no other is given
    text: str | None = None  # a corpus to prepare, as bytes, where no data are given
    caution: str = ""


def _width(hidden: int, intermediate: int, heads: int) -> dict[str, Any]:
    keys = ("hidden_size", "intermediate_size", "num_attention_heads")
    return {f"model.config.{key}": value for key, value in zip(keys, (hidden, intermediate, heads), strict=True)}


TIERS = {
    "smoke": Tier(
        recipe={"training.tokens": 49152},  # 12 steps
        sizes={"1x": {}, "2x": _width(96, 256, 6), "4x": _width(128, 512, 8)},
        rows=16,
        probed=2,
        batch=16,
        text="stdlib",
        caution="Tiny models, hardly trained: this shows that everything works, and the figures mean nothing. "
        "Without --data the sources of Python's standard library stand for every corpus.",
    ),
    "small": Tier(
        sizes={"1x": {}, "2x": _width(576, 1536, 9), "4x": _width(768, 2944, 12)},  # 34M, 66M, 134M parameters
        rows=48,
        probed=4,
        batch=8,
        reference="full",
        caution="A third of the paper's parameters, a quarter of its lengths and a thousandth of its tokens.",
    ),
    "paper": Tier(
        sizes={"1x": {}, "2x": {"model.preset": "200m"}, "4x": {"model.preset": "400m"}}, rows=None, probed=4, batch=4
    ),
}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model: which recipe of the tier, what is changed in it, and the corpus."""

    memory: str
    sampling: str | None = None
    multiple: int = 1  # of memory
    size: str = "1x"  # of the model
    corpus: str = "proof-pile"


class Lab:
    """The runs of a tier and their measurements."""

    def __init__(self, tier: str, out: Path, data: Path | None = None, reference: str | None = None):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "`elastic reproduce` is one process. To use several GPUs train by `torchrun ... elastic train ... "
                f"--out {out / 'runs'}` first: a run that lies there is not trained again"
            )
        self.name, self.tier, self.out, self.data, self.given = tier, TIERS[tier], out, data, reference
        if reference:
            load_config(reference)
        # a model has many cells, and each of these takes a while
        self.folder, self.run, self.counted = cache(self._folder), cache(self._run), cache(self._counted)

    def require(self, corpora: Iterable[str]) -> None:
        """Refuse before hours of work: rows to train and to measure on, and the reference, must be there."""
        if self.data is None and self.tier.text:
            return
        folders = [(self.data or Path("DATA")) / corpus for corpus in dict.fromkeys(corpora)]
        missing = [folder for folder in folders if not (folder / "manifest.json").exists()]
        if missing:
            how = f"--tokenizer meta-llama/Llama-2-7b-hf --length {self.training.length}"
            commands = "; ".join(f"elastic prepare {folder.name} {how} --out {folder}" for folder in missing)
            raise FileNotFoundError(
                f"tier {self.name} needs rows in {', '.join(map(str, missing))}: {commands}; "
                f"then --data {folders[0].parent}"
            )
        for folder in folders:
            samples(folder, "test")

    @property
    def training(self) -> Training:
        """What all runs of the tier have in common."""
        return self.recipe(Trained(memory="none")).training

    def _folder(self, corpus: str) -> Path:
        """The prepared rows of a corpus."""
        if self.data is not None or not self.tier.text:
            return (self.data or Path("DATA")) / corpus
        folder = self.out / "data" / f"{self.tier.text}-{self.training.length}"
        prepare(self.tier.text, folder, tokenizer="bytes", length=self.training.length)
        return folder

    def recipe(self, model: Trained) -> Recipe:
        """The tier's recipe for a model."""
        keys = {"model.memory_multiple": model.multiple, **self.tier.recipe, **self.tier.sizes[model.size]}
        if model.sampling:
            keys["model.sampling"] = model.sampling
        return load_recipe(RECIPES / self.name / f"{model.memory}.yaml").replace(**keys)

    def _run(self, model: Trained) -> Run:
        """The run of a model, whether it was trained or not."""
        rows = samples(self.folder(model.corpus))
        return Run(self.out / "runs", fit(self.recipe(model), rows), data_hash(rows))

    def _counted(self, model: Trained) -> dict[str, int]:
        """Floats of memory and added parameters of the whole model, as the paper counts them, and the order."""
        config = build_config(self.recipe(model))
        plain = type(config).from_dict(config.to_dict() | {"pad_heads": False})
        with torch.device("meta"):
            report = em.MemoryLlamaForCausalLM(plain).memory_report()
        return {
            "memory": sum(line["state_floats"] for line in report),
            "added": sum(line["extra_parameters"] for line in report),
            "order": plain.memory_order,
        }

    def train(self, model: Trained) -> None:
        """Train a model that is not there yet, or is there in part."""
        run = self.run(model)
        if run.finished:
            return
        # another machine than before an interruption only rounds differently, and the run says so
        begun = Resume(allowed=True, or_start=True, new_machine=True)
        train(run.recipe, self.folder(model.corpus), self.out / "runs", begun)
        torch.compiler.reset()  # code compiled for one model would count against the limit of the next
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def own_reference(self, corpus: str) -> Trained | None:
        """The model of this tier that finds LongPPL's key tokens, if it has one and no other was given."""
        if self.given or not self.tier.reference:
            return None
        return Trained(memory=self.tier.reference, corpus=corpus)

    def reference(self, corpus: str) -> str | None:
        """Where the model lies that finds LongPPL's key tokens; None if there is none."""
        own = self.own_reference(corpus)
        return str(self.run(own).folder) if own else self.given

    def measurement(self, model: Trained, conditions: Conditions, metric: str) -> Path:
        """The file of a measurement, made or not."""
        what: dict[str, Any] = {"conditions": asdict(conditions), "rows": self.count(metric)}
        what["data"] = self.test_rows(model).fingerprint
        if metric == "longppl":
            what["reference"] = _identity(self.reference(model.corpus) or "")
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:10]
        return self.run(model).folder / "evaluations" / f"{metric}-{digest}.json"

    def measure(self, model: Trained, conditions: Conditions, metric: str) -> None:
        """Measure a trained model, or go on with that, and keep the record; LongPPL only with a reference."""
        path, reference = self.measurement(model, conditions, metric), self.reference(model.corpus)
        if path.exists() or (metric == "longppl" and reference is None):
            return
        rows, run, partial = self.test_rows(model), self.run(model), path.with_name(f".{path.name}.partial")
        task = Task(
            model=load_model(str(run.folder)),
            rows=Spread(rows, self.count(metric) or len(rows)),
            tokenizer=rows.tokenizer(),
            conditions=conditions,
            batch_size=self.tier.batch,
            reference=reference or "",
            settings=Settings.scaled(rows.length),
            keys=self.out / "keys",
            partial=partial,
            identity={"data": rows.fingerprint, "split": rows.split},
        )
        write_record(path, str(run.folder), task, rows, with_progress(task, [metric]))
        shutil.rmtree(partial, ignore_errors=True)

    def test_rows(self, model: Trained) -> Samples:
        """What a model is measured on."""
        return samples(self.folder(model.corpus), "test")

    def count(self, metric: str) -> int | None:
        """How many of these rows a metric reads."""
        return self.tier.probed if metric == "reconstruction" else self.tier.rows


def read_kept(path: Path) -> Any:
    """The content of a file that an earlier run left; one that is damaged is named, with the way out."""
    try:
        return read_json(path)
    except ValueError as error:
        raise ValueError(f"{error}: remove it, and it is made again") from None


def _identity(reference: str) -> str:
    """A run by its name, which says what it is, wherever it lies; any other folder by its path."""
    path = Path(reference)
    if (path / "run.json").exists():
        return path.name
    return str(path.resolve()) if path.exists() else reference
