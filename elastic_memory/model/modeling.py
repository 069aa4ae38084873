"""Llama, its layers replaced: `MemoryLlamaForCausalLM`, and two mixins that do the same for other such models."""

import copy
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import can_return_tuple

from elastic_memory.attention import without_cudnn
from elastic_memory.memory import MEMORIES, Memory
from elastic_memory.model.cache import MemoryCache
from elastic_memory.model.configuration import MemoryLlamaConfig, MemorySettings
from elastic_memory.model.decoder import Decoder
from elastic_memory.model.layer import MemoryLayer, Rope
from elastic_memory.model.loss import next_token_loss
from elastic_memory.model.padding import PaddedRotary, pad_heads
from elastic_memory.model.rows import Rows, from_mask, from_positions
from elastic_memory.shapes import Float, Int, Tensor

# Labelled calls longer than this compute the loss in pieces and return no logits: at 32,768 tokens and a vocabulary of
# 32,000 they would take 4 GiB.
LOGITS_AT_MOST = 8192


# What a mixin is mixed into: a model of transformers, of whichever family.
_Model: Any = object


class MemoryBackbone(_Model):
    """Mixin for `LlamaModel` and its kind: embedding, layers with memory, norm."""

    def rope(self) -> Rope:
        """Rotary positions of this model."""
        return Rope(self.rotary_emb, self.embed_tokens.weight)

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "batch column"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: MemoryCache | None = None,
        inputs_embeds: Float[Tensor, "batch column width"] | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        keep: int = 0,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of every column, or of the last `keep`.

        `attention_mask` says which columns are real (left or right padding alike). Without a cache, `position_ids` that
        start again at 0 separate packed documents; with one they are ignored, as each row has its own clock.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if kwargs.get("output_attentions"):
            raise ValueError("output_attentions: fused attention kernels do not return their weights")
        source: Any = input_ids if input_ids is not None else inputs_embeds
        if source.shape[1] == 0:
            raise ValueError("no tokens: give at least one column")
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError(f"attention_mask of shape {tuple(attention_mask.shape)}: give [batch, column]")
        if use_cache and past_key_values is None:
            past_key_values = MemoryCache(self._owner())
        if past_key_values is not None:
            if output_hidden_states:
                raise ValueError("output_hidden_states: a stream keeps none of them; call without a cache")
            hidden = self._stream(input_ids, inputs_embeds, attention_mask, past_key_values, keep)
            return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values)

        # A constant of a compiled graph, as blocks and operators demand: dynamo makes one of what `range` takes.
        length = len(range(source.shape[1]))
        rows = None
        if position_ids is not None and position_ids.shape == source.shape[:2]:
            rows = from_positions(position_ids, attention_mask)
        if rows is None and attention_mask is not None:
            rows = from_mask(attention_mask[:, -source.shape[1] :])
        source = rows.align(source) if rows else source
        hidden = self._residual(self.embed_tokens(source) if input_ids is not None else source)
        every = [hidden]
        length = hidden.shape[1] if rows else length
        rope = Rope(self.rotary_emb, hidden, max([layer.span(length) for layer in self.layers]))
        for layer in self.layers:
            hidden = layer(hidden, rope)
            every.append(hidden)
        hidden = self._last_norm(hidden)
        if rows:
            hidden = rows.restore(hidden)
        states = None
        if output_hidden_states:
            states = (*(rows.restore(x) if rows else x for x in every[:-1]), hidden)
        return BaseModelOutputWithPast(last_hidden_state=hidden[:, -keep:], hidden_states=states)

    def _residual(self, embeddings: Float[Tensor, "batch token width"]) -> Float[Tensor, "batch token width"]:
        """What layers add to: in bf16 under such an autocast, as float32 would double the traffic.

        Attached models keep what they were trained with.
        """
        if getattr(self.config, "residual_in_fp32", True) or embeddings.is_meta:
            return embeddings
        device = embeddings.device.type
        narrow = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
        return embeddings.bfloat16() if narrow else embeddings

    def _last_norm(self, hidden: Float[Tensor, "batch token width"]) -> Float[Tensor, "batch token width"]:
        return self.norm(hidden)

    def _owner(self) -> Any:
        """What a cache asks for its layers and parameters."""
        return self

    @torch.compiler.disable  # clocks and buffers are Python's; a compiled model streams as it is
    @torch.inference_mode(False)  # a cache filled in inference mode must be of use outside it
    @torch.no_grad()  # innermost: leaving inference mode would switch gradients on again
    def _stream(
        self, ids: Tensor | None, embeds: Tensor | None, mask: Tensor | None, cache: MemoryCache, keep: int
    ) -> Float[Tensor, "batch column width"]:
        """Feed the columns to each row's open block, closing blocks as they fill: constant memory for any length."""
        if not isinstance(cache, MemoryCache):
            raise ValueError(f"past_key_values is a {type(cache).__name__}; this model needs a MemoryCache(model)")
        ids = None if ids is None else ids.long()
        source: Any = ids if ids is not None else embeds
        batch, columns = source.shape[:2]
        cache.begin(batch, source.device)
        rows = _padded_rows(mask, columns)
        probed = any(layer.self_attn.corrupt is not None for layer in self.layers)
        if cache.static and columns == 1 and ids is not None and rows is None and not probed:
            return self._decode(ids, cache)
        cache.decoding = False
        lengths = rows.lengths if rows else [columns] * batch
        # Of each row only the tokens among the last columns are wanted, those from `firsts` on.
        wanted = min(keep or columns, columns)
        tail = _padded_rows(mask, wanted)
        counts = tail.lengths if tail else [wanted] * batch
        firsts = [length - count for length, count in zip(lengths, counts, strict=True)]
        weight = self.embed_tokens.weight
        kept = weight.new_zeros(batch, wanted, weight.shape[1])
        aligned = rows.align(source) if rows else source
        rope = Rope(self.rotary_emb, self.embed_tokens.weight)
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
            hidden = self._residual(self.embed_tokens(piece) if ids is not None else piece)
            with without_cudnn():
                hidden = self._several(hidden, cache) if whole else self._piece(hidden, takes, rope, cache)
            known = piece if ids is not None else None
            if whole:
                cache.passed(whole, known)
            else:
                cache.advance(takes, known)
            _keep(kept, hidden, list(zip(firsts, done, takes, strict=True)))
            done = [start + take for start, take in zip(done, takes, strict=True)]
        cache.columns += columns
        return self.norm(tail.restore(kept) if tail else kept)

    def _piece(self, hidden: Tensor, takes: list[int], rope: Rope, cache: MemoryCache) -> Tensor:
        """Some tokens of each row, inside its open block."""
        segment = cache.segment(takes, rope, hidden.device)
        for layer, stream in zip(self.layers, cache.streams, strict=True):
            hidden = layer(hidden, rope, stream, segment)
        return hidden

    def _several(self, hidden: Tensor, cache: MemoryCache) -> Tensor:
        """Whole blocks of all rows at once."""
        rope = Rope(self.rotary_emb, self.embed_tokens.weight, cache.block_size)
        for layer, stream in zip(self.layers, cache.streams, strict=True):
            hidden = layer.stream_blocks(hidden, rope, stream, cache.seen[0])
        return hidden

    def _close_full(self, wanting: list[bool], rope: Rope, cache: MemoryCache) -> bool:
        """Fold the complete open blocks of rows that have more to read into memory."""
        groups = cache.full_rows(wanting)
        if groups:
            cache.record()
        for seen, full in groups.items():
            for layer, stream in zip(self.layers, cache.streams, strict=True):
                layer.close(rope, stream, full, seen)
            cache.closed(full)
        return bool(groups)

    def _decode(self, ids: Int[Tensor, "batch 1"], cache: MemoryCache) -> Float[Tensor, "batch 1 width"]:
        """One token of each row by the cache's decoder, which is filled anew whenever blocks close."""
        ready = cache.decoding and cache.decoder is not None and cache.decoder.settled == Decoder.conditions(self)
        if cache.decoder is None or not ready or cache.block_size in cache.opened:
            rope = self.rope()
            cache.refresh(rope)
            self._close_full([True] * len(ids), rope, cache)
            cache.decoder = Decoder.fill(self, cache, ids, cache.decoder)
        hidden = cache.decoder(ids, max(cache.opened))
        cache.opened = [opened + 1 for opened in cache.opened]
        cache.columns += 1
        return hidden


def _padded_rows(mask: Tensor | None, columns: int) -> Rows | None:
    """The layout of the new columns, if any of them is padding."""
    if mask is None:
        return None
    if mask.shape[1] < columns:
        raise ValueError(f"attention_mask has {mask.shape[1]} columns for {columns} tokens: give one for each at least")
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


class MemoryCausalLM(_Model):
    """Mixin for `LlamaForCausalLM` and its kind: loss without logits, caches, retrieval settings, accounting."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "batch column"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: MemoryCache | None = None,
        inputs_embeds: Float[Tensor, "batch column width"] | None = None,
        labels: Int[Tensor, "batch column"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As every causal LM of transformers.

        Labelled calls longer than 8,192 tokens return `logits=None`, unless `logits_to_keep` asks for some.
        """
        if labels is not None and self.training and (past_key_values is not None or use_cache):
            raise ValueError("training reads whole samples, with memory inside the call: leave past_key_values out")
        if use_cache and past_key_values is None:
            past_key_values = MemoryCache(self)
        kept = logits_to_keep if isinstance(logits_to_keep, int) and labels is None else 0
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            keep=kept,
            return_dict=True,
            **kwargs,
        )
        hidden, loss, logits = outputs.last_hidden_state, None, None
        if labels is not None:
            targets = _predictable(labels, attention_mask, position_ids)
            loss = self._loss(hidden, self.lm_head.weight, targets, num_items_in_batch)
        asked = not isinstance(logits_to_keep, int) or logits_to_keep > 0
        if labels is None or asked or hidden.shape[0] * hidden.shape[1] <= LOGITS_AT_MOST:
            wanted = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, wanted])
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )

    def compile_blocks(self, **options: Any) -> None:
        """Compile training and the single steps of static caches; layers that are alike share graphs: it takes seconds.

        Other streams stay as they are. `options` go to `torch.compile`.
        """
        # As many rows as somebody decodes; captured already, so without a mode that captures.
        steps = {"dynamic": None} | {name: value for name, value in options.items() if name != "mode"}
        options = {"fullgraph": True, "dynamic": False} | options
        for layer in self.base_model.layers:
            # Where there is a loop over blocks, its body once instead of all its rounds in one long graph.
            name = "blocks" if layer.memory.parallel else "one_block"
            # Bound to the layer after compilation, as a copy of the layer then has its own.
            setattr(layer, name, MethodType(torch.compile(getattr(MemoryLayer, name), **options), layer))
            for name in ("before_attention", "after_attention"):
                setattr(layer, name, MethodType(torch.compile(getattr(MemoryLayer, name), **steps), layer))
        model = self.base_model
        model._last_norm = MethodType(torch.compile(MemoryBackbone._last_norm, **options), model)
        self._loss = torch.compile(next_token_loss, **options)

    _loss = staticmethod(next_token_loss)

    @property
    def memories(self) -> dict[int, Memory]:
        """The memories by layer index, layers without one left out."""
        return {
            index: layer.memory for index, layer in enumerate(self.base_model.layers) if layer.memory.start(1, "meta")
        }

    def set_retrieval(self, **changes: Any) -> None:
        """Read the memory with another `sampling`, number of `points` or `order`, without retraining.

        A warm cache follows at its next call: low coefficients are a prefix, so what can be kept is kept.
        """
        if not self.memories:
            raise ValueError("this model has no memory whose retrieval could be set")
        for memory in self.memories.values():
            memory.set_retrieval(**changes)

    def memory_report(self) -> list[dict[str, Any]]:
        """Per layer with memory: mechanism, floats of state per row (carried, and as the paper counts), parameters."""
        names = {kind: name for name, kind in MEMORIES.items()}
        report = []
        for index, memory in self.memories.items():
            counted = memory
            if getattr(self.config, "pad_heads", False):  # count what was asked for, not what is stored
                counted = copy.deepcopy(memory)
                for part in counted.modules():
                    part.geometry = self.config.geometry()
            report.append(
                {
                    "layer": index,
                    "memory": names[type(memory)],
                    "state_floats": counted.floats.paper,
                    "carried_floats": counted.floats.carried,
                    "extra_parameters": memory.extra_parameters,
                }
            )
        return report

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in transformers. With a warm `past_key_values`, `inputs` are the tokens that come next.

        A whole sequence that begins with exactly what the cache has read is understood too. An `attention_mask` that
        covers what was read and `inputs` says that they are new, whatever they look like; and so they are on a cache
        that has read embeddings, whose ids it does not know. `inputs_embeds` are always the whole sequence, as
        transformers wants them.
        """
        cache = kwargs.get("past_key_values")
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        if isinstance(cache, MemoryCache) and cache.columns and ids is not None:
            mask = kwargs.get("attention_mask")
            mask = torch.ones_like(ids) if mask is None else mask
            if mask.shape[1] == ids.shape[1] and not cache.holds(ids, mask):
                kwargs["attention_mask"] = torch.cat((mask.new_ones(len(ids), cache.columns), mask), dim=1)
            elif mask.shape[1] == ids.shape[1] == cache.columns:
                if not all(cache.opened):
                    raise ValueError(
                        "the cache has read exactly these tokens, and cannot read the newest again: give what comes "
                        "next. If that looks the same, give an attention_mask that covers what was read, too"
                    )
                cache.rollback(1)  # the newest token is read again, for its logits
        return super().generate(inputs, *args, **kwargs)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any
    ) -> None:
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = cache = MemoryCache(self)
            if generation_config.is_assistant:
                cache.activate_past_recording()
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)


def _predictable(labels: Tensor, mask: Tensor | None, positions: Tensor | None) -> Int[Tensor, "batch column"]:
    """Labels without those that only padding, or another document, could predict."""
    if mask is not None:
        unseen = mask[:, -labels.shape[1] :].roll(1, dims=1) == 0
        labels = labels.masked_fill(unseen, -100)
    if positions is not None and positions.shape == labels.shape:
        labels = labels.masked_fill(positions == 0, -100)
    return labels


def install(backbone: Any, settings: MemorySettings) -> None:
    """Replace the layers of a Llama-like model by layers with memory, which share their parameters."""
    kept = [
        MemoryLayer(layer, settings.memory_at(index), settings.locality) for index, layer in enumerate(backbone.layers)
    ]
    backbone.layers = nn.ModuleList(kept)


class _Initialised(_Model):
    """Weights as Llama initialises them, memories as they say themselves; or those of a file, if they fit."""

    _no_split_modules = ("MemoryLayer",)

    @classmethod
    def from_pretrained(
        cls, *args: Any, ignore_mismatched_sizes: bool = False, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """As in transformers; weights of other shapes than the configuration's are named in the error."""
        model, info = super().from_pretrained(*args, ignore_mismatched_sizes=True, output_loading_info=True, **kwargs)
        if info["mismatched_keys"] and not ignore_mismatched_sizes:
            name, there, here = min(info["mismatched_keys"])
            raise ValueError(
                f"{name} is {list(there)} in the file and {list(here)} here: sizes such as block_size, "
                f"{model.config.block_size} here, and memory_order must be those that the model was trained with"
            )
        return (model, info) if output_loading_info else model

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Memory):
            module.reset()


class MemoryLlamaModel(MemoryBackbone, _Initialised, LlamaModel):
    """The model without its head."""

    config_class = MemoryLlamaConfig

    def __init__(self, config: MemoryLlamaConfig):
        super().__init__(config.stored())
        self.config = config
        install(self, config.settings(stored=True))
        if config.pad_heads:
            self.rotary_emb = PaddedRotary(LlamaRotaryEmbedding(config), config.stored().head_dim)
            for layer in self.layers:
                pad_heads(layer.self_attn, config.head_dim)
        with torch.no_grad():
            for layer in self.layers:  # residuals add up over depth: each layer starts with a smaller share
                for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                    projection.weight.mul_((2 * config.num_hidden_layers) ** -0.5)
        self.post_init()


class MemoryLlamaForCausalLM(MemoryCausalLM, _Initialised, LlamaForCausalLM):
    """A Llama decoder whose chosen layers carry a fixed-size recurrent memory."""

    config_class = MemoryLlamaConfig

    def __init__(self, config: MemoryLlamaConfig):
        super(LlamaForCausalLM, self).__init__(config)
        self.model = MemoryLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
