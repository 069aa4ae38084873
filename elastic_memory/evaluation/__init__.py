"""Measurements of a model, each with its protocol."""

from elastic_memory.evaluation.corruption import corrupted
from elastic_memory.evaluation.longppl import LongPerplexity, Settings, longppl
from elastic_memory.evaluation.perplexity import PROTOCOLS, Perplexity, perplexity
from elastic_memory.evaluation.recall import TASKS, Recall, learn, recall
from elastic_memory.evaluation.reconstruction import Reconstruction, Spectrum, reconstruction, spectrum
from elastic_memory.evaluation.throughput import Throughput, Workload, throughput

__all__ = [
    "PROTOCOLS", "TASKS", "LongPerplexity", "Perplexity", "Recall", "Reconstruction", "Settings", "Spectrum",
    "Throughput", "Workload", "corrupted", "learn", "longppl", "perplexity", "recall", "reconstruction", "spectrum",
    "throughput",
]  # fmt: skip
