"""Melodi inside each layer: summary tokens attend to the block, and a learned mixer of both makes the next memory."""

import torch
import torch.nn.functional as F
from torch import nn

from elastic_memory.memory.contract import Block, Geometry, Host, MemoryInfo, Reading, State, SummaryTokenMemory
from elastic_memory.memory.tools import one_of, wide
from elastic_memory.shapes import Float, Tensor


class MelodiMemory(SummaryTokenMemory):
    """Memory tokens of the residual stream, in front of the block; `order` of them, and as many summary tokens.

    Summary tokens u stand behind the block and see all of it; no token of the block sees them. The layer's outputs for
    block x and summaries u are mixed along the token axis into the memory of the next block: z = mix(rms([x; u])) + u.

    `first_block`: omit, or zeros to let block 0 attend to an empty memory. `summary_std`: initial size of the summary
    tokens; None: that of the token embeddings.
    """

    info = MemoryInfo(
        source="MELODI (arXiv 2410.03156), its propagation inside layers",
        phrase="summary tokens and a learned mixer of whole blocks",
        layers=lambda count: list(range(count)),
        # The paper counts both memory and summary tokens; together they are as large as Infini-Transformer's state.
        order_at=lambda multiple, geometry: multiple * geometry.head_dim // 2,
        paper_floats=lambda memory: 2 * memory,  # summary tokens count as state, although they are parameters
    )
    shares_softmax = True
    per_row_parameters = True
    no_join = "each summary depends on the one before it"
    no_sliding = "its mixer summarises disjoint blocks, and sliding windows overlap"

    def __init__(
        self,
        geometry: Geometry,
        *,
        order: int = 45,
        first_block: str = "omit",
        summary_std: float | None = None,
        detach_every: int | None = None,
    ):
        super().__init__(geometry, detach_every=detach_every)
        if order < 1:
            raise ValueError(f"{order} memory tokens: give an order (memory_order) from 1 on")
        self.order = self.front_size = order
        self.reads_start = one_of("first_block", first_block, ("omit", "zeros")) == "zeros"
        self.summary_std = geometry.initializer_range if summary_std is None else summary_std
        self.summary = nn.Parameter(torch.empty(order, geometry.width))
        self.mixer = Mixer(geometry.block_size + order, order)
        self._draw()

    def reset(self) -> None:
        """Mixer scaled by its inputs, so that a mixture is about as large as a token."""
        # One draw more than needed, as in earlier versions: a seed must keep giving the recorded weights.
        nn.init.normal_(self.mixer.weight)
        self._draw()

    def _draw(self) -> None:
        nn.init.normal_(self.summary, std=self.summary_std)
        nn.init.normal_(self.mixer.weight, std=self.mixer.weight.shape[-1] ** -0.5)
        nn.init.zeros_(self.mixer.bias)

    def start(self, batch: int, device: torch.device | str | None = None) -> State:
        """Memory tokens z, all zero."""
        return (torch.zeros(batch, self.order, self.geometry.width, device=device),)

    def front(self, state: State) -> Float[Tensor, "batch front width"]:
        """The memory tokens z."""
        return state[0]

    def tail(self) -> Float[Tensor, "tail width"]:
        """The summary tokens."""
        return self.summary

    def read(self, state: State, seen: int, host: Host) -> Reading:
        """The layer's own keys and values of z, at positions right before the block."""
        key, value = host.project(self.front(state))
        return host.rope(key, torch.arange(-self.order, 0, device=key.device)), value

    def write(self, state: State, block: Block, seen: int) -> State:
        """z = mix(rms([x; u])) + u; the old z enters only through attention."""
        context, summary = block.output, block.tail
        assert context is not None and summary is not None
        # The mixer's inputs are positions in the block (a short one has fewer) and positions among the summary tokens.
        # Two products instead of one of a concatenation, which would be a copy.
        of_block, of_summary = self.mixer.weight.split((self.geometry.block_size, self.order), dim=-1)
        mixed = of_block[..., : context.shape[1]] @ _rms(context) + of_summary @ _rms(summary)
        return (wide(mixed) + wide(self.mixer.bias)[..., None] + wide(summary),)


class Mixer(nn.Module):
    """Weight and bias along the token axis; not an `nn.Linear`, which adapters and quantisers would replace."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        linear = nn.Linear(inputs, outputs)
        self.weight, self.bias = linear.weight, linear.bias


def _rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-5)
