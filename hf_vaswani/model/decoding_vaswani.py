"""The decoder one token at a time, for `generate()`.

[`IncrementalDecoder`] computes what [`VaswaniDecoder`] computes with a cache, by the same layers, and stores it so
that a beam costs little:

- The encoder's keys and values are those of a sentence, not of a hypothesis: its hypotheses read them together.
- Those of the target stay where they were first written. In beam search a hypothesis goes on from another one's place
  at each step; instead of moving keys and values, each hypothesis has a mask over all that its sentence wrote. It is a
  product with more columns than needed, but the hypotheses of a sentence share it; places that none of them sees any
  more are forgotten from time to time.
- The prompt, which all hypotheses of a sentence have in common, is read by one of them.
- Sentences that are done are taken out.

It goes past the modules that it computes, so it speaks for a model only as long as these are the ones of the modelling
file, unchanged: [`AsWritten`] compares them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_hooks
from transformers.activations import ACT2FN
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel

# Tokens that room is made for at a time.
TOKENS_AT_A_TIME = 16
# From so many hypotheses on, the matrix of the vocabulary is worth bringing into the order of oneDNN's products.
ROWS_WORTH_PACKING = 32


def is_matrix(layer: Any) -> bool:
    """Whether a linear layer is nothing but its matrix and its bias: no adapter, not quantised."""
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter


def product_of(*layers: Any, groups: int = 1) -> Callable[[torch.Tensor], torch.Tensor]:
    """
    Several linear layers that read the same states, as one product where they are nothing but matrices.

    Args:
        layers ([`nn.Linear`], or what stands in the place of one): read states.
        groups (`int`): parts that each layer's output has; what is returned has the layers' first parts side by side,
            then their second ones, and so on.

    Returns:
        A function of states of shape `(rows, d_in)`.
    """
    if len(layers) == 1 and not is_matrix(layers[0]):
        return layers[0]
    if not all(is_matrix(layer) for layer in layers):
        return lambda states: side_by_side([layer(states).t() for layer in layers], groups).t()
    weight = side_by_side([layer.weight for layer in layers], groups).t()
    if layers[0].bias is None:
        return lambda states: torch.mm(states, weight)
    bias = side_by_side([layer.bias for layer in layers], groups)
    return lambda states: torch.addmm(bias, states, weight)


def side_by_side(parts: Sequence[torch.Tensor], groups: int) -> torch.Tensor:
    """Concatenates tensors along their first dimension, group by group."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


def sum_of(layer: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A linear layer and the sum behind it: a function of what the layer reads, and of what its output is added to."""
    if is_matrix(layer) and layer.bias is None:
        weight = layer.weight.t()
        return lambda states, others: torch.addmm(others, states, weight)
    project = product_of(layer)
    return lambda states, others: project(states).add_(others)


def norm_of(norm: nn.LayerNorm) -> Callable[[torch.Tensor], torch.Tensor]:
    """LayerNorm, without the way through its module."""
    shape, weight, bias, eps = norm.normalized_shape, norm.weight, norm.bias, norm.eps
    return lambda states: torch.layer_norm(states, shape, weight, bias, eps)


def add_and_norm(module: Any, sublayer: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """
    [`VaswaniAddAndNorm`] without dropout.

    Args:
        module ([`VaswaniAddAndNorm`]): the layer's own.
        sublayer (`Callable`): takes states of shape `(rows, d_model)`, and those that its output is to be added to.

    Returns:
        A function of states, and of whatever else `sublayer` takes.
    """
    norm = norm_of(module.layer_norm)
    if module.norm_first:
        return lambda states, *more: sublayer(norm(states), states, *more)
    return lambda states, *more: norm(sublayer(states, states, *more))


class SourceAttention:
    """
    Multi-head attention from the target to the source, for hypotheses of which several read one source.

    Args:
        attention ([`VaswaniAttention`]): a layer's own.
        encoder_states (`torch.Tensor` of shape `(sentences, source, d_model)`): the encoder's output.
        bias (`torch.Tensor` of shape `(sentences, 1, 1, source)`, *optional*): the source's padding.
    """

    def __init__(self, attention: Any, encoder_states: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.heads, self.scaling, self.bias = attention.num_heads, attention.scaling, bias
        self.project_query, self.project_out = product_of(attention.q_proj), sum_of(attention.out_proj)
        self.keys = by_head(attention.k_proj(encoder_states), self.heads)  # [sentences, heads, source, d_k]
        self.values = by_head(attention.v_proj(encoder_states), self.heads)  # [sentences, heads, source, d_v]

    def __call__(self, states: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """States of shape `(sentences * beams, d_model)` -> the same shape, with `others` added."""
        query = self.project_query(states)
        query = by_head(query.view(len(self.keys), -1, query.shape[1]), self.heads)
        return self.project_out(attend(query, self.keys, self.values, self.bias, self.scaling), others)

    def keep(self, sentences: torch.Tensor) -> None:
        """Takes out all sentences but those that are given."""
        self.keys, self.values = self.keys.index_select(0, sentences), self.values.index_select(0, sentences)
        if self.bias is not None:
            self.bias = self.bias.index_select(0, sentences)


class TargetAttention:
    """
    Multi-head attention from the target to the target, with the keys and values that it has made.

    Args:
        attention ([`VaswaniAttention`]): a layer's own.
        sentences (`torch.Tensor`): whose first dimension is theirs, of the right type and place.
    """

    def __init__(self, attention: Any, sentences: torch.Tensor) -> None:
        self.heads, self.scaling = attention.num_heads, attention.scaling
        d_k, d_v = (projection.out_features // self.heads for projection in (attention.k_proj, attention.v_proj))
        self.widths, self.of_query = (d_k, d_v), (d_k, d_k + d_v)
        # Of each head its query, key and value.
        self.project = product_of(attention.q_proj, attention.k_proj, attention.v_proj, groups=self.heads)
        self.project_out = sum_of(attention.out_proj)
        # Keys and values side by side: [sentences, heads, places, d_k + d_v].
        self.stored = sentences.new_empty(len(sentences), self.heads, 0, d_k + d_v)

    def __call__(
        self, states: torch.Tensor, others: torch.Tensor, written: int, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """
        One position of each hypothesis.

        Args:
            states (`torch.Tensor` of shape `(rows, d_model)`): there.
            others (`torch.Tensor` of shape `(rows, d_model)`): what is added.
            written (`int`): places that are taken already.
            bias (`torch.Tensor` of shape `(sentences, 1, beams, places)`, *optional*): what a hypothesis sees.

        Returns:
            `torch.Tensor` of shape `(rows, d_model)`.
        """
        projected = self.project(states)
        projected = by_head(projected.view(self.stored.shape[0], -1, projected.shape[1]), self.heads)
        query, new = projected.split(self.of_query, dim=3)
        beams = new.shape[2]
        self.stored.narrow(2, written, beams).copy_(new)
        keys, values = self.stored.narrow(2, 0, written + beams).split(self.widths, dim=3)
        return self.project_out(attend(query, keys, values, bias, self.scaling), others)

    def make_room(self, room: int, written: int) -> None:
        """For so many keys and values, of which some have been written."""
        stored = self.stored.new_empty(*self.stored.shape[:2], room, self.stored.shape[3])
        stored[:, :, :written] = self.stored[:, :, :written]
        self.stored = stored

    def keep(self, sentences: torch.Tensor, written: int) -> None:
        """Takes out all sentences but those that are given, and what is behind the places that are taken."""
        self.stored = self.stored[:, :, :written].index_select(0, sentences)

    def choose(self, places: torch.Tensor) -> None:
        """Keeps of each sentence some places, of shape `(sentences, kept)`."""
        shape = (*self.stored.shape[:2], places.shape[1], self.stored.shape[3])
        self.stored = self.stored.gather(2, places[:, None, :, None].expand(shape))


class LayerDecoder:
    """
    A layer of the decoder.

    Args:
        layer ([`VaswaniDecoderLayer`]): the layer.
        encoder_states (`torch.Tensor` of shape `(sentences, source, d_model)`): the encoder's output.
        source_bias (`torch.Tensor` of shape `(sentences, 1, 1, source)`, *optional*): the source's padding.
    """

    def __init__(self, layer: Any, encoder_states: torch.Tensor, source_bias: torch.Tensor | None) -> None:
        self.target = TargetAttention(layer.self_attn, encoder_states)
        self.source = SourceAttention(layer.cross_attn, encoder_states, source_bias)
        fc1, fc2, activation = (
            product_of(layer.feed_forward.fc1),
            sum_of(layer.feed_forward.fc2),
            layer.feed_forward.activation,
        )
        if type(activation) is nn.ReLU:
            activation = torch.relu_
        self.attend_to_target = add_and_norm(layer.self_attn_norm, self.target)
        self.attend_to_source = add_and_norm(layer.cross_attn_norm, self.source)
        self.feed_forward = add_and_norm(
            layer.feed_forward_norm, lambda states, others: fc2(activation(fc1(states)), others)
        )

    def step(self, states: torch.Tensor, written: int, bias: torch.Tensor | None) -> torch.Tensor:
        """[`VaswaniDecoderLayer`] for one position of each hypothesis; arguments are those of [`TargetAttention`]."""
        return self.feed_forward(self.attend_to_source(self.attend_to_target(states, written, bias)))


def by_head(states: torch.Tensor, heads: int) -> torch.Tensor:
    """`(sentences, length, heads * head_dim)` -> `(sentences, heads, length, head_dim)`."""
    return states.view(states.shape[0], states.shape[1], heads, -1).transpose(1, 2)


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Section 3.2.1, equation 1, and Concat of 3.2.2; all split into heads -> `(sentences * beams, heads * d_v)`."""
    attended = nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scaling)
    return attended.transpose(1, 2).reshape(query.shape[0] * query.shape[2], -1)


class IncrementalDecoder:
    """
    Args:
        decoder ([`VaswaniDecoder`]): the layers.
        encoder_states (`torch.Tensor` of shape `(sentences, source, d_model)`): the encoder's output.
        source_mask (`torch.Tensor` of shape `(sentences, source)`, *optional*): 1 for tokens, 0 for padding.
        num_beams (`int`): hypotheses of a sentence.
    """

    def __init__(
        self, decoder: Any, encoder_states: torch.Tensor, source_mask: torch.Tensor | None, num_beams: int
    ) -> None:
        self.decoder = decoder
        source_bias = None
        if source_mask is not None and not source_mask.all():
            source_bias = as_bias(source_mask != 0, encoder_states.dtype)[:, None, None]
        self.layers = [LayerDecoder(layer, encoder_states, source_bias) for layer in decoder.layers]
        self.length = 0  # positions of the target that have been read
        self.written = 0  # places of the target's keys and values that are taken
        self.room = 0  # places that there are
        # What a hypothesis sees of the places.
        self.bias = encoder_states.new_zeros(len(encoder_states), 1, num_beams, 0)
        # To each hypothesis its own place of a step.
        own = torch.eye(num_beams, dtype=torch.bool, device=encoder_states.device)
        self.own = as_bias(own, encoder_states.dtype)
        self.encoding = encoder_states.new_zeros(0, 0)  # of the positions that there is room for: [positions, d_model]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """
        Reads one token of each hypothesis.

        Args:
            tokens (`torch.LongTensor` of shape `(sentences, beams)`): or `(sentences, 1)`, as long as a sentence has
                one hypothesis only.

        Returns:
            `torch.Tensor` of shape `(sentences * beams, d_model)`: the decoder's output there.
        """
        beams = tokens.shape[1]
        self._make_room(beams)
        embeds = self.decoder.embed_tokens(tokens.reshape(-1))  # [rows, d_model]
        states = self.decoder.positions.add(embeds, self.encoding[self.length])
        bias = None
        if beams > 1:
            self.bias[..., self.written : self.written + beams] = self.own
            bias = self.bias[..., : self.written + beams]
        for layer in self.layers:
            states = layer.step(states, self.written, bias)
        self.length += 1
        self.written += beams
        return self.decoder.norm(states)

    def _make_room(self, beams: int) -> None:
        """Makes places where there are not enough, and forgets those that are not needed."""
        if self.length == len(self.encoding):
            wanted, table = max(TOKENS_AT_A_TIME, 2 * self.length), self.decoder.positions.table
            if table is not None:
                wanted = max(self.length + 1, min(wanted, table.num_embeddings))
            self.encoding = self.decoder.positions.encode(torch.arange(wanted, device=self.bias.device))
        if self.written + beams > self.room:
            if beams > 1:
                self._forget()
            self.room = self.written + TOKENS_AT_A_TIME * beams
            self.bias = nn.functional.pad(self.bias[..., : self.written], (0, self.room - self.written))
            for layer in self.layers:
                layer.target.make_room(self.room, self.written)

    def _forget(self) -> None:
        """Takes out places that no hypothesis sees any more: those of hypotheses that were left behind."""
        seen = (self.bias[:, 0, :, : self.written] == 0).any(dim=1)  # [sentences, places]
        needed = int(seen.sum(dim=1).max())
        # In their order; behind them, where a sentence has fewer, some that nobody sees.
        places = seen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :needed]
        shape = (*self.bias.shape[:3], needed)
        self.bias = self.bias.gather(3, places[:, None, None].expand(shape))
        for layer in self.layers:
            layer.target.choose(places)
        self.written = needed

    def reorder(self, parents: torch.Tensor) -> None:
        """
        Lets each hypothesis go on from another one of its sentence.

        Args:
            parents (`torch.LongTensor` of shape `(sentences, beams)`): which.
        """
        seen = self.bias[..., : self.written]
        seen.copy_(torch.take_along_dim(seen, parents[:, None, :, None], dim=2))

    def keep(self, sentences: torch.Tensor) -> None:
        """
        Takes out all sentences but some.

        Args:
            sentences (`torch.LongTensor` of shape `(kept,)`): which stay, in their order.
        """
        self.room = self.written
        self.bias = self.bias.index_select(0, sentences)
        for layer in self.layers:
            layer.target.keep(sentences, self.written)
            layer.source.keep(sentences)


def as_bias(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as a number to add to scores, of the shape of `visible`: 0 where it is true, else the least there is."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, torch.finfo(dtype).min
    )


class Vocabulary:
    """
    The linear transformation on top of the decoder.

    Args:
        lm_head (`nn.Module`): the layer.
        rows (`int`): hypotheses that it will see at a time.
    """

    def __init__(self, lm_head: nn.Module, rows: int) -> None:
        self.project: Callable[[torch.Tensor], torch.Tensor] = lm_head
        if is_matrix(lm_head) and rows >= ROWS_WORTH_PACKING and lm_head.weight.device.type == "cpu":
            # What torch's compiler does. (Where torch has no oneDNN, there is no such thing.)
            reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
            if reorder and torch.backends.mkldnn.is_available() and lm_head.weight.dtype == torch.float32:
                multiply = torch.ops.mkldnn._linear_pointwise
                packed, bias = reorder(lm_head.weight, rows), lm_head.bias
                self.project = lambda states: multiply(states, packed, bias, "none", [], "")

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """States of shape `(rows, d_model)` -> logits of shape `(rows, vocab_size)`, in float32."""
        return self.project(states).float()


class Predictor:
    """
    What a model says of the next tokens; or several models, by the mean of their probabilities.

    Args:
        models (`Sequence` of [`VaswaniForConditionalGeneration`]): with the same vocabulary.
        encoder_states (`Sequence` of `torch.Tensor` of shape `(sentences, source, d_model)`): what the encoder of each
            says.
        source_mask (`torch.Tensor` of shape `(sentences, source)`, *optional*): 1 for tokens, 0 for padding.
        num_beams (`int`): hypotheses of a sentence.
    """

    def __init__(
        self,
        models: Sequence[Any],
        encoder_states: Sequence[torch.Tensor],
        source_mask: torch.Tensor | None,
        num_beams: int,
    ) -> None:
        rows = len(encoder_states[0]) * num_beams
        self.vocabularies = [Vocabulary(model.lm_head, rows) for model in models]
        self.decoders = [
            IncrementalDecoder(model.model.decoder, states, source_mask, num_beams)
            for model, states in zip(models, encoder_states, strict=True)
        ]
        self.states: list[torch.Tensor] = []  # of each decoder where it has read to

    def read(self, tokens: torch.Tensor) -> None:
        """[`IncrementalDecoder.step`]."""
        self.states = [decoder.step(tokens) for decoder in self.decoders]

    def logits(self) -> torch.Tensor:
        """Of the token that comes next, of shape `(rows, vocab_size)`, in float32."""
        if len(self.decoders) == 1:
            return self.vocabularies[0].logits(self.states[0])
        return self.log_probs()

    def log_probs(self) -> torch.Tensor:
        """Of the token that comes next, of shape `(rows, vocab_size)`, in float32."""
        several = []
        for vocabulary, states in zip(self.vocabularies, self.states, strict=True):
            logits = vocabulary.logits(states)
            several.append(torch.log_softmax(logits, dim=1, out=logits))
        if len(several) == 1:
            return several[0]
        return torch.logsumexp(torch.stack(several), dim=0) - math.log(len(several))

    def repeat(self, beams: int) -> None:
        """Has what was read for one hypothesis of each sentence count for so many."""
        self.states = [states.repeat_interleave(beams, dim=0) for states in self.states]

    def reorder(self, parents: torch.Tensor) -> None:
        """[`IncrementalDecoder.reorder`]."""
        for decoder in self.decoders:
            decoder.reorder(parents)

    def keep(self, sentences: torch.Tensor) -> None:
        """[`IncrementalDecoder.keep`]."""
        for decoder in self.decoders:
            decoder.keep(sentences)


# ---- The network as it was written -------------------------------------------------------------------------------

# The modules that the decoder here stands for, with their parts: each is exactly the class of this name in the
# modelling file, or one of torch's.
PARTS = {
    "VaswaniForConditionalGeneration": {"model": "VaswaniModel", "lm_head": "linear"},
    # The encoder is called as it is.
    "VaswaniModel": {"encoder": "any", "decoder": "VaswaniDecoder"},
    "VaswaniDecoder": {
        "embed_tokens": "embedding",
        "positions": "VaswaniPositions",
        "layers": "list",
        "norm": "final norm",
    },
    "VaswaniPositions": {"table": "embedding", "dropout": "VaswaniDropout"},
    "VaswaniDecoderLayer": {
        "self_attn": "VaswaniAttention",
        "self_attn_norm": "VaswaniAddAndNorm",
        "cross_attn": "VaswaniAttention",
        "cross_attn_norm": "VaswaniAddAndNorm",
        "feed_forward": "VaswaniFeedForward",
        "feed_forward_norm": "VaswaniAddAndNorm",
    },
    "VaswaniAttention": {"q_proj": "linear", "k_proj": "linear", "v_proj": "linear", "out_proj": "linear"},
    "VaswaniAddAndNorm": {"layer_norm": "norm", "dropout": "VaswaniDropout"},
    "VaswaniFeedForward": {
        "fc1": "linear",
        "activation": "activation",
        "dropout": "VaswaniDropout",
        "fc2": "linear",
    },
    "VaswaniDropout": {},
}
TORCH: dict[str, set[Any]] = {
    "linear": {nn.Linear},
    "embedding": {nn.Embedding, type(None)},
    "norm": {nn.LayerNorm},
    "final norm": {nn.LayerNorm, nn.Identity},
    # They are called, and each number by itself: any of these will do.
    "activation": {entry[0] if isinstance(entry, tuple) else entry for entry in dict.values(ACT2FN)},
    "list": {nn.ModuleList},
}
# Methods of a model that have no part in what it computes.
NOT_COMPUTING = {"generate", "save_pretrained", "push_to_hub"}
# Functions of torch that the modules call.
FUNCTIONS = ("dropout", "embedding", "layer_norm", "linear", "relu", "scaled_dot_product_attention", "softmax")
FOREIGN = (
    GenerationMixin,
    PreTrainedModel,
    EncoderDecoderCache,
    DynamicCache,
    DynamicLayer,
    GradientCheckpointingLayer,
    nn.Module,
    nn.Linear,
    nn.LayerNorm,
    nn.Embedding,
    nn.Identity,
    nn.ModuleList,
    nn.Dropout,
    nn.ReLU,
)


def _is_int8(kind: type) -> bool:
    """Recognises torch's linear layer with weights of 8 bits by its name: importing it would take time."""
    return (kind.__module__, kind.__name__) == ("torch.ao.nn.quantized.dynamic.modules.linear", "Linear")


def _fits(module: Any) -> bool:
    """Tells whether a matrix, or the weights of a LayerNorm, have the sizes that their module names."""
    if isinstance(module, nn.LayerNorm):
        return len(module.normalized_shape) == 1
    return module.weight.shape == (module.out_features, module.in_features)


def _is_regular(attention: Any) -> bool:
    """Tells whether the projections of an attention have biases together or not at all, and sizes of whole heads."""
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = {callable(layer.bias) or layer.bias is not None for layer in projections}
    widths = [layer.out_features % attention.num_heads for layer in projections]
    return len(biases) == 1 and not any(widths) and isinstance(attention.scaling, float)


def computes(name: str, value: Any) -> bool:
    """Tells whether an attribute of a class has a part in what its modules compute. torch's compiler sets others."""
    return callable(value) and (name in ("__call__", "__getattr__", "__getattribute__") or not name.startswith("__"))


def is_unchanged(kind: type, attributes: dict[str, Any]) -> bool:
    """Tells whether a class has the attributes that it had, and has not been given one in the place of a base's."""
    now = vars(kind)
    if any(now.get(name) is not value for name, value in attributes.items()):
        return False
    new = (name for name in now.keys() - attributes.keys() if computes(name, now[name]))
    return not any(hasattr(base, name) for name in new for base in kind.__bases__)


class AsWritten:
    """
    The modelling file as it is when it is imported, to tell later whether a model still computes what it says.

    Args:
        names (`dict[str, Any]`): the file's global names.
        kernels (`dict[str, Any]`): the global names of the kernels' file.
    """

    def __init__(self, names: dict[str, Any], kernels: dict[str, Any]) -> None:
        self.names = names
        files = {file["__name__"]: file for file in (names, kernels)}
        self.functions = [
            (file, name, value) for file in files.values() for name, value in file.items() if callable(value)
        ]
        ours = [value for _, _, value in self.functions if getattr(value, "__module__", "") in files]
        self.classes = {
            kind: {name: value for name, value in vars(kind).items() if computes(name, value)}
            for kind in (*FOREIGN, *ours)
            if isinstance(kind, type)
        }
        self.torch = {name: getattr(nn.functional, name) for name in FUNCTIONS}
        self.attentions = dict(names["ALL_ATTENTION_FUNCTIONS"])
        self.masks = dict(ALL_MASK_ATTENTION_FUNCTIONS)
        self.callables: dict[type, set[str]] = {}

    def matches(self, model: Any) -> bool:
        """
        Tells whether [`IncrementalDecoder`] computes what a model computes. It does not where a class, a function or
        an attention of the file has been replaced, where a module on the way is of another class, has a method of its
        own, a hook, or parameters or parts that do not belong to it, or where one of them is in training mode.
        """
        return (
            not (torch_hooks._global_forward_hooks or torch_hooks._global_forward_pre_hooks)
            and all(file.get(name) is value for file, name, value in self.functions)
            and all(getattr(nn.functional, name) is value for name, value in self.torch.items())
            and all(is_unchanged(kind, attributes) for kind, attributes in self.classes.items())
            and self._is(model, "VaswaniForConditionalGeneration")
            and model.lm_head.out_features == model.config.vocab_size
        )

    def _is(self, module: Any, kind: str) -> bool:
        if kind == "any" or (module is None and kind == "embedding"):
            return True
        if not self._is_of(type(module), kind) or not self._is_untouched(module, kind):
            return False
        if kind == "list":
            return all(self._is(layer, "VaswaniDecoderLayer") for layer in module)
        if kind == "VaswaniAttention" and not (_is_regular(module) and self._is_known(module)):
            return False
        return all(self._is(getattr(module, name, None), part) for name, part in PARTS.get(kind, {}).items())

    def _is_untouched(self, module: nn.Module, kind: str) -> bool:
        """Tells whether a module has no hook, no method of its own, and only the parameters and parts of its kind."""
        if module._forward_hooks or module._forward_pre_hooks:
            return False
        if not self._callables(type(module)).isdisjoint(vars(module)):
            return False
        # It is called as it is; torch leaves it in training mode, in which it does nothing else.
        if _is_int8(type(module)):
            return True
        if kind in ("linear", "norm") and not _fits(module):
            return False
        parameters = () if kind in PARTS or kind == "activation" else ("weight", "bias")
        parts = module._modules.keys() if kind == "list" else PARTS.get(kind, {}).keys()
        return not (module.training or module._parameters.keys() - parameters or module._modules.keys() - parts)

    def _is_of(self, found: Any, kind: str) -> bool:
        """Compares a module's class with the one that is expected."""
        if kind == "linear" and _is_int8(found):
            return True
        return found in TORCH[kind] if kind in TORCH else found is self.names[kind]

    def _is_known(self, attention: Any) -> bool:
        """Tells whether its implementation and masks are those that transformers had when the file was imported."""
        name = attention.config._attn_implementation
        if name not in (None, "eager") and name not in self.attentions:
            return False
        tables = ((self.names["ALL_ATTENTION_FUNCTIONS"], self.attentions), (ALL_MASK_ATTENTION_FUNCTIONS, self.masks))
        return all(now.get(name) is before.get(name) for now, before in tables)

    def _callables(self, kind: type) -> set[str]:
        """The names that a module of this class finds in its class when it calls them."""
        if kind not in self.callables:
            self.callables[kind] = {name for name in dir(kind) if callable(getattr(kind, name, None))} - NOT_COMPUTING
        return self.callables[kind]
