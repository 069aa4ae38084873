"""A training step's forward and backward pass as one CUDA graph, recorded once and replayed with new samples.

A sequential memory launches tens of thousands of small kernels per step, more than Python can issue in the time that a
GPU needs to run them. A replayed graph has no launch overhead.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from elastic_memory.memory import ParallelMemory
from elastic_memory.shapes import Float, Tensor


def gains(model: Any) -> bool:
    """Whether to capture a model's steps: it is compiled, on a GPU, and some memory is sequential.

    Parallel ones keep a GPU busy anyway; gradient checkpointing reads the random state, which a capture forbids.
    """
    if not (getattr(model, "compiled", False) and model.device.type == "cuda") or model.is_gradient_checkpointing:
        return False
    return not all(isinstance(memory, ParallelMemory) for memory in model.memories.values())


class Captured:
    """`step`, which takes tensors by name, adds to the gradients of `parameters` and returns a loss.

    Its first call runs eagerly, which compiles what a capture must find ready; the second is captured; all further ones
    are replays. Inputs of other shapes start again. What the step reads must outlive it: weights do, and a compiled
    model holds the operators of its memories.
    """

    known: Any  # shapes of the latest inputs
    graph: Any
    loss: Any
    inputs: dict[str, Tensor]
    parameters: list[torch.nn.Parameter]  # those that the step reaches
    gradients: list[Tensor]

    def __init__(self, step: Callable[..., Float[Tensor, ""]], parameters: Iterable[torch.nn.Parameter]):
        self.step, self.all = step, list(parameters)
        self.release()

    def __call__(self, **inputs: Tensor) -> Float[Tensor, ""]:
        """Run the step with these inputs; the loss returned is not overwritten by the next call."""
        shapes = {name: (x.shape, x.dtype) for name, x in inputs.items()}
        if self.known != shapes:
            self.release()
            self.known = shapes
            loss = self.step(**inputs)
            # Parameters without a gradient keep none: an optimizer skips these, and would decay those with zeros.
            self.parameters = [parameter for parameter in self.all if parameter.grad is not None]
            return loss
        if self.graph is None:
            self._capture(inputs)
        self._attach()
        for name, x in inputs.items():
            self.inputs[name].copy_(x)
        self.graph.replay()
        return self.loss.clone()

    def release(self) -> None:
        """Free the graph and its memory; the next call starts again."""
        self.known = self.graph = self.loss = None
        self.inputs, self.gradients = {}, []

    def _capture(self, inputs: dict[str, Tensor]) -> None:
        device = self.parameters[0].device
        with torch.cuda.device(device):
            self.inputs = {name: x.to(device, copy=True) for name, x in inputs.items()}
            self.gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
            self._attach()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):  # torch's own may be of another GPU
                self.loss = self.step(**self.inputs)
            self.graph = graph

    def _attach(self) -> None:
        """Gradients live where they were at capture; those set to None since then start at zero."""
        dropped = [(p, own) for p, own in zip(self.parameters, self.gradients, strict=True) if p.grad is not own]
        if dropped:
            torch._foreach_zero_([own for _, own in dropped])
        for parameter, own in dropped:
            parameter.grad = own
