"""One mechanism per file; listing it here is all it takes to train, stream, test, count and tabulate it."""

from elastic_memory.memory.contract import Block, Floats, Geometry, Host, Memory, Reading, State
from elastic_memory.memory.elastic import ElasticMemory
from elastic_memory.memory.none import NoMemory

MEMORIES: dict[str, type[Memory]] = {
    "none": NoMemory,
    "elastic": ElasticMemory,
}

__all__ = ["MEMORIES", "Block", "Floats", "Geometry", "Host", "Memory", "Reading", "State"]
