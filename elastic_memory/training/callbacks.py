"""When to save, when to stop, and the progress bar."""

import gc
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from elastic_memory.common.progress import Bars
from elastic_memory.training.interrupts import Interrupts
from elastic_memory.training.recipe import Recipe
from elastic_memory.training.runs import Run
from elastic_memory.training.spikes import Watch


class SaveAndStop(TrainerCallback):
    """Saves every `save_every` steps, at the end and when interrupted; never between bad steps."""

    def __init__(self, recipe: Recipe, interrupts: Interrupts, watch: Watch) -> None:
        self.every, self.interrupts, self.watch = recipe.execution.save_every, interrupts, watch
        self.due = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Decide after each step; all processes decide the same."""
        last = state.global_step >= state.max_steps
        self.due = self.due or state.global_step % self.every == 0
        control.should_save = self.interrupts.agreed or last or (self.due and not self.watch.bad_in_a_row)
        control.should_training_stop = control.should_training_stop or self.interrupts.agreed or last
        if control.should_save:
            self.due = False
            gc.collect()
        if gc.isenabled():
            # garbage collection takes longer than a step; reference counts free what a step allocates
            gc.collect()
            gc.freeze()
            gc.disable()
        return control


class ProgressBar(TrainerCallback):
    """Loss, speed and time left: a bar on a terminal, one line per minute in a log."""

    def __init__(self, run: Run, steps: int) -> None:
        self.name, self.steps = run.folder.name, steps
        self.bar: Bars | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Open the bar, on the main process."""
        if state.is_world_process_zero:
            self.bar = Bars()
            self.task = self.bar.add_task(self.name, total=self.steps, completed=state.global_step, unit="steps")
            self.begun = state.global_step
            self.bar.start()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Update the bar; in a log, the first and the last step always get a line."""
        logs = kwargs["logs"]
        if "tokens_per_second" not in logs or not self.bar:
            return
        text = f"loss {logs['loss']:.4f}  {logs['tokens_per_second']:,.0f} tokens/s"
        printed_at = self.bar.printed_at
        self.bar.update(self.task, completed=state.global_step, description=f"{self.name}  {text}")
        if state.global_step in (self.begun + 1, self.steps) and self.bar.printed_at == printed_at:
            self.bar.print_line(self.task)

    def close(self) -> None:
        """Close the bar, however the run ended."""
        if self.bar:
            self.bar.stop()
