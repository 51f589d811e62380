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
from contextlib import AbstractContextManager, nullcontext, suppress
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
    Keys and values of `num_beams` hypotheses of each sentence, in the number format and on the device of `like`, which
    an attention uses like an [`EncoderDecoderCache`]. If there are prompts, in the layers of a [`Cache`], it begins
    with them: the hypotheses of a sentence share its prompt, of which an additive mask hides the padding.
    """

    def __init__(
        self, like: torch.Tensor, num_beams: int, prompt: Sequence[Any] = (), mask: torch.Tensor | None = None
    ) -> None:
        self.self_attention_cache, self.cross_attention_cache = self, DynamicCache()
        self.is_updated: dict[int, bool] = {}  # the layers whose keys and values of the source are known
        # Keys and values of each layer, [sentences, heads, capacity, head_dim]. Those behind `used` are not set.
        self.layers = [[layer.keys, layer.values] for layer in prompt]
        # Positions that the hypotheses of a sentence have written, of each sentence.
        self.used = self.capacity = prompt[0].keys.shape[2] if prompt else 0
        # 0 for the positions that a hypothesis sees, else very negative, [sentences, 1, num_beams, capacity].
        self.mask = like.new_zeros(len(like), 1, num_beams, self.used) + (0 if mask is None else mask)
        # In one step, each hypothesis sees its own position, and not those of the others.
        self.own = as_mask(torch.eye(num_beams, dtype=torch.bool, device=like.device), like.dtype)
        self.is_padded = mask is not None  # some hypotheses do not see some positions of the prompt

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

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
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
        self.used = self.capacity = int(seen.sum(dim=1).max())
        # In their order; sentences that need fewer keep some unseen positions behind them.
        places = seen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, None, : self.used]
        self.mask = torch.take_along_dim(self.mask, places[:, None], dim=3)
        self.layers = [
            [torch.take_along_dim(each, places[..., None], dim=2) for each in layer] for layer in self.layers
        ]

    def reorder(self, parents: torch.Tensor) -> None:
        """Replaces each hypothesis by another one of its sentence, given in shape `(sentences, num_beams)`."""
        seen = self.mask[..., : self.used]
        seen.copy_(torch.take_along_dim(seen, parents[:, None, :, None], dim=2))

    def keep(self, sentences: torch.Tensor) -> None:
        """Keeps the sentences with these indices, of shape `(kept,)`, in ascending order."""
        self.capacity = self.used
        self.mask = self.mask[..., : self.used].index_select(0, sentences)
        self.layers = [[each[:, :, : self.used].index_select(0, sentences) for each in layer] for layer in self.layers]
        for layer in self.cross_attention_cache.layers:
            layer.keys, layer.values = (states.index_select(0, sentences) for states in (layer.keys, layer.values))


def as_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns an additive mask of the shape of `visible`: 0 where it is true, else the least finite number."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


# ---- One model ---------------------------------------------------------------------------------------------------


class IncrementalDecoder:
    """
    [`VaswaniDecoder`], one token of each of `num_beams` hypotheses of a sentence at a time. The states are the
    encoder's, of shape `(sentences, source, d_model)`, and their mask has the shape `(sentences, source)`: 1 for
    tokens, 0 for padding. A decoder on its own has read its prompts at once: the states are its last output, of shape
    `(sentences, 1, d_model)`, the mask is that of the prompts, and their keys and values are layers of a [`Cache`].
    """

    def __init__(
        self, decoder: Any, states: torch.Tensor, source_mask: torch.Tensor | None, num_beams: int, prompt: Any = ()
    ) -> None:
        self.decoder = decoder
        decoder.check_layer_indices()
        visible = None if source_mask is None or source_mask.all() else source_mask != 0
        self.source = states if decoder.has_source else None
        self.source_mask = None if visible is None else as_mask(visible, states.dtype)[:, None, None]
        self.cache = HypothesesCache(states, num_beams, prompt, self.source_mask if prompt else None)
        self.encoding = states.new_zeros(0, 0)  # of the first positions: [positions, d_model]
        # Tokens that the hypotheses have read: of every sentence, or of each, [sentences, 1]; and of the longest one.
        self.lengths: Any = self.cache.used
        self.longest = self.cache.used
        if prompt and visible is not None:
            self.lengths = visible.sum(dim=1, keepdim=True)
            self.longest = int(self.lengths.max())
        # On a GPU modules are as fast, and autocast knows best in which types to compute.
        products = products_of(decoder.layers, len(states) * num_beams) if states.device.type == "cpu" else {}
        self.are_all_plain = len(products) == sum(10 if layer.has_source else 6 for layer in decoder.layers)
        # transformers takes a longer way to torch's function.
        attentions = (each for each in submodules(decoder.layers) if function_of(each) == "sdpa")
        self.functions = products | dict.fromkeys(attentions, attend)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """
        Reads one token of each hypothesis, in shape `(sentences, num_beams)`; in shape `(sentences, 1)` while all
        hypotheses of a sentence are the same. Returns the output at these tokens, of shape `(tokens, d_model)`.
        """
        positions = self.decoder.positions
        if self.longest >= len(self.encoding):
            positions.check(self.longest)
            wanted = max(TOKENS_AT_A_TIME, 2 * self.longest)
            if positions.table is not None:
                wanted = min(wanted, positions.table.num_embeddings)
            self.encoding = positions.encode(torch.arange(wanted, device=tokens.device))
        states = self.compute(tokens, self.encoding[self.lengths], self.cache.make_room(tokens.shape[1]))
        self.lengths, self.longest = self.lengths + 1, self.longest + 1
        self.cache.used += tokens.shape[1]
        return states

    def compute(self, tokens: torch.Tensor, encoding: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Computes a step, by the encodings of the tokens' positions and the mask of what they see."""
        # Products in the type of autocast, and everything else in that of the states, which is more exact and faster.
        autocast = without_autocast(tokens.device) if self.are_all_plain else NO_CONTEXT
        with autocast, Substitutes(self.functions):
            states = self.decoder.positions.add(self.decoder.embed_tokens(tokens), encoding)
            states = self.decoder.run_layers(states, mask, self.source, self.source_mask, cache=self.cache)
        return states.flatten(0, 1)

    def keep(self, sentences: torch.Tensor) -> None:
        """Keeps the sentences with these indices, of shape `(kept,)`, in ascending order."""
        self.cache.keep(sentences)
        self.source, self.source_mask = (
            None if each is None else each.index_select(0, sentences) for each in (self.source, self.source_mask)
        )
        if isinstance(self.lengths, torch.Tensor):
            self.lengths = self.lengths.index_select(0, sentences)
            self.longest = int(self.lengths.max())


def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> tuple[Any, None]:
    """Attends as [`eager_attention_forward`] does, by torch's own function."""
    return nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling).transpose(1, 2), None


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Returns the context in which operations compute in the types of their arguments."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else NO_CONTEXT


# ---- One or several models ---------------------------------------------------------------------------------------


class EnsembleDecoder:
    """
    The decoders of one or several models with the same vocabulary, which predict tokens by the mean of their
    probabilities: all entries of the vocabulary, or those given in shape `(entries,)`. Each model has its encoder's
    states; other arguments as in [`IncrementalDecoder`].
    """

    def __init__(
        self,
        models: Sequence[Any],
        encoder_states: Sequence[torch.Tensor],
        source_mask: torch.Tensor | None,
        num_beams: int,
        entries: torch.Tensor | None = None,
        prompt: Sequence[Any] = (),
    ) -> None:
        rows = len(encoder_states[0]) * num_beams
        self.projections = [output_projection(model.lm_head, rows, entries) for model in models]
        self.decoders = [
            IncrementalDecoder(model.model.decoder, states, source_mask, num_beams, prompt)
            for model, states in zip(models, encoder_states, strict=True)
        ]
        self.states = [states[:, -1] for states in encoder_states] if prompt else []  # outputs at the last tokens
        self.unread: list[torch.Tensor] = []  # tokens that are read before the next logits

    def read(self, tokens: torch.Tensor) -> None:
        """Reads one token of each hypothesis, see [`IncrementalDecoder.step`]."""
        self.states = [decoder.step(tokens) for decoder in self.decoders]

    def logits(self) -> torch.Tensor:
        """Returns logits of the next token, of shape `(rows, entries)`, in float32; an ensemble: log_probs."""
        while self.unread:
            self.read(self.unread.pop(0))
        with without_autocast(self.states[0].device):
            several = [project(states).float() for project, states in zip(self.projections, self.states, strict=True)]
        if len(several) == 1:
            return several[0]
        several = [logits.log_softmax(dim=1) for logits in several]
        return torch.logsumexp(torch.stack(several), dim=0) - math.log(len(several))

    def log_probs(self) -> torch.Tensor:
        """Returns log-probabilities of the next token, of shape `(rows, entries)`, in float32."""
        logits = self.logits()
        return logits if len(self.decoders) > 1 else torch.log_softmax(logits, dim=1, out=logits)

    def reorder(self, parents: torch.Tensor) -> None:
        """Replaces hypotheses, see [`HypothesesCache.reorder`]."""
        for decoder in self.decoders:
            decoder.cache.reorder(parents)

    def keep(self, sentences: torch.Tensor) -> None:
        """Removes sentences, see [`IncrementalDecoder.keep`]."""
        for decoder in self.decoders:
            decoder.keep(sentences)


def output_projection(lm_head: Any, rows: int, entries: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the linear transformation on top of a decoder (Section 3.4) as a function of `(rows, d_model)`."""
    if not is_plain(lm_head):
        return lm_head if entries is None else lambda states: lm_head(states).index_select(1, entries)
    weight, bias = lm_head.weight, lm_head.bias
    if entries is not None:
        weight, bias = (each if each is None else each.index_select(0, entries) for each in (weight, bias))
    # With autocast, too: rounded logits would change the order of hypotheses.
    return product(weight, bias, weight.dtype, rows)


# ---- Models that were changed ------------------------------------------------------------------------------------

# Each computes number by number.
ACTIVATIONS = {entry[0] if isinstance(entry, tuple) else entry for entry in dict.values(ACT2FN)}
# Modules with classes that do so: adapters and quantized linear layers.
WRAPPERS = ("peft.tuners.", "torch.ao.nn.quantized.", "bitsandbytes.nn.", "torchao.")
# Methods that do not affect what a model computes.
NOT_COMPUTING = {"generate", "save_pretrained", "push_to_hub"}
# The largest difference of two outputs that rounding explains, relative to the largest number; 0.05 in half precision.
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4}


def find_change(model: Any) -> str | None:
    """Returns why [`EnsembleDecoder`] may compute something else than a model, as its predicate, or `None`."""
    if torch_hooks._global_forward_hooks or torch_hooks._global_forward_pre_hooks:
        return "is watched by global hooks"
    # The search does the work of these, and calls only the modules below them.
    for module in (model, model.model, model.model.decoder, model.model.decoder.positions):
        if not is_as_written(module):
            return f"has hooks on its {type(module).__name__}, or another one"
    unknown = []
    for module in (*submodules(model.lm_head), *submodules(model.model.decoder)):
        if not is_as_written(module):
            if type(module).__module__.startswith(WRAPPERS):
                continue
            unknown.append(module)
        if module.training:
            return "is in training mode"
        # The others take no additive mask of four dimensions.
        if function_of(module) not in (None, "eager", "sdpa"):
            return f"has the attention {function_of(module)}"
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


def function_of(module: Any) -> str | None:
    """Returns the name of the function that an attention of the decoder calls; `None` for any other module."""
    if "layer_idx" not in vars(module):
        return None
    name: str = module.config._attn_implementation or "eager"
    registered = ALL_ATTENTION_FUNCTIONS.get(name)
    is_known = registered is None or registered.__module__.startswith("transformers.")
    return name if is_known else f"{name} of {registered.__module__}"


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
    state: list[Any] = []
    for module in changed:
        state += [type(module).forward, vars(module).get("forward")]
        state += [{**module._forward_hooks}, {**module._forward_pre_hooks}]
        state += [(id(each), each._version) for each in (*module.parameters(), *module.buffers())]
    # In the module, so that it lives as long, and so do the functions that it compares.
    before = vars(decoder).get("_steps_proved")
    if before is None or before[0] != state:
        is_equal = False
        # A module that cannot work with this cache is no error of the caller's.
        with suppress(Exception):
            is_equal = _differs_by_rounding(decoder)
        before = vars(decoder)["_steps_proved"] = state, is_equal
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
    repeated = [each.repeat_interleave(beams, dim=0) for each in (states, mask)] if decoder.has_source else []
    expected = decoder(tokens.flatten(0, 1), None, *repeated, use_cache=False).last_hidden_state
    steps = IncrementalDecoder(decoder, states, mask if decoder.has_source else None, beams)
    steps.step(tokens[:, :1, 0])
    found = torch.stack([steps.step(tokens[:, :, i]) for i in range(1, length)], dim=1)
    difference = (found - expected[:, 1:]).abs().max() / expected.abs().max()
    return bool(difference <= ROUNDING.get(expected.dtype, 0.05))
