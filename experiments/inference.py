"""The appendix's table of inference throughput: the forward half of what `speed` measures."""

import importlib.util
from pathlib import Path

from elastic_memory.report.tables import Table

_spec = importlib.util.spec_from_file_location("experiments.speed", Path(__file__).with_name("speed.py"))
assert _spec and _spec.loader
_speed = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_speed)


def run(tier: str, out: Path) -> Table:
    """Measure what is missing, write it, and show evaluation throughput."""
    return _speed.table(_speed.measure(tier, out), "inference")
