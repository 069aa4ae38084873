"""One mechanism per file. A mechanism listed in MEMORIES is trained, streamed, tested, counted and tabulated."""

from elastic_memory.memory.clock import ClockMemory
from elastic_memory.memory.contract import (
    Block,
    Geometry,
    Host,
    Memory,
    MemoryInfo,
    ParallelMemory,
    Reading,
    State,
    SummaryTokenMemory,
)
from elastic_memory.memory.dyadic import DyadicMemory
from elastic_memory.memory.elastic import ElasticMemory
from elastic_memory.memory.infini import InfiniMemory
from elastic_memory.memory.means import MeansMemory
from elastic_memory.memory.melodi import MelodiMemory
from elastic_memory.memory.memorizing import MemorizingMemory
from elastic_memory.memory.merged import MergedMemory
from elastic_memory.memory.none import NoMemory
from elastic_memory.memory.outliers import OutliersMemory
from elastic_memory.memory.recent import RecentMemory
from elastic_memory.memory.recent_merged import RecentMergedMemory
from elastic_memory.memory.sampled import SampledMemory

MEMORIES: dict[str, type[Memory]] = {
    "none": NoMemory,
    "elastic": ElasticMemory,
    "memorizing": MemorizingMemory,
    "infini": InfiniMemory,
    "melodi": MelodiMemory,
    "sampled": SampledMemory,
    "recent": RecentMemory,
    "means": MeansMemory,
    "merged": MergedMemory,
    "recent_merged": RecentMergedMemory,
    "clock": ClockMemory,
    "dyadic": DyadicMemory,
    "outliers": OutliersMemory,
}

__all__ = [
    "MEMORIES", "Block", "Geometry", "Host", "Memory", "MemoryInfo", "ParallelMemory", "Reading", "State",
    "SummaryTokenMemory",
]  # fmt: skip
