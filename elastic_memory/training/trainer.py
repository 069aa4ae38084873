"""transformers' Trainer with our order of samples, rules for bad steps, metrics and checkpoints."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, TrainerControl, TrainerState

from elastic_memory.common.checksums import write_manifest
from elastic_memory.common.speedups import find
from elastic_memory.memory.counts import GATES
from elastic_memory.training import checkpoints
from elastic_memory.training.callbacks import ProgressBar, SaveAndStop
from elastic_memory.training.interrupts import Interrupts
from elastic_memory.training.measures import Measures, memory_norms, whole
from elastic_memory.training.order import Collate, ReadAhead, Schedule
from elastic_memory.training.recipe import Recipe
from elastic_memory.training.runs import Run
from elastic_memory.training.spikes import Restart, UnstableError, Watch, learning_rate_factor

capture = find("cuda_graph")


def arguments(recipe: Recipe, run: Run) -> TrainingArguments:
    """The recipe as TrainingArguments. Saving and logging are ours, so Trainer's own are off."""
    training, execution = recipe.training, recipe.execution
    args = TrainingArguments(
        output_dir=str(run.folder),
        run_name=run.folder.name,
        max_steps=training.steps,
        per_device_train_batch_size=execution.micro_batch,
        learning_rate=training.learning_rate,
        adam_beta1=training.beta1,
        adam_beta2=training.beta2,
        adam_epsilon=training.epsilon,
        max_grad_norm=training.clip,
        bf16=training.precision == "bf16",
        seed=training.seed,
        full_determinism=execution.deterministic,
        use_cpu=execution.device == "cpu",
        gradient_checkpointing=execution.gradient_checkpointing,
        train_sampling_strategy="sequential",
        dataloader_drop_last=True,
        # pinning uses all of torch's threads and waits for busy cores: costs 20 ms, saves one
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        disable_tqdm=True,
        report_to=execution.report_to,
    )
    # without this, Trainer would use DataParallel over all visible GPUs
    args._n_gpu = min(args.n_gpu, 1)
    share = execution.micro_batch * args.world_size
    if training.batch % share:
        raise ValueError(
            f"a step of {training.batch} samples cannot be split into {args.world_size} processes x micro-batches of "
            f"{execution.micro_batch}; change execution.micro_batch or the number of processes"
        )
    args.gradient_accumulation_steps = training.batch // share
    return args


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Weight decay for matrices only; gates and blends have their own learning rate."""
    training = recipe.training
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    gates: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # adapters are trained, not what they adapt
            continue
        last = name.rsplit(".", 1)[-1]
        group = gates if last.endswith(GATES) else vectors if parameter.ndim < 2 or "bias" in last else matrices
        group.append(parameter)
    groups = [
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
        {"params": gates, "weight_decay": 0.0, "lr": training.learning_rate * training.gate_lr_scale},
    ]
    return [group for group in groups if group["params"]]


class MemoryTrainer(Trainer):
    """One attempt of a run, from a checkpoint or from the start."""

    def __init__(
        self,
        run: Run,
        model: Any,
        schedule: Schedule,
        watch: Watch,
        restarts: list[Restart],
        interrupts: Interrupts,
    ) -> None:
        self.run, self.schedule, self.watch, self.restarts = run, schedule, watch, restarts
        self.network = model  # not wrapped by accelerate
        self.interrupts = interrupts
        self.skipped: str | None = None
        self.captured: Any = None
        args = arguments(run.recipe, run)
        self.measures = Measures(model, run.recipe, args)
        self.progress = ProgressBar(run, args.max_steps)
        stride = args.per_device_train_batch_size * args.world_size
        self.batches = ReadAhead(
            schedule, Collate(model.config.vocab_size), stride, ahead=args.gradient_accumulation_steps
        )
        super().__init__(
            model=model,
            args=args,
            train_dataset=self.batches,
            data_collator=_unchanged,
            callbacks=[SaveAndStop(run.recipe, interrupts, watch), self.progress],
        )
        self.remove_callback(PrinterCallback)
        if self.is_fsdp_enabled and run.recipe.training.lora:
            raise ValueError(
                "training.lora with FSDP: merging needs whole matrices; use torchrun alone, or no adapters"
            )
        if self.is_fsdp_enabled:
            # precision is set by autocast alone: FSDP's own policy rounds loss and summed gradients to bfloat16
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = None

    def close(self) -> None:
        """Stop the progress bar and the reader."""
        self.progress.close()
        self.batches.close()

    # -- which samples

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """The micro-batches of one step; raises unless they hold the samples scheduled for this step and device."""
        begin = time.perf_counter()
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.measures.data_seconds = time.perf_counter() - begin
        self.measures.loss = torch.zeros((), device=device)
        self.sample = batches[0]["input_ids"][:1]
        step, size = self.run.recipe.training.batch, self.args.per_device_train_batch_size
        self.planned = self.schedule.ids[self.state.global_step * step :][:step].tolist()
        for i, batch in enumerate(batches):
            first = (i * self.args.world_size + self.args.process_index) * size
            rows, planned = batch.pop("rows"), self.planned[first : first + size]
            if rows != planned:
                raise RuntimeError(f"step {self.state.global_step + 1}: read rows {rows}, expected {planned}")
        return batches, items

    # -- which steps count

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW with the groups of `parameter_groups`."""
        if self.optimizer is None:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args)
            self.optimizer = kind(parameter_groups(model or self.network, self.run.recipe), **options)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """A learning rate that depends only on the step and the restarts so far."""

        def factor(step: int) -> float:
            return learning_rate_factor(step, num_training_steps, self.restarts)

        self.lr_scheduler = self.rates = LambdaLR(optimizer or self.create_optimizer(), factor)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            # the checkpoint's learning rates may be from before a restart, or missing (--weights-only)
            rates, step = self.rates, self.state.global_step
            rates.last_epoch = step
            rates._last_lr = [base * rates.lr_lambdas[0](step) for base in rates.base_lrs]
            for group, rate in zip(rates.optimizer.param_groups, rates._last_lr, strict=True):
                group["lr"] = rate

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        differing = {*load_result.missing_keys} - {*self.network.all_tied_weights_keys} | {*load_result.unexpected_keys}
        if differing:
            raise ValueError(f"the checkpoint is of another model, which differs in {', '.join(sorted(differing)[:4])}")

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of one micro-batch, as a CUDA graph where possible."""
        alone = self.args.world_size == 1 and not self.is_fsdp_enabled
        if self.captured is None and alone and capture is not None and capture.gains(self.network):
            self.captured = capture.Captured(partial(self._forward_and_backward, model), model.parameters())
        if self.captured is not None:
            loss = self.captured(**inputs, num_items_in_batch=num_items_in_batch)
        else:
            loss = self._forward_and_backward(model, num_items_in_batch, **inputs)
        self.measures.loss = self.measures.loss + loss
        # Trainer sums this and would stay NaN forever; the true loss is in `measures`
        return torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)

    def _forward_and_backward(self, model: nn.Module, num_items_in_batch: Any, **inputs: Any) -> torch.Tensor:
        return super().training_step(model, inputs, num_items_in_batch)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip gradients and judge the step; drop them if it must not be applied: the optimizer then does nothing."""
        norm = whole(super()._clip_grad_norm(model))
        mine = torch.stack([self.measures.loss.float(), norm.new_tensor(float(self.interrupts.pending)).float()])
        loss, stop = (self.accelerator.reduce(mine, "sum") / self.args.world_size).tolist()
        self.interrupts.agreed = stop > 0
        self.measures.step_loss, self.measures.gradient_norm = loss, float(norm)
        self.skipped = self.watch.judge(loss, float(norm))
        if self.watch.must_restart:
            first = self.state.global_step + 2 - self.watch.bad_in_a_row
            count = self.watch.bad_in_a_row
            raise UnstableError(first, f"{count} steps in a row not applied, the last because of {self.skipped}")
        if self.skipped:
            model.zero_grad(set_to_none=True)
        return norm

    # -- what is logged

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write one line of metrics per step, and pass them on to the trackers of `report_to`."""
        if "loss" in logs:
            logs.update(self.measures.line(self.state.global_step))
            # streaming needs unsharded weights between layer calls, which FSDP does not keep
            if self.control.should_save and self.measures.memories and not self.is_fsdp_enabled:
                with self.accelerator.autocast():
                    logs.update(memory_norms(self.network, self.sample))
            if self.is_world_process_zero():
                refusal = {"skipped": self.skipped, "rows": self.planned} if self.skipped else {}
                self.run.log({"step": self.state.global_step, **logs, **refusal})
        super().log(logs, start_time)
        self.state.log_history.clear()  # it is in metrics.jsonl; checkpoints need no copy

    # -- what is saved

    def _get_output_dir(self, trial: Any = None) -> str:
        return str(self.run.checkpoints / checkpoints.STAGING)

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        """Let Trainer save into a hidden folder, then publish it; refuses weights that are not finite."""
        step = self.state.global_step
        if not self._finite():
            raise UnstableError(step, f"the weights after step {step} are not finite")
        try:
            with checkpoints.saving(self.run.checkpoints / checkpoints.STAGING) as staged:
                super()._save_checkpoint(model, trial)
                self.accelerator.wait_for_everyone()
                if self.is_world_process_zero():
                    folder = staged / f"checkpoint-{step}"
                    # an unneeded pickle: recipe.yaml has it all
                    (folder / "training_args.bin").unlink(missing_ok=True)
                    self.run.flush()
                    checkpoints.seal(folder, self.run.checkpoints, self.run.digest, step)
                    checkpoints.prune(self.run.checkpoints, self.run.recipe.execution.keep, saved=step)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise self.run.unwritten(f"the checkpoint of step {step}", error) from error
        self.accelerator.wait_for_everyone()

    def _finite(self) -> bool:
        """Whether all weights are finite, on all devices."""
        parts = [p.to_local() if isinstance(p, DTensor) else p for p in self.network.parameters()]
        strange = torch.stack([(~torch.isfinite(part)).any() for part in parts]).any()
        return not self.accelerator.reduce(strange.float(), "sum").item()


def _unchanged(batch: Any) -> Any:
    return batch


def repair_for_weights_only(folder: Path, step: int, run: Run) -> None:
    """Make a checkpoint without training state resumable: same weights and step, a fresh optimizer."""
    if not (folder / checkpoints.TRAINER_STATE).exists():
        callbacks: Any = [TrainerControl()]  # Trainer expects its state among the callbacks
        size = run.recipe.execution.micro_batch
        state = TrainerState(global_step=step, logging_steps=1, train_batch_size=size, stateful_callbacks=callbacks)
        state.save_to_json(str(folder / checkpoints.TRAINER_STATE))
    write_manifest(folder, run.digest, step)
