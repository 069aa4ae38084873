"""`model.compile_blocks()`: training by compiled layers, several at once for memories that read block by block."""

from functools import partial
from types import MethodType
from typing import Any

from elastic_memory.fast import decoder
from elastic_memory.fast.compiled import compiled
from elastic_memory.fast.wavefront import Wavefront, supports
from elastic_memory.memory import ParallelMemory
from elastic_memory.model.backbone import MemoryBackbone
from elastic_memory.model.layer import MemoryLayer
from elastic_memory.model.loss import next_token_loss, summed_loss


def compile_blocks(model: Any, **options: Any) -> None:
    """Compile each layer, the last norm, the loss, and what a static cache runs for one token."""
    # Decoding steps have any number of rows, and no `mode`: the decoder itself captures them.
    steps = {"dynamic": None} | {name: value for name, value in options.items() if name != "mode"}
    options = {"fullgraph": True, "dynamic": False} | options
    backbone = model.base_model
    vars(backbone).pop("run_layers", None)  # of an earlier call, perhaps with other layers
    # Bound to the instance after compilation, so that a copy of the model has its own.
    if supports(backbone.layers):
        backbone.run_layers = MethodType(Wavefront(backbone.layers[0], **options), backbone)
    for layer in backbone.layers:
        # Of a loop over blocks only the body: unrolled it would be one long graph.
        name = "blocks" if isinstance(layer.memory, ParallelMemory) else "one_block"
        setattr(layer, name, MethodType(compiled(getattr(MemoryLayer, name), **options), layer))
        for function in (decoder.before_attention, decoder.after_attention):
            setattr(layer, function.__name__, MethodType(compiled(function, **steps), layer))
    backbone.last_norm = MethodType(compiled(MemoryBackbone.last_norm, **options), backbone)
    model._loss = partial(next_token_loss, summed=compiled(summed_loss, **options))
