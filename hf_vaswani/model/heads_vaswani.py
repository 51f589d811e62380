"""The family of the Transformer: the stacks of the paper with another head.

The encoder alone became BERT (Devlin et al., 2018): [`VaswaniForMaskedLM`], [`VaswaniForPreTraining`] and the
classifiers. The decoder alone, without its attention to a source, became GPT (Radford et al., 2018):
[`VaswaniForCausalLM`]. The layers are those of `modeling_vaswani.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Cache, GenerationConfig, GenerationMixin
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs, can_return_tuple

from .configuration_vaswani import CACHE, VaswaniConfig, takes_both_cache_names
from .generation_vaswani import FastSearchMixin, limit_length, without_changed_hooks
from .kernels_vaswani import FORWARD
from .modeling_vaswani import (
    HEADS,
    VaswaniDropout,
    VaswaniLanguageModel,
    VaswaniModel,
    VaswaniPreTrainedModel,
    check_ids,
    check_shape,
    smoothed_cross_entropy,
)
from .rules_vaswani import TRANSFORMERS_RULES, search_call

# ---- Heads -------------------------------------------------------------------------------------------------------


class VaswaniLMTransform(nn.Module):
    """The layer between BERT's encoder and its vocabulary: LayerNorm(activation(x W + b)) (Devlin et al., 2018)."""

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.d_model, config.d_model)
        self.activation = ACT2FN[config.activation_function]
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(batch, length, d_model)` -> the same shape."""
        return self.layer_norm(self.activation(self.dense(hidden_states)))


class VaswaniPooler(nn.Module):
    """A text as one vector: tanh(x W + b) of its first token (Devlin et al., 2018)."""

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.d_model, config.d_model)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """`(batch, length, d_model)` and the padding mask -> `(batch, d_model)`."""
        return torch.tanh(self.dense(pick(hidden_states, first_tokens(hidden_states, attention_mask))))


def pick(hidden_states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """`(batch, length, d_model)` and one column of each text, `(batch,)` -> the states there, `(batch, d_model)`."""
    return hidden_states[torch.arange(len(columns), device=columns.device), columns]


def first_tokens(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Returns the column of each text's first token, `(batch,)`, on whichever side the padding is."""
    if attention_mask is None or attention_mask.dim() != 2:
        return torch.zeros(hidden_states.shape[0], dtype=torch.long, device=hidden_states.device)
    return (attention_mask != 0).int().argmax(dim=1)


def last_tokens(
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    input_ids: torch.Tensor | None,
    pad_token_id: int | None,
) -> torch.Tensor:
    """
    Returns the column of each text's last token, `(batch,)`, on whichever side the padding is. Without a mask, padding
    is known by its id.
    """
    length = hidden_states.shape[1]
    if attention_mask is not None and attention_mask.dim() == 2:
        is_token = attention_mask != 0
    elif input_ids is not None and pad_token_id is not None:
        is_token = input_ids != pad_token_id
    else:
        is_token = torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=hidden_states.device)
    return length - 1 - is_token.flip(1).int().argmax(dim=1)


# ---- Language models ---------------------------------------------------------------------------------------------


class VaswaniForMaskedLM(VaswaniLanguageModel):
    """BERT's encoder with the linear transformation on top: predicts tokens that were masked (Devlin et al., 2018)."""

    stacks = ("encoder",)
    _keys_to_ignore_on_load_unexpected = [r"(^|\.)decoder\.", *HEADS]
    _tied_weights_keys = {"lm_head.weight": "model.encoder.embed_tokens.weight"}

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__(config)
        self.model = VaswaniModel(self.config)
        self.lm_transform = VaswaniLMTransform(config) if config.lm_head_transform else nn.Identity()
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=config.lm_head_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        epsilon_ls: float = 0.0,
        num_items_in_batch: torch.Tensor | int | None = None,
        loss_only: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        """
        Computes logits, `(batch, source, vocab_size)`, and with labels, `(batch, source)`, the loss in nats per label.
        Labels are the tokens to predict, or -100 where nothing was masked; with `loss_only`, logits are computed for
        them alone. Other arguments and errors as in [`VaswaniModel.forward`] for an encoder, and in
        [`VaswaniForConditionalGeneration.forward`].
        """
        outputs = self.model(
            input_ids, attention_mask, inputs_embeds=inputs_embeds, token_type_ids=token_type_ids, **kwargs
        )
        logits, loss = self.predict(outputs.last_hidden_state, labels, epsilon_ls, num_items_in_batch, loss_only)
        return MaskedLMOutput(loss, logits, outputs.hidden_states, outputs.attentions)

    def predict(
        self,
        hidden_states: torch.Tensor,
        labels: Any,
        epsilon_ls: float,
        num_items_in_batch: torch.Tensor | int | None,
        loss_only: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Computes logits and loss from the encoder's output; arguments and results as in `forward`."""
        if labels is not None:
            check_shape("labels", labels, *hidden_states.shape[:2])
        if labels is not None and loss_only:
            is_label = labels != -100
            hidden_states, labels = hidden_states[is_label][None], labels[is_label][None]  # [1, labels, ...]
        return self.logits_and_loss(
            self.lm_transform(hidden_states), labels, epsilon_ls, num_items_in_batch, loss_only
        )


@dataclass
class VaswaniForPreTrainingOutput(ModelOutput):
    """
    Output of [`VaswaniForPreTraining`], with the names of BERT's.

    Args:
        loss (`torch.Tensor`, *optional*): sum of both losses, in nats.
        prediction_logits (`torch.Tensor` of shape `(batch, source, vocab_size)`): scores of the tokens.
        seq_relationship_logits (`torch.Tensor` of shape `(batch, 2)`): scores of "the second segment continues the
            first" and "it does not".
        hidden_states, attentions (`tuple` of `torch.Tensor`, *optional*): as in [`BaseModelOutput`].
    """

    loss: torch.Tensor | None = None
    prediction_logits: torch.Tensor | None = None
    seq_relationship_logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


class VaswaniForPreTraining(VaswaniForMaskedLM):
    """BERT as it is pre-trained: predicts masked tokens, and whether one segment continues another."""

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__(config)
        self.pooler = VaswaniPooler(config)
        self.next_sentence = nn.Linear(config.d_model, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        next_sentence_label: torch.LongTensor | None = None,
        epsilon_ls: float = 0.0,
        num_items_in_batch: torch.Tensor | int | None = None,
        num_texts_in_batch: torch.Tensor | int | None = None,
        loss_only: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> VaswaniForPreTrainingOutput:
        """
        Computes the logits of both heads, and the sum of the losses whose labels are given. Takes the arguments of
        [`VaswaniForMaskedLM.forward`], and raises a ValueError as it does, or if `next_sentence_label`, `(batch,)`, is
        not 0 where the second segment continues the first, 1 where it does not, or -100 where there is no label.
        `num_texts_in_batch` is the divisor of the summed loss of these labels; their number by default.
        """
        outputs = self.model(
            input_ids, attention_mask, inputs_embeds=inputs_embeds, token_type_ids=token_type_ids, **kwargs
        )
        logits, loss = self.predict(outputs.last_hidden_state, labels, epsilon_ls, num_items_in_batch, loss_only)
        relation = self.next_sentence(self.pooler(outputs.last_hidden_state, attention_mask))  # [batch, 2]
        if next_sentence_label is not None:
            next_loss = text_loss("next_sentence_label", relation, next_sentence_label, 0.0, num_texts_in_batch)
            loss = next_loss if loss is None else loss + next_loss
        return VaswaniForPreTrainingOutput(loss, logits, relation, outputs.hidden_states, outputs.attentions)


@without_changed_hooks
class CausalGenerationMixin(FastSearchMixin):
    """`generate()` of a decoder on its own: the settings and rules of transformers."""

    def _prepare_generated_length(self, generation_config: GenerationConfig, **kwargs: Any) -> GenerationConfig:
        """Sets what the searches read: transformers' rules, and one maximum length for all texts."""
        config = super()._prepare_generated_length(generation_config=generation_config, **kwargs)
        if self.config.position_encoding == "learned":
            mask = search_call().mask
            # Columns that are padding in every row.
            padding = int((mask == 0).sum(dim=1).min()) if mask is not None and mask.dim() == 2 else 0
            # The last token of a text is not read.
            most = self.config.max_position_embeddings + padding + 1
            if kwargs["input_ids_length"] >= most:
                raise ValueError(
                    f"The longest prompt has {kwargs['input_ids_length'] - padding} tokens, but the model has "
                    f"only {self.config.max_position_embeddings} positions (max_position_embeddings): shorten it."
                )
            limit_length(config, most)
        vars(config).update(TRANSFORMERS_RULES)
        texts = kwargs["inputs_tensor"]
        search_call().max_lengths = torch.full(texts.shape[:1], config.max_length, device=texts.device)
        return config


class VaswaniForCausalLM(CausalGenerationMixin, VaswaniLanguageModel, GenerationMixin):
    """The decoder alone with the linear transformation on top: predicts the next token (Radford et al., 2018)."""

    stacks = ("decoder",)
    _keys_to_ignore_on_load_unexpected = [r"(^|\.)encoder\.", r"\.cross_attn(_norm)?\.", *HEADS]
    _tied_weights_keys = {"lm_head.weight": "model.decoder.embed_tokens.weight"}

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__(config)
        self.model = VaswaniModel(self.config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=config.lm_head_bias)
        self.post_init()

    @takes_both_cache_names
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        epsilon_ls: float = 0.0,
        num_items_in_batch: torch.Tensor | int | None = None,
        loss_only: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """
        Computes logits, `(batch, length, vocab_size)`, and with labels, `(batch, length)`, the loss in nats per token.
        Labels are the tokens themselves, or -100 for those that are not to be predicted: as in every causal model of
        transformers, each is predicted at the position before it. Without labels, `logits_to_keep` is the number of
        last positions, or indices of positions, whose logits to return; 0 means all. Other arguments and errors as in
        [`VaswaniModel.forward`] for a decoder on its own, and in [`VaswaniForConditionalGeneration.forward`].
        """
        if labels is not None:
            use_cache = False
        options = {"cache": cache, "use_cache": use_cache, "position_ids": position_ids}
        outputs = self.model(input_ids, attention_mask, inputs_embeds=inputs_embeds, **options, **kwargs)
        hidden_states = outputs.last_hidden_state
        if labels is not None:
            check_shape("labels", labels, *hidden_states.shape[:2])
            labels = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)  # type: ignore[assignment]
        else:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            hidden_states = hidden_states[:, kept]
        logits, loss = self.logits_and_loss(hidden_states, labels, epsilon_ls, num_items_in_batch, loss_only)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE: outputs.get(CACHE)},
        )


# ---- Classifiers -------------------------------------------------------------------------------------------------


class VaswaniClassifier(VaswaniPreTrainedModel):
    """Base class of the classifiers: one stack, dropout, and a linear layer with a row for each label."""

    _keys_to_ignore_on_load_unexpected = [r"(^|\.)encoder\.", r"(^|\.)decoder\.", r"\.cross_attn(_norm)?\.", *HEADS]

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = VaswaniModel(self.config)
        self.dropout = VaswaniDropout(
            config.dropout if config.classifier_dropout is None else config.classifier_dropout
        )
        self.classifier = nn.Linear(config.d_model, config.num_labels)
        self.post_init()

    @classmethod
    def stacks_from(cls, saved: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the only stack of a model, or the encoder if it has both."""
        return cls.stacks or saved[:1]


class VaswaniForSequenceClassification(VaswaniClassifier):
    """
    A label for a text or a pair of texts. An encoder reads it from the first token through BERT's pooler (Devlin et
    al., 2018); a decoder alone reads it from the last token (Radford et al., 2018).
    """

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__(config)
        self.pooler = VaswaniPooler(config) if self.config.stacks == ("encoder",) else None
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        labels: torch.Tensor | None = None,
        epsilon_ls: float = 0.0,
        num_items_in_batch: torch.Tensor | int | None = None,
        loss_only: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """
        Computes the scores of the labels, `(batch, num_labels)`, and with labels the loss of
        [`classification_loss`]. Other arguments and errors as in its stack, and in the language models.
        """
        options = {"use_cache": kwargs.pop("use_cache", False), "token_type_ids": token_type_ids}
        outputs = self.model(input_ids, attention_mask, inputs_embeds=inputs_embeds, **options, **kwargs)
        hidden_states = outputs.last_hidden_state
        if self.pooler is not None:
            text = self.pooler(hidden_states, attention_mask)
        else:
            text = pick(hidden_states, last_tokens(hidden_states, attention_mask, input_ids, self.config.pad_token_id))
        logits = self.classifier(self.dropout(text))  # [batch, num_labels]
        loss = None
        if labels is not None:
            loss = classification_loss(logits, labels, self.config, epsilon_ls, num_items_in_batch)
        kept: Any = None if loss_only else logits
        return SequenceClassifierOutput(loss, kept, outputs.hidden_states, outputs.attentions)


class VaswaniForTokenClassification(VaswaniClassifier):
    """A label for each token, such as the first piece of each word (Devlin et al., 2018)."""

    stacks = ("encoder",)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        epsilon_ls: float = 0.0,
        num_items_in_batch: torch.Tensor | int | None = None,
        loss_only: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        """
        Computes the scores of the labels, `(batch, source, num_labels)`, and the loss in nats per label if `labels`
        are given, `(batch, source)`, with -100 for tokens to ignore. Other arguments and errors are those of
        [`VaswaniModel.forward`] for an encoder, and of the language models.
        """
        outputs = self.model(
            input_ids, attention_mask, inputs_embeds=inputs_embeds, token_type_ids=token_type_ids, **kwargs
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))  # [batch, source, num_labels]
        loss = None
        if labels is not None:
            check_shape("labels", labels, *logits.shape[:2])
            check_ids("labels", labels.masked_fill(labels == -100, 0), self.config.num_labels, "num_labels")
            loss = smoothed_cross_entropy(logits, labels, epsilon_ls, num_items_in_batch)
        kept: Any = None if loss_only else logits
        return TokenClassifierOutput(loss, kept, outputs.hidden_states, outputs.attentions)


def classification_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    config: VaswaniConfig,
    epsilon_ls: float,
    num_items_in_batch: torch.Tensor | int | None,
) -> torch.Tensor:
    """
    Computes the loss, a scalar in float32, of scores `(batch, num_labels)`; the kind of problem as in transformers'
    classifiers. Labels are the true label of each text, `(batch,)`; or, `(batch, num_labels)`, one 0 or 1 for each
    with the config's `problem_type` `"multi_label_classification"`, and numbers with `"regression"`. Raises a
    ValueError if they have another shape or are not below `num_labels`. `epsilon_ls` smooths single labels, and
    `num_items_in_batch` is the divisor of the summed loss; the number of texts by default.
    """
    problem = config.problem_type
    if problem is None and config.num_labels == 1:
        problem = "regression"
    elif problem is None:
        whole = not labels.dtype.is_floating_point
        problem = "single_label_classification" if whole else "multi_label_classification"
    if problem == "single_label_classification":
        return text_loss("labels", logits, labels, epsilon_ls, num_items_in_batch)
    if labels.numel() != logits.numel():
        raise ValueError(
            f"labels has the shape {tuple(labels.shape)}, but with the problem_type {problem} it must be "
            f"{tuple(logits.shape)}."
        )
    measures: dict[str, Any] = {
        "regression": nn.functional.mse_loss,
        "multi_label_classification": nn.functional.binary_cross_entropy_with_logits,
    }
    total = measures[problem](logits.float(), labels.to(logits.device).view_as(logits).float(), reduction="sum")
    items = len(logits) if num_items_in_batch is None else num_items_in_batch
    return total / (items * config.num_labels)


def text_loss(name: str, logits: Any, labels: Any, epsilon_ls: float, num_items_in_batch: Any) -> torch.Tensor:
    """
    Returns [`smoothed_cross_entropy`] with one label for each text, `(batch,)`, known or -100; raises a ValueError
    with the name of the argument, and its shape or the label that is unknown.
    """
    batch, num_labels = logits.shape
    if labels.shape != (batch,):
        raise ValueError(f"{name} has the shape {tuple(labels.shape)}, but must be ({batch},): one for each text.")
    check_ids(name, labels.masked_fill(labels == -100, 0), num_labels, "num_labels")
    return smoothed_cross_entropy(logits[:, None], labels[:, None], epsilon_ls, num_items_in_batch)


FORWARD[VaswaniForCausalLM] = VaswaniForCausalLM.forward
