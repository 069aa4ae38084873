"""Train and measure the models of tables.

    OUT/runs/small-proofs-elastic-uniform-seed1-1a2b3c4d.json    a record: all that tables need
    OUT/runs/small-proofs-keys.json                              positions of LongPPL's key tokens, found once
    OUT/work/small-proofs-elastic-uniform-seed1-5e6f7a8b9c/      the run, with weights, until it is measured

Tables share models and their records. After an interruption the next call continues with what is missing.
"""

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import elastic_memory as em
from elastic_memory.common.environment import environment, free_memory, hardware
from elastic_memory.common.files import sha256, write_json_once
from elastic_memory.common.locks import locked
from elastic_memory.common.strict import read_json
from elastic_memory.data import Samples, prepare, samples
from elastic_memory.evaluation.inputs import Spread
from elastic_memory.evaluation.loading import load_config, load_model
from elastic_memory.evaluation.longppl import FoundKeys, Settings, key_tokens
from elastic_memory.evaluation.metrics import Conditions, Evaluation
from elastic_memory.evaluation.record import describe, with_progress
from elastic_memory.reproduction.records import Record
from elastic_memory.reproduction.scheduler import running_now
from elastic_memory.reproduction.tiers import TIERS
from elastic_memory.training.build import build_config
from elastic_memory.training.corpus import data_hash, fit
from elastic_memory.training.recipe import RECIPES, Recipe, Training, load_recipe
from elastic_memory.training.runs import Run
from elastic_memory.training.session import Resume, train

# A measurement of a model: a metric, and its conditions.
Measurement = tuple[str, Conditions]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model: its memory, which selects the recipe of the tier, and what differs from that recipe."""

    memory: str
    sampling: str | None = None
    multiple: int = 1  # of memory
    points: int = 1  # times the recipe's number of memory tokens
    size: str = "1x"  # of the model
    corpus: str = "proofs"
    learning_rate: float | None = None  # None, here and below: the recipe's
    tokens: int | None = None
    seed: int | None = None

    @property
    def name(self) -> str:
        """Corpus, memory, and what differs from the tier's recipe."""
        parts = [self.corpus, self.memory, self.sampling or ""]
        parts += [f"memory{self.multiple}x"] * (self.multiple != 1) + [f"points{self.points}x"] * (self.points != 1)
        parts += [f"model{self.size}"] * (self.size != "1x")
        parts += [f"lr{self.learning_rate:g}"] if self.learning_rate else []
        parts += [f"{self.tokens / 1e6:g}M"] if self.tokens else []
        return "-".join(filter(None, [*parts, f"seed{self.seed}"]))


class Lab:
    """Trains and measures the models of a tier; one record per model says what was done."""

    def __init__(self, tier: str, out: Path, data: Path | None = None, reference: str | None = None):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "`elastic reproduce` starts its own processes. To train a model on several GPUs, first run `torchrun "
                f"... elastic train ... --out {out / 'work'}`: finished runs there are used"
            )
        self.name, self.tier, self.out, self.data = tier, TIERS[tier], out, data
        self.work = out / "work"
        self.reference = reference or self._recorded_reference() or self.tier.reference
        # slow, and called for many cells of the same model
        self.folder, self.run, self.counted = cache(self._folder), cache(self._run), cache(self._counted)
        self.recipe = cache(self._recipe)
        self.tokenizer = cache(lambda corpus: self.test_rows(corpus).tokenizer())

    # -- recipes and records

    @property
    def training(self) -> Training:
        """What all runs of the tier share."""
        return self.recipe(Trained(memory="none")).training

    def _recipe(self, model: Trained) -> Recipe:
        """The tier's recipe for a model."""
        recipe = load_recipe(RECIPES / self.tier.recipes / f"{model.memory}.yaml")
        keys = {"model.memory_multiple": model.multiple, **self.tier.recipe, **self.tier.sizes[model.size]}
        changed = {"model.sampling": model.sampling, "training.learning_rate": model.learning_rate}
        changed |= {"training.tokens": model.tokens, "training.seed": model.seed}
        keys |= {key: value for key, value in changed.items() if value is not None}
        if model.points != 1:
            keys["model.config.memory_points"] = model.points * build_config(recipe).memory_points
        return recipe.replace(name=f"{self.name}-{model.name}", **keys)

    def record(self, model: Trained) -> Record:
        """The record of a model so far."""
        recipe = self.recipe(model)
        facts = {"name": f"{recipe.name}-{recipe.digest()[:8]}", "tier": self.name, "model": asdict(model)}
        return Record(self.out / "runs" / f"{facts['name']}.json", facts)

    def missing(self, model: Trained, wanted: Iterable[Measurement]) -> list[Measurement]:
        """The measurements that its record lacks; LongPPL only if there is a reference."""
        record = self.record(model)
        return [
            (metric, conditions)
            for metric, conditions in wanted
            if record.find(metric, asdict(conditions)) is None and (metric != "longppl" or self.reference)
        ]

    def _counted(self, model: Trained) -> dict[str, int]:
        """Memory floats and added parameters of the whole model, as the paper counts them, and the order."""
        config = build_config(self.recipe(model))
        with torch.device("meta"):
            report = em.MemoryLlamaForCausalLM(config).memory_report()
        return {
            "memory": sum(line["state_floats"] for line in report),
            "added": sum(line["extra_parameters"] for line in report),
            "order": config.memory_order,
        }

    # -- checks before hours of work

    def check_inputs(self, corpora: Sequence[str], longppl: bool) -> None:
        """Raise unless all corpora are prepared and, where key tokens are still to be found, the reference exists."""
        if self.data is not None or not self.tier.text:
            root = self.data or Path("DATA")
            folders = [root / self.tier.corpora[corpus] for corpus in dict.fromkeys(corpora)]
            missing = [folder for folder in folders if not (folder / "manifest.json").exists()]
            if missing:
                how = f"--tokenizer meta-llama/Llama-2-7b-hf --length {self.training.length}"
                commands = "; ".join(f"elastic prepare TEXT {how} --out {folder}" for folder in missing)
                raise FileNotFoundError(
                    f"tier {self.name} needs rows in {', '.join(map(str, missing))}: {commands}; then --data {root}"
                )
            for folder in folders:
                samples(folder, "test")
        if longppl and self.reference:
            self._check_reference(Path(self.reference).name)
            if all(self.known_keys(corpus) for corpus in corpora):
                return
            try:
                load_config(self.reference)
            except (OSError, ValueError) as error:
                raise FileNotFoundError(
                    f"LongPPL needs a reference model, which finds key tokens: {error}. Give one with --reference "
                    "(a run, a folder, a .gguf file, a name on the hub)"
                ) from None

    def _recorded_reference(self) -> str | None:
        """The reference that found the key tokens on record, if it is not the tier's default."""
        paths = sorted((self.out / "runs").glob(f"{self.name}-*-keys.json"))
        names = [read_json(path)["reference"] for path in paths[:1]]
        return next((name for name in names if name != Path(self.tier.reference or "").name), None)

    def check_rows(self, corpora: Sequence[str]) -> None:
        """Raise if the rows are not those of the records: numbers from other rows cannot share a table."""
        for corpus in corpora:
            test, train = self.test_rows(corpus), samples(self.folder(corpus))
            tokenizer = test.manifest["tokenizer"]["sha256"]
            for path in sorted((self.out / "runs").glob(f"{self.name}-{corpus}-*-seed*.json")):
                record = read_json(path)
                for how in (entry["data"] for entry in record["measured"] if "ppl" in entry["metrics"]):
                    facts = {"test": (how["sha256"], test.fingerprint)}
                    if how["tokenizer"] == tokenizer:  # older records hashed the tokenizer in another way
                        facts["training"] = record["trained"]["data"], data_hash(train)
                    for name, (held, now) in facts.items():
                        if held != now:
                            raise ValueError(
                                f"{path.name} was made with other {name} rows ({held[:8]}) than those in "
                                f"{train.folder} ({now[:8]}): give these with --data, or choose another --out"
                            )

    def _check_reference(self, name: str) -> None:
        """Raise if results were measured with another reference: its key tokens are not comparable."""
        for path in sorted((self.out / "runs").glob(f"{self.name}-*.json")):
            for entry in read_json(path).get("measured", []):
                other = entry["metrics"].get("longppl", {}).get("reference", {}).get("reference", name)
                if Path(other).name != name:
                    raise ValueError(
                        f"{path.name} has LongPPL with the reference {other}, not {name}: use --reference {other}, or "
                        "choose another --out"
                    )

    def _folder(self, corpus: str) -> Path:
        """The prepared rows of a corpus."""
        if self.data is not None or not self.tier.text:
            return (self.data or Path("DATA")) / self.tier.corpora[corpus]
        folder = self.work / "data" / f"{self.tier.text}-{self.training.length}"
        prepare(self.tier.text, folder, tokenizer="bytes", length=self.training.length)
        return folder

    def _run(self, model: Trained) -> Run:
        """The run of a model, trained or not; a finished run of `elastic train` is used too."""
        rows = samples(self.folder(model.corpus))
        recipe, data = fit(self.recipe(model), rows), data_hash(rows)
        for folder in self.work.glob(f"[!.]*-{recipe.digest(data)}"):
            if not folder.name.startswith(f"{self.name}-{model.corpus}") and (folder / "result.json").exists():
                recipe = recipe.replace(name=folder.name.removesuffix(f"-{recipe.digest(data)}"), variant="")
        return Run(self.work, recipe, data)

    def test_rows(self, corpus: str) -> Samples:
        """The test rows of a corpus."""
        return samples(self.folder(corpus), "test")

    def spread(self, corpus: str, metric: str) -> Spread:
        """The test rows that a metric reads."""
        rows, count = self.test_rows(corpus), self.tier.probed if metric == "reconstruction" else self.tier.rows
        return Spread(rows, count or len(rows))

    # -- training and measuring

    def complete(
        self, model: Trained, wanted: Iterable[Measurement], keep_weights: bool = False, sharing: int = 1
    ) -> None:
        """Train and measure what the record lacks, then remove the weights unless `keep_weights`.

        `sharing`: how many such processes share the device, as planned.
        """
        wanted = list(wanted)
        # The lock of a training run ends with training; this one covers measuring and removing the weights too.
        with locked(self.work / "locks" / self.record(model).content["name"]):
            if self.record(model).trained and not self.missing(model, wanted):
                return
            self._train(model, sharing)
            missing = self.missing(model, wanted)  # everything, if the model had to be trained again
            for conditions in dict.fromkeys(conditions for _, conditions in missing):
                self._measure(model, conditions, [metric for metric, when in missing if when == conditions])
            if not keep_weights and self.run(model).recipe.name == self.recipe(model).name:  # not of `elastic train`
                self._remove(self.run(model).folder)
                self.run.cache_clear()  # type: ignore[attr-defined]

    def _remove(self, folder: Path) -> None:
        """Rename first: a half-removed folder must not look like a finished run."""
        doomed = folder.with_name(f".removing-{folder.name}")
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _train(self, model: Trained, sharing: int) -> None:
        run, record = self.run(model), self.record(model)
        if not run.finished:
            # resuming on another machine only changes rounding, and the record says so
            resume = Resume(allowed=True, or_start=True, new_machine=True)
            before = self._processes_on_device(sharing)
            result = train(run.recipe, self.folder(model.corpus), self.work, resume)
            record.add_training(result, run.measured(), (before + self._processes_on_device(sharing)) / 2)
            torch.compiler.reset()  # else its compiled code counts against the recompilation limit of the next model
            free_memory()
        elif record.trained is None:
            record.add_training(run.content(), run.measured(), 1)

    def _processes_on_device(self, planned: int) -> int:
        return running_now(self.work / "logs") if planned > 1 else planned

    def _measure(self, model: Trained, conditions: Conditions, metrics: list[str]) -> None:
        """Measure a trained model under one set of conditions, and record the results."""
        rows, run = self.test_rows(model.corpus), self.run(model)
        for group in (["reconstruction"], [metric for metric in metrics if metric != "reconstruction"]):
            if not set(group) & set(metrics):
                continue
            known = self.find_keys(model.corpus) if "longppl" in group else None
            task = Evaluation(
                model=load_model(str(run.folder)),
                rows=self.spread(model.corpus, group[0]),
                tokenizer=self.tokenizer(model.corpus),
                conditions=conditions,
                # P4 erases memory at every block: the gain from memory within one model
                protocols=("P0", "P4") if conditions == Conditions() else ("P0",),
                batch_size=self.tier.batch,
                reference=self.reference or "",
                settings=Settings.scaled(rows.length),
                known_keys=known,
                partial=run.folder / "partial",
                identity={"data": rows.fingerprint, "split": rows.split},
            )
            self.record(model).add(describe(run.folder.name, task, rows, with_progress(task, group)))

    def find_keys(self, corpus: str) -> FoundKeys:
        """LongPPL's key tokens of a corpus: found once, then read from their record."""
        known = self.known_keys(corpus)
        if known is not None:
            return known
        assert self.reference is not None
        facts, path = self._key_facts(corpus), self._key_path(corpus)
        settings, spread = Settings(**facts["settings"]), self.spread(corpus, "longppl")
        found = key_tokens(self.reference, self.tokenizer(corpus), spread, settings, self.work / "keys")
        file, where = Path(self.reference), environment() | {"hardware": hardware()}
        facts |= {"file_sha256": sha256(file) if file.is_file() else None, "environment": where}
        path.parent.mkdir(parents=True, exist_ok=True)
        # If another process found them first, with other rounding, its file wins: all models need the same tokens.
        write_json_once(path, {**facts, "found_by": found.reference, "texts": found.texts})
        return self.known_keys(corpus) or found

    def known_keys(self, corpus: str) -> FoundKeys | None:
        """The key tokens on record, or None; the model that found them need not exist any more."""
        path = self._key_path(corpus)
        if not path.exists():
            return None
        held, facts = read_json(path), self._key_facts(corpus)
        other = [name for name, value in facts.items() if held.get(name) != value]
        file = Path(self.reference or "")
        if file.is_file() and sha256(file) != held["file_sha256"]:
            other.append("reference")
        if other:
            raise ValueError(
                f"{path} has the key tokens of another {' and '.join(other)}: remove it, or choose another --out"
            )
        return FoundKeys(held["found_by"], held["texts"])

    def _key_facts(self, corpus: str) -> dict[str, Any]:
        """What key tokens depend on; their record must agree with it."""
        rows, read = self.test_rows(corpus), len(self.spread(corpus, "longppl"))
        settings, reference = asdict(Settings.scaled(rows.length)), Path(self.reference or "").name
        return {"reference": reference, "data": rows.fingerprint, "rows": read, "settings": settings}

    def _key_path(self, corpus: str) -> Path:
        return self.out / "runs" / f"{self.name}-{corpus}-keys.json"
