"""One process of `elastic reproduce --parallel`: `python -m elastic_memory.reproduction.worker JOB`.

JOB is the JSON of a `Job`: a model to train and measure, or a corpus whose key tokens to find.
"""

import ctypes
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Job:
    """The arguments of a worker: exactly one of `model` and `keys` is given."""

    tier: str
    out: str
    data: str | None = None
    reference: str | None = None
    model: dict[str, Any] | None = None  # fields of `Trained`
    keys: str | None = None  # a corpus
    keep_weights: bool = False
    sharing: int = 1

    def command(self) -> list[str]:
        """The command line of its process."""
        return [sys.executable, "-m", "elastic_memory.reproduction.worker", json.dumps(asdict(self))]


def end_with_scheduler() -> None:
    """Ask for SIGTERM if the process that started this one is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@contextmanager
def left_if_in_use() -> Iterator[None]:
    """Exit with `IN_USE` if another call holds the lock of this job: the scheduler then counts it as left."""
    from elastic_memory.common.locks import InUseError
    from elastic_memory.reproduction.scheduler import IN_USE

    try:
        yield
    except InUseError as error:
        print(error, file=sys.stderr)
        sys.exit(IN_USE)


def main(text: str) -> None:
    """Do the job."""
    end_with_scheduler()

    from elastic_memory.reproduction.lab import Lab, Trained
    from elastic_memory.reproduction.tables import wanted

    job = Job(**json.loads(text))
    lab = Lab(job.tier, Path(job.out), Path(job.data) if job.data else None, job.reference)
    if job.keys:
        lab.find_keys(job.keys)
    if job.model:
        model = Trained(**job.model)
        with left_if_in_use():
            lab.complete(model, wanted(model), job.keep_weights, job.sharing)


if __name__ == "__main__":
    main(sys.argv[1])
