"""The appendix's table of inference throughput: the forward half of what `speed` measures."""

from pathlib import Path

from elastic_memory.report.tables import Table
from elastic_memory.reproduction.tables import speed

PLANS = speed.PLANS


def run(tier: str, out: Path) -> Table:
    """Measure what is missing, write it, and show evaluation throughput."""
    return speed.table(speed.measure(tier, out), "inference")
