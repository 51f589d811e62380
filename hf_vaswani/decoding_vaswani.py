"""Greedy and beam search of `generate()` on a decoder that reads one token at a time.

[`IncrementalDecoder`] computes what [`VaswaniDecoder`] computes with a cache, by the same layers, and stores it so
that a beam costs little:

- The encoder's keys and values are those of a sentence, not of a hypothesis: its hypotheses read them together.
- Those of the target stay where they were first written. In beam search a hypothesis goes on from another one's place
  at each step; instead of moving keys and values, each hypothesis has a mask over all that its sentence ever wrote. It
  is a product with more columns than needed, but the hypotheses of a sentence share it.
- The prompt, which all hypotheses of a sentence have in common, is read by one of them.
- Sentences that are done are taken out.

The searches decide what transformers' decide; those that need more of it than the tokens are left to transformers (see
`generation_vaswani.py`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    GenerateBeamEncoderDecoderOutput,
    GenerateEncoderDecoderOutput,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

# Tokens that have room at first; then it doubles.
FIRST_CAPACITY = 16
# Tokens of which the best one stands for all when the best ones are looked for.
GROUP_SIZE = 16
# Scores that are worth it.
WORTH_GROUPING = 2**15
# The part of the sentences that must be done before they are taken out, which moves the others.
WORTH_TAKING_OUT = 1 / 8
# From so many hypotheses on, the matrix of the vocabulary is worth bringing into the order of oneDNN's products.
ROWS_WORTH_PACKING = 32
# What these do to a row has to do with that row alone: rows that are done may be missing.
ROW_BY_ROW = {
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
}


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
        self.stored = nn.functional.pad(self.stored[:, :, :written], (0, 0, 0, room - written))

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
        """Doubles the places where there are not enough."""
        if self.length == len(self.encoding):
            wanted, table = max(FIRST_CAPACITY, 2 * self.length), self.decoder.positions.table
            if table is not None:
                wanted = max(self.length + 1, min(wanted, table.num_embeddings))
            self.encoding = self.decoder.positions.encode(torch.arange(wanted, device=self.bias.device))
        if self.written + beams > self.room:
            if beams > 1:
                self._forget()
            self.room = self.written + FIRST_CAPACITY * beams
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


def best_tokens(
    scores: torch.Tensor, offsets: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    The best tokens of all hypotheses of a sentence together. `torch.topk` of all of them would take as long on a CPU
    as making them does: the tokens are compared in groups, and then those in the `k` best groups with each other.

    Args:
        scores (`torch.Tensor` of shape `(sentences, hypotheses, vocab_size)`): of tokens.
        offsets (`torch.Tensor` of shape `(sentences, hypotheses)`): what is added to all scores of a hypothesis.
        k (`int`): how many; at most hypotheses x vocabulary.

    Returns:
        Their scores, their hypotheses and their ids, each of shape `(sentences, k)`, the best first.
    """
    sentences, hypotheses, vocab_size = scores.shape
    # A processor of the caller's may return a part of something larger.
    scores = scores.contiguous()
    groups = vocab_size // GROUP_SIZE
    if scores.numel() < WORTH_GROUPING and k == hypotheses == 1:
        # Faster than topk where there is but one.
        best, places = scores[:, 0].max(dim=1, keepdim=True)
        return best + offsets, torch.zeros_like(places), places
    if scores.device.type != "cpu" or scores.numel() < WORTH_GROUPING or groups * hypotheses < 2 * k:
        best, places = (scores + offsets[:, :, None]).flatten(1).topk(k)
        return best, places // vocab_size, places % vocab_size
    # Group g has the tokens g, g + groups, g + 2 groups, ...: to compare them is to compare rows of this view.
    row = hypotheses * vocab_size
    grouped = scores.as_strided((sentences, hypotheses, GROUP_SIZE, groups), (row, vocab_size, groups, 1))
    of_groups = grouped.amax(dim=2) + offsets[:, :, None]  # [sentences, hypotheses, groups]
    best_groups = of_groups.flatten(1).topk(k, sorted=False).indices  # [sentences, k]
    first = best_groups // groups * vocab_size + best_groups % groups
    places = (first[:, :, None] + torch.arange(0, groups * GROUP_SIZE, groups)).flatten(1)
    if groups * GROUP_SIZE < vocab_size:
        # Those that are in no group.
        rest = torch.arange(groups * GROUP_SIZE, vocab_size) + torch.arange(0, row, vocab_size)[:, None]
        places = torch.cat((places, rest.flatten().expand(sentences, -1)), dim=1)
    candidates = scores.view(sentences, row).gather(1, places) + offsets.gather(1, places // vocab_size)
    best, chosen = candidates.topk(k)
    places = places.gather(1, chosen)
    return best, places // vocab_size, places % vocab_size


# ---- The searches ------------------------------------------------------------------------------------------------


@dataclass
class Alive:
    """What a beam search knows of the sentences that are not done. The first dimension of everything is theirs."""

    numbers: torch.Tensor  # which of the batch they are, [sentences]
    longest: torch.Tensor  # tokens that they may get at most, [sentences, 1]
    is_open: torch.Tensor  # whether they may still get better, [sentences, 1]
    running_scores: torch.Tensor  # log-probabilities, [sentences, beams]
    running_sequences: torch.Tensor  # kept up for processors alone, [sentences, beams, length]
    scores: torch.Tensor  # of the best finished hypotheses, with the length penalty, [sentences, beams]
    is_finished: torch.Tensor  # whether there is such a one, [sentences, beams]
    where: torch.Tensor  # see [`read_back`], [sentences, beams]

    def of(self, chosen: torch.Tensor) -> "Alive":
        """Those of some sentences, by a mask of shape `(sentences,)`."""
        return Alive(*(getattr(self, field.name)[chosen] for field in fields(self)))


@dataclass
class Step:
    """What a step of a beam search chose for the sentences that were not done."""

    rows: torch.Tensor  # of each sentence of the batch, its place in the others, [batch]
    tokens: torch.Tensor  # of the candidates, [sentences, candidates]
    parents: torch.Tensor  # the hypotheses that they go on from, [sentences, candidates]
    chosen: torch.Tensor  # the candidates that became the step's hypotheses, [sentences, beams]


def read_back(
    history: list[Step], where: torch.Tensor, returned: int, num_beams: int, fill: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Hypotheses from their last tokens to their first.

    Args:
        history (`list[Step]`): all steps.
        where (`torch.LongTensor` of shape `(batch * returned,)`): steps before the one in which a hypothesis ended,
            times candidates, plus the candidate that it was; -1 where there is none.
        returned (`int`): hypotheses of a sentence.
        num_beams (`int`): hypotheses of a sentence in a step.
        fill (`int`): the token behind a hypothesis.

    Returns:
        Their tokens, and the rows of `batch * num_beams` that these were chosen in, -1 behind; both of shape
        `(batch * returned, length of the longest)`.
    """
    candidates = history[0].tokens.shape[1]
    last, candidate = where // candidates, where % candidates
    sentences = torch.arange(len(where), device=where.device) // returned
    parents = torch.zeros_like(last)
    tokens: list[torch.Tensor] = []
    indices: list[torch.Tensor] = []
    for number in range(int(last.max()), -1, -1):
        step = history[number]
        rows = step.rows[sentences]
        candidate = torch.where(last > number, step.chosen[rows, parents], candidate)
        parents = step.parents[rows, candidate]
        tokens.append(step.tokens[rows, candidate].where(last >= number, fill))
        indices.append((parents + sentences * num_beams).where(last >= number, -1).int())
    if not tokens:
        return where.new_empty(len(where), 0), where.new_empty(len(where), 0).int()
    return torch.stack(tokens[::-1], dim=1), torch.stack(indices[::-1], dim=1)


def beam_search(
    models: Sequence[Any],
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    generation_config: GenerationConfig,
    encoder_states: Sequence[torch.Tensor],
    source_mask: torch.Tensor | None,
) -> torch.Tensor | GenerateBeamEncoderDecoderOutput:
    """
    `GenerationMixin._beam_search`, by the rules that are in [`BeamSearchRules`] and `_check_early_stop_heuristic`.

    Args:
        models (`Sequence` of [`VaswaniForConditionalGeneration`]): one that translates, or several together.
        input_ids (`torch.LongTensor` of shape `(batch * beams, prompt)`): the decoder's prompt.
        logits_processor ([`LogitsProcessorList`]): takes log-probabilities.
        generation_config ([`GenerationConfig`]): of this call, with [`BeamSearchRules`] as `length_penalty`.
        encoder_states (`Sequence` of `torch.Tensor` of shape `(batch, source, d_model)`): from each encoder.
        source_mask (`torch.Tensor` of shape `(batch, source)`, *optional*): 1 for tokens, 0 for padding.

    Returns:
        `torch.LongTensor` of shape `(batch * num_return_sequences, length)`, or with `return_dict_in_generate`
        [`GenerateBeamEncoderDecoderOutput`] with these `sequences`, `sequences_scores` and `beam_indices`.
    """
    num_beams, early_stopping = generation_config.num_beams, generation_config.early_stopping
    rules = generation_config.length_penalty
    device, batch, prompt_length = input_ids.device, len(encoder_states[0]), input_ids.shape[1]
    num_candidates = max(2, 1 + len(rules.eos_token_ids)) * num_beams
    row_by_row = all(type(processor) in ROW_BY_ROW for processor in logits_processor)
    predictor = Predictor(models, encoder_states, source_mask, num_beams)
    prompt = input_ids.view(batch, num_beams, prompt_length)
    for column in range(prompt_length):
        predictor.read(prompt[:, :1, column])
    # Of a prompt there is one hypothesis: too little where it does not have enough tokens, or a processor counts rows.
    if not row_by_row or models[0].config.vocab_size < num_candidates:
        predictor.repeat(num_beams)
    numbers, nothing = torch.arange(batch, device=device), torch.full((batch, num_beams), -1e9, device=device)
    alive = Alive(
        numbers=numbers,
        longest=rules.longest,
        is_open=torch.ones(batch, 1, dtype=torch.bool, device=device),
        # All but one hypothesis come later.
        running_scores=nothing.index_fill(1, numbers[:1], 0.0),
        running_sequences=prompt,
        scores=nothing,
        is_finished=torch.zeros(batch, num_beams, dtype=torch.bool, device=device),
        where=numbers.new_full((batch, num_beams), -1),
    )
    rows, history, done = numbers, list[Step](), list[Alive]()
    while True:
        candidate_scores, parents, tokens = candidates_of(
            alive, predictor.log_probs(), logits_processor, num_candidates
        )
        length = len(history) + 1
        ends = torch.isin(tokens, rules.eos_token_ids) | (length >= alive.longest)
        alive.running_scores, chosen = candidate_scores.where(~ends, -1e9).topk(num_beams)
        alive.scores, alive.is_finished, kept = rules.finish(
            alive.is_open, alive.scores, alive.is_finished, candidate_scores, tokens, ends, length, early_stopping
        )
        these = torch.arange(len(history) * num_candidates, length * num_candidates, device=device)
        alive.where = torch.cat((alive.where, these.expand(len(tokens), -1)), dim=1).gather(1, kept)
        history.append(Step(rows, tokens, parents, chosen))
        alive.is_open = models[0]._check_early_stop_heuristic(
            is_early_stop_heuristic_unsatisfied=alive.is_open,
            running_beam_scores=alive.running_scores,
            beam_scores=alive.scores,
            is_sent_finished=alive.is_finished,
            cur_len=prompt_length + length,
            max_length=generation_config.max_length,
            decoder_prompt_len=prompt_length,
            early_stopping=early_stopping,
            length_penalty=rules,
        )
        goes_on = alive.is_open[:, 0] & ~ends.all(dim=1)
        if early_stopping is True:
            goes_on &= ~alive.is_finished.all(dim=1)
        remaining = int(goes_on.sum())
        if remaining == 0:
            break
        parents, tokens = parents.gather(1, chosen), tokens.gather(1, chosen)
        predictor.reorder(parents)
        if logits_processor:
            sequences = models[0]._gather_beams(alive.running_sequences, parents)
            alive.running_sequences = torch.cat((sequences, tokens[:, :, None]), dim=2)
        if row_by_row and remaining <= (1 - WORTH_TAKING_OUT) * len(goes_on):
            done.append(alive.of(~goes_on))
            alive, tokens = alive.of(goes_on), tokens[goes_on]
            rows = rows.new_zeros(batch).index_copy(0, alive.numbers, torch.arange(remaining, device=device))
            rules = replace(rules, longest=alive.longest, shortest_limit=int(alive.longest.min()))
            predictor.keep(goes_on.nonzero()[:, 0])
        predictor.read(tokens)

    done.append(alive)
    order = torch.cat([part.numbers for part in done]).argsort()
    returned = generation_config.num_return_sequences
    where, scores, is_finished = (
        torch.cat([getattr(part, name) for part in done])[order, :returned].flatten()
        for name in ("where", "scores", "is_finished")
    )
    eos, pad = generation_config._eos_token_tensor, generation_config._pad_token_tensor
    fill = -1 if eos is None else int(pad or eos[0])
    sequences, indices = read_back(history, where.where(is_finished, -1), returned, num_beams, fill)
    sequences = torch.cat((prompt[:, :returned].flatten(0, 1), sequences), dim=1)
    if not generation_config.return_dict_in_generate:
        return sequences
    return GenerateBeamEncoderDecoderOutput(sequences=sequences, sequences_scores=scores, beam_indices=indices)


def candidates_of(
    alive: Alive, log_probs: torch.Tensor, logits_processor: LogitsProcessorList, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    The best hypotheses with one more token.

    Args:
        alive ([`Alive`]): the sentences.
        log_probs (`torch.Tensor` of shape `(sentences * beams, vocab_size)`): of the next token; or of the first beam
            of each sentence alone.
        logits_processor ([`LogitsProcessorList`]): changes them.
        k (`int`): how many.

    Returns:
        Their log-probabilities, the beams that they go on from, and their last tokens, each of shape `(sentences, k)`.
    """
    sentences = len(alive.numbers)
    beams = len(log_probs) // sentences
    if logits_processor:
        log_probs = logits_processor(alive.running_sequences[:, :beams].flatten(0, 1), log_probs)
    return best_tokens(log_probs.reshape(sentences, beams, -1), alive.running_scores[:, :beams], k)


def greedy_search(
    models: Sequence[Any],
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    generation_config: GenerationConfig,
    encoder_states: Sequence[torch.Tensor],
    source_mask: torch.Tensor | None,
    streamer: Any = None,
) -> torch.Tensor | GenerateEncoderDecoderOutput:
    """
    `GenerationMixin._sample` where nothing is drawn: the best token at each step.

    Args:
        input_ids (`torch.LongTensor` of shape `(batch, prompt)`): the decoder's prompt.
        streamer ([`BaseStreamer`], *optional*): gets each step's tokens.
        models, logits_processor, generation_config, encoder_states, source_mask: as in [`beam_search`]; processors
            take logits here.

    Returns:
        `torch.LongTensor` of shape `(batch, length)`, or with `return_dict_in_generate`
        [`GenerateEncoderDecoderOutput`] with these `sequences`.
    """
    device, (batch, length) = input_ids.device, input_ids.shape
    eos, pad = generation_config._eos_token_tensor, generation_config._pad_token_tensor
    fill = 0 if pad is None else int(pad)
    eos = input_ids.new_empty(0) if eos is None else eos.to(device)
    predictor = Predictor(models, encoder_states, source_mask, num_beams=1)
    for column in range(length):
        predictor.read(input_ids[:, column, None])
    sequences, numbers = input_ids, torch.arange(batch, device=device)
    nothing = torch.zeros(batch, 1, device=device)
    max_lengths = generation_config._max_lengths.to(device)  # of the sentences in the decoder
    goes_on = torch.ones(batch, dtype=torch.bool, device=device)
    row_by_row = all(type(processor) in ROW_BY_ROW for processor in logits_processor)
    while True:
        if length == sequences.shape[1]:
            sequences = nn.functional.pad(sequences, (0, max(FIRST_CAPACITY, length)), value=fill)
        logits = predictor.logits()
        if logits_processor:
            logits = logits_processor(sequences[numbers, :length], logits)
        _, _, tokens = best_tokens(logits[:, None], nothing[: len(logits)], k=1)
        tokens = tokens[:, 0].where(goes_on, fill)
        sequences[numbers, length] = tokens
        length += 1
        if streamer is not None:
            streamer.put(sequences[:, length - 1].cpu())
        goes_on &= ~torch.isin(tokens, eos) & (length < max_lengths)
        remaining = int(goes_on.sum())
        if remaining == 0:
            break
        if row_by_row and remaining <= (1 - WORTH_TAKING_OUT) * len(goes_on):
            predictor.keep(goes_on.nonzero()[:, 0])
            numbers, max_lengths, tokens = numbers[goes_on], max_lengths[goes_on], tokens[goes_on]
            goes_on = goes_on[goes_on]
        predictor.read(tokens[:, None])
    if streamer is not None:
        streamer.end()
    sequences = sequences[:, :length]
    return (
        GenerateEncoderDecoderOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences
    )
