"""The network of "Attention Is All You Need" (Vaswani et al., 2017), in the order of its Section 3.

3.2 attention, 3.3 feed-forward, 3.4 embeddings, 3.5 positions; then the layers and stacks of 3.1 that they make
up (Figure 1), and on top the three models that transformers' users know: the bare network, the one that translates,
and the encoder alone. Last, the loss of 5.4.
"""

import copy
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_vaswani import VaswaniConfig
from .decoding_vaswani import AsWritten
from .generation_vaswani import VaswaniGenerationMixin

# Not used here: transformers copies the files that the model's file imports, and the pipeline travels with the model.
from .pipeline_vaswani import VaswaniTranslationPipeline  # noqa: F401

# ---- 5.4 Dropout -------------------------------------------------------------------------------------------------


class VaswaniDropout(nn.Dropout):
    """
    Dropout (Section 5.4). On a CPU torch draws a number for each element, one after the other, which in a small model
    takes a large part of an update; this draws 64 bits for four elements. An element is kept or not by 16 of them, so
    the rate is `p` rounded to a multiple of 1/65536, and what is kept is scaled by just that rate.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Any shape -> the same shape. Draws from torch's global generator, as `nn.Dropout` does."""
        threshold = round(self.p * 2**16)
        if not self.training or input.device.type != "cpu" or threshold in (0, 2**16) or torch.compiler.is_compiling():
            return super().forward(input)
        return _Dropout.apply(input, threshold)


class _Dropout(torch.autograd.Function):
    """Zeroes elements with probability `threshold` / 65536. Keeps one byte an element for the backward pass."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, threshold: int) -> torch.Tensor:
        words = torch.empty((input.numel() + 3) // 4, dtype=torch.int64, device=input.device).random_(-(2**63), None)
        draws = words.view(torch.int16)[: input.numel()].view(input.shape)  # from -2^15 to 2^15 - 1
        kept = draws >= threshold - 2**15
        ctx.save_for_backward(kept)
        ctx.scale = 2**16 / (2**16 - threshold)
        # Converted and multiplied is several times faster here than `torch.where`, and than a product of unlike types.
        return kept.to(input.dtype).mul_(input).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (kept,) = ctx.saved_tensors
        return kept.to(gradient.dtype).mul_(gradient).mul_(ctx.scale), None


# ---- 3.2 Attention -----------------------------------------------------------------------------------------------


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Unpack[TransformersKwargs],
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Scaled dot-product attention: softmax(Q K^T / sqrt(d_k)) V (Section 3.2.1, equation 1). In the shapes, `target` is
    where the queries stand and `source` what they look at; in self-attention the two are one.

    Args:
        module (`nn.Module`): the attention that calls; tells whether dropout is on.
        query (`torch.Tensor` of shape `(batch, heads, target, d_k)`): Q.
        key (`torch.Tensor` of shape `(batch, heads, source, d_k)`): K.
        value (`torch.Tensor` of shape `(batch, heads, source, d_v)`): V.
        attention_mask (`torch.Tensor` of shape `(batch, 1, target, source)`, *optional*): 0 where a query may look,
            a very negative number where not (Section 3.2.3: "setting to -inf").
        scaling (`float`): 1 / sqrt(d_k).
        dropout (`float`): rate on the attention weights.

    Returns:
        The attended values of shape `(batch, target, heads, d_v)`, and the weights of shape
        `(batch, heads, target, source)`.
    """
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling  # [batch, heads, target, source]
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    attended = torch.matmul(weights, value)  # [batch, heads, target, d_v]
    return attended.transpose(1, 2).contiguous(), weights  # [batch, target, heads, d_v]


class VaswaniAttention(nn.Module):
    """
    Multi-head attention: Concat(head_1, ..., head_h) W^O with head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)
    (Section 3.2.2). The h projections of a kind are one matrix.

    Args:
        config ([`VaswaniConfig`]): sizes and switches.
        is_causal (`bool`): whether this is the decoder's self-attention. `sdpa` and flash attention hide the future by
            this word where no mask comes; `eager` looks at the mask alone.
        layer_idx (`int`, *optional*): the layer's place in its stack, which names its row in the cache.
    """

    def __init__(self, config: VaswaniConfig, is_causal: bool = False, layer_idx: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.is_causal = is_causal
        self.layer_idx = layer_idx
        self.num_heads = config.num_heads
        d_k = config.d_k or config.d_model // config.num_heads
        d_v = config.d_v or config.d_model // config.num_heads
        self.scaling = d_k**-0.5
        self.q_proj = nn.Linear(config.d_model, config.num_heads * d_k, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.d_model, config.num_heads * d_k, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.d_model, config.num_heads * d_v, bias=config.attention_bias)
        self.out_proj = nn.Linear(config.num_heads * d_v, config.d_model, bias=config.attention_bias)

    def split_heads(self, states: torch.Tensor) -> torch.Tensor:
        """`(batch, length, heads * head_dim)` -> `(batch, heads, length, head_dim)`."""
        return states.view(*states.shape[:-1], self.num_heads, -1).transpose(1, 2)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(batch, target, d_model)`): where the queries come from.
            attention_mask (`torch.Tensor` of shape `(batch, 1, target, source)`, *optional*): see
                [`eager_attention_forward`].
            encoder_hidden_states (`torch.Tensor` of shape `(batch, source, d_model)`, *optional*): where keys and
                values come from; without it they come from `hidden_states` (self-attention).
            past_key_values ([`Cache`], *optional*): keys and values of earlier calls, updated in place.

        Returns:
            The output of shape `(batch, target, d_model)`, and the weights of shape `(batch, heads, target, source)`
            where the attention implementation gives them, else `None`.
        """
        query = self.split_heads(self.q_proj(hidden_states))
        key, value = self.keys_and_values(hidden_states, encoder_hidden_states, past_key_values)
        attention: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attended, weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        concatenated = attended.reshape(*hidden_states.shape[:-1], -1)  # [batch, target, heads * d_v]
        return self.out_proj(concatenated), weights

    def keys_and_values(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None,
        past_key_values: Cache | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V split into heads, from the cache as far as it has them. Arguments as in `forward`."""
        if encoder_hidden_states is None:
            cache = getattr(past_key_values, "self_attention_cache", past_key_values)
        else:
            cache = getattr(past_key_values, "cross_attention_cache", None)
            # The source does not change while its translation grows: its keys and values are computed once.
            if cache is not None and past_key_values.is_updated.get(self.layer_idx):  # type: ignore[union-attr]
                return cache.layers[self.layer_idx].keys, cache.layers[self.layer_idx].values
        states = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        key, value = self.split_heads(self.k_proj(states)), self.split_heads(self.v_proj(states))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
            if encoder_hidden_states is not None:
                past_key_values.is_updated[self.layer_idx] = True  # type: ignore[union-attr]
        return key, value


# ---- 3.3 Position-wise Feed-Forward Networks ---------------------------------------------------------------------


class VaswaniFeedForward(nn.Module):
    """FFN(x) = max(0, x W1 + b1) W2 + b2, the same at every position (Section 3.3, equation 2)."""

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.d_model, config.d_ff)
        self.activation = ACT2FN[config.activation_function]
        self.dropout = VaswaniDropout(config.activation_dropout)
        self.fc2 = nn.Linear(config.d_ff, config.d_model)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(batch, length, d_model)` -> the same shape."""
        return self.fc2(self.dropout(self.activation(self.fc1(hidden_states))))


# ---- 3.4 Embeddings and Softmax ----------------------------------------------------------------------------------
#
# The look-up is `embed` below; the factor sqrt(d_model) and the sum with the positions are in `VaswaniPositions`. The
# one matrix of both embeddings and the pre-softmax transformation is tied in `VaswaniForConditionalGeneration`. The
# softmax itself is in the loss and in `generate()`.


class VaswaniPreTrainedModel(PreTrainedModel):
    """The embedding's look-up, and what transformers asks of a model: its first weights, and what it supports."""

    config: VaswaniConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _no_split_modules = ["VaswaniEncoderLayer", "VaswaniDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # The paper is silent; tensor2tensor: Xavier uniform for matrices, N(0, d_model^-0.5) for embeddings.
        if isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.d_model**-0.5)
            # A slice does not know that its matrix was loaded, so `init` cannot protect it.
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    def _resize_token_embeddings(
        self, new_num_tokens: int, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        resized = super()._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        # transformers knows of the source embedding and the head; a target embedding of its own grows with them.
        target = getattr(getattr(self.base_model, "decoder", None), "embed_tokens", resized)
        if target.num_embeddings != resized.num_embeddings:
            requires_grad = target.weight.requires_grad
            target = self._get_resized_embeddings(target, resized.num_embeddings, mean_resizing=mean_resizing)
            self.base_model.decoder.embed_tokens = target.requires_grad_(requires_grad)
        return resized

    def embed(self, side: str, input_ids: torch.LongTensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """
        The rows of this stack's embedding matrix (Section 3.4), unless they are given.

        Args:
            side (`str`): what the arguments' names start with for the caller: `""` or `"decoder_"`.
            input_ids (`torch.LongTensor` of shape `(batch, length)`, *optional*): tokens.
            inputs_embeds (`torch.Tensor` of shape `(batch, length, d_model)`, *optional*): instead.

        Returns:
            `torch.Tensor` of shape `(batch, length, d_model)`.

        Raises:
            ValueError: neither or both were given, they have another shape or no tokens, or an id is not in the
                vocabulary.
        """
        if input_ids is not None and inputs_embeds is None:
            if input_ids.dim() != 2:
                raise ValueError(
                    f"{side}input_ids must be (batch, length), but the shape is {tuple(input_ids.shape)}."
                )
            check_not_empty(f"{side}input_ids", input_ids)
            check_ids(f"{side}input_ids", input_ids, self.config.vocab_size, "vocab_size")
            return self.embed_tokens(input_ids)
        if inputs_embeds is None or input_ids is not None:
            given = "neither" if inputs_embeds is None else "both"
            raise ValueError(f"Give exactly one of {side}input_ids and {side}inputs_embeds: {given} came.")
        if inputs_embeds.dim() != 3 or inputs_embeds.shape[2] != self.config.d_model:
            raise ValueError(
                f"{side}inputs_embeds must be (batch, length, d_model), d_model being {self.config.d_model}, "
                f"but the shape is {tuple(inputs_embeds.shape)}."
            )
        check_not_empty(f"{side}inputs_embeds", inputs_embeds)
        return inputs_embeds


def check_layer_numbers(layers: nn.ModuleList) -> None:
    """
    Refuses layers that would write into one place of the cache: one layer used twice, or copies of one.

    Raises:
        ValueError: with the layer's place and its number.
    """
    for place, layer in enumerate(layers):
        for attention in (getattr(layer, "self_attn", None), getattr(layer, "cross_attn", None)):
            number = getattr(attention, "layer_idx", place)
            if number != place:
                raise ValueError(
                    f"Decoder layer {place} has an attention whose layer_idx is {number}, so that two layers would "
                    "share one place of the cache: give each its own layer_idx, or set use_cache=False."
                )


def check_not_empty(name: str, given: torch.Tensor) -> None:
    """
    Refuses a batch without sentences, or sentences without a token.

    Raises:
        ValueError: with the shape.
    """
    if given.shape[0] == 0 or given.shape[1] == 0:
        raise ValueError(f"{name} must have sentences with at least one token, but the shape is {tuple(given.shape)}.")


def check_ids(name: str, ids: torch.Tensor, size: int, size_name: str) -> None:
    """
    Refuses an id that its table has no row for, on the CPU; elsewhere looking would make the device wait.

    Raises:
        ValueError: with the id and the size of the table.
    """
    if ids.device.type != "cpu" or ids.numel() == 0 or torch.compiler.is_compiling():
        return
    for id_ in (int(ids.min()), int(ids.max())):
        if not 0 <= id_ < size:
            raise ValueError(f"{name} has {id_}, but {size_name} is {size}: ids go from 0 to {size - 1}.")


def check_shape(name: str, given: torch.Tensor | None, batch: int, length: int | None = None) -> None:
    """
    Refuses states or a mask of another number of sentences or tokens; a mask of four dimensions is the caller's own.

    Raises:
        ValueError: with both numbers.
    """
    if given is None or given.dim() > 3:
        return
    if given.dim() < 2:
        raise ValueError(f"{name} must be (batch, length), but the shape is {tuple(given.shape)}.")
    if given.shape[0] != batch:
        raise ValueError(f"{name} is of {given.shape[0]} sentences, but the tokens are of {batch}.")
    if length is not None and given.shape[1] != length:
        raise ValueError(f"{name} is {given.shape[1]} tokens wide, but there are {length}.")


# ---- 3.5 Positional Encoding -------------------------------------------------------------------------------------


def sinusoids(
    positions: torch.Tensor, d_model: int, layout: str = "interleaved", base: float = 10000.0
) -> torch.Tensor:
    """
    PE(pos, 2i) = sin(pos / base^(2i/d_model)) and PE(pos, 2i+1) = cos of the same (Section 3.5).

    Args:
        positions (`torch.LongTensor` of shape `(...)`): positions, counted from 0; any number.
        d_model (`int`): width, even.
        layout (`str`): `"interleaved"` as above; `"concatenated"`: all sines, then all cosines; `"tensor2tensor"`:
            concatenated, with i / (d_model/2 - 1) in place of 2i / d_model.
        base (`float`): the wavelengths go from 2 pi to `base` * 2 pi.

    Returns:
        `torch.FloatTensor` of shape `(..., d_model)`, in float32 whatever the model's own type.
    """
    # Angles in float64: at position 100 000 those of float32 are wrong in the third digit. Some devices have no
    # float64; the few numbers of a table are then computed on the CPU.
    where = torch.device("cpu") if positions.device.type == "mps" else positions.device
    i = torch.arange(d_model // 2, device=where, dtype=torch.float64)
    exponents = i / max(d_model // 2 - 1, 1) if layout == "tensor2tensor" else 2 * i / d_model
    angles = positions.to(where, torch.float64)[..., None] / base**exponents  # [..., d_model / 2]
    if layout == "interleaved":
        encoding = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)  # [..., d_model]
    else:
        encoding = torch.cat((angles.sin(), angles.cos()), dim=-1)
    return encoding.to(positions.device, torch.float32)


def position_ids(
    inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None = None, past_length: torch.Tensor | int = 0
) -> torch.Tensor:
    """
    Positions counted from 0 at a sentence's first token: padding moves none of them, on whichever side it is.

    Args:
        inputs_embeds (`torch.Tensor` of shape `(batch, length, d_model)`): the tokens; gives length and device.
        attention_mask (`torch.Tensor` of shape `(batch, past + length)`, *optional*): 1 for tokens, 0 for padding.
            Without it every column counts.
        past_length (`int`, or a tensor of one number): columns that a cache holds already.

    Returns:
        `torch.LongTensor` of shape `(batch, length)`, or `(1, length)` without a mask.
    """
    columns = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_length  # [length]
    if attention_mask is None:
        return columns[None]
    counted = (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)  # [batch, past + length]
    # Columns that a mask does not reach are padding, as in the masks that transformers makes of it.
    return counted[:, columns.clamp(max=attention_mask.shape[1] - 1)]


class VaswaniPositions(nn.Module):
    """
    The bottom of both stacks in Figure 1: embedding times sqrt(d_model), plus position, then dropout (Sections 3.4,
    3.5 and 5.4). Sinusoids are computed when asked for: there is nothing to save, and no longest sentence. Learned
    positions (Table 3 row E) are a table of `max_position_embeddings` rows.
    """

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__()
        self.scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.d_model = config.d_model
        self.layout = config.sinusoid_layout
        self.offset = config.position_offset
        self.max_position_embeddings = config.max_position_embeddings
        learned = config.position_encoding == "learned"
        self.table = nn.Embedding(config.max_position_embeddings, config.d_model) if learned else None
        self.dropout = VaswaniDropout(config.dropout)

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_length: torch.Tensor | int = 0,
    ) -> torch.Tensor:
        """
        Args:
            inputs_embeds (`torch.Tensor` of shape `(batch, length, d_model)`): rows of the embedding matrix.
            attention_mask (`torch.Tensor` of shape `(batch, past + length)`, *optional*): 1 for tokens, 0 for
                padding. A ready mask of four dimensions says nothing about positions: then every column counts.
            past_length (`int`, or a tensor of one number): columns that a cache holds already.

        Returns:
            `torch.Tensor` of shape `(batch, length, d_model)`, of the type of `inputs_embeds`.

        Raises:
            ValueError: a learned table has no row for a position.
        """
        if attention_mask is not None and attention_mask.dim() != 2:
            attention_mask = None
        positions = position_ids(inputs_embeds, attention_mask, past_length)
        if self.table is not None or attention_mask is None:
            return self.add(inputs_embeds, self.encode(positions))
        # All sentences count through the same positions: each is computed once.
        columns = torch.arange(attention_mask.shape[1], device=positions.device)
        return self.add(inputs_embeds, nn.functional.embedding(positions, self.encode(columns)))

    def encode(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions of shape `(...)`, from 0 on -> their encodings, `(..., d_model)`. Errors as in `forward`."""
        if self.table is None:
            return sinusoids(positions + self.offset, self.d_model, self.layout)
        check_ids("positions", positions, self.max_position_embeddings, "max_position_embeddings")
        return self.table(positions)

    def add(self, inputs_embeds: torch.Tensor, encoding: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding matrix, `(..., d_model)`, and encodings to add -> the shape of the first."""
        # In float32, and rounded once: a sum made in bfloat16 can hardly tell neighbouring positions apart.
        embeddings = inputs_embeds.to(torch.promote_types(inputs_embeds.dtype, torch.float32))
        hidden_states = embeddings * self.scale + encoding
        return self.dropout(hidden_states.to(inputs_embeds.dtype))


# ---- 3.1 Encoder and Decoder Stacks ------------------------------------------------------------------------------


class VaswaniAddAndNorm(nn.Module):
    """
    "Add & Norm" of Figure 1 around one sub-layer: LayerNorm(x + Dropout(Sublayer(x))) (Sections 3.1 and 5.4), or
    x + Dropout(Sublayer(LayerNorm(x))) with `norm_position="pre"`.
    """

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.norm_first = config.norm_position == "pre"
        self.dropout = VaswaniDropout(config.dropout)

    def forward(self, hidden_states: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`(batch, length, d_model)` and the sub-layer as a function of that -> the same shape."""
        if self.norm_first:
            return hidden_states + self.dropout(sublayer(self.layer_norm(hidden_states)))
        return self.layer_norm(hidden_states + self.dropout(sublayer(hidden_states)))


class VaswaniEncoderLayer(GradientCheckpointingLayer):
    """One of the N boxes on the left of Figure 1: self-attention, feed-forward (Section 3.1)."""

    def __init__(self, config: VaswaniConfig, layer_idx: int | None = None) -> None:
        super().__init__()
        self.self_attn = VaswaniAttention(config, layer_idx=layer_idx)
        self.self_attn_norm = VaswaniAddAndNorm(config)
        self.feed_forward = VaswaniFeedForward(config)
        self.feed_forward_norm = VaswaniAddAndNorm(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """`(batch, source, d_model)` and the padding mask -> the same shape."""
        # Multi-Head Attention, Add & Norm
        hidden_states = self.self_attn_norm(hidden_states, lambda x: self.self_attn(x, attention_mask, **kwargs)[0])
        # Feed Forward, Add & Norm
        return self.feed_forward_norm(hidden_states, lambda x: self.feed_forward(x))


class VaswaniDecoderLayer(GradientCheckpointingLayer):
    """One of the N boxes on the right of Figure 1: masked self-attention, attention to the source, feed-forward."""

    def __init__(self, config: VaswaniConfig, layer_idx: int | None = None) -> None:
        super().__init__()
        self.self_attn = VaswaniAttention(config, is_causal=True, layer_idx=layer_idx)
        self.self_attn_norm = VaswaniAddAndNorm(config)
        self.cross_attn = VaswaniAttention(config, layer_idx=layer_idx)
        self.cross_attn_norm = VaswaniAddAndNorm(config)
        self.feed_forward = VaswaniFeedForward(config)
        self.feed_forward_norm = VaswaniAddAndNorm(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """`(batch, target, d_model)`, both masks and the encoder's states -> the shape of the first."""
        # Masked Multi-Head Attention, Add & Norm
        hidden_states = self.self_attn_norm(
            hidden_states,
            lambda x: self.self_attn(x, attention_mask, past_key_values=past_key_values, **kwargs)[0],
        )
        # Multi-Head Attention from the target to the source, Add & Norm
        hidden_states = self.cross_attn_norm(
            hidden_states,
            lambda x: self.cross_attn(
                x, encoder_attention_mask, encoder_hidden_states, past_key_values=past_key_values, **kwargs
            )[0],
        )
        # Feed Forward, Add & Norm
        return self.feed_forward_norm(hidden_states, lambda x: self.feed_forward(x))


def final_norm(config: VaswaniConfig) -> nn.Module:
    """The LayerNorm on top of a stack of pre-norm layers; on post-norm ones there is nothing (Section 3.1)."""
    return nn.LayerNorm(config.d_model, eps=config.layer_norm_eps) if config.norm_position == "pre" else nn.Identity()


class VaswaniEncoder(VaswaniPreTrainedModel):
    """The left half of Figure 1."""

    _can_record_outputs = {"hidden_states": VaswaniEncoderLayer, "attentions": VaswaniAttention}

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        self.positions = VaswaniPositions(config)
        self.layers = nn.ModuleList([VaswaniEncoderLayer(config, i) for i in range(config.encoder_layers)])
        self.norm = final_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(batch, source)`, *optional*): source tokens.
            attention_mask (`torch.Tensor` of shape `(batch, source)`, *optional*): 1 for tokens, 0 for padding.
            inputs_embeds (`torch.Tensor` of shape `(batch, source, d_model)`, *optional*): instead of `input_ids`.

        Returns:
            [`BaseModelOutput`] with `last_hidden_state` of shape `(batch, source, d_model)`.

        Raises:
            ValueError: neither or both of `input_ids` and `inputs_embeds` were given, the mask is of other sentences,
                an id is not in the vocabulary, or a position not in the table of learned ones.
        """
        inputs_embeds = self.embed("", input_ids, inputs_embeds)
        check_shape("attention_mask", attention_mask, *inputs_embeds.shape[:2])
        padding_mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=inputs_embeds, attention_mask=attention_mask
        )
        hidden_states = self.positions(inputs_embeds, attention_mask)
        for layer in self.layers:
            hidden_states = layer(hidden_states, padding_mask, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))


class VaswaniDecoder(VaswaniPreTrainedModel):
    """The right half of Figure 1, up to the linear transformation."""

    _can_record_outputs = {
        "hidden_states": VaswaniDecoderLayer,
        "attentions": OutputRecorder(VaswaniAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(VaswaniAttention, index=1, layer_name="cross_attn"),
    }

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        self.positions = VaswaniPositions(config)
        self.layers = nn.ModuleList([VaswaniDecoderLayer(config, i) for i in range(config.decoder_layers)])
        self.norm = final_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(batch, target)`, *optional*): the target, shifted right by one.
            attention_mask (`torch.Tensor` of shape `(batch, past + target)`, *optional*): 1 for tokens, 0 for padding.
            encoder_hidden_states (`torch.Tensor` of shape `(batch, source, d_model)`): the encoder's output.
            encoder_attention_mask (`torch.Tensor` of shape `(batch, source)`, *optional*): the source's padding.
            past_key_values ([`EncoderDecoderCache`], *optional*): keys and values of the target so far.
            inputs_embeds (`torch.Tensor` of shape `(batch, target, d_model)`, *optional*): instead of `input_ids`.
            use_cache (`bool`, *optional*): whether to make and return such a cache.

        Returns:
            [`BaseModelOutputWithPastAndCrossAttentions`] with `last_hidden_state` of shape
            `(batch, target, d_model)`.

        Raises:
            ValueError: as in [`VaswaniEncoder`], and where the encoder's states are missing or of another number of
                sentences, or two layers would share one place of the cache.
        """
        inputs_embeds = self.embed("decoder_", input_ids, inputs_embeds)
        if encoder_hidden_states is None:
            raise ValueError("The decoder needs the encoder's output: give encoder_hidden_states.")
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        if past_key_values is not None:
            check_layer_numbers(self.layers)
        past_length = past_key_values.get_seq_length() if past_key_values is not None else 0
        batch, target = inputs_embeds.shape[:2]
        check_shape("the encoder's output", encoder_hidden_states, batch)
        check_shape("attention_mask", encoder_attention_mask, batch, encoder_hidden_states.shape[1])
        # transformers' masks take any width. With a cache, a mask of the new tokens alone is a mistake that they would
        # not notice. (A static cache counts on the device, and takes masks of its own width.)
        length = past_length + target if isinstance(past_length, int) and past_length else None
        check_shape("decoder_attention_mask", attention_mask, batch, length)
        # 3.2.3: a target position sees itself and those before it, and every position of the source.
        causal_mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=getattr(past_key_values, "self_attention_cache", past_key_values),
        )
        encoder_attention_mask = create_bidirectional_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=encoder_attention_mask,
            encoder_hidden_states=encoder_hidden_states,
        )
        hidden_states = self.positions(inputs_embeds, attention_mask, past_length)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                causal_mask,
                encoder_hidden_states,
                encoder_attention_mask=encoder_attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values
        )


# ---- The three models --------------------------------------------------------------------------------------------


def config_of(config: VaswaniConfig, is_encoder_decoder: bool) -> VaswaniConfig:
    """The config, or a copy that says so: an encoder alone is no encoder-decoder, and a whole model is one."""
    if config.is_encoder_decoder != is_encoder_decoder:
        config = copy.deepcopy(config)
        config.is_encoder_decoder = is_encoder_decoder
    return config


class VaswaniModel(VaswaniPreTrainedModel):
    """Encoder and decoder without the final linear transformation (Figure 1 up to "Linear")."""

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__(config_of(config, is_encoder_decoder=True))
        # 3.4: one matrix for source and target. Every tied name points at the one that is stored.
        if config.share_embeddings:
            self._tied_weights_keys = {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}
        self.encoder = VaswaniEncoder(self.config)
        self.decoder = VaswaniDecoder(self.config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The source embedding, which is also the target's where they are shared."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replaces the source embedding, and the target's with it where they are shared."""
        self.encoder.embed_tokens = value
        if self.config.share_embeddings and self.config.tie_word_embeddings:
            self.decoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(batch, source)`, *optional*): source tokens.
            attention_mask (`torch.Tensor` of shape `(batch, source)`, *optional*): 1 for tokens, 0 for padding.
            decoder_input_ids (`torch.LongTensor` of shape `(batch, target)`, *optional*): the target, shifted right
                by one.
            decoder_attention_mask (`torch.Tensor` of shape `(batch, past + target)`, *optional*): likewise.
            encoder_outputs ([`BaseModelOutput`] or `tuple`, *optional*): of an earlier call; the encoder does not run.
            past_key_values ([`EncoderDecoderCache`], *optional*): keys and values of the target so far.
            inputs_embeds (`torch.Tensor` of shape `(batch, source, d_model)`, *optional*): instead of `input_ids`.
            decoder_inputs_embeds (`torch.Tensor` of shape `(batch, target, d_model)`, *optional*): instead of
                `decoder_input_ids`.
            use_cache (`bool`, *optional*): whether to return `past_key_values`.

        Returns:
            [`Seq2SeqModelOutput`] with `last_hidden_state` of shape `(batch, target, d_model)`.
        """
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds, **kwargs)
        elif isinstance(encoder_outputs, torch.Tensor):
            raise ValueError("encoder_outputs must be what the encoder returns, or a tuple, but it is a tensor.")
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


class VaswaniForConditionalGeneration(VaswaniGenerationMixin, VaswaniPreTrainedModel, GenerationMixin):
    """Figure 1 up to its softmax: a [`VaswaniModel`] and the linear transformation on top. It translates."""

    as_written: AsWritten

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__(config_of(config, is_encoder_decoder=True))
        source = "model.encoder.embed_tokens.weight"
        target = "model.decoder.embed_tokens.weight"
        # 3.4: "we share the same weight matrix between the two embedding layers and the pre-softmax transformation".
        if config.share_embeddings:
            self._tied_weights_keys = {target: source, "lm_head.weight": source}
        else:
            self._tied_weights_keys = {"lm_head.weight": target}
        self.model = VaswaniModel(self.config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=config.lm_head_bias)
        self.post_init()

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As in [`PreTrainedModel`]. What is tied is also saved as tied."""
        # PEFT compares the output with the source embedding. Where the target's alone is tied to it, PEFT turns ties
        # off, and the output, which is stored as the target embedding, would be drawn anew when the folder is loaded.
        if self.lm_head.weight is self.model.decoder.embed_tokens.weight:
            self.config.tie_word_embeddings = True
        super().save_pretrained(save_directory, *args, **kwargs)

    def prepare_decoder_input_ids_from_labels(self, labels: torch.LongTensor) -> torch.Tensor:
        """
        The decoder's input for teacher forcing: the labels, shifted right by one (Section 3.1).

        Args:
            labels (`torch.LongTensor` of shape `(batch, target)`): target tokens, -100 where there is none.

        Returns:
            `torch.LongTensor` of shape `(batch, target)`, starting with `decoder_start_token_id`.
        """
        shifted = labels.new_full(labels.shape, self.config.decoder_start_token_id)
        shifted[:, 1:] = labels[:, :-1]
        # What stands behind a target is never looked at.
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id or 0)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        epsilon_ls: float = 0.0,
        num_items_in_batch: torch.Tensor | int | None = None,
        loss_only: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """
        Arguments of [`VaswaniModel.forward`], and:

        Args:
            labels (`torch.LongTensor` of shape `(batch, target)`, *optional*): the tokens to predict, -100 where
                there is nothing to predict. Makes `decoder_input_ids` where those are not given.
            epsilon_ls (`float`): label smoothing (Section 5.4): the true token keeps 1 - epsilon, the others share
                epsilon. The paper's letters, because transformers' Trainer takes every argument with "label" in its
                name for a column of the data.
            num_items_in_batch (`int`, *optional*): the summed loss is divided by this number, and without it by the
                number of labels here. Given the labels of a whole update, micro-batches add up exactly.
            loss_only (`bool`): whether `logits` are not wanted, but `loss` alone: it is then computed a few positions
                at a time, which takes less time and a fraction of the memory. Its `backward` runs once.

        Returns:
            [`Seq2SeqLMOutput`] with `logits` of shape `(batch, target, vocab_size)`, which are `None` with
            `loss_only`, and, with labels, `loss` in nats per target token.

        Raises:
            ValueError: as in [`VaswaniModel`], labels are of another shape or not in the vocabulary, or there are none
                for `loss_only`.
        """
        if loss_only and labels is None:
            raise ValueError("loss_only needs labels, but there are none.")
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits, loss = self.logits_and_loss(
            outputs.last_hidden_state, labels, epsilon_ls, num_items_in_batch, loss_only
        )
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )

    def logits_and_loss(
        self,
        hidden_states: torch.Tensor,
        labels: torch.LongTensor | None,
        epsilon_ls: float,
        num_items_in_batch: torch.Tensor | int | None,
        loss_only: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """
        "Linear" of Figure 1, and the loss of what comes out of it. Arguments and errors as in `forward`.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch, target, d_model)`): the decoder's output.

        Returns:
            Logits of shape `(batch, target, vocab_size)`, or `None` with `loss_only`; and the loss, where there are
            labels.
        """
        # The embedding's padding row is zero and stays zero, also as a row of this matrix: no gradient for it.
        frozen = self.config.pad_token_id if self.training and self.config.tie_word_embeddings else None
        if labels is not None:
            check_shape("labels", labels, *hidden_states.shape[:2])
            check_ids("labels", labels.masked_fill(labels == -100, 0), self.config.vocab_size, "vocab_size")
            if loss_only and is_plain_linear(self.lm_head, hidden_states):
                weight = self.lm_head.weight
                return None, smoothed_linear_cross_entropy(
                    hidden_states, weight, labels, epsilon_ls, num_items_in_batch, frozen
                )
        logits = self.lm_head(hidden_states)  # [batch, target, vocab_size]
        if frozen is not None:
            logits[..., frozen] = logits[..., frozen].detach()
        loss = None if labels is None else smoothed_cross_entropy(logits, labels, epsilon_ls, num_items_in_batch)
        return None if loss_only else logits, loss


class VaswaniEncoderModel(VaswaniPreTrainedModel):
    """The left half of Figure 1 alone: the encoder's states, as features of the source. Loads from any Vaswani."""

    _keys_to_ignore_on_load_unexpected = [r"(^|\.)decoder\.", r"^lm_head\."]

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__(config_of(config, is_encoder_decoder=False))
        self.encoder = VaswaniEncoder(self.config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The source embedding."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replaces the source embedding."""
        self.encoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Arguments, result and errors of [`VaswaniEncoder.forward`]."""
        return self.encoder(input_ids, attention_mask, inputs_embeds, **kwargs)


# ---- 5.4 Label Smoothing -----------------------------------------------------------------------------------------


def smoothed_cross_entropy(
    logits: torch.Tensor,
    labels: torch.LongTensor,
    epsilon_ls: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """
    Cross-entropy with label smoothing (Section 5.4): the true token has probability 1 - epsilon, each of the other
    V - 1 has epsilon / (V - 1).

    Args:
        logits (`torch.Tensor` of shape `(batch, target, vocab_size)`): before the softmax.
        labels (`torch.LongTensor` of shape `(batch, target)`): true tokens; -100 counts for nothing.
        epsilon_ls (`float`): epsilon.
        num_items_in_batch (`int`, *optional*): divisor of the sum; without it, the number of labels.

    Returns:
        `torch.Tensor`, one number in float32.
    """
    vocab_size = logits.shape[-1]
    # torch spreads its epsilon over all V tokens, the true one included; this factor takes that share out again.
    spread = epsilon_ls * vocab_size / (vocab_size - 1)
    loss = nn.functional.cross_entropy(
        logits.float().view(-1, vocab_size),
        labels.to(logits.device).view(-1),
        reduction="mean" if num_items_in_batch is None else "sum",
        label_smoothing=spread,
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def is_plain_linear(layer: nn.Module, states: torch.Tensor) -> bool:
    """
    Whether `layer` is one matrix and nothing else, which may be multiplied with in parts and without a call: not an
    adapter, not quantised, not sharded, not hooked. (A compiler makes parts of its own; and gradients in float16 are
    to be scaled before they are made, by a factor that comes with `backward`.)
    """
    return (
        type(layer) is nn.Linear
        and layer.bias is None
        and type(layer.weight) is nn.Parameter
        and not (layer._forward_hooks or layer._forward_pre_hooks or hasattr(layer, "_hf_hook"))
        and layer.weight.device == states.device
        and type_of_products(layer.weight) in (torch.float32, torch.bfloat16)
        and not torch.compiler.is_compiling()
    )


def type_of_products(weight: torch.Tensor) -> torch.dtype:
    """The type in which a linear layer computes here: its own, or that of autocast."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def positions_at_once(weight: torch.Tensor) -> int:
    """
    How many positions have logits at a time. On a CPU: few enough for its caches, and enough that adding to the
    matrix's gradient each time costs less than they do. On a GPU: enough to keep it busy.
    """
    vocab_size, d_model = weight.shape
    if weight.device.type == "cpu":
        return max(1, min(2 * d_model, 2**24 // vocab_size))
    return max(1, 2**27 // vocab_size)


def smoothed_linear_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.LongTensor,
    epsilon_ls: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
    frozen_row: int | None = None,
) -> torch.Tensor:
    """
    [`smoothed_cross_entropy`] of the logits `hidden_states @ weight.T`, which never exist all at once, and not at all
    where there is no label.

    Args:
        hidden_states (`torch.Tensor` of shape `(batch, target, d_model)`): the decoder's output.
        weight (`torch.Tensor` of shape `(vocab_size, d_model)`): the matrix before the softmax.
        labels, epsilon_ls, num_items_in_batch: as in [`smoothed_cross_entropy`].
        frozen_row (`int`, *optional*): a row of the matrix that gets no gradient.

    Returns:
        `torch.Tensor`, one number in float32. Its `backward` runs once.
    """
    true = labels.to(hidden_states.device) != -100
    targets = labels.to(hidden_states.device)[true]
    total = _SmoothedLinearCrossEntropy.apply(
        hidden_states[true], weight, targets, epsilon_ls, frozen_row, torch.is_grad_enabled()
    )
    return total / (len(targets) if num_items_in_batch is None else num_items_in_batch)


class _SmoothedLinearCrossEntropy(torch.autograd.Function):
    """
    The sum over positions, and at once its gradients: the logits z of some positions become probabilities p in place,
    and these become the gradient. Each of the V tokens has the share s of a position's label, and the true one, y, has
    r on top of it:

        loss = log(sum(exp(z))) - r * z[y] - s * sum(z)    and    d loss / dz = p - r * (1 at y, else 0) - s.

    All that has to do with s is the same for every token, so that it needs no work of the size of z.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        epsilon_ls: float,
        frozen_row: int | None,
        with_gradients: bool,
    ) -> torch.Tensor:
        vocab_size, dtype = weight.shape[0], type_of_products(weight)
        share = epsilon_ls / (vocab_size - 1)
        rest = 1 - share * vocab_size
        matrix, inputs = weight.to(dtype), states.to(dtype)
        sum_of_rows = weight.sum(dim=0, dtype=torch.float32)  # [d_model]
        sum_of_states = states.sum(dim=0, dtype=torch.float32)  # [d_model]
        total = -share * sum_of_states.dot(sum_of_rows)
        of_states, of_weight = (with_gradients and needed for needed in ctx.needs_input_grad[:2])
        by_states = torch.empty_like(inputs) if of_states else None
        by_weight = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        size = positions_at_once(weight)
        buffer = inputs.new_empty(min(size, len(inputs)), vocab_size)
        exact = dtype == torch.float32
        in_float32 = buffer if exact else buffer.float()
        for start in range(0, len(inputs), size):
            part, true = inputs[start : start + size], labels[start : start + size, None]
            logits = torch.mm(part, matrix.T, out=buffer[: len(part)])
            probabilities = logits if exact else in_float32[: len(part)].copy_(logits)
            of_true, largest = probabilities.gather(1, true), probabilities.amax(dim=1)
            torch.softmax(probabilities, dim=1, out=probabilities)
            # log(sum(exp(z))): the largest probability is exp(largest z) over that sum.
            total += (largest - probabilities.amax(dim=1).log()).sum() - rest * of_true.sum()
            probabilities.scatter_add_(1, true, probabilities.new_full(true.shape, -rest))
            gradient = probabilities if exact else logits.copy_(probabilities)
            if by_states is not None:
                torch.mm(gradient, matrix, out=by_states[start : start + size])
            if by_weight is not None and exact:
                by_weight.addmm_(gradient.T, part)
            elif by_weight is not None:
                by_weight += gradient.T @ part
        if by_states is not None:
            by_states = by_states.to(states.dtype).sub_(share * sum_of_rows)
        if by_weight is not None:
            by_weight = by_weight.sub_(share * sum_of_states).to(weight.dtype)
            if frozen_row is not None:
                by_weight[frozen_row] = 0
        ctx.save_for_backward(by_states, by_weight)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # In place: another of the size of the matrix would be the largest tensor of all.
        parts = [None if part is None else part.mul_(gradient) for part in ctx.saved_tensors]
        return *parts, None, None, None, None


# The fast search of `generate()` computes by itself what the decoder above computes: change both together. A model
# that is changed, subclassed or patched is noticed, and left to transformers' search.
VaswaniForConditionalGeneration.as_written = AsWritten(globals())
