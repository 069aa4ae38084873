"""Llama with memory layers: `MemoryLlamaForCausalLM`, and the mixin that does the same for other such models."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import can_return_tuple

from elastic_memory.common.speedups import find
from elastic_memory.memory import MEMORIES, Memory
from elastic_memory.memory.counts import extra_parameters, state_floats
from elastic_memory.model.backbone import MemoryBackbone, Mixed, check_columns, check_mask
from elastic_memory.model.configuration import MemoryLlamaConfig, MemorySettings
from elastic_memory.model.layer import MemoryLayer
from elastic_memory.model.loss import next_token_loss, plain_head
from elastic_memory.model.padding import PaddedRotary, pad_heads
from elastic_memory.shapes import Float, Int, Tensor
from elastic_memory.streaming.cache import MemoryCache
from elastic_memory.streaming.reader import whole_calls
from elastic_memory.streaming.unread import Call, unread_cache

# Labelled calls longer than this compute the loss in pieces and return no logits: at 32,768 tokens and a vocabulary of
# 32,000 they would take 4 GiB.
LOGITS_AT_MOST = 8192


class MemoryCausalLM(Mixed):
    """Mixin for `LlamaForCausalLM` and its kind: loss without logits, caches, retrieval settings, accounting."""

    @whole_calls
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

        Labelled calls in training longer than 8,192 tokens return `logits=None`, unless `logits_to_keep` asks for some.
        """
        # Not in the signature: Trainer would then always pass it.
        shift_labels = kwargs.pop("shift_labels", None)
        labelled = labels is not None or shift_labels is not None
        if labelled and self.training and (past_key_values is not None or use_cache):
            raise ValueError("training reads whole samples, with memory inside the call: leave past_key_values out")
        if use_cache and past_key_values is None:
            past_key_values = MemoryCache(self)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=False,  # the cache of this call is ours, not the backbone's
            keep=logits_to_keep if isinstance(logits_to_keep, int) and not labelled else 0,
            return_dict=True,
            **kwargs,
        )
        if not labelled and past_key_values is None:
            past_key_values = unread_cache(
                self, use_cache, Call(input_ids, inputs_embeds, attention_mask, position_ids)
            )
        hidden, loss, logits = outputs.last_hidden_state, None, None
        asked = not isinstance(logits_to_keep, int) or logits_to_keep > 0
        wanted = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        few = hidden.shape[0] * hidden.shape[1] <= LOGITS_AT_MOST
        if asked or few or not labelled or not self.training:
            logits = self.lm_head(hidden[:, wanted])
        if labelled:
            if labels is not None:
                labels = _predictable(labels, attention_mask, position_ids)
            given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            loss = self._labelled_loss(hidden, None if asked else logits, given | kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=past_key_values, hidden_states=outputs.hidden_states
        )

    def _labelled_loss(
        self, hidden: Float[Tensor, "batch column width"], logits: Tensor | None, given: dict[str, Any]
    ) -> Float[Tensor, ""]:
        """The loss, without logits if the head is a plain linear layer."""
        if self.loss_function is not ForCausalLMLoss:
            logits = self.lm_head(hidden) if logits is None else logits
            given = {name: value for name, value in given.items() if value is not None or name == "labels"}
            return self.loss_function(logits=logits, vocab_size=self.config.vocab_size, **given)
        if given.get("ignore_index", -100) != -100:
            raise ValueError(f"ignore_index={given['ignore_index']}: labels that do not count are -100")
        head = self.lm_head
        if plain_head(head, hidden):
            source = hidden, head.weight
        else:
            source = (hidden, head) if logits is None else (logits, nn.Identity())
        shifted = given["shift_labels"]
        if shifted is not None:
            return self._loss(*source, shifted, given["num_items_in_batch"], shifted=True)
        return self._loss(*source, given["labels"], given["num_items_in_batch"])

    def compile_blocks(self, **options: Any) -> None:
        """Compile training and the single steps of static caches; `options` go to `torch.compile`.

        Each layer is compiled, identical ones share graphs; for sequential memories several layers run as a wavefront.
        The first calls then take about a minute, half a minute more for a wavefront. Other streams stay as they are.
        """
        fast = find("compile")
        if fast is None:
            raise ValueError("compile_blocks: the folder elastic_memory/fast is missing here; train without compiling")
        fast.compile_blocks(self, **options)

    @property
    def compiled(self) -> bool:
        """Whether `compile_blocks` was called."""
        return "_loss" in vars(self)

    _loss = staticmethod(next_token_loss)

    @property
    def memories(self) -> dict[int, Memory]:
        """The memories by layer index, layers without one left out."""
        return {
            index: layer.memory
            for index, layer in enumerate(self.base_model.layers)
            if layer.memory.start(1, "meta") or layer.memory.widens
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
            floats = state_floats(counted)
            report.append(
                {
                    "layer": index,
                    "memory": names[type(memory)],
                    "state_floats": floats.paper,
                    "carried_floats": floats.carried,
                    "extra_parameters": extra_parameters(memory),
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
        if isinstance(ids, Tensor) and kwargs.get("inputs_embeds") is None:
            check_columns(ids)
        if isinstance(cache, MemoryCache) and cache.columns and ids is not None:
            mask = kwargs.get("attention_mask")
            mask = torch.ones_like(ids) if mask is None else mask
            check_mask(mask, *ids.shape, before=cache.columns)
            if mask.shape[1] == ids.shape[1] and not cache.holds(ids, mask):
                kwargs["attention_mask"] = torch.cat((mask.new_ones(len(ids), cache.columns), mask), dim=1)
            elif mask.shape[1] == ids.shape[1] == cache.columns:
                if not all(cache.opened):
                    raise ValueError(
                        "the cache has read exactly these tokens, and cannot read the newest again: give what comes "
                        "next. If the next tokens are equal to these, give an attention_mask that covers both"
                    )
                with cache.newest_again():  # for its logits
                    return super().generate(inputs, *args, **kwargs)
        return super().generate(inputs, *args, **kwargs)

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Greedy decoding and sampling as in transformers; on a GPU by captured steps."""
        fast = find("generation")
        if fast is not None and fast.serves(self, generation_config, synced_gpus, kwargs.get("past_key_values")):
            return fast.sample(
                self, input_ids, logits_processor, stopping_criteria, generation_config, streamer, kwargs
            )
        return super()._sample(
            input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **kwargs
        )

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any
    ) -> None:
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            kind = generation_config.cache_implementation or "dynamic"
            if kind not in ("dynamic", "static"):
                raise ValueError(f"cache_implementation={kind!r}: a memory cache is 'dynamic' or 'static'")
            generation_config.cache_implementation = None  # transformers takes a name or a cache
            model_kwargs["past_key_values"] = cache = MemoryCache(self, static=kind == "static")
            if generation_config.is_assistant:
                cache.activate_past_recording()
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)


def _predictable(labels: Tensor, mask: Tensor | None, positions: Tensor | None) -> Int[Tensor, "batch column"]:
    """Labels, ignored where the previous token is padding or belongs to another document."""
    if mask is not None:
        unseen = mask[:, -labels.shape[1] :].roll(1, dims=1) == 0
        labels = labels.masked_fill(unseen, -100)
    if positions is not None:  # one row of them is for all rows
        labels = labels.masked_fill(positions == 0, -100)
    return labels


def name_causal_lm(kind: type) -> None:
    """Tell transformers that this class is a causal LM: Trainer's label smoothing shifts labels for those it knows."""
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind.__name__] = kind.__name__


def refuse_spread(model: Any) -> None:
    """Refuse a `device_map` over several GPUs; parts offloaded to CPU or disk run on the one that is left."""
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()} - {"cpu", "disk", "meta"}
    devices = sorted(
        {f"cuda:{place}" if place.isdigit() else "cuda:0" if place == "cuda" else place for place in places}
    )
    if len(devices) > 1:
        raise ValueError(
            f"device_map spreads the model over {', '.join(devices)}, and a memory runs on one device: "
            "give device_map={'': 0}, or one that offloads to cpu or disk"
        )


def memory_layers(backbone: Any, settings: MemorySettings) -> nn.ModuleList:
    """The layers of a Llama-like model, with memory; they share its parameters."""
    kept = [
        MemoryLayer(layer, settings.memory_at(index), settings.locality) for index, layer in enumerate(backbone.layers)
    ]
    return nn.ModuleList(kept)


class WrongSizeError(ValueError, RuntimeError):
    """Weights of other shapes than the configuration's; transformers raises a RuntimeError for them."""


class _Initialised(Mixed):
    """Initialises weights as Llama does and memories by `initialise`; loads weights only if their shapes fit."""

    _no_split_modules = ("MemoryLayer",)
    _can_record_outputs = {"hidden_states": MemoryLayer}  # noqa: RUF012 - as transformers declares it; no attentions
    _tp_plan = _pp_plan = None  # memories hold the heads of a whole layer, and caches all layers

    @classmethod
    def from_pretrained(
        cls, *args: Any, ignore_mismatched_sizes: bool = False, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """As in transformers; weights of other shapes than the configuration's are named in the error."""
        if kwargs.get("tp_plan") is not None or kwargs.get("tp_size") is not None:
            raise ValueError("tensor parallelism: memories hold all heads of a layer; load without tp_plan and tp_size")
        model, info = super().from_pretrained(*args, ignore_mismatched_sizes=True, output_loading_info=True, **kwargs)
        if info["mismatched_keys"] and not ignore_mismatched_sizes:
            name, there, here = min(info["mismatched_keys"])
            raise WrongSizeError(
                f"{name} is {list(there)} in the file and {list(here)} here: sizes such as block_size, "
                f"{model.config.block_size} here, and memory_order must be those that the model was trained with"
            )
        refuse_spread(model)
        return (model, info) if output_loading_info else model

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing to do, as for the configuration."""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Memory):
            module.initialise()


class MemoryLlamaModel(MemoryBackbone, _Initialised, LlamaModel):
    """The model without its head."""

    config_class = MemoryLlamaConfig

    def __init__(self, config: MemoryLlamaConfig):
        super().__init__(config.stored())
        self.config = config
        self.layers = memory_layers(self, config.settings(stored=True))
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


class MemoryLlamaForSequenceClassification(GenericForSequenceClassification, _Initialised, LlamaPreTrainedModel):
    """One or several scores per row, read at its last token: classifiers and reward models."""

    config_class = MemoryLlamaConfig
