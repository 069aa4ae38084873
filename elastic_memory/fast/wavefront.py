"""Layers of sequential memories as a wavefront: several layers run together, each on another block.

A block depends on itself in the layer below and on the block before it in the same layer. So the blocks on a diagonal
of layers and blocks do not depend on each other, and run as rows of one batch, each with the weights of its own layer.
One block's tokens would leave a GPU idle. A layer that has done all blocks is replaced by the next one, so that nearly
all groups have the same size.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.module import _has_any_global_hook

from elastic_memory.common.hooks import has_hooks
from elastic_memory.fast.compiled import compiled
from elastic_memory.memory import State, SummaryTokenMemory
from elastic_memory.model.backbone import MemoryBackbone
from elastic_memory.model.layer import MemoryLayer
from elastic_memory.model.rope import Rope
from elastic_memory.shapes import Float, Tensor

TOKENS = 49152  # of all layers in a group: enough to keep a large GPU busy

MEMORY = "self_attn.memory."
BEFORE, BETWEEN = "input_layernorm.weight", "post_attention_layernorm.weight"
# Projections, and the norms before them.
PROJECTIONS = {f"self_attn.{name}_proj.weight": BEFORE for name in "qkv"} | {"self_attn.o_proj.weight": None}
PROJECTIONS |= {"mlp.gate_proj.weight": BETWEEN, "mlp.up_proj.weight": BETWEEN, "mlp.down_proj.weight": None}


class Wavefront:
    """Runs whole samples through the layers of a backbone: all at once if it `fits`, else one after the other."""

    def __init__(self, layer: MemoryLayer, **options: Any):
        self.shapes, self.template = _shapes(layer), _Template(layer)
        self.run, self.add, self.join = (compiled(function, **options) for function in (_run_group, _add, _join))

    def fits(self, layers: Sequence[MemoryLayer], hidden: Float[Tensor, "batch token width"]) -> bool:
        """Whether a wavefront is faster for this batch, and the layers are still those it was built for."""
        (rows, length, _), size = hidden.shape, layers[0].locality.block_size
        gains = rows > 0 and length % size == 0 and length >= 3 * size and 2 * rows * size <= TOKENS
        if not gains or hidden.is_meta or not supports(layers):
            return False
        return _shapes(layers[0]) == self.shapes and type(layers[0].memory) is type(self.template.layer.memory)

    def __call__(
        self, backbone: Any, hidden: Float[Tensor, "batch token width"], rope: Rope
    ) -> Float[Tensor, "batch token width"]:
        """The output of the last layer."""
        if not self.fits(backbone.layers, hidden):
            return MemoryBackbone.run_layers(backbone, hidden, rope)
        return self.wave(backbone.layers, hidden, rope)

    def wave(
        self, layers: Sequence[MemoryLayer], hidden: Float[Tensor, "batch token width"], rope: Rope
    ) -> Float[Tensor, "batch token width"]:
        """Blocks of different layers as rows of one batch."""
        rows, memories = len(hidden), [layer.memory for layer in layers]
        stacks, shared = _stacks([dict(layer.named_parameters()) for layer in layers], hidden), _Shared(self.add)
        blocks = [*_blocks(hidden, layers[0].locality.block_size)]  # each after the layers it has passed
        states = [memory.start(rows, hidden.device) for memory in memories]
        first = 0 if memories[0].reads_start else 1
        if first:  # block 0 reads nothing: another graph, and all layers in sequence
            for index, layer in enumerate(layers):
                output, state = layer.one_block(blocks[0], rope, states[index], 0, False, True)
                blocks[0], states[index] = _contiguous_copy(output), memories[index].cut(state, 1)
        many = group_size(len(layers), blocks[0][..., 0].numel())
        for step in _schedule(len(layers), range(first, len(blocks)), many):
            for group in _pieces(list(step), many):
                own, numbers = slice(group[0], group[-1] + 1), [step[index] for index in group]
                taken = [blocks[number] for number in numbers]
                output, written = self.run(self.template, shared.take(stacks, own), taken, rope, states[own])
                # Split outside the compiled graph, which would return each gradient as large as all of them.
                outputs = _SplitRows.apply(self.join, rows, output)
                parts = zip(*(part.split(rows) for part in written), strict=True)
                for index, number, own_output, state in zip(group, numbers, outputs, parts, strict=True):
                    blocks[number], states[index] = own_output, memories[index].cut(state, number + 1)
        return _Whole.apply(*blocks)


def group_size(layers: int, tokens: int) -> int:
    """Layers per group, if a block has so many tokens in all rows together; groups have about equal sizes."""
    groups = -(-layers // max(TOKENS // tokens, 1))
    return -(-layers // groups)


def _schedule(layers: int, blocks: range, many: int) -> Iterator[dict[int, int]]:
    """Steps of the wavefront: which block each of `many` neighbouring layers takes, as {layer: block}."""
    period = max(len(blocks), many)  # after which the next layers start
    starts = [index // many * period + index % many for index in range(layers)]
    for step in range(starts[-1] + len(blocks)):
        yield {index: blocks[step - start] for index, start in enumerate(starts) if 0 <= step - start < len(blocks)}


def supports(layers: Sequence[MemoryLayer]) -> bool:
    """Whether these are identical layers of sequential memories, of supported parts, without hooks."""
    memory, shapes = layers[0].memory, _shapes(layers[0])
    known = {name for name in shapes if not name.startswith(MEMORY)} == {*PROJECTIONS, BEFORE, BETWEEN}
    by_row = isinstance(memory, SummaryTokenMemory) and memory.per_row_parameters
    if not by_row or not known or len(layers) < 2 or _has_any_global_hook():
        return False
    return all(_plain(layer) and type(layer.memory) is type(memory) and _shapes(layer) == shapes for layer in layers)


def _plain(layer: MemoryLayer) -> bool:
    """Whether a layer is an unmodified `MemoryLayer` of supported parts: no probe, hooks or gradient checkpointing."""
    if type(layer) is not MemoryLayer or layer.self_attn.corrupt is not None:
        return False
    if layer.gradient_checkpointing and layer.training:
        return False
    if any(type(layer.get_submodule(name.removesuffix(".weight"))) is not nn.Linear for name in PROJECTIONS):
        return False
    if not all(_scales(type(norm)) for norm in (layer.input_layernorm, layer.post_attention_layernorm)):
        return False
    return not any("forward" in vars(part) or has_hooks(part) for part in layer.modules())


@lru_cache
def _scales(kind: type[nn.Module]) -> bool:
    """Whether a norm of this kind multiplies by its weight itself, not by 1 + weight or the like."""
    try:
        with torch.device("cpu"), torch.no_grad():
            norm: Any = kind(4)
            x = torch.tensor([[1.0, -2.0, 3.0, 0.5]])
            norm.weight.fill_(1)
            once = norm(x)
            norm.weight.fill_(3)
            thrice = norm(x)
    except Exception:  # another constructor: not a supported norm
        return False
    return torch.allclose(thrice, 3 * once)


def _stacks(weights: list[dict[str, Tensor]], like: Tensor) -> dict[str, Tensor]:
    """Weights of all layers stacked, once for all groups; projections in the precision of products.

    A norm's weight is multiplied into the projections behind it: fewer products than with all tokens.
    """
    device, dtype = like.device.type, weights[0][BEFORE].dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:  # which autocast leaves alone
        dtype = torch.get_autocast_dtype(device)
    stacks = {name: torch.stack([own[name] for own in weights]) for name in weights[0]}
    norms = {name: stacks.pop(name)[:, None] for name in (BEFORE, BETWEEN)}
    for name, norm in PROJECTIONS.items():
        stacks[name] = (stacks[name] if norm is None else stacks[name] * norms[norm]).to(dtype)
    return stacks


class _Shared:
    """Sums the gradients of stacked weights over the groups that use slices of them; returned with the last group."""

    def __init__(self, accumulate: Callable[[list[Tensor], list[Tensor]], None]) -> None:
        self.accumulate = accumulate
        self.taken = 0
        self.arrived: set[int] = set()  # groups whose gradients are in the sums
        self.sums: dict[int, Tensor] = {}

    def take(self, stacks: dict[str, Float[Tensor, "layer ..."]], own: slice) -> dict[str, Tensor]:
        """The weights of some layers, for one group."""
        self.taken += 1
        return dict(zip(stacks, _Slices.apply(self, self.taken, own, *stacks.values()), strict=True))

    def add(self, number: int, own: slice, shapes: list[torch.Size], gradients: Sequence[Any]) -> list[Tensor | None]:
        """Add the gradients of one group, in float32 at least. Returns the sums if it was the last group, else None."""
        if number in self.arrived:  # a second backward pass, after one that failed
            self.arrived, self.sums = set(), {}
        self.arrived.add(number)
        given = {index: gradient for index, gradient in enumerate(gradients) if gradient is not None}
        for index, gradient in given.items():
            if index not in self.sums:
                precise = torch.promote_types(gradient.dtype, torch.float32)
                self.sums[index] = gradient.new_zeros(shapes[index], dtype=precise)
        if given:
            self.accumulate([self.sums[index][own] for index in given], list(given.values()))
        if len(self.arrived) < self.taken:
            return [None] * len(shapes)
        sums, self.arrived, self.sums = self.sums, set(), {}
        return [sums.get(index) for index in range(len(shapes))]


class _Slices(torch.autograd.Function):
    """Slices of stacked weights. Autograd itself would sum gradients as large as the stacks, mostly zeros."""

    @staticmethod
    def forward(ctx: Any, shared: _Shared, number: int, own: slice, *stacks: Tensor) -> tuple[Tensor, ...]:
        ctx.shared, ctx.number, ctx.own = shared, number, own
        ctx.shapes = [stack.shape for stack in stacks]
        ctx.set_materialize_grads(False)
        slices = tuple(stack.detach()[own] for stack in stacks)
        trained = ctx.needs_input_grad[3:]
        ctx.mark_non_differentiable(*(part for part, needed in zip(slices, trained, strict=True) if not needed))
        return slices

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        return None, None, None, *ctx.shared.add(ctx.number, ctx.own, ctx.shapes, gradients)


def _add(sums: list[Tensor], gradients: list[Tensor]) -> None:
    for own, gradient in zip(sums, gradients, strict=True):
        own += gradient


def _blocks(x: Float[Tensor, "batch token width"], size: int) -> tuple[Float[Tensor, "batch size width"], ...]:
    """Blocks in one memory layout whatever the sample's length: each layout would need a graph of its own."""
    return _contiguous_copy(x.unflatten(1, (-1, size)).transpose(0, 1)).unbind()


class _Whole(torch.autograd.Function):
    """Concatenates blocks. Their gradients are laid out as blocks, too."""

    @staticmethod
    def forward(ctx: Any, *blocks: Tensor) -> Tensor:
        ctx.size = blocks[0].shape[1]
        return torch.cat(blocks, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return _blocks(gradient, ctx.size)


class _SplitRows(torch.autograd.Function):
    """Splits the rows of a group by layer. The gradients are concatenated by one compiled kernel."""

    @staticmethod
    def forward(ctx: Any, join: Callable[[list[Tensor]], Tensor], rows: int, x: Tensor) -> tuple[Tensor, ...]:
        ctx.join = join
        return x.split(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:  # type: ignore[override]
        return None, None, gradients[0] if len(gradients) == 1 else ctx.join(list(gradients))


def _join(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts)


class _Template(nn.Module):
    """A layer that takes its weights as arguments, those of several layers at once."""

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
    """Multiplies the rows of several layers, each by the weight of its own layer."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, x: Float[Tensor, "row token width"]) -> Float[Tensor, "row token out"]:
        # Split and merged in two steps each: of one combined step, the compiler does not see that nothing is copied.
        by_layer = x.unflatten(0, (len(self.weight), -1)).to(self.weight.dtype)
        product = _Product.apply(by_layer.flatten(1, 2), self.weight)
        return product.unflatten(1, by_layer.shape[1:3]).flatten(0, 1)


class _Product(torch.autograd.Function):
    """x W^T by layer. The gradient of the weights has their memory layout; autograd's would be transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.bmm(x, weight.mT)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return torch.bmm(gradient, weight), torch.bmm(gradient.mT, x)


def _run_group(
    template: _Template,
    stacks: dict[str, Tensor],
    blocks: list[Tensor],
    rope: Rope,
    states: list[State],
) -> tuple[Tensor, State]:
    """One block in each layer of a group, as rows of one batch: outputs, and states after it."""
    rows, one = len(blocks[0]), blocks[0].new_ones(())
    # Memory parameters repeated for each row, so that the memory need not know of layers.
    by_row = {name: own.repeat_interleave(rows, dim=0) for name, own in stacks.items() if name.startswith(MEMORY)}
    given = stacks | by_row | {BEFORE: one, BETWEEN: one}
    given = {f"layer.{name}": weight for name, weight in given.items()}
    state = tuple(torch.cat(parts) for parts in zip(*states, strict=True))
    # The last block writes too, although nobody reads it: one graph for all blocks.
    output, state = functional_call(template, given, (torch.cat(blocks), rope, state, 0, True, True))
    return _contiguous_copy(output), state


def _contiguous_copy(x: Tensor) -> Tensor:
    """A contiguous copy; `contiguous` would keep the strides of a single row."""
    return x.clone(memory_format=torch.contiguous_format)


def _pieces(items: list[int], most: int) -> Iterator[list[int]]:
    """Groups of neighbours: `most` of them, or 1, 2, 4, ..., so that few sizes have to be compiled."""
    while items:
        count = most if len(items) >= most else 1 << (len(items).bit_length() - 1)
        yield items[:count]
        items = items[count:]


def _shapes(layer: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in layer.named_parameters()}
