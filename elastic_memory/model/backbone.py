"""A Llama's backbone with memory, as a mixin: embedding, layers, norm; for whole samples and streams of any length."""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import can_return_tuple

from elastic_memory.attention import without_cudnn
from elastic_memory.fast.decoder import Decoder
from elastic_memory.fast.wavefront import Wavefront
from elastic_memory.memory.contract import constant
from elastic_memory.model.calls import whole_calls
from elastic_memory.model.rope import Rope
from elastic_memory.shapes import Float, Int, Tensor
from elastic_memory.streaming.cache import MemoryCache
from elastic_memory.streaming.packing import Rows, from_mask, from_positions
from elastic_memory.streaming.unread import Call, unasked

# What a mixin is mixed into: a model of transformers, of whichever family.
Mixed: Any = object


class MemoryBackbone(Mixed):
    """Mixin for `LlamaModel` and its kind: embedding, layers with memory, norm."""

    wavefront: Wavefront | None = None  # of a compiled model whose layers have to wait for blocks

    def rope(self, size: int = 0) -> Rope:
        """Rotary positions of this model, with a table for blocks of `size` tokens."""
        device = next(self.rotary_emb.buffers()).device  # embeddings may be offloaded
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
        _refuse(self.config, input_ids if input_ids is not None else inputs_embeds, attention_mask, kwargs)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        source: Any = input_ids if input_ids is not None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = MemoryCache(self)
        if past_key_values is not None:
            tokens, wanted = (input_ids, inputs_embeds, attention_mask), 0 if output_hidden_states else keep
            every = self.stream(*tokens, past_key_values, wanted, bool(output_hidden_states))
            return BaseModelOutputWithPast(
                last_hidden_state=every[-1][:, -keep:],
                past_key_values=past_key_values,
                hidden_states=_chosen(every, output_hidden_states),
            )

        length = constant(source.shape[1])  # blocks and operators depend on it
        rows = None
        if position_ids is not None and position_ids.shape == source.shape[:2]:
            rows = from_positions(position_ids, attention_mask)
        if rows is None and attention_mask is not None:
            rows = from_mask(attention_mask[:, -source.shape[1] :])
        source = rows.align(source) if rows else source
        hidden = self.residual(self.embed_tokens(source) if input_ids is not None else source)
        every = []
        length = hidden.shape[1] if rows else length
        # Its length would be one more that graphs depend on.
        like = hidden.new_empty(())
        before, behind = (max(ends) for ends in zip(*[layer.span(length) for layer in self.layers], strict=True))
        rope = Rope(self.rotary_emb, like, before, behind)
        if self.wavefront is not None and not output_hidden_states and self.wavefront.fits(self.layers, hidden):
            hidden = self.wavefront(self.layers, hidden, rope)
        else:
            for layer in self.layers:
                if output_hidden_states:
                    every.append(rows.restore(hidden) if rows else hidden)
                    hidden = rows.align(every[-1]) if rows else hidden  # gradients reach what is returned
                hidden = layer(hidden, rope)
        hidden = self.last_norm(hidden)
        if rows:
            hidden = rows.restore(hidden)
        states = _chosen([*every, hidden], output_hidden_states)
        cache = unasked(self, use_cache, Call(input_ids, inputs_embeds, attention_mask, position_ids))
        return BaseModelOutputWithPast(last_hidden_state=hidden[:, -keep:], past_key_values=cache, hidden_states=states)

    def residual(self, embeddings: Float[Tensor, "batch token width"]) -> Float[Tensor, "batch token width"]:
        """What layers add to: in bf16 under such an autocast, as float32 would double the traffic.

        Attached models keep what they were trained with.
        """
        if getattr(self.config, "residual_in_fp32", True) or embeddings.is_meta:
            return embeddings
        device = embeddings.device.type
        narrow = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
        return embeddings.bfloat16() if narrow else embeddings

    def last_norm(self, hidden: Float[Tensor, "batch token width"]) -> Float[Tensor, "batch token width"]:
        """The norm behind the layers; of its own, as training compiles it."""
        return self.norm(hidden)

    @torch.compiler.disable  # clocks and buffers are Python's; a compiled model streams as it is
    @torch.inference_mode(False)  # a cache filled in inference mode must be of use outside it
    @torch.no_grad()  # innermost: leaving inference mode would switch gradients on again
    def stream(
        self,
        ids: Tensor | None,
        embeds: Tensor | None,
        mask: Tensor | None,
        cache: MemoryCache,
        keep: int,
        every: bool = False,
    ) -> list[Float[Tensor, "batch column width"]]:
        """Feed the columns to each row's open block, closing blocks as they fill: constant memory for any length.

        Hidden states of the last `keep` columns: the last ones, or if asked `every` layer's, the embeddings first.
        """
        if not isinstance(cache, MemoryCache):
            raise ValueError(f"past_key_values is a {type(cache).__name__}; this model needs a MemoryCache(model)")
        if cache.owner is not self.layers:
            raise ValueError("past_key_values belongs to another model: save it, and load it with this one")
        ids = None if ids is None else ids.long()
        source: Any = ids if ids is not None else embeds
        batch, columns = source.shape[:2]
        cache.begin(batch, source.device)
        rows = _padded_rows(mask, columns)
        probed = any([attention.corrupt is not None for attention in cache.attentions])
        captured = cache.static and (cache.decoder is not None or not self.offloaded())
        if captured and columns == 1 and ids is not None and rows is None and not probed and not every:
            return [self._decode(ids, cache)]
        cache.mark()
        cache.decoding = False
        lengths = rows.lengths if rows else [columns] * batch
        # Of each row only the tokens among the last columns are wanted, those from `firsts` on.
        wanted = min(keep or columns, columns)
        tail = _padded_rows(mask, wanted)
        counts = tail.lengths if tail else [wanted] * batch
        firsts = [length - count for length, count in zip(lengths, counts, strict=True)]
        kept = [
            self.embed_tokens.weight.new_zeros(batch, wanted, self.config.hidden_size, device=source.device)
            for _ in range(1 + every * len(self.layers))
        ]
        aligned = rows.align(source) if rows else source
        rope = self.rope()
        cache.refresh(rope)

        done = [0] * batch
        while any(length > start for start, length in zip(done, lengths, strict=True)):
            self._close_full([length > start for start, length in zip(done, lengths, strict=True)], rope, cache)
            whole = 0 if probed else cache.whole_blocks([b - a for a, b in zip(done, lengths, strict=True)])
            takes = [
                whole * cache.block_size or min(cache.block_size - opened, length - start)
                for opened, start, length in zip(cache.opened, done, lengths, strict=True)
            ]
            piece = _cut(aligned, done, max(takes))
            hidden = self.residual(self.embed_tokens(piece) if ids is not None else piece)
            spans = list(zip(firsts, done, takes, strict=True))
            with without_cudnn():
                for index, state in enumerate(self._through_layers(hidden, takes, whole, rope, cache)):
                    if every or index == len(self.layers):
                        _keep(kept[index if every else 0], state, spans)
            known = piece if ids is not None else None
            if whole:
                cache.passed(whole, known)
            else:
                cache.advance(takes, known)
            done = [start + take for start, take in zip(done, takes, strict=True)]
        cache.columns += columns
        kept = [tail.restore(part) if tail else part for part in kept]
        return [*kept[:-1], self.norm(kept[-1])]

    def _through_layers(
        self, hidden: Tensor, takes: list[int], whole: int, rope: Rope, cache: MemoryCache
    ) -> Iterator[Float[Tensor, "batch token width"]]:
        """What enters each layer, and what leaves the last: of whole blocks of all rows, or tokens of open blocks."""
        segment = None if whole else cache.segment(takes, rope, hidden.device)
        rope = self.rope(cache.block_size) if whole else rope
        for layer, stream in zip(self.layers, cache.streams, strict=True):
            yield hidden
            hidden = layer(hidden, rope, stream, segment, cache.seen[0])
        yield hidden

    def _close_full(self, wanting: list[bool], rope: Rope, cache: MemoryCache) -> bool:
        """Fold the complete open blocks of rows that have more to read into memory."""
        groups = cache.full_rows(wanting)
        if groups:
            cache.record()
        for seen, full in groups.items():
            for layer, stream in zip(self.layers, cache.streams, strict=True):
                layer.close(rope, stream, full, seen, cache.block_size)
            cache.closed(full)
        return bool(groups)

    def _decode(self, ids: Int[Tensor, "batch 1"], cache: MemoryCache) -> Float[Tensor, "batch 1 width"]:
        """One token of each row by the cache's decoder, which is filled anew whenever blocks close."""
        ready = (
            cache.decoding and cache.decoder is not None and cache.decoder.settled == Decoder.conditions(self, cache)
        )
        if cache.decoder is None or not ready or cache.block_size in cache.opened:
            rope = self.rope()
            cache.mark()
            cache.refresh(rope)
            if self._close_full([True] * len(ids), rope, cache):
                cache.mark(anew=True)  # the decoder writes over the blocks that are in memory now
            cache.decoder = Decoder.fill(self, cache, ids, cache.decoder)
        hidden = cache.decoder(ids, max(cache.opened))
        cache.opened = [opened + 1 for opened in cache.opened]
        cache.columns += 1
        return hidden


def check_mask(mask: Tensor, rows: int, columns: int, before: int | None = None) -> None:
    """Refuse a mask that does not say of every token whether it is real.

    It may speak of tokens read before, too: of all of them, if it is known that there were `before`.
    """
    fits = mask.ndim == 2 and mask.shape[0] == rows and mask.shape[1] >= columns
    if not fits or (before is not None and mask.shape[1] not in (columns, before + columns)):
        after = f" after {before}" if before else ""
        raise ValueError(
            f"attention_mask of shape {list(mask.shape)} for {rows} rows of {columns} tokens{after}: give [batch, "
            "column], with a column for each new token, or for all that were read before, too"
        )


def _refuse(config: Any, source: Any, mask: Tensor | None, options: dict[str, Any]) -> None:
    """Refuse what would have to be ignored."""
    if options.get("output_attentions", config.output_attentions):
        raise ValueError("output_attentions: fused attention kernels do not return their weights")
    if not options.get("is_causal", True):
        raise ValueError("is_causal=False: a memory holds what came before, so tokens see no later ones")
    if source.shape[1] == 0:
        raise ValueError("no tokens: give at least one column")
    if mask is not None:
        check_mask(mask, *source.shape[:2])


def _chosen(every: list[Tensor], asked: bool | Collection[int]) -> tuple[Tensor | None, ...] | None:
    """The hidden states that were asked for: all, the embeddings first, or those that some layers return."""
    if isinstance(asked, Collection) and asked:
        return tuple(state if layer in asked else None for layer, state in enumerate(every[1:]))
    return tuple(every) if asked else None


def _padded_rows(mask: Tensor | None, columns: int) -> Rows | None:
    """The layout of the new columns, if any of them is padding."""
    if mask is None:
        return None
    new = mask[:, -columns:]
    return None if bool(new.all()) else from_mask(new)


def _cut(x: Tensor, starts: list[int], width: int) -> Tensor:
    """`width` tokens of each row from its own start; what lies behind a row's end repeats its last token."""
    if len(set(starts)) == 1:
        return x[:, starts[0] : starts[0] + width]
    places = torch.tensor(starts, device=x.device)[:, None] + torch.arange(width, device=x.device)
    return x[torch.arange(len(x), device=x.device)[:, None], places.clamp(max=x.shape[1] - 1)]


def _keep(kept: Tensor, hidden: Tensor, spans: list[tuple[int, int, int]]) -> None:
    """Copy into `kept` what is wanted of a piece: row by row (first wanted token, first token here, tokens here)."""
    for span in set(spans):
        first, start, take = span
        begin, end = max(first, start), start + take
        if begin < end:
            rows = slice(None) if len(set(spans)) == 1 else [row for row, own in enumerate(spans) if own == span]
            kept[rows, begin - first : end - first] = hidden[rows, begin - start : take].to(kept.dtype)
