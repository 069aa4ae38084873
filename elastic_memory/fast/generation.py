"""`generate` by captured steps: the next token is computed while the CPU still asks whether the last one was the end.

The loop of transformers, for greedy decoding and sampling, with the same processors, criteria and random numbers. It
waits for the GPU once per token, and not for the step that was started ahead; if no further token is wanted, that step
is taken back.
"""

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from elastic_memory.common.hooks import has_hooks
from elastic_memory.shapes import Float, Int, Tensor
from elastic_memory.streaming.cache import MemoryCache

DEVICES = ("cuda",)  # where captured steps are faster
PACKAGES = ("torch.nn.", "transformers.", "elastic_memory.")  # modules whose calls a graph may replace
# Processors that depend on the scores alone, so that a graph can hold them.
PURE = tuple(f"{name}LogitsWarper" for name in ("Temperature", "TopK", "TopP", "MinP", "Typical", "Epsilon", "Eta"))
RECORDED: dict[Any, "_Recorded"] = {}
ROOM = 1024  # tokens that the buffer of ids grows by, at least


def serves(model: Any, config: Any, synced_gpus: bool, cache: Any) -> bool:
    """Whether `sample` does what this call of `generate` asks for; if not on a GPU, the log says why."""
    if model.device.type not in DEVICES:
        return False
    reason = _obstacle(model, config, synced_gpus, cache)
    if reason is not None:
        _say_once(f"generate: decoding without CUDA graphs, several times slower: {reason}")
    return reason is None


@lru_cache
def _say_once(line: str) -> None:
    logging.getLogger("elastic_memory").warning(line)


def _obstacle(model: Any, config: Any, synced_gpus: bool, cache: Any) -> str | None:
    """Why captured steps cannot serve a call."""
    asked = [name for name in ("attentions", "hidden_states", "scores", "logits") if getattr(config, f"output_{name}")]
    if not isinstance(cache, MemoryCache):
        return "there is no cache"
    if cache.locality.kind == "full":
        return "full attention has no blocks of fixed size"
    if synced_gpus:
        return "synced_gpus: all processes take the same steps"
    if config.is_assistant:
        return "an assistant's tokens are taken back"
    if config.return_dict_in_generate and asked:
        return f"output_{asked[0]} was asked for"
    return _foreign_part(model.base_model)


def _foreign_part(backbone: Any) -> str | None:
    """The first module that does something in its call which a replayed graph would not do."""
    for name, module in backbone.named_modules():
        kind = type(module)
        if has_hooks(module) or hasattr(module, "_hf_hook"):
            return f"{name or 'the model'} has hooks"
        bases = (base for base in kind.__mro__ if base.__module__.startswith(PACKAGES))
        if kind.__module__ != "elastic_memory.model.attach" and next(bases, None) is not kind:
            return f"{name or 'the model'} is a {kind.__name__} of {kind.__module__}"
        if getattr(module, "corrupt", None) is not None:
            return f"{name} has a probe"
    return None


def sample(
    model: Any, ids: Int[Tensor, "row column"], processors: Any, criteria: Any, config: Any, streamer: Any, kwargs: dict
) -> Any:
    """Continue `ids` until `criteria` are met: what transformers' `_sample` returns, sooner."""
    outputs = model._prefill(ids, config, kwargs, is_first_iteration=True)
    cache, logits = outputs.past_key_values, outputs.logits[:, -1]
    del outputs
    choose = _chooser(processors, config.do_sample, logits)
    ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    unfinished = torch.ones(len(ids), dtype=torch.long, device=ids.device)
    growing, message = _Growing(ids), _Message(ids)
    with cache.captured():
        while True:
            chosen = choose(ids, logits)
            if ends:
                chosen = chosen * unfinished + config._pad_token_tensor * (1 - unfinished)
            ids = growing.append(chosen)
            unfinished = unfinished & ~criteria(ids, None)
            message.send(chosen, unfinished)
            ahead = cache.block_size not in cache.opened  # the end of a block cannot be taken back
            if ahead:
                logits = _step(model, cache, chosen)
            try:
                tokens, more = message.receive()
                if streamer is not None:
                    streamer.put(tokens)
            except BaseException:
                if ahead:
                    cache.rollback(1)
                raise
            if not more:
                break
            if not ahead:
                logits = _step(model, cache, chosen)
        if ahead:
            cache.rollback(1)
    if streamer is not None:
        streamer.end()
    if config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=ids, past_key_values=cache)
    return ids


def _chooser(processors: Any, sampled: bool, logits: Float[Tensor, "row token"]) -> Callable[..., Int[Tensor, " row"]]:
    """The function (ids, logits) -> next tokens; a CUDA graph if the processors depend on the scores alone."""

    def choose(ids: Tensor | None, logits: Tensor) -> Tensor:
        scores = processors(ids, logits.to(torch.float32, copy=True))
        if sampled:
            return torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)
        return scores.argmax(dim=-1)

    if not sampled or not logits.is_cuda or not all(type(processor).__name__ in PURE for processor in processors):
        return choose
    settings = tuple((type(processor).__name__, repr(sorted(vars(processor).items()))) for processor in processors)
    key = settings, logits.shape, logits.dtype, logits.device
    recorded = RECORDED.pop(key, None) or _Recorded(choose, logits)
    RECORDED[key] = recorded  # newest last
    while len(RECORDED) > 4:
        RECORDED.pop(next(iter(RECORDED)))
    return recorded


class _Recorded:
    """A choice as a CUDA graph: sorting, cutting and drawing are many small kernels."""

    def __init__(self, choose: Callable[..., Tensor], logits: Float[Tensor, "row token"]):
        self.logits, self.graph = logits.clone(), torch.cuda.CUDAGraph()
        state, side = torch.cuda.get_rng_state(logits.device), torch.cuda.Stream(logits.device)
        with torch.cuda.device(logits.device):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                choose(None, self.logits)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(self.graph, stream=side):
                self.chosen = choose(None, self.logits)
        torch.cuda.set_rng_state(state, logits.device)  # as if nothing had been drawn

    def __call__(self, ids: Tensor, logits: Float[Tensor, "row token"]) -> Int[Tensor, " row"]:
        self.logits.copy_(logits)
        self.graph.replay()
        return self.chosen


def _step(model: Any, cache: MemoryCache, tokens: Int[Tensor, " row"]) -> Float[Tensor, "row token"]:
    """The logits after one more token of each row."""
    hidden = cache.whole_call(cache.feed, model.base_model, tokens[:, None], None, None, 1)[-1]
    return model.lm_head(hidden)[:, -1]


class _Growing:
    """Ids in a buffer with room for more, as copying them for every token takes long after a long prompt."""

    def __init__(self, ids: Int[Tensor, "row column"]):
        self.buffer, self.columns = ids, ids.shape[1]

    def append(self, chosen: Int[Tensor, " row"]) -> Int[Tensor, "row column"]:
        """All ids, the chosen ones last."""
        if self.columns == self.buffer.shape[1]:
            room = self.buffer.new_empty(len(self.buffer), max(ROOM, self.columns // 4))
            self.buffer = torch.cat((self.buffer, room), dim=1)
        self.buffer[:, self.columns] = chosen
        self.columns += 1
        return self.buffer[:, : self.columns]


class _Message:
    """Sends each token, and whether more are wanted, to the CPU without waiting for kernels that started later."""

    def __init__(self, ids: Int[Tensor, "row column"]):
        self.arrived: Any = torch.cuda.Event() if ids.is_cuda else None
        self.held = torch.empty(len(ids) + 1, dtype=torch.long, pin_memory=ids.is_cuda)

    def send(self, chosen: Int[Tensor, " row"], unfinished: Int[Tensor, " row"]) -> None:
        self.held.copy_(torch.cat((chosen, unfinished.amax(0, keepdim=True))), non_blocking=True)
        if self.arrived is not None:
            self.arrived.record(torch.cuda.current_stream(chosen.device))  # which need not be the current device

    def receive(self) -> tuple[Int[Tensor, " row"], bool]:
        """The chosen tokens, and whether more are wanted."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.held[:-1].clone(), bool(self.held[-1])
