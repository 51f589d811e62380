"""The decoder one token at a time, for the searches of `generate()`.

The model's own layers compute each step, with a cache that makes beams cheap: **the hypotheses of a sentence are
positions of one row**, and a mask says which earlier positions each of them sees.

- Keys and values of the source are stored once for each sentence, and its hypotheses share them.
- Keys and values of the target stay where they were written. When a hypothesis extends another one in beam search, its
  row of the mask changes, instead of keys and values being copied. Each product has more columns than necessary, but
  all hypotheses of a sentence share it. Positions that no hypothesis sees any more are removed from time to time.
- One hypothesis reads the prompt, which all hypotheses of a sentence share. A decoder on its own, whose prompts are
  long, reads them at once.
- Finished sentences are removed.

A module that mixes positions would mix hypotheses. [`find_change`] trusts the classes of this package and of known
wrappers, and asks [`equals_rows`] about all others.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_hooks
from transformers.activations import ACT2FN
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .kernels_vaswani import FORWARD, Substitutes, is_plain, product, products_of

# Positions of each hypothesis by which the buffers of keys and values grow.
TOKENS_AT_A_TIME = 16
NO_CONTEXT: AbstractContextManager[None] = nullcontext()


# ---- Keys and values ---------------------------------------------------------------------------------------------


class HypothesesCache:
    """
    Keys and values of the hypotheses of some sentences. An attention uses it like an [`EncoderDecoderCache`].

    Args:
        sentences (`int`): number of sentences.
        num_beams (`int`): number of hypotheses of a sentence.
        like (`torch.Tensor`): gives number format and device of the mask.

    Attributes:
        used (`int`): positions that the hypotheses of a sentence have written, of each sentence.
        mask (`torch.Tensor` of shape `(sentences, 1, num_beams, capacity)`): 0 for the positions that each hypothesis
            sees, and a very negative number for the others.
    """

    def __init__(self, sentences: int, num_beams: int, like: torch.Tensor) -> None:
        self.self_attention_cache, self.cross_attention_cache = self, DynamicCache()
        # The layers whose keys and values of the source are known.
        self.is_updated: dict[int, bool] = {}
        # Keys and values of each layer, [sentences, heads, capacity, head_dim]. Those behind `used` are not set.
        self.layers: list[list[torch.Tensor]] = []
        self.used = self.capacity = 0
        self.mask = like.new_zeros(sentences, 1, num_beams, 0)
        # In one step, each hypothesis sees its own position, and not those of the others.
        self.own = as_mask(torch.eye(num_beams, dtype=torch.bool, device=like.device), like.dtype)
        self.is_padded = False  # whether some hypotheses do not see some positions of the prompt

    def start(self, prompt: "Prompt") -> None:
        """Begins with the keys and values of a prompt, which all hypotheses of a sentence share."""
        self.layers = [[layer.keys, layer.values] for layer in prompt.layers]
        self.used = self.capacity = prompt.layers[0].keys.shape[2]
        self.mask = self.mask.new_zeros(*self.mask.shape[:3], self.capacity)
        if prompt.mask is not None:
            self.is_padded = True
            self.mask += as_mask(prompt.mask, self.mask.dtype)[:, None, None]

    def make_room(self, new: int) -> torch.Tensor | None:
        """
        Makes room for one position of each of `new` hypotheses of a sentence, and returns the mask of what they see,
        of shape `(sentences, 1, new, used + new)`; `None` if that is everything.
        """
        if self.used + new > self.capacity:
            if new > 1:
                self.forget()
            self.capacity = self.used + TOKENS_AT_A_TIME * new
            self.mask = nn.functional.pad(self.mask[..., : self.used], (0, self.capacity - self.used))
        if new == 1 and not self.is_padded:
            return None
        self.mask[..., self.used : self.used + new] = self.own
        return self.mask[..., : self.used + new]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds keys and values of shape `(sentences, heads, new, head_dim)` to a layer, and returns all of it."""
        if layer_idx == len(self.layers):
            self.layers.append([states[:, :, :0] for states in (keys, values)])
        layer, end = self.layers[layer_idx], self.used + keys.shape[2]
        for i, states in enumerate((keys, values)):
            if layer[i].shape[2] < end:
                buffer = states.new_empty(*states.shape[:2], self.capacity, states.shape[3])
                buffer[:, :, : self.used] = layer[i][:, :, : self.used]
                layer[i] = buffer
            layer[i].narrow(2, self.used, keys.shape[2]).copy_(states)
        return layer[0].narrow(2, 0, end), layer[1].narrow(2, 0, end)

    def forget(self) -> None:
        """Removes positions that no hypothesis sees any more: those of discarded hypotheses."""
        seen = (self.mask[:, 0, :, : self.used] == 0).any(dim=1)  # [sentences, used]
        needed = int(seen.sum(dim=1).max())
        # In their order; sentences that need fewer keep some unseen positions behind them.
        places = seen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :needed]
        self.mask = self.mask.gather(3, places[:, None, None].expand(*self.mask.shape[:3], needed))
        for layer in self.layers:
            for i, states in enumerate(layer):
                shape = (*states.shape[:2], needed, states.shape[3])
                layer[i] = states.gather(2, places[:, None, :, None].expand(shape))
        self.used = self.capacity = needed

    def reorder(self, parents: torch.Tensor) -> None:
        """Replaces each hypothesis by another one of its sentence, given in shape `(sentences, num_beams)`."""
        seen = self.mask[..., : self.used]
        seen.copy_(torch.take_along_dim(seen, parents[:, None, :, None], dim=2))

    def keep(self, sentences: torch.Tensor) -> None:
        """Keeps the sentences with these indices, of shape `(kept,)`, in ascending order."""
        self.capacity = self.used
        self.mask = self.mask[..., : self.used].index_select(0, sentences)
        self.layers = [
            [states[:, :, : self.used].index_select(0, sentences) for states in each] for each in self.layers
        ]
        for layer in self.cross_attention_cache.layers:
            layer.keys, layer.values = (states.index_select(0, sentences) for states in (layer.keys, layer.values))


def as_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns an additive mask of the shape of `visible`: 0 where it is true, else the least finite number."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, torch.finfo(dtype).min
    )


@dataclass(frozen=True)
class Prompt:
    """Texts that a decoder on its own has read at once, and what it computed."""

    states: torch.Tensor  # output at the last position, [sentences, d_model]
    layers: Sequence[Any]  # of a [`Cache`]: keys and values of each layer, [sentences, heads, prompt, head_dim]
    mask: torch.Tensor | None  # 1 for tokens, 0 for padding, [sentences, prompt]; None if there is no padding

    @classmethod
    def read(cls, decoder: Any, input_ids: torch.Tensor, mask: torch.Tensor | None, cache: Any) -> "Prompt":
        """Reads texts of shape `(sentences, prompt)` with a decoder and an empty cache."""
        states = decoder(input_ids, mask, cache=cache, use_cache=True).last_hidden_state
        return cls(states[:, -1], cache.layers, None if mask is None or mask.all() else mask != 0)


# ---- One model ---------------------------------------------------------------------------------------------------


class IncrementalDecoder:
    """
    [`VaswaniDecoder`], one token of each hypothesis at a time.

    Args:
        decoder ([`VaswaniDecoder`]): the module.
        encoder_states (`torch.Tensor` of shape `(sentences, source, d_model)`): output of the encoder; of a decoder on
            its own any states of these sentences.
        source_mask (`torch.Tensor` of shape `(sentences, source)`, *optional*): 1 for tokens, 0 for padding.
        num_beams (`int`): number of hypotheses of a sentence.
    """

    def __init__(
        self, decoder: Any, encoder_states: torch.Tensor, source_mask: torch.Tensor | None, num_beams: int
    ) -> None:
        self.decoder, self.encoder_states = decoder, encoder_states
        decoder.check_layer_indices()
        self.source_mask = None
        if source_mask is not None and not source_mask.all():
            self.source_mask = as_mask(source_mask != 0, encoder_states.dtype)[:, None, None]
        self.cache = HypothesesCache(len(encoder_states), num_beams, encoder_states)
        self.length = 0  # tokens that each hypothesis of the longest sentence has read
        # Tokens that the others have less, [sentences]; None if all have as many.
        self.lag: torch.Tensor | None = None
        self.encoding = encoder_states.new_zeros(0, 0)  # of the first positions: [positions, d_model]
        # On a GPU modules are as fast, and autocast knows best in which types to compute.
        is_cpu = encoder_states.device.type == "cpu"
        products = products_of(decoder.layers, len(encoder_states) * num_beams) if is_cpu else {}
        self.are_all_plain = len(products) == sum(10 if layer.has_source else 6 for layer in decoder.layers)
        self.functions = products | attentions_of(decoder.layers)

    def start(self, prompt: Prompt) -> None:
        """Continues a prompt, in place of reading it token by token."""
        self.cache.start(prompt)
        self.length = self.cache.used
        if prompt.mask is not None:
            self.lag = (~prompt.mask).sum(dim=1)
            self._compare_lengths()

    def _compare_lengths(self) -> None:
        """Finds the longest sentence that is left."""
        if self.lag is not None:
            least = int(self.lag.min())
            self.lag, self.length = self.lag - least, self.length - least

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """
        Reads one token of each hypothesis, in shape `(sentences, num_beams)`; in shape `(sentences, 1)` while all
        hypotheses of a sentence are the same. Returns the output at these tokens, of shape `(tokens, d_model)`.
        """
        # Products in the type of autocast, and everything else in that of the states, which is more exact and faster.
        with without_autocast(tokens.device) if self.are_all_plain else NO_CONTEXT:
            return self._step(tokens).flatten(0, 1)

    def _step(self, tokens: torch.Tensor) -> torch.Tensor:
        self._encode_positions(tokens.device)
        encoding = self.encoding[self.length] if self.lag is None else self.encoding[self.length - self.lag, None]
        states = self.decoder.positions.add(self.decoder.embed_tokens(tokens), encoding)  # [sentences, beams, d_model]
        mask = self.cache.make_room(tokens.shape[1])
        source = self.encoder_states if self.decoder.has_source else None
        with Substitutes(self.functions):
            states = self.decoder.run_layers(states, mask, source, self.source_mask, cache=self.cache)
        self.length += 1
        self.cache.used += tokens.shape[1]
        return states

    def _encode_positions(self, device: torch.device) -> None:
        """Encodes the next positions, some of them at once."""
        if self.length < len(self.encoding):
            return
        positions = self.decoder.positions
        positions.check(self.length)
        wanted = max(TOKENS_AT_A_TIME, 2 * self.length)
        if positions.table is not None:
            wanted = min(wanted, positions.table.num_embeddings)
        self.encoding = positions.encode(torch.arange(wanted, device=device))

    def keep(self, sentences: torch.Tensor) -> None:
        """Keeps the sentences with these indices, of shape `(kept,)`, in ascending order."""
        self.cache.keep(sentences)
        self.encoder_states = self.encoder_states.index_select(0, sentences)
        if self.source_mask is not None:
            self.source_mask = self.source_mask.index_select(0, sentences)
        if self.lag is not None:
            self.lag = self.lag.index_select(0, sentences)
            self._compare_lengths()


# ---- One or several models ---------------------------------------------------------------------------------------


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Returns the context in which operations compute in the types of their arguments."""
    is_on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_on else NO_CONTEXT


def output_projection(lm_head: Any, rows: int, entries: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """
    Returns the linear transformation on top of the decoder (Section 3.4) as a function of states of shape
    `(rows, d_model)`, of all entries of the vocabulary or of those that are given.
    """
    if not is_plain(lm_head):
        return lm_head if entries is None else lambda states: lm_head(states).index_select(1, entries)
    weight, bias = lm_head.weight, lm_head.bias
    if entries is not None:
        weight = weight.index_select(0, entries)
        bias = None if bias is None else bias.index_select(0, entries)
    # With autocast, too: rounded logits would change the order of hypotheses.
    return product(weight, bias, weight.dtype, rows)


def attentions_of(layers: nn.Module) -> dict[nn.Module, Callable[..., Any]]:
    """Returns torch's own function for the attentions that call it by a longer way of transformers."""
    attentions = filter(is_attention, submodules(layers))
    return {
        each: attend for each in attentions if is_attention_of_transformers(each) and name_of_attention(each) == "sdpa"
    }


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attends from positions that see what the mask says, as [`eager_attention_forward`]."""
    attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return attended.transpose(1, 2), None


class EnsembleDecoder:
    """
    The decoders of one or several models with the same vocabulary, which predict tokens by the mean of their
    probabilities. Each has its encoder's states; other arguments as in [`IncrementalDecoder`].

    Args:
        entries (`torch.LongTensor` of shape `(entries,)`, *optional*): the entries of the vocabulary that are
            predicted; all by default.
    """

    def __init__(
        self,
        models: Sequence[Any],
        encoder_states: Sequence[torch.Tensor],
        source_mask: torch.Tensor | None,
        num_beams: int,
        entries: torch.Tensor | None = None,
    ) -> None:
        rows = len(encoder_states[0]) * num_beams
        self.projections = [output_projection(model.lm_head, rows, entries) for model in models]
        self.decoders = [
            IncrementalDecoder(model.model.decoder, states, source_mask, num_beams)
            for model, states in zip(models, encoder_states, strict=True)
        ]
        self.states: list[torch.Tensor] = []  # outputs of the decoders at the last tokens

    def start(self, prompt: Prompt) -> None:
        """Continues a prompt of the only model, see [`IncrementalDecoder.start`]."""
        self.decoders[0].start(prompt)
        self.states = [prompt.states]

    def read(self, tokens: torch.Tensor) -> None:
        """Reads one token of each hypothesis, see [`IncrementalDecoder.step`]."""
        self.states = [decoder.step(tokens) for decoder in self.decoders]

    def logits(self) -> torch.Tensor:
        """Returns logits of the next token, of shape `(rows, entries)`, in float32; an ensemble: log_probs."""
        return self._logits()[0] if len(self.decoders) == 1 else self.log_probs()

    def log_probs(self) -> torch.Tensor:
        """Returns log-probabilities of the next token, of shape `(rows, entries)`, in float32."""
        several = [torch.log_softmax(logits, dim=1, out=logits) for logits in self._logits()]
        if len(several) == 1:
            return several[0]
        return torch.logsumexp(torch.stack(several), dim=0) - math.log(len(several))

    def _logits(self) -> list[torch.Tensor]:
        """Returns the logits of each model."""
        with without_autocast(self.states[0].device):
            return [project(states).float() for project, states in zip(self.projections, self.states, strict=True)]

    def repeat(self, beams: int) -> None:
        """Repeats the output for one hypothesis of each sentence for `beams` hypotheses."""
        self.states = [states.repeat_interleave(beams, dim=0) for states in self.states]

    def reorder(self, parents: torch.Tensor) -> None:
        """Replaces hypotheses, see [`HypothesesCache.reorder`]."""
        for decoder in self.decoders:
            decoder.cache.reorder(parents)

    def keep(self, sentences: torch.Tensor) -> None:
        """Removes sentences, see [`IncrementalDecoder.keep`]."""
        for decoder in self.decoders:
            decoder.keep(sentences)


# ---- Models that were changed ------------------------------------------------------------------------------------

# Each computes number by number.
ACTIVATIONS = {entry[0] if isinstance(entry, tuple) else entry for entry in dict.values(ACT2FN)}
# Modules with classes that do so: adapters and quantized linear layers.
WRAPPERS = ("peft.tuners.", "torch.ao.nn.quantized.", "bitsandbytes.nn.", "torchao.")
# Attention functions that take an additive mask of four dimensions.
WITH_ADDITIVE_MASK = (None, "eager", "sdpa")
# Methods that do not affect what a model computes.
NOT_COMPUTING = {"generate", "save_pretrained", "push_to_hub"}
# The largest difference between two computations of an output that rounding explains, relative to the largest output.
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4}
ROUNDING_OF_HALF_PRECISION = 0.05


def find_change(model: Any) -> str | None:
    """
    Returns why [`EnsembleDecoder`] may compute something else than a model, as the predicate of a sentence about it,
    or `None`.
    """
    if torch_hooks._global_forward_hooks or torch_hooks._global_forward_pre_hooks:
        return "is watched by global hooks"
    # The search does the work of these, and calls only the modules below them.
    for module in (model, model.model, model.model.decoder, model.model.decoder.positions):
        if not is_as_written(module):
            return f"has hooks on its {type(module).__name__}, or another one"
    unknown = []
    for module in (*submodules(model.lm_head), *submodules(model.model.decoder)):
        known = is_as_written(module)
        if not known and type(module).__module__.startswith(WRAPPERS):
            continue
        if module.training:
            return "is in training mode"
        if is_attention(module):
            if name_of_attention(module) not in WITH_ADDITIVE_MASK:
                return f"has the attention {name_of_attention(module)!r}"
            known = known and is_attention_of_transformers(module)
        if not known:
            unknown.append(module)
    if unknown and not equals_rows(model.model.decoder, unknown):
        return f"has a {type(unknown[0]).__name__} that mixes positions"
    return None


def submodules(module: Any) -> Iterator[Any]:
    """Yields a module and all below it. `nn.Module.modules` takes several times as long."""
    pending = [module]
    while pending:
        module = pending.pop()
        if module is not None:
            yield module
            pending += module._modules.values()


def is_attention(module: nn.Module) -> bool:
    """Returns whether a module is an attention of a decoder, which has an entry in a cache."""
    return "layer_idx" in vars(module)


def name_of_attention(attention: Any) -> str | None:
    """Returns the name of the function that an attention calls, or `None` for the one of this package."""
    name: str | None = attention.config._attn_implementation
    return name


def is_attention_of_transformers(attention: Any) -> bool:
    """Returns whether nobody has registered another function under the name of the one that an attention calls."""
    function = ALL_ATTENTION_FUNCTIONS.get(name_of_attention(attention))
    return function is None or function.__module__.startswith("transformers.")


def is_as_written(module: nn.Module) -> bool:
    """Returns whether a module is of a class of this package or a position-wise one of torch, and unchanged."""
    kind: Any = type(module)
    return (
        (FORWARD.get(kind) is kind.forward or kind in ACTIVATIONS)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and vars(module).keys().isdisjoint(methods(kind))
    )


@functools.cache
def methods(kind: type) -> frozenset[str]:
    """Returns the names of the methods of a class."""
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name, None))) - NOT_COMPUTING


def equals_rows(decoder: Any, changed: Sequence[nn.Module]) -> bool:
    """
    Computes some steps of a decoder with hypotheses as positions of a row, and with a row for each, and returns
    whether they differ by rounding alone. The answer is remembered until one of its changed modules is changed again.
    """
    state = [
        (
            type(module).forward,
            vars(module).get("forward"),
            (*module._forward_hooks.values(), *module._forward_pre_hooks.values()),
            [(id(each), each._version) for each in (*module.parameters(), *module.buffers())],
        )
        for module in changed
    ]
    # In the module, so that it lives as long, and so do the functions that it compares.
    before = vars(decoder).get("_steps_proved")
    if before is None or before[0] != state:
        try:
            before = state, _differs_by_rounding(decoder)
        # A module that cannot work with this cache is no error of the caller's.
        except Exception:
            before = state, False
        vars(decoder)["_steps_proved"] = before
    return before[1]


@torch.no_grad()
def _differs_by_rounding(decoder: Any) -> bool:
    config, weight = decoder.config, decoder.embed_tokens.weight
    generator = torch.Generator().manual_seed(0)
    sentences, beams, length = 2, 3, 4
    with torch.device("cpu"):
        tokens = torch.randint(config.vocab_size, (sentences, beams, length), generator=generator).to(weight.device)
        states = torch.randn(sentences, 5, config.d_model, generator=generator).to(weight)
        mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).to(weight.device)
    tokens[:, :, 0] = tokens[:, :1, 0]
    source = {"encoder_hidden_states": states, "encoder_attention_mask": mask} if decoder.has_source else {}
    repeated = {name: each.repeat_interleave(beams, dim=0) for name, each in source.items()}
    expected = decoder(tokens.flatten(0, 1), **repeated, use_cache=False).last_hidden_state
    steps = IncrementalDecoder(decoder, states, source.get("encoder_attention_mask"), beams)
    steps.step(tokens[:, :1, 0])
    found = torch.stack([steps.step(tokens[:, :, i]) for i in range(1, length)], dim=1)
    difference = (found - expected[:, 1:]).abs().max() / expected.abs().max()
    return bool(difference <= ROUNDING.get(expected.dtype, ROUNDING_OF_HALF_PRECISION))
