"""A Llama's backbone with memory, as a mixin: embedding, layers, norm; for whole samples and streams of any length."""

from collections.abc import Collection
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import can_return_tuple

from elastic_memory.memory.tools import static
from elastic_memory.model.rope import Rope
from elastic_memory.shapes import Float, Int, Tensor
from elastic_memory.streaming.cache import MemoryCache
from elastic_memory.streaming.packing import from_mask, from_positions
from elastic_memory.streaming.reader import whole_calls
from elastic_memory.streaming.unread import Call, unread_cache

# What a mixin is mixed into: a model of transformers, of whichever family.
Mixed: Any = object


class MemoryBackbone(Mixed):
    """Mixin for `LlamaModel` and its kind: embedding, layers with memory, norm."""

    def rope(self, size: int = 0) -> Rope:
        """Rotary positions of this model, with a table for blocks of `size` tokens."""
        device = next(self.rotary_emb.buffers()).device  # embeddings may be offloaded: ask the rotary tables
        return Rope(self.rotary_emb, self.embed_tokens.weight.new_empty((), device=device), size=size)

    def offloaded(self) -> bool:
        """Whether accelerate fetches weights when modules are called, which no captured step can do."""
        parts = [self.embed_tokens, self.norm, *(layer.self_attn.o_proj for layer in self.layers)]
        return any(hasattr(part, "_hf_hook") for part in parts)

    @whole_calls
    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "batch column"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: MemoryCache | None = None,
        inputs_embeds: Float[Tensor, "batch column width"] | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | Collection[int] | None = None,
        keep: int = 0,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of every column, or of the last `keep`.

        `output_hidden_states` may list layers, as in transformers: theirs are returned, and None for the others.
        `attention_mask` says which columns are real (left or right padding alike). Without a cache, `position_ids` that
        start again at 0 separate packed documents; with one they are ignored, as each row has its own clock.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        source: Any = input_ids if input_ids is not None else inputs_embeds
        _refuse(self.config, source, attention_mask, kwargs)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if use_cache and past_key_values is None:
            past_key_values = MemoryCache(self)
        if past_key_values is not None:
            tokens = input_ids, inputs_embeds, attention_mask
            return self._stream(past_key_values, tokens, keep, output_hidden_states)
        static(source.shape[1])  # a compiled graph is for one length: blocks and operators depend on it
        rows = None
        position_ids = of_each_row(position_ids, source)
        if position_ids is not None:
            rows = from_positions(position_ids, attention_mask)
        if rows is None and attention_mask is not None:
            rows = from_mask(attention_mask[:, -source.shape[1] :])
        source = rows.align(source) if rows else source
        hidden = self.residual(self.embed_tokens(source) if input_ids is not None else source)
        every = []
        positions = [layer.positions(hidden.shape[1]) for layer in self.layers]
        before, behind = (max(counts) for counts in zip(*positions, strict=True))
        # `Rope` needs the type and device of `hidden` only; compiled graphs would also depend on its length.
        rope = Rope(self.rotary_emb, hidden.new_empty(()), before, behind)
        if output_hidden_states:
            for layer in self.layers:
                every.append(rows.restore(hidden) if rows else hidden)
                hidden = layer(rows.align(every[-1]) if rows else hidden, rope)  # gradients reach what is returned
        else:
            hidden = self.run_layers(hidden, rope)
        hidden = self.last_norm(hidden)
        if rows:
            hidden = rows.restore(hidden)
        states = _chosen([*every, hidden], output_hidden_states)
        cache = unread_cache(self, use_cache, Call(input_ids, inputs_embeds, attention_mask, position_ids))
        return BaseModelOutputWithPast(last_hidden_state=hidden[:, -keep:], past_key_values=cache, hidden_states=states)

    def _stream(
        self, cache: Any, tokens: tuple[Tensor | None, ...], keep: int, output_hidden_states: bool | Collection[int]
    ) -> BaseModelOutputWithPast:
        """`forward` for the next tokens of a cache."""
        if not isinstance(cache, MemoryCache):
            raise ValueError(f"past_key_values is a {type(cache).__name__}; this model needs a MemoryCache(model)")
        every = cache.feed(self, *tokens, 0 if output_hidden_states else keep, bool(output_hidden_states))
        states = _chosen(every, output_hidden_states)
        return BaseModelOutputWithPast(
            last_hidden_state=every[-1][:, -keep:], past_key_values=cache, hidden_states=states
        )

    def residual(self, embeddings: Float[Tensor, "batch token width"]) -> Float[Tensor, "batch token width"]:
        """The residual stream: bf16 under bf16 autocast, as float32 would double the memory traffic.

        Attached models keep the precision they were trained with.
        """
        if getattr(self.config, "residual_in_fp32", True) or embeddings.is_meta:
            return embeddings
        device = embeddings.device.type
        narrow = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
        return embeddings.bfloat16() if narrow else embeddings

    def run_layers(self, hidden: Float[Tensor, "batch token width"], rope: Rope) -> Float[Tensor, "batch token width"]:
        """One layer after the other; `compile_blocks` may replace this."""
        for layer in self.layers:
            hidden = layer(hidden, rope)
        return hidden

    def last_norm(self, hidden: Float[Tensor, "batch token width"]) -> Float[Tensor, "batch token width"]:
        """The norm behind the layers; `compile_blocks` may replace this."""
        return self.norm(hidden)


def check_mask(mask: Tensor, rows: int, columns: int, before: int | None = None) -> None:
    """Refuse a mask that fits neither the new tokens nor all of them; `before`: those read earlier, if known."""
    fits = mask.ndim == 2 and mask.shape[0] == rows and mask.shape[1] >= columns
    if not fits or (before is not None and mask.shape[1] not in (columns, before + columns)):
        after = f" after {before}" if before else ""
        raise ValueError(
            f"attention_mask of shape {list(mask.shape)} for {rows} rows of {columns} tokens{after}: give [batch, "
            "column], with a column for each new token, or for all that were read before, too"
        )


def of_each_row(position_ids: Tensor | None, source: Tensor) -> Int[Tensor, "batch column"] | None:
    """Positions as [batch, column]; a single row of them is for all rows, as in transformers."""
    if position_ids is None:
        return None
    if position_ids.shape not in (source.shape[:2], (1, source.shape[1])):
        raise ValueError(
            f"position_ids of shape {list(position_ids.shape)} for tokens of shape {list(source.shape[:2])}: give "
            "[batch, column], or [1, column] for all rows"
        )
    return position_ids.expand(source.shape[:2])


def check_columns(source: Tensor) -> None:
    """Refuse tokens without an axis of rows, and calls without tokens."""
    if source.ndim < 2:
        raise ValueError(f"tokens of shape {list(source.shape)}: give [batch, column], such as ids[None] for one row")
    if source.shape[1] == 0:
        raise ValueError("no tokens: give at least one column")


def _refuse(config: Any, source: Any, mask: Tensor | None, options: dict[str, Any]) -> None:
    """Refuse arguments that would have to be ignored."""
    if options.get("output_attentions", config.output_attentions):
        raise ValueError("output_attentions: fused attention kernels do not return their weights")
    if not options.get("is_causal", True):
        raise ValueError("is_causal=False: a memory holds what came before, so tokens see no later ones")
    check_columns(source)
    if mask is not None:
        check_mask(mask, *source.shape[:2])


def _chosen(every: list[Tensor], asked: bool | Collection[int]) -> tuple[Tensor | None, ...] | None:
    """The hidden states that were asked for: all, the embeddings first, or those that some layers return."""
    if isinstance(asked, Collection) and asked:
        return tuple(state if layer in asked else None for layer, state in enumerate(every[1:]))
    return tuple(every) if asked else None
