"""`train`: one run from recipe to result, through interruptions, bad steps and changes of machine."""

import gc
import os
import shutil
import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from accelerate.utils.memory import should_reduce_batch_size
from safetensors import SafetensorError

from elastic_memory.common.checksums import IncompleteError, write_manifest
from elastic_memory.common.environment import environment, free_memory, is_main, peak_memory
from elastic_memory.common.files import DISK_FULL, whole_folder, write_json, write_text
from elastic_memory.common.locks import locked
from elastic_memory.common.progress import console
from elastic_memory.common.strict import read_yaml
from elastic_memory.common.threads import choose_threads
from elastic_memory.data import Samples, samples
from elastic_memory.data.start import StartingModel
from elastic_memory.model.parameters import parameters_of
from elastic_memory.training import checkpoints, limits, logs
from elastic_memory.training.build import build_config, build_model, start_model
from elastic_memory.training.card import model_card
from elastic_memory.training.corpus import data_hash, fit, tokenizer_sha256
from elastic_memory.training.interrupts import Interrupts
from elastic_memory.training.lora import merge_lora
from elastic_memory.training.order import Schedule
from elastic_memory.training.recipe import Recipe
from elastic_memory.training.runs import Run, StoppedError, differences, machine, run_facts
from elastic_memory.training.spikes import Restart, UnstableError, Watch
from elastic_memory.training.trainer import MemoryTrainer, repair_for_weights_only


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Whether a run that was started earlier is resumed, and under which conditions."""

    allowed: bool = False
    or_start: bool = False  # start if there is nothing to resume, even if an unfinished run differs only in settings
    weights_only: bool = False  # resume from the weights alone if the optimizer state is gone
    new_machine: bool = False  # resume on other devices, micro-batches or versions: same samples, other rounding


def train(
    recipe: Recipe,
    data: str | Path,
    out: str | Path,
    resume: Resume | None = None,
    start: StartingModel | None = None,
) -> dict[str, Any]:
    """Train, or resume training, and return the content of the run's `result.json`.

    With `start`, fine-tune that model instead of a fresh one.

    The same call in several processes (torchrun, accelerate launch) trains one model on all of them. SIGTERM and Ctrl-C
    save a checkpoint and raise SystemExit.
    """
    transformers.utils.logging.disable_progress_bar()
    rows = samples(data, split="train")
    recipe = fit(recipe, rows, start)
    run = Run(Path(out), recipe, data_hash(rows))
    if run.finished:
        tell(f"{run.folder.name} is finished: its model is in {run.model}")
        return run.content()
    limits.check(recipe, start)
    interrupts = Interrupts()
    session = Session(run, rows, resume or Resume(), interrupts, start)
    try:
        session.open()  # nothing to save yet: a signal may end the process as usual
        with interrupts:
            return session.train()
    except ValueError:
        session.forget()
        raise
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise run.unwritten("a file of the run", error) from error
    finally:
        session.close()


def tell(text: str) -> None:
    """Print a message, in the main process only."""
    if is_main():
        console.print(text, highlight=False, markup=False)


class Session:
    """The work of one process on one run, from taking the lock to releasing it."""

    def __init__(
        self, run: Run, rows: Samples, resume: Resume, interrupts: Interrupts, start: StartingModel | None = None
    ) -> None:
        self.run, self.rows, self.resume, self.interrupts, self.start = run, rows, resume, interrupts, start
        training = run.recipe.training
        most = training.corpus_tokens and training.corpus_tokens // training.length
        self.schedule = Schedule(rows, training.steps * training.batch, training.seed, most)
        self.held = ExitStack()
        self.fresh = False  # whether this session created the run's folder
        self.facts: dict[str, Any] = {}  # to be written when the run starts
        if training.precision == "bf16":
            # memory states stay float32 under autocast; their products may use the tensor cores (tf32)
            self.held.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("high")

    def open(self) -> None:
        """Check the run and lock its folder, before anything is written; processes but the main one wait."""
        if is_main():
            self._lock_run()
        self.processes = PartialState(cpu=self.run.recipe.execution.device == "cpu")
        self.processes.wait_for_everyone()

    def _lock_run(self) -> None:
        self._choose_threads()
        run, here = self.run, machine(self.run.recipe)
        self.rows.verify_rows()
        if run.exists and not self.resume.allowed:
            with locked(run.checkpoints / "lock"):  # if another process trains it, its error names that process
                last = (checkpoints.steps(run.checkpoints) or [0])[-1]
            raise ValueError(
                f"{run.folder.name} was already started and is at step {last} of {run.recipe.training.steps}: "
                "add --resume to continue, or remove the folder to start over"
            )
        if self.resume.allowed and not self.resume.or_start and not run.exists:
            self._refuse_to_start()
        self.fresh = not run.folder.exists()
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        self.held.enter_context(locked(run.checkpoints / "lock"))
        if run.exists:
            changed = differences(run.facts()["machine"], here)
            if changed and not self.resume.new_machine:
                raise ValueError(
                    f"{run.folder.name} was started on another machine or with other versions ({'; '.join(changed)}): "
                    "samples would be the same, rounding would differ; add --new-machine to resume anyway"
                )
        logs.mend(run.events)
        run.check(0)
        checkpoints.sweep(run.checkpoints)
        tokenizer = tokenizer_sha256(self.rows)
        self.facts = {"tokenizer": tokenizer, "sample_order": self.schedule.digest, "machine": here, **environment()}

    def _choose_threads(self) -> None:
        """On a CPU: choose the faster number of threads for a new run; keep the run's own to resume exactly."""
        on_cpu = self.run.recipe.execution.device == "cpu" or not torch.cuda.is_available()
        if not on_cpu or "OMP_NUM_THREADS" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return
        self.held.callback(torch.set_num_threads, torch.get_num_threads())
        known = self.run.facts()["machine"].get("threads") if self.run.exists else None
        if isinstance(known, int) and 1 <= known <= (os.cpu_count() or 1):
            torch.set_num_threads(known)
        elif not self.run.exists:
            config = self.start.config if self.start else build_config(self.run.recipe)
            choose_threads(config.hidden_size)

    def _refuse_to_start(self) -> None:
        """Raise because there is nothing to resume; if an unfinished run of this recipe exists, say how it differs."""
        run = self.run
        for folder in sorted(run.folder.parent.glob(f"{run.recipe.name}-*")):
            if not (folder / "run.json").exists() or (folder / "result.json").exists():
                continue
            facts = run_facts(folder)
            old = read_yaml((folder / "recipe.yaml").read_text(errors="replace"), str(folder / "recipe.yaml"))
            if not isinstance(old, dict):
                raise ValueError(f"{folder / 'recipe.yaml'} is not a recipe: restore it from a copy")
            now = {"data": run.data, "tokenizer": tokenizer_sha256(self.rows)}
            old |= {name: facts.get(name, value) for name, value in now.items()}
            new = run.recipe.to_dict() | now
            changed = [line for line in differences(old, new) if not line.startswith("execution.")]
            raise ValueError(
                f"nothing to resume: {folder.name} trains something else ({'; '.join(changed)}). "
                "Undo the change to resume it, or omit --resume to start a new run (--requeue does so without asking)"
            )
        raise ValueError(
            f"nothing to resume in {run.folder.parent}: it has no run of {run.recipe.name}. Give the folder that has "
            "it (--out), or omit --resume to start (--requeue resumes or starts)"
        )

    def train(self) -> dict[str, Any]:
        """Run attempts until the last step is done."""
        while True:
            step = self._starting_point()
            trainer = self._trainer(step)
            folder = checkpoints.folder_of(self.run.checkpoints, step) if step else None
            unstable, memory = None, None
            try:
                trainer.train(resume_from_checkpoint=str(folder) if folder else None)
                return self._finish(trainer)
            except UnstableError as error:
                unstable = error.with_traceback(None)
            except RuntimeError as error:
                if not should_reduce_batch_size(error):
                    raise
                memory = str(error).strip().split("\n")[0][:300]
            finally:
                trainer.close()
            # outside the handlers: their exceptions hold the tensors of the failed step
            step = trainer.state.global_step + 1
            del trainer
            if unstable:
                self._restart(unstable, step)
            else:
                self._out_of_memory(memory, step)
            free_memory()

    def _starting_point(self) -> int:
        """The step of the newest intact checkpoint, 0 if there is none; found by the main process, shared with all."""
        step = [0]
        if is_main():
            run = self.run
            try:
                found = checkpoints.newest(run.checkpoints, run.digest, weights_only=self.resume.weights_only)
            except IncompleteError as error:
                raise ValueError(
                    f"{error}: training cannot resume exactly. Add --weights-only to resume from the weights with "
                    "a fresh optimizer, or remove that checkpoint to use the one before it"
                ) from None
            run.check(found.step)
            if self.facts:  # written once, after everything there was verified
                run.begin(self.facts)
                self.facts = {}
            for why in found.rejected.values():
                tell(f"skipped a damaged checkpoint: {why}")
                run.event("passed over", reason=why)
            if found.rejected and not found.step:
                raise ValueError(
                    f"all {len(found.rejected)} checkpoints of {run.folder.name} are damaged "
                    f"({'; '.join(found.rejected.values())}): remove them to start over"
                )
            step = [found.step]
            if found.lacks:
                repair_for_weights_only(checkpoints.folder_of(run.checkpoints, found.step), found.step, run)
                run.event("weights only", step=found.step, reason=found.lacks)
            run.rewind(found.step)
            tell(f"{run.folder.name}: " + (f"resumed at step {found.step}" if found.step else "starting"))
            run.event("start", step=found.step, sample_order=self.schedule.digest)
        broadcast_object_list(step)
        return step[0]

    def _trainer(self, step: int) -> MemoryTrainer:
        run = self.run
        for halved in run.history("out of memory"):
            run.recipe = run.recipe.replace(**{"execution.micro_batch": halved["micro_batch"]})
        watch = Watch(run.recipe.stability)
        for line in run.measured():
            watch.judge(float(line["loss"]), float(line["grad_norm"]))
        restarts = [Restart(0, run.recipe.training.warmup_steps)]
        restarts += [Restart(line["back_to"], line["warmup"]) for line in run.history("restart")]
        model = start_model(self.start, run.recipe) if self.start else build_model(run.recipe)
        return MemoryTrainer(run, model, self.schedule, watch, restarts, self.interrupts)

    def _restart(self, error: UnstableError, step: int) -> None:
        """Go back to the last checkpoint before the first bad step, with twice the warm-up."""
        run, past = self.run, self.run.history("restart")
        self.processes.wait_for_everyone()  # the main process adds to the history below
        rule = run.recipe.stability
        if len(past) >= rule.restarts:
            raise StoppedError(
                f"step {step}: {error.reason}, after {len(past)} restarts; the last good checkpoint is intact. Start "
                "a new run with a lower training.learning_rate or a longer training.warmup"
            )
        if is_main():
            bad = [line for line in run.measured() if line["step"] >= error.first]
            back_to = checkpoints.newest(run.checkpoints, run.digest, before=error.first).step
            for later in checkpoints.steps(run.checkpoints):
                if later > back_to:
                    checkpoints.discard(run.checkpoints, later)
            warmup = run.recipe.training.warmup_steps * 2 ** (len(past) + 1)
            run.event("restart", step=step, back_to=back_to, warmup=warmup, reason=error.reason, steps=bad)
            tell(f"step {step}: {error.reason}; restarting from step {back_to} with {warmup} steps of warm-up")
        self.processes.wait_for_everyone()

    def _out_of_memory(self, cause: str | None, step: int) -> None:
        """Stop with advice, or continue with half the micro-batch and twice the accumulation: the same global batch."""
        run, execution = self.run, self.run.recipe.execution
        size, length = execution.micro_batch, run.recipe.training.length
        text = (
            f"out of memory at step {step} with micro-batches of {size} x {length:,} tokens, "
            f"{peak_memory():,} bytes in use at most ({cause})"
        )
        if execution.on_oom == "stop" or size == 1 or self.processes.num_processes > 1:
            change = f"micro_batch={size // 2}" if size > 1 else "gradient_checkpointing=true"
            raise StoppedError(
                f"{text}; checkpoints are untouched. Try --set execution.{change} --resume --new-machine"
            )
        run.event("out of memory", step=step, micro_batch=size // 2, reason=text)
        tell(f"{text}; continuing with micro-batches of {size // 2} and the same global batch")

    def _finish(self, trainer: MemoryTrainer) -> dict[str, Any]:
        """Write the model and the result; or, if the run was interrupted, exit with its exit code."""
        run = self.run
        if trainer.state.global_step < run.recipe.training.steps:
            if is_main():
                run.event("interrupted", step=trainer.state.global_step, exit_code=self.interrupts.exit_code)
            how = "repeat the command to resume" if self.resume.or_start else "add --resume to continue"
            tell(f"{run.folder.name}: stopped after step {trainer.state.global_step}, saved; {how}")
            raise SystemExit(self.interrupts.exit_code)
        if run.recipe.training.lora:
            merge_lora(trainer.network)
        result = self._result(trainer)
        state = trainer.accelerator.get_state_dict(trainer.model) if trainer.is_fsdp_enabled else None
        if is_main():
            self._write_model(trainer.network, state, result)
            write_json(run.result, result)
            run.event("finished", step=result["steps"])
            tell(f"{run.folder.name}: finished, loss {result['final_loss']:.4f}; the model is in {run.model}")
        self.processes.wait_for_everyone()
        return result

    def _write_model(self, network: Any, state: Any, result: dict[str, Any]) -> None:
        run = self.run
        try:
            with whole_folder(run.model) as staged:
                network.save_pretrained(staged, state_dict=state)
                shutil.copytree(self.rows.folder / "tokenizer", staged, dirs_exist_ok=True)
                write_json(staged / "training.json", result)
                write_text(staged / "README.md", model_card(run.recipe, result, network, self.rows.manifest["source"]))
                write_manifest(staged, run.digest, result["steps"], without=("README.md",))  # the card may be edited
                shutil.rmtree(run.model, ignore_errors=True)
        except (OSError, SafetensorError) as error:
            raise run.unwritten("the model", error) from error

    def _result(self, trainer: MemoryTrainer) -> dict[str, Any]:
        run, lines = self.run, self.run.measured()
        applied = [float(line["loss"]) for line in lines if "skipped" not in line]
        last = applied[-max(1, len(lines) // 100) :]
        speeds = [line["tokens_per_second"] for line in lines]
        mfu = [line["mfu"] for line in lines if "mfu" in line]
        return {
            "name": run.folder.name,
            "steps": len(lines),
            "tokens": len(lines) * run.recipe.training.batch_tokens,
            "final_loss": statistics.fmean(last) if last else None,
            "parameters": parameters_of(trainer.network),
            "tokens_per_second": statistics.median(speeds),
            "mfu": statistics.median(mfu) if mfu else None,
            "data_share": statistics.fmean(line["data_share"] for line in lines),
            "peak_memory_bytes": peak_memory(),
            "skipped": len(lines) - len(applied),
            "restarts": run.history("restart"),
            "starts": len(run.history("start")),
            "sample_order": self.schedule.digest,
            "data": run.data,
            "tokenizer": tokenizer_sha256(self.rows),
            "mode": "deterministic" if run.recipe.execution.deterministic else "fast",
            "machine": machine(run.recipe),
            **environment(),
            "recipe": run.recipe.to_dict(),
        }

    def forget(self) -> None:
        """Remove the folder of a run that was refused before its first step."""
        if self.fresh and not checkpoints.steps(self.run.checkpoints) and not self.run.measured():
            shutil.rmtree(self.run.folder)

    def close(self) -> None:
        """Restore this process's settings and release the folder."""
        gc.enable()
        gc.unfreeze()
        self.held.close()
