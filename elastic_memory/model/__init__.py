"""The Hugging Face side: configuration, models, cache; registered with the Auto classes on import."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from elastic_memory.model.attach import attach_memory, detach_memory
from elastic_memory.model.configuration import MemoryLlamaConfig
from elastic_memory.model.modeling import (
    MemoryLlamaForCausalLM,
    MemoryLlamaForSequenceClassification,
    MemoryLlamaModel,
    name_causal_lm,
)
from elastic_memory.streaming.cache import MemoryCache

AutoConfig.register("memory_llama", MemoryLlamaConfig, exist_ok=True)
AutoModel.register(MemoryLlamaConfig, MemoryLlamaModel, exist_ok=True)
AutoModelForCausalLM.register(MemoryLlamaConfig, MemoryLlamaForCausalLM, exist_ok=True)

AutoModelForSequenceClassification.register(MemoryLlamaConfig, MemoryLlamaForSequenceClassification, exist_ok=True)
name_causal_lm(MemoryLlamaForCausalLM)

__all__ = [
    "MemoryCache", "MemoryLlamaConfig", "MemoryLlamaForCausalLM", "MemoryLlamaForSequenceClassification",
    "MemoryLlamaModel", "attach_memory", "detach_memory",
]  # fmt: skip
