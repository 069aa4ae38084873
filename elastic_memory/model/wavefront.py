"""Layers whose memories go block by block, several of them at once.

A block waits for itself in the layer before, and for the block before it in the same layer. So the blocks on a diagonal
of layers and blocks wait for nobody, and go together: as rows of one batch, each with the weights of its own layer.
Instead of one block's tokens at a time, a GPU gets as many as it needs to be busy.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from elastic_memory.memory import State
from elastic_memory.model.compilation import compiled
from elastic_memory.model.layer import MemoryLayer, Rope
from elastic_memory.shapes import Float, Tensor

TOKENS = 32768  # of all layers that go together; with more, a GPU is as busy as with these

MEMORY = "self_attn.memory."
PROJECTIONS = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
PROJECTIONS += [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]


class Wavefront:
    """Whole samples through layers that are alike; `fits` says whether it can take them now."""

    def __init__(self, layers: Sequence[MemoryLayer], **options: Any):
        self.layers = layers
        self.shapes = _shapes(layers[0])
        self.template = _Template(layers[0])
        self.run = compiled(_together, **options)

    @staticmethod
    def applies(layers: Sequence[MemoryLayer]) -> bool:
        """Whether layers are alike, of the parts that are known here, and have to wait for blocks at all."""
        memory, shapes = layers[0].memory, _shapes(layers[0])
        alike = all(type(layer.memory) is type(memory) and _shapes(layer) == shapes for layer in layers)
        known = {name for name in shapes if not name.startswith(MEMORY)} == {*PROJECTIONS, *NORMS}
        return alike and known and memory.by_row and not memory.parallel and len(layers) > 1

    def fits(self, hidden: Float[Tensor, "batch token width"]) -> bool:
        """Whether there is something to gain, and nobody has changed the layers, looks into them or recomputes them."""
        size = self.layers[0].locality.block_size
        if hidden.shape[1] % size or hidden.shape[1] < 3 * size or 2 * len(hidden) * size > TOKENS:
            return False
        apart = [
            layer.self_attn.corrupt is not None
            or (layer.gradient_checkpointing and layer.training)
            or any(part._forward_hooks or part._forward_pre_hooks for part in layer.modules())
            or _shapes(layer) != self.shapes
            for layer in self.layers
        ]
        return not any(apart)

    def __call__(self, hidden: Float[Tensor, "batch token width"], rope: Rope) -> Float[Tensor, "batch token width"]:
        """What leaves the last layer."""
        layers, memories = self.layers, [layer.memory for layer in self.layers]
        weights = [dict(layer.named_parameters()) for layer in layers]
        stacks = self._stacks(weights, hidden)
        # Each as far as it has come; all of one layout, as each layout would be compiled.
        blocks = [block.contiguous() for block in hidden.split(layers[0].locality.block_size, dim=1)]
        states = [memory.start(len(hidden), hidden.device) for memory in memories]
        first = 0 if memories[0].reads_start else 1
        if first:  # block 0 reads nothing, so it waits for nobody and is of another shape
            for index, layer in enumerate(layers):
                output, state = layer.one_block(blocks[0], rope, states[index], 0, False, True)
                blocks[0], states[index] = output.contiguous(), memories[index].cut(state, 1)
        for step in range(first, len(blocks) + len(layers) - 1):
            ready = [index for index in range(len(layers)) if first <= step - index < len(blocks)]
            for group in _pieces(ready, TOKENS // blocks[0][..., 0].numel()):
                turn, own = [step - index for index in group], slice(group[0], group[-1] + 1)
                slices = {name: stack[own] for name, stack in stacks.items()}
                taken = [blocks[block] for block in turn]
                outputs, written = self.run(self.template, slices, weights[own], taken, rope, states[own])
                for index, block, output, state in zip(group, turn, outputs, written, strict=True):
                    blocks[block], states[index] = output, memories[index].cut(state, block + 1)
        return torch.cat(blocks, dim=1)

    @staticmethod
    @torch.no_grad()  # gradients go to each layer's own
    def _stacks(weights: list[dict[str, Tensor]], like: Tensor) -> dict[str, Tensor]:
        """The projections of all layers, once for all groups, which take slices; as precise as products will be."""
        device, dtype = like.device.type, weights[0][PROJECTIONS[0]].dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        return {name: torch.stack([own[name].to(dtype) for own in weights]) for name in PROJECTIONS}


class _Template(nn.Module):
    """A layer whose weights are given with every call, those of several layers at once."""

    def __init__(self, layer: MemoryLayer):
        super().__init__()
        self.layer = copy.deepcopy(layer).to("meta")
        for part in (self.layer.self_attn, self.layer.mlp):
            for name, child in part.named_children():
                if isinstance(child, nn.Linear):
                    setattr(part, name, _Projection(child.weight))

    def forward(self, *args: Any) -> tuple[Tensor, State]:
        return MemoryLayer.one_block(self.layer, *args)


class _Projection(nn.Module):
    """Rows of several layers, each by the weight of its own layer."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, x: Float[Tensor, "row token width"]) -> Float[Tensor, "row token out"]:
        by_layer = x.reshape(len(self.weight), -1, x.shape[-1]).to(self.weight.dtype)
        return _Product.apply(by_layer, self.weight).view(*x.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """x W^T, layer by layer. The gradient of weights comes as they lie in memory; autograd would have it transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.bmm(x, weight.mT)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return torch.bmm(gradient, weight), torch.bmm(gradient.mT, x)


class _Shared(torch.autograd.Function):
    """A slice of a stack, whose gradient goes to the layers' own weights."""

    @staticmethod
    def forward(ctx: Any, stack: Tensor, *own: Tensor) -> Tensor:
        ctx.dtype = own[0].dtype
        return stack.view_as(stack)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *gradient.to(ctx.dtype).unbind()


def _together(
    template: _Template,
    stacks: dict[str, Tensor],
    weights: list[dict[str, Tensor]],
    blocks: list[Tensor],
    rope: Rope,
    states: list[State],
) -> tuple[list[Tensor], list[State]]:
    """A block in each of some layers, as rows of one batch: its output, and the state after it."""
    rows, given = len(blocks[0]), {}
    for name in weights[0]:
        own = [weight[name] for weight in weights]
        if name not in stacks:
            given[f"layer.{name}"] = _by_row(name, own, rows)
        else:  # without gradients, torch's compiler takes a function of any number of arguments for one without context
            given[f"layer.{name}"] = _Shared.apply(stacks[name], *own) if torch.is_grad_enabled() else stacks[name]
    state = tuple(torch.cat(parts) for parts in zip(*states, strict=True))
    # A last block writes too, to no purpose: it is then the same function as all others.
    output, state = functional_call(template, given, (torch.cat(blocks), rope, state, 0, True, True))
    return _apart(output, rows), list(zip(*(_apart(part, rows) for part in state), strict=True))


def _by_row(name: str, own: list[Tensor], rows: int) -> Tensor:
    """What is small, for each row: whatever uses it then need not know of layers."""
    weight = torch.stack(own).repeat_interleave(rows, dim=0)
    return weight[:, None] if name in NORMS else weight


def _apart(x: Tensor, rows: int) -> list[Tensor]:
    """Each layer's rows, as tensors of their own: a view's gradient would be as large as what it is a view of."""
    return [part.clone(memory_format=torch.contiguous_format) for part in x.split(rows)]


def _pieces(items: list[int], most: int) -> Iterator[list[int]]:
    """Neighbours, 1, 2, 4, ... of them, so that few numbers have to be compiled."""
    while items:
        count = 1 << (min(len(items), max(most, 1)).bit_length() - 1)
        yield items[:count]
        items = items[count:]


def _shapes(layer: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in layer.named_parameters()}
