"""When a step is not applied, and when training restarts.

The rule, for each step's loss and gradient norm (over all devices):

* non-finite loss or gradient norm: the update is not applied;
* loss above mean + `sigmas` standard deviations of the last `window` applied losses, once a quarter of the window is
  filled: the update is not applied. Losses of steps that were not applied do not enter the window;
* `patience` such steps in a row: restart from the last checkpoint before them, with a new warm-up of twice the length;
  at most `restarts` times. Without a checkpoint this is the paper's own restart.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_memory.training.recipe import Stability


class UnstableError(Exception):
    """`patience` steps in a row could not be applied; `first` is the first of them."""

    def __init__(self, first: int, reason: str) -> None:
        super().__init__(reason)
        self.first, self.reason = first, reason


class Watch:
    """Judges each step. Its state follows from the metrics so far, so a resumed run replays them."""

    def __init__(self, rule: Stability) -> None:
        self.rule = rule
        self.applied: deque[float] = deque(maxlen=rule.window)
        self.bad_in_a_row = 0

    def judge(self, loss: float, gradient_norm: float) -> str | None:
        """Why this step must not be applied, or None."""
        reason = self._reason(loss, gradient_norm)
        if reason is None:
            self.applied.append(loss)
            self.bad_in_a_row = 0
        else:
            self.bad_in_a_row += 1
        return reason

    def _reason(self, loss: float, gradient_norm: float) -> str | None:
        if not math.isfinite(loss):
            return "non-finite loss"
        if not math.isfinite(gradient_norm):
            return "non-finite gradient"
        if len(self.applied) * 4 >= self.rule.window:
            bound = statistics.fmean(self.applied) + self.rule.sigmas * statistics.pstdev(self.applied)
            if loss > bound:
                return f"loss spike above {bound:.4g}"
        return None

    @property
    def must_restart(self) -> bool:
        """Whether `patience` steps in a row were not applied."""
        return self.bad_in_a_row >= self.rule.patience


@dataclass(frozen=True)
class Restart:
    """At `step` the learning rate starts from zero again, with `warmup` steps of warm-up."""

    step: int
    warmup: int


def learning_rate_factor(step: int, steps: int, restarts: Sequence[Restart]) -> float:
    """Cosine decay over the whole run, times a linear warm-up since the last restart (the start counts as one)."""
    last = [restart for restart in restarts if restart.step <= step][-1]
    climb = min(1.0, (step - last.step) / last.warmup)
    begin = [restart.warmup for restart in restarts if restart.step == 0][-1]
    progress = min(1.0, max(0, step - begin) / max(1, steps - begin))
    return climb * 0.5 * (1 + math.cos(math.pi * progress))
