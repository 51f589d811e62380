"""The decoder one token at a time, for `generate()`.

[`IncrementalDecoder`] computes the same as [`VaswaniDecoder`] with a cache, by the same layers, but makes beams cheap:

- Keys and values of the encoder are stored once for each sentence, and its hypotheses share them.
- Keys and values of the target stay where they were written. When a hypothesis extends another one in beam search, its
  mask over all positions that its sentence has written changes, instead of keys and values being copied. Each product
  has more columns than necessary, but all hypotheses of a sentence share it. Positions that no hypothesis sees any
  more are removed from time to time.
- One hypothesis reads the prompt, which all hypotheses of a sentence share. A decoder on its own, whose prompts are
  long, reads them at once by its modules.
- Finished sentences are removed.

It bypasses the modules whose results it computes. [`is_unmodified`] checks that a model has these modules, unchanged.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .kernels_vaswani import type_of_products
from .products_vaswani import fast_products, fused_linear, is_matrix, linear_add, product

# Positions by which the buffers of keys and values grow.
TOKENS_AT_A_TIME = 16


def layer_norm_fn(norm: nn.LayerNorm) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns LayerNorm as a function, without the overhead of calling its module."""
    shape, weight, bias, eps = norm.normalized_shape, norm.weight, norm.bias, norm.eps
    return lambda states: torch.layer_norm(states, shape, weight, bias, eps)


def add_and_norm(module: Any, sublayer: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """
    Returns [`VaswaniAddAndNorm`] without dropout as a function.

    Args:
        module ([`VaswaniAddAndNorm`]): module of the layer.
        sublayer (`Callable`): function of states and residual, each of shape `(rows, d_model)`, and of more arguments.

    Returns:
        A function of states and of the other arguments of `sublayer`.
    """
    norm = layer_norm_fn(module.layer_norm)
    if module.norm_first:
        return lambda states, *more: sublayer(norm(states), states, *more)
    return lambda states, *more: norm(sublayer(states, states, *more))


@dataclass(frozen=True)
class Prompt:
    """Texts that a decoder on its own has read at once, and what it computed."""

    states: torch.Tensor  # output at the last position, [sentences, d_model]
    layers: Sequence[Any]  # of a [`Cache`]: keys and values of each layer, [sentences, heads, prompt, head_dim]
    mask: torch.Tensor | None  # 1 for tokens, 0 for padding, [sentences, prompt]; None if there is no padding

    @classmethod
    def read(cls, decoder: Any, input_ids: torch.Tensor, mask: torch.Tensor | None, cache: Any) -> "Prompt":
        """
        Reads texts.

        Args:
            decoder ([`VaswaniDecoder`]): the module.
            input_ids (`torch.LongTensor` of shape `(sentences, prompt)`): the texts.
            mask (`torch.Tensor` of shape `(sentences, prompt)`, *optional*): 1 for tokens, 0 for padding.
            cache ([`Cache`]): an empty one.
        """
        states = decoder(input_ids, mask, cache=cache, use_cache=True).last_hidden_state
        return cls(states[:, -1], cache.layers, None if mask is None or mask.all() else mask != 0)


class SourceAttention:
    """
    Multi-head attention from the target to the source, which all hypotheses of a sentence share (Section 3.2.3).

    Args:
        attention ([`VaswaniAttention`]): module of the layer.
        encoder_states (`torch.Tensor` of shape `(sentences, source, d_model)`): output of the encoder.
        bias (`torch.Tensor` of shape `(sentences, 1, 1, source)`, *optional*): mask of the source's padding.
        rows (`int`): number of hypotheses.
    """

    def __init__(self, attention: Any, encoder_states: torch.Tensor, bias: torch.Tensor | None, rows: int) -> None:
        self.heads, self.scaling, self.bias = attention.num_heads, attention.scaling, bias
        self.project_query = fused_linear(attention.q_proj, rows=rows)
        self.project_out = linear_add(attention.out_proj, rows)
        dtype = type_of_attention(encoder_states)
        with fast_products(attention.config, encoder_states):
            keys, values = attention.k_proj(encoder_states).to(dtype), attention.v_proj(encoder_states).to(dtype)
        self.keys = by_head(keys, self.heads)  # [sentences, heads, source, d_k]
        self.values = by_head(values, self.heads)  # [sentences, heads, source, d_v]

    def __call__(self, states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Attends from `states` and adds `residual`; both of shape `(sentences * beams, d_model)`."""
        query = self.project_query(states).to(self.keys.dtype)
        query = by_head(query.view(len(self.keys), -1, query.shape[1]), self.heads)
        return self.project_out(attend(query, self.keys, self.values, self.bias, self.scaling), residual)

    def keep(self, sentences: torch.Tensor) -> None:
        """Keeps the sentences with these indices."""
        self.keys, self.values = self.keys.index_select(0, sentences), self.values.index_select(0, sentences)
        if self.bias is not None:
            self.bias = self.bias.index_select(0, sentences)


class TargetAttention:
    """
    Multi-head attention from the target to its earlier positions, with their keys and values (Section 3.2.3).

    Args:
        attention ([`VaswaniAttention`]): module of the layer.
        encoder_states (`torch.Tensor` of shape `(sentences, source, d_model)`): gives the number of sentences, and
            type and device of keys and values.
        rows (`int`): number of hypotheses.
    """

    def __init__(self, attention: Any, encoder_states: torch.Tensor, rows: int) -> None:
        self.heads, self.scaling = attention.num_heads, attention.scaling
        d_k, d_v = (projection.out_features // self.heads for projection in (attention.k_proj, attention.v_proj))
        self.widths, self.query_widths = (d_k, d_v), (d_k, d_k + d_v)
        # The output has query, key and value of the first head, then those of the second, and so on.
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.project = fused_linear(*projections, rows=rows, groups=self.heads)
        self.project_out = linear_add(attention.out_proj, rows)
        # Keys and values, concatenated: [sentences, heads, places, d_k + d_v].
        dtype = type_of_attention(encoder_states)
        self.stored = encoder_states.new_empty(len(encoder_states), self.heads, 0, d_k + d_v, dtype=dtype)

    def __call__(
        self, states: torch.Tensor, residual: torch.Tensor, written: int, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """
        Attends from one new position of each hypothesis.

        Args:
            states (`torch.Tensor` of shape `(rows, d_model)`): input at this position.
            residual (`torch.Tensor` of shape `(rows, d_model)`): added to the output.
            written (`int`): number of places in use.
            bias (`torch.Tensor` of shape `(sentences, 1, beams, places)`, *optional*): mask of the places that each
                hypothesis sees.

        Returns:
            `torch.Tensor` of shape `(rows, d_model)`.
        """
        projected = self.project(states).to(self.stored.dtype)
        projected = by_head(projected.view(self.stored.shape[0], -1, projected.shape[1]), self.heads)
        query, new = projected.split(self.query_widths, dim=3)
        beams = new.shape[2]
        self.stored.narrow(2, written, beams).copy_(new)
        keys, values = self.stored.narrow(2, 0, written + beams).split(self.widths, dim=3)
        return self.project_out(attend(query, keys, values, bias, self.scaling), residual)

    def make_room(self, room: int, written: int) -> None:
        """Resizes the buffer to `room` places, of which `written` are in use."""
        stored = self.stored.new_empty(*self.stored.shape[:2], room, self.stored.shape[3])
        stored[:, :, :written] = self.stored[:, :, :written]
        self.stored = stored

    def recall(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Takes keys and values of a prompt, of shape `(sentences, heads, prompt, head_dim)`."""
        self.stored = torch.cat((keys, values), dim=3).to(self.stored.dtype)

    def keep(self, sentences: torch.Tensor, written: int) -> None:
        """Keeps the sentences with these indices, and the places in use."""
        self.stored = self.stored[:, :, :written].index_select(0, sentences)

    def choose(self, places: torch.Tensor) -> None:
        """Keeps the places with these indices, of shape `(sentences, kept)`."""
        shape = (*self.stored.shape[:2], places.shape[1], self.stored.shape[3])
        self.stored = self.stored.gather(2, places[:, None, :, None].expand(shape))


class IncrementalLayer:
    """
    One layer of the decoder (Section 3.1).

    Args:
        layer ([`VaswaniDecoderLayer`]): the module.
        encoder_states (`torch.Tensor` of shape `(sentences, source, d_model)`): output of the encoder.
        source_bias (`torch.Tensor` of shape `(sentences, 1, 1, source)`, *optional*): mask of the source's padding.
        rows (`int`): number of hypotheses.
    """

    def __init__(self, layer: Any, encoder_states: torch.Tensor, source_bias: torch.Tensor | None, rows: int) -> None:
        self.target = TargetAttention(layer.self_attn, encoder_states, rows)
        self.source = (
            SourceAttention(layer.cross_attn, encoder_states, source_bias, rows) if layer.has_source else None
        )
        fc1, fc2 = fused_linear(layer.feed_forward.fc1, rows=rows), linear_add(layer.feed_forward.fc2, rows)
        activation = layer.feed_forward.activation
        if type(activation) is nn.ReLU:
            activation = torch.relu_
        self.attend_to_target = add_and_norm(layer.self_attn_norm, self.target)
        if self.source is not None:
            self.attend_to_source = add_and_norm(layer.cross_attn_norm, self.source)
        self.feed_forward = add_and_norm(
            layer.feed_forward_norm, lambda states, residual: fc2(activation(fc1(states)), residual)
        )

    def step(self, states: torch.Tensor, written: int, bias: torch.Tensor | None) -> torch.Tensor:
        """Computes one position of each hypothesis; arguments as in [`TargetAttention`]."""
        states = self.attend_to_target(states, written, bias)
        if self.source is not None:
            states = self.attend_to_source(states)
        return self.feed_forward(states)


def type_of_attention(states: torch.Tensor) -> torch.dtype:
    """Returns the type in which attention computes: on a CPU that of the states, and else that of products."""
    # For few queries, torch's attention takes twice as long in bfloat16 as in float32 on a CPU.
    return states.dtype if states.device.type == "cpu" else type_of_products(states)


def by_head(states: torch.Tensor, heads: int) -> torch.Tensor:
    """Splits `(sentences, length, heads * head_dim)` into `(sentences, heads, length, head_dim)`."""
    return states.view(states.shape[0], states.shape[1], heads, -1).transpose(1, 2)


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Computes equation 1 and Concat of Section 3.2.2 for split heads: `(sentences * beams, heads * d_v)`."""
    attended = nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scaling)
    return attended.transpose(1, 2).reshape(query.shape[0] * query.shape[2], -1)


class IncrementalDecoder:
    """
    [`VaswaniDecoder`], one token at a time, with the keys and values of earlier tokens.

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
        self.decoder = decoder
        source_bias, dtype = None, type_of_attention(encoder_states)
        if source_mask is not None and not source_mask.all():
            source_bias = as_bias(source_mask != 0, dtype)[:, None, None]
        rows = len(encoder_states) * num_beams
        self.layers = [IncrementalLayer(layer, encoder_states, source_bias, rows) for layer in decoder.layers]
        self.length = 0  # tokens that each hypothesis of the longest sentence has read
        # Tokens that the others have less, [sentences]; None if all have as many.
        self.lag: torch.Tensor | None = None
        self.written = 0  # places of keys and values in use
        self.room = 0  # places in the buffers
        # Mask of the places that each hypothesis sees.
        self.bias = encoder_states.new_zeros(len(encoder_states), 1, num_beams, 0, dtype=dtype)
        # Mask of the places of one step: each hypothesis sees its own.
        own = torch.eye(num_beams, dtype=torch.bool, device=encoder_states.device)
        self.own = as_bias(own, dtype)
        self.encoding = encoder_states.new_zeros(0, 0)  # of the first positions: [positions, d_model]

    def recall(self, prompt: Prompt) -> None:
        """Continues a prompt, which all hypotheses of a sentence share, in place of reading it."""
        for layer, of_prompt in zip(self.layers, prompt.layers, strict=True):
            layer.target.recall(of_prompt.keys, of_prompt.values)
        self.length = self.written = self.room = prompt.layers[0].keys.shape[2]
        self.bias = self.bias.new_zeros(*self.bias.shape[:3], self.room)
        if prompt.mask is not None:
            self.bias += as_bias(prompt.mask, self.bias.dtype)[:, None, None]
            self.lag = (~prompt.mask).sum(dim=1)
            self._compare_lengths()

    def _compare_lengths(self) -> None:
        """Finds the longest sentence that is left."""
        if self.lag is not None:
            least = int(self.lag.min())
            self.lag, self.length = self.lag - least, self.length - least

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """
        Reads one token of each hypothesis.

        Args:
            tokens (`torch.LongTensor` of shape `(sentences, beams)`): the tokens; of shape `(sentences, 1)` while all
                hypotheses of a sentence are the same.

        Returns:
            `torch.Tensor` of shape `(sentences * beams, d_model)`: output of the decoder at these tokens.
        """
        beams = tokens.shape[1]
        self._make_room(beams)
        embeds = self.decoder.embed_tokens(tokens.reshape(-1))  # [rows, d_model]
        positions = self.length if self.lag is None else (self.length - self.lag).repeat_interleave(beams)
        states = self.decoder.positions.add(embeds, self.encoding[positions])
        bias = None
        if beams > 1 or self.lag is not None:
            self.bias[..., self.written : self.written + beams] = self.own
            bias = self.bias[..., : self.written + beams]
        for layer in self.layers:
            states = layer.step(states, self.written, bias)
        self.length += 1
        self.written += beams
        return self.decoder.norm(states)

    def _make_room(self, beams: int) -> None:
        """Ensures that the buffers have places for the next step, and removes unused ones before they grow."""
        if self.length >= len(self.encoding):
            self.decoder.positions.check_last(self.length)
            wanted, table = max(TOKENS_AT_A_TIME, 2 * self.length), self.decoder.positions.table
            if table is not None:
                wanted = min(wanted, table.num_embeddings)
            self.encoding = self.decoder.positions.encode(torch.arange(wanted, device=self.bias.device))
        if self.written + beams > self.room:
            if beams > 1:
                self._forget()
            self.room = self.written + TOKENS_AT_A_TIME * beams
            self.bias = nn.functional.pad(self.bias[..., : self.written], (0, self.room - self.written))
            for layer in self.layers:
                layer.target.make_room(self.room, self.written)

    def _forget(self) -> None:
        """Removes places that no hypothesis sees any more: those of discarded hypotheses."""
        seen = (self.bias[:, 0, :, : self.written] == 0).any(dim=1)  # [sentences, places]
        needed = int(seen.sum(dim=1).max())
        # In their order; sentences that need fewer keep some unseen places behind them.
        places = seen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :needed]
        shape = (*self.bias.shape[:3], needed)
        self.bias = self.bias.gather(3, places[:, None, None].expand(shape))
        for layer in self.layers:
            layer.target.choose(places)
        self.written = needed

    def reorder(self, parents: torch.Tensor) -> None:
        """
        Replaces each hypothesis by another one of its sentence.

        Args:
            parents (`torch.LongTensor` of shape `(sentences, beams)`): indices of the hypotheses to continue.
        """
        seen = self.bias[..., : self.written]
        seen.copy_(torch.take_along_dim(seen, parents[:, None, :, None], dim=2))

    def keep(self, sentences: torch.Tensor) -> None:
        """
        Removes all other sentences.

        Args:
            sentences (`torch.LongTensor` of shape `(kept,)`): indices of the sentences to keep, in ascending order.
        """
        self.room = self.written
        self.bias = self.bias.index_select(0, sentences)
        if self.lag is not None:
            self.lag = self.lag.index_select(0, sentences)
            self._compare_lengths()
        for layer in self.layers:
            layer.target.keep(sentences, self.written)
            if layer.source is not None:
                layer.source.keep(sentences)


def as_bias(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns an additive mask of the shape of `visible`: 0 where it is true, else the least finite number."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, torch.finfo(dtype).min
    )


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Returns the context in which operations compute in the types of their arguments."""
    is_on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_on else nullcontext()


class OutputProjection:
    """
    The linear transformation on top of the decoder (Section 3.4).

    Args:
        lm_head (`nn.Module`): the module.
        rows (`int`): number of hypotheses of a step.
        entries (`torch.LongTensor` of shape `(entries,)`, *optional*): the entries of the vocabulary to compute; all
            by default.
    """

    def __init__(self, lm_head: Any, rows: int, entries: torch.Tensor | None = None) -> None:
        if not is_matrix(lm_head):
            self.project = lm_head if entries is None else lambda states: lm_head(states).index_select(1, entries)
            return
        weight, bias = lm_head.weight, lm_head.bias
        if entries is not None:
            weight = weight.index_select(0, entries)
            bias = None if bias is None else bias.index_select(0, entries)
        # With autocast, too: rounded logits would change the order of hypotheses.
        self.project = product([weight], bias, weight.dtype, rows)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Returns logits of shape `(rows, entries)` in float32 for states of shape `(rows, d_model)`."""
        with without_autocast(states.device):
            return self.project(states).float()


class EnsembleDecoder:
    """
    The decoders of one or several models, which predict tokens by the mean of their probabilities.

    Args:
        models (`Sequence` of [`VaswaniForConditionalGeneration`], or one [`VaswaniForCausalLM`]): models with the same
            vocabulary.
        encoder_states (`Sequence` of `torch.Tensor` of shape `(sentences, source, d_model)`): outputs of their
            encoders; of a decoder on its own see [`IncrementalDecoder`].
        source_mask (`torch.Tensor` of shape `(sentences, source)`, *optional*): 1 for tokens, 0 for padding.
        num_beams (`int`): number of hypotheses of a sentence.
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
        self.projections = [OutputProjection(model.lm_head, rows, entries) for model in models]
        self.decoders = [
            IncrementalDecoder(model.model.decoder, states, source_mask, num_beams)
            for model, states in zip(models, encoder_states, strict=True)
        ]
        self.states: list[torch.Tensor] = []  # outputs of the decoders at the last tokens

    def recall(self, prompt: Prompt) -> None:
        """Continues a prompt of the only model, see [`IncrementalDecoder.recall`]."""
        self.decoders[0].recall(prompt)
        self.states = [prompt.states]

    def read(self, tokens: torch.Tensor) -> None:
        """Reads one token of each hypothesis, see [`IncrementalDecoder.step`]."""
        # The decoders have converted their matrices.
        with without_autocast(tokens.device):
            self.states = [decoder.step(tokens) for decoder in self.decoders]

    def logits(self) -> torch.Tensor:
        """Returns logits of the next token, of shape `(rows, entries)`, in float32; an ensemble: log_probs."""
        if len(self.decoders) == 1:
            return self.projections[0].logits(self.states[0])
        return self.log_probs()

    def log_probs(self) -> torch.Tensor:
        """Returns log-probabilities of the next token, of shape `(rows, entries)`, in float32."""
        several = []
        for projection, states in zip(self.projections, self.states, strict=True):
            logits = projection.logits(states)
            several.append(torch.log_softmax(logits, dim=1, out=logits))
        if len(several) == 1:
            return several[0]
        return torch.logsumexp(torch.stack(several), dim=0) - math.log(len(several))

    def repeat(self, beams: int) -> None:
        """Repeats the output for one hypothesis of each sentence for `beams` hypotheses."""
        self.states = [states.repeat_interleave(beams, dim=0) for states in self.states]

    def reorder(self, parents: torch.Tensor) -> None:
        """Replaces hypotheses, see [`IncrementalDecoder.reorder`]."""
        for decoder in self.decoders:
            decoder.reorder(parents)

    def keep(self, sentences: torch.Tensor) -> None:
        """Removes sentences, see [`IncrementalDecoder.keep`]."""
        for decoder in self.decoders:
            decoder.keep(sentences)
