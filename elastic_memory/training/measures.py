"""The metrics of a training step: loss, speed, and the mean of the memories' gates."""

import time
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

import elastic_memory as em
from elastic_memory.memory.counts import gates
from elastic_memory.shapes import Int, Tensor
from elastic_memory.training.build import flops_per_token, peak_flops
from elastic_memory.training.recipe import Recipe


def device_name(device: torch.device) -> str:
    """The accelerator's name, or the device type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def whole(value: Tensor) -> Tensor:
    """The full tensor of one that FSDP has sharded; a collective, so all processes must call this."""
    return value.full_tensor() if isinstance(value, DTensor) else value


@torch.no_grad()
def memory_norms(model: Any, sample: Int[Tensor, "1 token"]) -> dict[str, float]:
    """Root mean square of each layer's memory state after reading a sample."""
    cache, training = em.MemoryCache(model), model.training
    model.eval()
    model(sample, past_key_values=cache, logits_to_keep=1)
    model.train(training)
    states = {layer: stream.state for layer, stream in enumerate(cache.streams) if stream.state}
    return {
        f"memory_norm/{layer}": float(torch.cat([part.float().flatten() for part in state]).square().mean().sqrt())
        for layer, state in states.items()
    }


class Measures:
    """Collects the metrics of one step."""

    def __init__(self, model: Any, recipe: Recipe, args: TrainingArguments) -> None:
        self.recipe = recipe
        self.memories = model.memories
        peak = peak_flops(device_name(args.device))
        flops = flops_per_token(model.config, recipe.training.length)
        self.tokens_at_peak = peak * args.world_size / flops if peak else None
        self.loss = torch.zeros(())
        self.step_loss = self.gradient_norm = self.data_seconds = 0.0
        self.last = time.perf_counter()

    def line(self, step: int) -> dict[str, Any]:
        """The metrics of the step that has just ended."""
        seconds, self.last = time.perf_counter() - self.last, time.perf_counter()
        speed = self.recipe.training.batch_tokens / seconds
        line = {
            "loss": self.step_loss,
            "grad_norm": self.gradient_norm,
            "tokens": step * self.recipe.training.batch_tokens,
            "tokens_per_second": round(speed, 1),
            "data_share": round(self.data_seconds / seconds, 5),
        }
        if self.tokens_at_peak:
            line["mfu"] = round(speed / self.tokens_at_peak, 4)
        for layer, memory in self.memories.items():
            line |= {f"{name}/{layer}": round(float(whole(gate.mean())), 6) for name, gate in gates(memory).items()}
        return line
