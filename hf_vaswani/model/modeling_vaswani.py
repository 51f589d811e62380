"""The network of "Attention Is All You Need" (Vaswani et al., 2017).

First the paper, bottom-up through Section 3 and Figure 1, and the regularization of 5.4. Then the models that users of
transformers know, what transformers and PEFT ask of them, and the checks of the inputs. Models of one stack with
another head are in `heads_vaswani.py`.
"""

import copy
import inspect
import math
import os
import re
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
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_vaswani import CACHE, NAMES_OF_THE_CACHE, VaswaniConfig, takes_both_cache_names
from .generation_vaswani import VaswaniGenerationMixin
from .kernels_vaswani import (
    FORWARD,
    attention_of,
    cpu_dropout,
    is_plain_linear,
    linear,
    share_of_others,
    smoothed_linear_cross_entropy,
)

# Weights of the models with a head, which others leave out when they load.
HEADS = [rf"^{head}\." for head in ("lm_head", "lm_transform", "pooler", "next_sentence", "classifier")]

# ---- 3.2 Attention -----------------------------------------------------------------------------------------------


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Scaled dot-product attention: softmax(Q K^T / sqrt(d_k)) V (Section 3.2.1, equation 1). In the shapes, `target`
    counts the queries and `source` the keys and values; in self-attention both are the same positions.

    Q is `(batch, heads, target, d_k)`, K `(batch, heads, source, d_k)`, V `(batch, heads, source, d_v)`; `scaling` is
    1 / sqrt(d_k). The mask, `(batch, 1, target, source)`, is added to the scores: 0 for visible positions, a very
    negative number for hidden ones (Section 3.2.3: "setting to -inf"). Weights are dropped while `module`, the calling
    attention, trains. Returns the attended values, `(batch, target, heads, d_v)`, and the weights, `(batch, heads,
    target, source)`.
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
    (Section 3.2.2). The matrices of the h heads are stored as one. `is_causal` is for the decoder's self-attention:
    `sdpa` and flash attention hide the future by this attribute if there is no mask, `eager` only by the mask.
    `layer_idx` is the layer's entry in the cache.
    """

    # Each head has keys and values of its own; the attention functions of transformers ask.
    num_key_value_groups = 1

    def __init__(self, config: VaswaniConfig, is_causal: bool = False, layer_idx: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.is_causal = is_causal
        self.layer_idx = layer_idx
        self.num_heads = config.num_heads
        d_k, d_v = (width or config.d_model // config.num_heads for width in (config.d_k, config.d_v))
        self.scaling = d_k**-0.5
        self.q_proj = nn.Linear(config.d_model, config.num_heads * d_k, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.d_model, config.num_heads * d_k, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.d_model, config.num_heads * d_v, bias=config.attention_bias)
        self.out_proj = nn.Linear(config.num_heads * d_v, config.d_model, bias=config.attention_bias)

    def split_heads(self, states: torch.Tensor) -> torch.Tensor:
        """`(batch, length, heads * head_dim)` -> `(batch, heads, length, head_dim)`."""
        return states.view(*states.shape[:-1], self.num_heads, -1).transpose(1, 2)

    @takes_both_cache_names
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Attends from each target position, `(batch, target, d_model)`, to the source, `(batch, source, d_model)`, by
        default the target itself (self-attention). The mask is that of [`eager_attention_forward`]; the cache has keys
        and values of earlier calls, and is updated in place. Returns the output, `(batch, target, d_model)`, and the
        weights, `(batch, heads, target, source)`, or `None` if the attention implementation does not return them.
        """
        query = self.split_heads(linear(self.q_proj, hidden_states))
        key, value = self.keys_and_values(hidden_states, encoder_hidden_states, cache, kwargs)
        attention = attention_of(self) or ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.config.attention_dropout if self.training else 0.0
        attended, weights = attention(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        concatenated = attended.reshape(*hidden_states.shape[:-1], -1)  # [batch, target, heads * d_v]
        return linear(self.out_proj, concatenated), weights

    def keys_and_values(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None, cache: Any, options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V split into heads, those of earlier positions from the cache. Arguments as in `forward`."""
        if encoder_hidden_states is None:
            states, own_cache = hidden_states, getattr(cache, "self_attention_cache", cache)
        else:
            states, own_cache = encoder_hidden_states, getattr(cache, "cross_attention_cache", None)
            # The source is the same at every decoding step: its keys and values are computed once.
            if own_cache is not None and cache.is_updated.get(self.layer_idx):
                return own_cache.layers[self.layer_idx].keys, own_cache.layers[self.layer_idx].values
        key, value = (self.split_heads(linear(layer, states)) for layer in (self.k_proj, self.v_proj))
        if own_cache is None:
            return key, value
        if is_paged(own_cache):
            # It changes the keywords of the attention function.
            return own_cache.update(key, value, self.layer_idx, kwargs=options)
        key, value = own_cache.update(key, value, self.layer_idx)
        if encoder_hidden_states is not None:
            cache.is_updated[self.layer_idx] = True
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
        return linear(self.fc2, self.dropout(self.activation(linear(self.fc1, hidden_states))))


# ---- 3.4 Embeddings and Softmax ----------------------------------------------------------------------------------
#
# The look-up is `VaswaniStack.embed`; the factor sqrt(d_model) is in `VaswaniPositions`. The two embeddings and the
# pre-softmax linear transformation are tied in `VaswaniForConditionalGeneration`; the softmax is in the loss.


# ---- 3.5 Positional Encoding -------------------------------------------------------------------------------------


def sinusoids(
    positions: torch.Tensor, d_model: int, layout: str = "interleaved", base: float = 10000.0
) -> torch.Tensor:
    """
    PE(pos, 2i) = sin(pos / base^(2i/d_model)) and PE(pos, 2i+1) = cos of the same (Section 3.5), always in float32.

    Args:
        positions (`torch.LongTensor` of shape `(...)`): positions, counted from 0, without an upper limit.
        d_model (`int`): width, even. The result has the shape `(..., d_model)`.
        layout (`str`): `"interleaved"` as above; `"concatenated"`: all sines, then all cosines; `"tensor2tensor"`:
            concatenated, with i / (d_model/2 - 1) in place of 2i / d_model.
        base (`float`): the wavelengths range from 2 pi to `base` * 2 pi.
    """
    # Angles in float64: at position 100 000 those of float32 are wrong in the third digit. Devices without float64
    # have their small table computed on the CPU.
    device = torch.device("cpu") if positions.device.type == "mps" else positions.device
    i = torch.arange(d_model // 2, device=device, dtype=torch.float64)
    exponents = i / max(d_model // 2 - 1, 1) if layout == "tensor2tensor" else 2 * i / d_model
    angles = positions.to(device, torch.float64)[..., None] / base**exponents  # [..., d_model / 2]
    if layout == "interleaved":
        encoding = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)  # [..., d_model]
    else:
        encoding = torch.cat((angles.sin(), angles.cos()), dim=-1)
    return encoding.to(positions.device, torch.float32)


def position_ids(
    inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None = None, past_length: torch.Tensor | int = 0
) -> torch.Tensor:
    """
    Positions counted from 0 at the first token of each sentence, on whichever side the padding is: `(batch, length)`.
    The mask, `(batch, past + length)`, is 1 for tokens and 0 for padding; without one every column counts, and the
    result is `(1, length)`. `past_length` columns are already in the cache.
    """
    columns = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_length  # [length]
    if attention_mask is None:
        return columns[None]
    counted = (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)  # [batch, past + length]
    # Columns beyond the end of a mask are padding, as in the masks that transformers makes of it.
    return counted[:, columns.clamp(max=attention_mask.shape[1] - 1)]


class VaswaniPositions(nn.Module):
    """
    The bottom of both stacks in Figure 1: embedding times sqrt(d_model), plus position, then dropout (Sections 3.4,
    3.5 and 5.4). Sinusoids are computed when they are needed: nothing is saved, and there is no maximum length.
    Learned positions (Table 3 row E) are a table of `max_position_embeddings` rows.
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
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps) if config.embedding_norm else None
        self.dropout = VaswaniDropout(config.dropout)

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_length: torch.Tensor | int = 0,
        positions: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Scales embeddings, `(batch, length, d_model)`, and adds their positions and segments. Positions, `(batch,
        length)`, are counted from 0; by default [`position_ids`] counts them. Returns shape and type of the
        embeddings; raises a ValueError if a position is beyond the table of learned ones.
        """
        # A mask of four dimensions does not tell tokens from padding: every column then counts.
        if attention_mask is not None and attention_mask.dim() != 2:
            attention_mask = None
        is_given = positions is not None
        if positions is None:
            positions = position_ids(inputs_embeds, attention_mask, past_length)
        if self.table is not None and not torch.compiler.is_compiling():
            if attention_mask is None and not is_given:
                self.check(int(past_length) + inputs_embeds.shape[1] - 1)
            elif is_given or attention_mask.shape[1] > self.max_position_embeddings:  # type: ignore[union-attr]
                # In training, the device waits for no data that the collator has already measured.
                self.check(positions, wait=not self.training)
        if self.table is not None or attention_mask is None or is_given:
            encoding = self.encode(positions)
        else:
            # The sentences share their positions: each is computed once.
            columns = torch.arange(attention_mask.shape[1], device=positions.device)
            encoding = nn.functional.embedding(positions, self.encode(columns))
        return self.add(inputs_embeds, encoding if segments is None else encoding + segments)

    def check(self, positions: torch.Tensor | int, wait: bool = True) -> None:
        """
        Checks that a table of learned positions has these, before a GPU looks them up, which would fail for the rest
        of the process; raises a ValueError with both numbers.
        """
        if self.table is not None:
            positions = torch.as_tensor(positions)
            check_ids("positions", positions, self.max_position_embeddings, "max_position_embeddings", wait=wait)

    def encode(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions of shape `(...)`, counted from 0 and below the limit -> their encodings, `(..., d_model)`."""
        if self.table is None:
            return sinusoids(positions + self.offset, self.d_model, self.layout)
        return self.table(positions)

    def add(self, inputs_embeds: torch.Tensor, encoding: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding matrix, `(..., d_model)`, and their encodings -> the shape of the first."""
        # In float32, and rounded once: bfloat16 sums hardly distinguish neighbouring positions.
        embeddings = inputs_embeds.to(torch.promote_types(inputs_embeds.dtype, torch.float32))
        hidden_states = (embeddings * self.scale + encoding).to(inputs_embeds.dtype)
        return self.dropout(hidden_states if self.norm is None else self.norm(hidden_states))


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
        """
        `(batch, length, d_model)` and the sub-layer, a function of it -> the same shape. It must not be a module:
        accelerate's hooks of offloaded weights move every argument that has a `.to`, and a module's weights with it.
        """
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
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """`(batch, source, d_model)` and the padding mask -> the same shape."""
        # Multi-Head Attention, Add & Norm
        hidden_states = self.self_attn_norm(hidden_states, lambda x: self.self_attn(x, attention_mask, **kwargs)[0])
        # Feed Forward, Add & Norm
        return self.feed_forward_norm(hidden_states, lambda x: self.feed_forward(x))


class VaswaniDecoderLayer(GradientCheckpointingLayer):
    """One of the N boxes on the right of Figure 1; without an encoder it has no attention to a source."""

    def __init__(self, config: VaswaniConfig, layer_idx: int | None = None) -> None:
        super().__init__()
        self.self_attn = VaswaniAttention(config, is_causal=True, layer_idx=layer_idx)
        self.self_attn_norm = VaswaniAddAndNorm(config)
        self.has_source = "encoder" in config.stacks
        if self.has_source:
            self.cross_attn = VaswaniAttention(config, layer_idx=layer_idx)
            self.cross_attn_norm = VaswaniAddAndNorm(config)
        self.feed_forward = VaswaniFeedForward(config)
        self.feed_forward_norm = VaswaniAddAndNorm(config)

    @takes_both_cache_names
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`(batch, target, d_model)`, both masks, the encoder's states and the cache -> the shape of the first."""
        # Masked Multi-Head Attention, Add & Norm
        hidden_states = self.self_attn_norm(hidden_states, lambda x: self.self_attn(x, attention_mask, **kwargs)[0])
        # Multi-Head Attention from the target to the source, Add & Norm
        if self.has_source:
            hidden_states = self.cross_attn_norm(
                hidden_states, lambda x: self.cross_attn(x, encoder_attention_mask, encoder_hidden_states, **kwargs)[0]
            )
        # Feed Forward, Add & Norm
        return self.feed_forward_norm(hidden_states, lambda x: self.feed_forward(x))


class VaswaniPreTrainedModel(PreTrainedModel):
    """Base class of stacks and models: initial weights, and the features of transformers that they support."""

    config: VaswaniConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    # transformers adds those of the stacks that a model has.
    _no_split_modules: list[str] = []
    _skip_keys_device_placement = [*NAMES_OF_THE_CACHE]
    # Patterns of the weights of other classes; see [`post_init`].
    _keys_to_ignore_on_load_unexpected: Any = None
    # Stacks of the class; None if the config names them.
    stacks: tuple[str, ...] | None = None

    def __init__(self, config: VaswaniConfig) -> None:
        stacks = self.stacks_from(config.stacks)
        if config.stacks != stacks:
            config = copy.deepcopy(config)
            config.is_encoder_decoder, config.is_decoder = len(stacks) == 2, stacks == ("decoder",)
        super().__init__(config)

    @classmethod
    def stacks_from(cls, saved: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the stacks that the class has when it is loaded from the folder of a model with `saved` stacks."""
        return cls.stacks or saved

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, *model_args: Any, **kwargs: Any
    ) -> Any:
        """
        Loads a model as [`PreTrainedModel.from_pretrained`] does, and from the folder of another class the stacks and
        heads that both have. Raises a ValueError if they share no stack, or a class finds weights under other names.
        """
        with_report = kwargs.pop("output_loading_info", False)
        names = stored_embedding(cls, pretrained_model_name_or_path, kwargs)
        if names:
            kwargs["key_mapping"] = names | (kwargs.get("key_mapping") or {})
        model, report = super().from_pretrained(
            pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
        )
        kinds = {kind: each for kind in ("missing", "unexpected") if (each := report[f"{kind}_keys"])}
        if kinds:
            found = ", ".join(f"{len(each)} {kind} (first: {min(each)})" for kind, each in kinds.items())
            model.loading_error = f"The weights of {model.name_or_path} do not match its config.json: {found}."
            # Under another name, a weight of the same class would stay random.
            if len(kinds) == 2 and model.config.architectures == [cls.__name__]:
                raise ValueError(model.loading_error)
        if names:
            # transformers would save the matrix under the name that it was loaded from.
            model.__dict__.pop("_weight_conversions", None)
        return (model, report) if with_report else model

    def save_pretrained(
        self, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Saves the model, and a matrix with two names under both, unless loading ties the one to the other."""
        # transformers copies the files that this one imports, wherever it does: the pipeline travels with the model.
        from .pipeline_vaswani import VaswaniTranslationPipeline  # noqa: F401

        # PEFT compares the output with the source embedding. Where only the target's is tied to it, PEFT turns ties
        # off when it merges, and loading the folder would initialize the output anew.
        has_output = isinstance(self, VaswaniForConditionalGeneration)
        if has_output and self.lm_head.weight is self.model.decoder.embed_tokens.weight:
            self.config.tie_word_embeddings = True
        weights = self.state_dict() if state_dict is None else state_dict
        ties = getattr(self, "_tied_weights_keys", None) if self.config.tie_word_embeddings else None
        if copies := copies_of_shared(weights, ties or {}):
            state_dict = weights | copies
        super().save_pretrained(save_directory, is_main_process, state_dict, *args, **kwargs)

    def post_init(self) -> None:
        """Ends the construction of a model as [`PreTrainedModel.post_init`] does."""
        super().post_init()
        # Loading leaves out the parts that another class has and this one lacks. In a part that this one has, a name
        # that it does not know is a weight under another name.
        names = [name for name, _ in self.named_parameters()]
        patterns = self._keys_to_ignore_on_load_unexpected or ()
        self._keys_to_ignore_on_load_unexpected = {
            pattern for pattern in patterns if not any(re.search(pattern, name) for name in names)
        }

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        # The paper is silent; tensor2tensor: Xavier uniform for matrices, and for embeddings a normal
        # distribution with standard deviation d_model^-0.5. BERT and GPT: one deviation for all.
        std = self.config.initializer_range
        if isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
        elif isinstance(module, nn.Linear) and std is None:
            init.xavier_uniform_(module.weight)
        elif isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.d_model**-0.5 if std is None else std)
        if isinstance(module, nn.LayerNorm | nn.Linear) and module.bias is not None:
            init.zeros_(module.bias)
        # `init` leaves loaded weights alone, but does not recognise a single loaded row.
        padding = getattr(module, "padding_idx", None)
        if padding is not None and not getattr(module.weight, "_is_hf_initialized", False):
            init.zeros_(module.weight[padding])

    def _resize_token_embeddings(
        self, new_num_tokens: int, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        resized = super()._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        # transformers resizes the source embedding and the output only: a target embedding of its own is left.
        decoder = getattr(self.base_model, "decoder", None)
        if decoder is not None and decoder.embed_tokens.num_embeddings != resized.num_embeddings:
            old = decoder.embed_tokens
            target = self._get_resized_embeddings(old, resized.num_embeddings, mean_resizing=mean_resizing)
            decoder.embed_tokens = target.requires_grad_(old.weight.requires_grad)
        return resized


class VaswaniStack(VaswaniPreTrainedModel):
    """One half of Figure 1: embedding, positions, N layers. Base class of both halves."""

    # In front of `input_ids` and `inputs_embeds` in the arguments of a whole model.
    argument_prefix = ""

    def __init__(self, config: VaswaniConfig, layer: Callable[..., nn.Module], num_layers: int) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model, config.zero_row)
        self.positions = VaswaniPositions(config)
        self.layers = nn.ModuleList([layer(config, i) for i in range(num_layers)])
        # Post-norm layers end with a LayerNorm (Section 3.1); on top of pre-norm ones there is one for the stack.
        pre_norm = config.norm_position == "pre"
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps) if pre_norm else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    def embed(self, input_ids: torch.LongTensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """
        Looks tokens, `(batch, length)`, up in the embedding matrix (Section 3.4), or returns the embeddings that are
        given in their place; raises a ValueError unless one of them is given, and fits.
        """
        prefix, d_model = self.argument_prefix, self.config.d_model
        if (input_ids is None) == (inputs_embeds is None):
            both = "neither is" if input_ids is None else "both are"
            raise ValueError(f"Pass exactly one of {prefix}input_ids and {prefix}inputs_embeds: {both} given.")
        given: Any = input_ids if inputs_embeds is None else inputs_embeds
        shape, width = tuple(given.shape), () if inputs_embeds is None else (d_model,)
        if len(shape) < 2 or shape[2:] != width or 0 in shape:
            name, last = ("input_ids", "") if inputs_embeds is None else ("inputs_embeds", f", {d_model}")
            raise ValueError(f"{prefix}{name} has the shape {shape}, but must be (batch, length{last}), not empty.")
        if inputs_embeds is not None:
            return inputs_embeds
        check_ids(f"{prefix}input_ids", input_ids, self.config.vocab_size, "vocab_size")
        return self.embed_tokens(input_ids)

    def run_layers(self, hidden_states: torch.Tensor, *arguments: Any, **kwargs: Any) -> torch.Tensor:
        """
        Computes the N layers on top of [`VaswaniPositions`], with the other arguments of a layer: masks have the shape
        `(batch, 1, 1 or length, keys)` here. The search has masks and a cache of its own.
        """
        for layer in self.layers:
            hidden_states = layer(hidden_states, *arguments, **kwargs)
        return self.norm(hidden_states)


class VaswaniEncoder(VaswaniStack):
    """The left half of Figure 1."""

    _no_split_modules = ["VaswaniEncoderLayer"]
    _can_record_outputs = {"hidden_states": VaswaniEncoderLayer, "attentions": VaswaniAttention}

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__(config, VaswaniEncoderLayer, config.encoder_layers)
        self.embed_segments = nn.Embedding(config.type_vocab_size, config.d_model) if config.type_vocab_size else None
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Encodes the source, with the arguments that [`VaswaniModel.forward`] has for it, and the same errors."""
        refuse_unread(self, **kwargs)
        inputs_embeds = self.embed(input_ids, inputs_embeds)
        check_shape("attention_mask", attention_mask, *inputs_embeds.shape[:2])
        # A model without segments takes zeros: transformers' tokenizers give them to all tokens.
        segments, size = None, self.config.type_vocab_size
        check_ids("token_type_ids", token_type_ids, size or 1, "type_vocab_size" if size else "the number of segments")
        if self.embed_segments is not None:
            check_shape("token_type_ids", token_type_ids, *inputs_embeds.shape[:2])
            if token_type_ids is None:
                token_type_ids = inputs_embeds.new_zeros(inputs_embeds.shape[:2], dtype=torch.long)
            segments = self.embed_segments(token_type_ids)
        padding_mask = create_bidirectional_mask(self.config, inputs_embeds, attention_mask)
        hidden_states = self.positions(inputs_embeds, attention_mask, segments=segments)
        return BaseModelOutput(last_hidden_state=self.run_layers(hidden_states, padding_mask, **kwargs))


class VaswaniDecoder(VaswaniStack):
    """The right half of Figure 1, up to the linear transformation."""

    _no_split_modules = ["VaswaniDecoderLayer"]
    _can_record_outputs = {
        "hidden_states": VaswaniDecoderLayer,
        "attentions": OutputRecorder(VaswaniAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(VaswaniAttention, index=1, layer_name="cross_attn"),
    }

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__(config, VaswaniDecoderLayer, config.decoder_layers)
        self.has_source = "encoder" in config.stacks
        self.argument_prefix = "decoder_" if self.has_source else ""

    @takes_both_cache_names
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        position_ids: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """
        Decodes the target, all positions at once or from where the cache ends: arguments and errors as in
        [`VaswaniModel.forward`]. A decoder on its own has no states of a source, `(batch, source, d_model)`.
        """
        read = kwargs.keys() if is_paged(cache) else set() if position_ids is None else OF_PACKED_TEXTS
        refuse_unread(self, **{name: value for name, value in kwargs.items() if name not in read})
        if not self.has_source:
            refuse_unread(self, encoder_attention_mask=encoder_attention_mask)
        inputs_embeds = self.embed(input_ids, inputs_embeds)
        if self.has_source and encoder_hidden_states is None:
            raise ValueError("encoder_hidden_states is missing: pass the encoder's output to the decoder.")
        if not self.has_source and encoder_hidden_states is not None:
            raise ValueError("encoder_hidden_states was given, but this decoder has no attention to a source.")
        # The mask is made without a new, empty cache: with one, transformers does not tell the texts of a row apart.
        read_cache = getattr(cache, "self_attention_cache", cache)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
            if self.has_source:
                cache = EncoderDecoderCache(cache, DynamicCache(config=self.config))
        if cache is not None:
            self.check_layer_indices()
        past_length = cache.get_seq_length() if cache is not None and not is_paged(cache) else 0
        batch, target = inputs_embeds.shape[:2]
        # transformers accepts masks of any width, and would silently misread one of the new tokens alone. A static
        # cache counts on the device and takes wider masks: they are not checked.
        length = past_length + target if isinstance(past_length, int) and past_length else None
        check_shape(f"{self.argument_prefix}attention_mask", attention_mask, batch, length)
        if position_ids is not None:
            check_shape("position_ids", position_ids.expand(batch, -1), batch, target)
        # 3.2.3: a target position attends to itself, to those before it, and to every position of the source.
        causal_mask = create_causal_mask(self.config, inputs_embeds, attention_mask, read_cache, position_ids)
        if encoder_hidden_states is not None:
            check_shape("the encoder's output", encoder_hidden_states, batch)
            check_shape("attention_mask", encoder_attention_mask, batch, encoder_hidden_states.shape[1])
            encoder_attention_mask = create_bidirectional_mask(
                self.config, inputs_embeds, encoder_attention_mask, encoder_hidden_states
            )
        hidden_states = self.positions(inputs_embeds, attention_mask, past_length, position_ids)
        # By this name, gradient checkpointing leaves the cache out.
        cached: dict[str, Any] = {CACHE: cache}
        hidden_states = self.run_layers(
            hidden_states, causal_mask, encoder_hidden_states, encoder_attention_mask, **cached, **kwargs
        )
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden_states, **cached)

    def check_layer_indices(self) -> None:
        """Checks that no two layers write to one entry of the cache, as a layer used twice would."""
        for position, layer in enumerate(self.layers):
            for attention in (getattr(layer, "self_attn", None), getattr(layer, "cross_attn", None)):
                layer_idx = getattr(attention, "layer_idx", position)
                if layer_idx != position:
                    raise ValueError(
                        f"An attention of decoder layer {position} has layer_idx {layer_idx}: two layers would share "
                        "an entry of the cache. Give each its own layer_idx, or set use_cache=False."
                    )


# ---- 5.4 Regularization ------------------------------------------------------------------------------------------


class VaswaniDropout(nn.Dropout):
    """Dropout (Section 5.4). Training on a CPU takes [`cpu_dropout`], which is faster than torch's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Any shape -> the same shape. Draws from torch's global generator, as `nn.Dropout` does."""
        if not self.training:
            return input
        if input.device.type == "cpu" and not torch.compiler.is_compiling():
            return cpu_dropout(input, self.p)
        return super().forward(input)


def smoothed_cross_entropy(
    logits: torch.Tensor,
    labels: torch.LongTensor,
    epsilon_ls: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """
    Cross-entropy with label smoothing (Section 5.4): the true token has probability 1 - epsilon, each of the other
    V - 1 tokens has epsilon / (V - 1). Returns a scalar in float32.

    Args:
        logits (`torch.Tensor` of shape `(batch, target, vocab_size)`): scores before the softmax.
        labels (`torch.LongTensor` of shape `(batch, target)`): true tokens, or -100 where there is no label.
        epsilon_ls (`float`): epsilon.
        num_items_in_batch (`int`, *optional*): divisor of the sum; the number of labels by default.
    """
    vocab_size = logits.shape[-1]
    # torch spreads its epsilon over all V tokens, the true one included; this factor compensates for that.
    spread = share_of_others(epsilon_ls, vocab_size) * vocab_size
    reduction = "mean" if num_items_in_batch is None else "sum"
    scores, labels = logits.float().view(-1, vocab_size), labels.to(logits.device).view(-1)  # type: ignore[assignment]
    loss = nn.functional.cross_entropy(scores, labels, reduction=reduction, label_smoothing=spread)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


# ---- The models --------------------------------------------------------------------------------------------------


class VaswaniModel(VaswaniPreTrainedModel):
    """Figure 1 up to "Linear": encoder and decoder, or one of them alone as the config says; the other is `None`."""

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__(config)
        config, stacks = self.config, self.config.stacks
        # 3.4: one matrix for source and target. Tied names map to the name that is stored.
        if config.share_embeddings and len(stacks) == 2:
            self._tied_weights_keys = {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}
        self.encoder: VaswaniEncoder = VaswaniEncoder(config) if "encoder" in stacks else None  # type: ignore[assignment]
        self.decoder: VaswaniDecoder = VaswaniDecoder(config) if "decoder" in stacks else None  # type: ignore[assignment]
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """Returns the source embedding, which is also the target's if they are shared."""
        return (self.encoder or self.decoder).embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replaces the source embedding, and the target's if they are shared."""
        (self.encoder or self.decoder).embed_tokens = value
        if self.config.is_encoder_decoder and self.config.share_embeddings and self.config.tie_word_embeddings:
            self.decoder.embed_tokens = value

    @takes_both_cache_names
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput | BaseModelOutput | BaseModelOutputWithPastAndCrossAttentions:
        """
        Encodes the source and decodes the target. A model of one stack takes the arguments of that stack, which for a
        decoder have no `decoder_` in front.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, source)`, *optional*): source tokens.
            attention_mask (`torch.Tensor` of shape `(batch, source)`, *optional*): 1 for tokens, 0 for padding.
            decoder_input_ids (`torch.LongTensor` of shape `(batch, target)`, *optional*): the target, shifted right.
            decoder_attention_mask (`torch.Tensor` of shape `(batch, past + target)`, *optional*): 1 for tokens.
            encoder_outputs ([`BaseModelOutput`] or `tuple`, *optional*): what the encoder returned in an earlier call.
            cache ([`EncoderDecoderCache`], *optional*): keys and values of the target so far; a [`Cache`] for a
                decoder on its own. Also understood by its name before transformers 5.24, `past_key_values`.
            inputs_embeds, decoder_inputs_embeds (`torch.Tensor`, *optional*): their embeddings in place of ids.
            use_cache (`bool`, *optional*): whether to create and return a cache.
            token_type_ids (`torch.LongTensor` of shape `(batch, source)`, *optional*): segments; all 0 by default.
            position_ids (`torch.LongTensor` of shape `(batch, target)`, *optional*): positions of a decoder on its
                own, counted from 0; by default they count the tokens of each sentence. Without mask and cache, a text
                begins wherever they do not go on by 1, and no position attends to another text than its own.

        Returns [`Seq2SeqModelOutput`] with `last_hidden_state`, `(batch, target, d_model)`, or the only stack's
        output. Raises a ValueError if not exactly one of ids and embeddings is given, shapes do not fit, an id is
        beyond its table, or layers share an entry of the cache; and a TypeError for an argument that nothing reads.
        """
        of_the_target = {"decoder_input_ids": decoder_input_ids, "decoder_inputs_embeds": decoder_inputs_embeds}
        of_two: dict[str, Any] = {"encoder_outputs": encoder_outputs, "decoder_attention_mask": decoder_attention_mask}
        if self.decoder is None:
            refuse_unread(self, cache=cache, position_ids=position_ids, **of_the_target, **of_two)
            return self.encoder(input_ids, attention_mask, inputs_embeds, token_type_ids, **kwargs)
        if self.encoder is None:
            refuse_unread(self, **of_the_target, **of_two)
            check_ids("token_type_ids", token_type_ids, 1, "the number of segments")
            kwargs |= {"cache": cache, "use_cache": use_cache, "position_ids": position_ids}
            return self.decoder(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        refuse_unread(self, position_ids=position_ids)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds, token_type_ids, **kwargs)
        encoder_outputs = as_encoder_output(encoder_outputs)
        kwargs |= {"encoder_hidden_states": encoder_outputs[0], "encoder_attention_mask": attention_mask}
        kwargs |= {"cache": cache, "use_cache": use_cache, "inputs_embeds": decoder_inputs_embeds}
        decoder_outputs = self.decoder(decoder_input_ids, decoder_attention_mask, **kwargs)
        names = ("last_hidden_state", "hidden_states", "attentions")
        of_both = {f"encoder_{name}": encoder_outputs.get(name) for name in names}
        of_both |= {f"decoder_{name}": decoder_outputs.get(name) for name in names[1:]}
        of_both |= {name: decoder_outputs.get(name) for name in ("last_hidden_state", "cross_attentions", CACHE)}
        return Seq2SeqModelOutput(**of_both)


class VaswaniLanguageModel(VaswaniPreTrainedModel):
    """Base class of the models that predict tokens: the linear transformation of Figure 1, and its loss."""

    lm_head: nn.Linear

    @property
    def frozen_row(self) -> int | None:
        """Row of the output matrix that gets no gradient: tied to the embedding of `<pad>`, it is to stay zero."""
        return self.config.zero_row if self.training and self.config.tie_word_embeddings else None

    def logits_and_loss(
        self,
        hidden_states: torch.Tensor,
        labels: torch.LongTensor | None,
        epsilon_ls: float,
        num_items_in_batch: torch.Tensor | int | None,
        loss_only: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """
        Applies "Linear" of Figure 1 to `(batch, target, d_model)`: logits, `(batch, target, vocab_size)`, or `None`
        with `loss_only`, and the loss, or `None` without labels. Other arguments and errors as in
        [`VaswaniForConditionalGeneration.forward`].
        """
        if loss_only and labels is None:
            raise ValueError("loss_only needs labels, but labels is None.")
        frozen = self.frozen_row
        if labels is not None:
            check_shape("labels", labels, *hidden_states.shape[:2])
            check_ids("labels", labels.masked_fill(labels == -100, 0), self.config.vocab_size, "vocab_size")
            if loss_only and is_plain_linear(self.lm_head, hidden_states):
                settings = (epsilon_ls, num_items_in_batch, frozen)
                return None, smoothed_linear_cross_entropy(hidden_states, self.lm_head.weight, labels, *settings)
        logits = self.lm_head(hidden_states)  # [batch, target, vocab_size]
        if frozen is not None:
            # In place: autograd then cuts this column's gradient, and the logits are not copied.
            logits[..., frozen] = logits[..., frozen].detach()
        loss = None if labels is None else smoothed_cross_entropy(logits, labels, epsilon_ls, num_items_in_batch)
        return None if loss_only else logits, loss


class VaswaniForConditionalGeneration(VaswaniGenerationMixin, VaswaniLanguageModel, GenerationMixin):
    """The translation model: all of Figure 1, a [`VaswaniModel`] and the linear transformation on top."""

    stacks = ("encoder", "decoder")

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__(config)
        source, target = (f"model.{stack}.embed_tokens.weight" for stack in self.stacks)
        # 3.4: "we share the same weight matrix between the two embedding layers and the pre-softmax transformation".
        head = "lm_head.weight"
        self._tied_weights_keys = {target: source, head: source} if config.share_embeddings else {head: target}
        self.model = VaswaniModel(self.config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=config.lm_head_bias)
        self.post_init()

    def prepare_decoder_input_ids_from_labels(self, labels: torch.LongTensor) -> torch.Tensor:
        """Makes the decoder's input for teacher forcing: labels, `(batch, target)`, shifted right (Section 3.1)."""
        shifted = labels.new_full(labels.shape, self.config.decoder_start_token_id)
        shifted[:, 1:] = labels[:, :-1]
        # The causal mask hides the end of a target from its tokens: any id will do there.
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id or 0)

    @takes_both_cache_names
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        epsilon_ls: float = 0.0,
        num_items_in_batch: torch.Tensor | int | None = None,
        loss_only: bool = False,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """
        Computes logits, `(batch, target, vocab_size)`, and with labels the loss in nats per target token. Takes the
        arguments of [`VaswaniModel.forward`], with the same errors, and:

        Args:
            labels (`torch.LongTensor` of shape `(batch, target)`, *optional*): the tokens to predict, or -100 where
                there is no label. Shifted right, they are the default of `decoder_input_ids`.
            epsilon_ls (`float`): label smoothing, as in [`smoothed_cross_entropy`]. transformers' Trainer takes every
                argument with "label" in its name for a column of the data.
            num_items_in_batch (`int`, *optional*): divisor of the summed loss; the number of labels by default.
            loss_only (`bool`): return `loss` without `logits`, computed a few positions at a time in a fraction of the
                memory. Its `backward` can run once only.
        """
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        kwargs |= {"cache": cache, "use_cache": use_cache, "encoder_outputs": encoder_outputs}
        kwargs |= {"inputs_embeds": inputs_embeds, "decoder_inputs_embeds": decoder_inputs_embeds}
        outputs = self.model(input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, **kwargs)
        others = dict(outputs)
        states = others.pop("last_hidden_state")
        logits, loss = self.logits_and_loss(states, labels, epsilon_ls, num_items_in_batch, loss_only)
        return Seq2SeqLMOutput(loss=loss, logits=logits, **others)


class VaswaniEncoderModel(VaswaniModel):
    """The left half of Figure 1 alone, for features of the source. Loads from the folder of any Vaswani model."""

    stacks = ("encoder",)
    _keys_to_ignore_on_load_unexpected = [r"(^|\.)decoder\.", *HEADS]


# ---- What transformers and PEFT ask of the models ----------------------------------------------------------------


def stored_embedding(
    kind: type[VaswaniPreTrainedModel], path: str | os.PathLike[str] | None, options: dict[str, Any]
) -> dict[str, str]:
    """
    Returns the name of the shared embedding in the folder of a model with other stacks, and its name in the class, or
    nothing if it is the same; raises a ValueError if the folder's model has none of the stacks of the class.
    """
    try:
        fields = kind.config_class.get_config_dict(path, **options)[0] if path else {}
    except OSError:  # There is no config: transformers says so, or finds it where an adapter says.
        return {}
    if fields.get("model_type") != kind.config_class.model_type:
        return {}
    saved = kind.config_class.from_dict(fields)
    wanted = kind.stacks_from(saved.stacks)
    if not set(wanted) & set(saved.stacks):
        raise ValueError(
            f"{path} has {'a decoder and no encoder' if 'decoder' in saved.stacks else 'an encoder and no decoder'}, "
            f"which {kind.__name__} needs: choose another model, or another class."
        )
    # A shared embedding is stored once, with the first stack of a model.
    before, after = (f"{stacks[0]}.embed_tokens" for stacks in (saved.stacks, wanted))
    return {before: after} if saved.share_embeddings and saved.tie_word_embeddings and before != after else {}


def copies_of_shared(weights: dict[str, Any], ties: dict[str, str]) -> dict[str, Any]:
    """
    Returns copies of those of the weights that have another name already, except where loading ties one name to the
    other, as `ties` says. transformers would save such a matrix under one name, and loading would make up the others.
    """
    # Weights that are on disk are on the meta device here, and others may have no single place in memory.
    places = {
        name: (weight.device, weight.data_ptr(), weight.shape)
        for name, weight in weights.items()
        if type(weight) in (torch.Tensor, nn.Parameter) and weight.device.type != "meta" and weight.numel()
    }
    seen, copies = set(), {}
    for name, place in places.items():
        if places.get(ties.get(name, "")) != place:
            if place in seen:
                copies[name] = weights[name].clone()
            seen.add(place)
    return copies


# ---- What comes in -----------------------------------------------------------------------------------------------


def check_ids(name: str, ids: torch.Tensor | None, size: int, size_name: str, wait: bool = False) -> None:
    """
    Checks that ids, if any are given, have a row in a table of `size` rows; raises a ValueError with the id and the
    size. Reading ids makes a GPU wait, so they are checked there only with `wait`.
    """
    if ids is None or ids.numel() == 0 or ids.is_meta or torch.compiler.is_compiling():
        return
    # While a graph is recorded, its ids are not known yet.
    if ids.is_cpu or (wait and not (ids.is_cuda and torch.cuda.is_current_stream_capturing())):
        # One read of the device for both.
        for id_ in torch.stack((ids.min(), ids.max())).tolist():
            if not 0 <= id_ < size:
                raise ValueError(f"{name} has {id_}, but {size_name} is {size}: ids range from 0 to {size - 1}.")


def as_encoder_output(given: Any) -> BaseModelOutput:
    """Returns the output of an encoder that was given as one, or as a tuple; raises a ValueError for a tensor."""
    if isinstance(given, torch.Tensor):
        raise ValueError("encoder_outputs is a tensor: pass the encoder's whole output, or a tuple of tensors.")
    return given if isinstance(given, BaseModelOutput) else BaseModelOutput(*given)


def check_shape(name: str, given: torch.Tensor | None, batch: int, length: int | None = None) -> None:
    """Checks the batch size and the length of states or a mask; raises a ValueError with both numbers."""
    # A mask of four dimensions is used as it is.
    if given is None or given.dim() > 3:
        return
    if given.dim() < 2:
        raise ValueError(f"{name} has the shape {tuple(given.shape)}, but must be (batch, length).")
    if given.shape[0] != batch:
        raise ValueError(f"{name} has {given.shape[0]} sentences, but the tokens have {batch}.")
    if length is not None and given.shape[1] != length:
        raise ValueError(f"{name} is {given.shape[1]} tokens wide, but there are {length} tokens.")


def is_paged(cache: Any) -> bool:
    """Returns whether a cache is that of transformers' continuous batching, which has rules of its own."""
    return type(cache).__name__ == "PagedAttentionCache"


# Keywords that transformers' decorators of a stack read or set, or that `generate()` has read and hands down.
READ_BY_TRANSFORMERS = {
    *("is_causal", "output_attentions", "output_hidden_states", "prune_layers", "use_cache"),
    *("assistant_tokenizer", "debug_io", "debug_io_dir", "tokenizer"),
}
# Keywords that say where the texts of a row begin, as positions do: other attention functions see it by the mask.
LENGTHS_OF_TEXTS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
OF_PACKED_TEXTS = LENGTHS_OF_TEXTS | {"seq_idx"}
# Keywords that an attention function of transformers reads without naming them, by a part of its name.
READ_BY_ATTENTION = {"flash": LENGTHS_OF_TEXTS | {"deterministic"}, "flex": {"kernel_options"}}
# Arguments that a layer passes to its attention function by itself, so that callers cannot set them.
GIVEN_BY_LAYERS = {"module", "query", "key", "value", "attention_mask", "dropout", "scaling", "cache", "kwargs"}


def refuse_unread(module: Any, **keywords: Any) -> None:
    """Raises a TypeError for the first keyword, `None` aside, that nothing below a model or stack reads."""
    unknown = [name for name, value in keywords.items() if value is not None and name not in READ_BY_TRANSFORMERS]
    if not unknown:
        return
    attention = module.config._attn_implementation or "eager"
    function = ALL_ATTENTION_FUNCTIONS.get(attention)
    read = set() if function is None else inspect.signature(function).parameters.keys() - GIVEN_BY_LAYERS
    read = read.union(*(names for part, names in READ_BY_ATTENTION.items() if part in attention))
    if unread := [name for name in unknown if name not in read]:
        kind = type(module).__name__
        raise TypeError(f"{unread[0]} was given, but neither {kind} nor its attention ({attention}) reads it.")


FORWARD.update(
    (kind, kind.forward)
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == __name__
)
