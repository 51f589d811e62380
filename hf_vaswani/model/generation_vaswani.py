"""The search of Section 6.1 inside transformers' `generate()`: length penalty, longest output, rules of the beam.

"We used beam search with a beam size of 4 and length penalty alpha = 0.6. We set the maximum output length during
inference to input length + 50, but terminate early when possible." Where the paper is silent, its authors' code
(tensor2tensor, `beam_search.py`) decides. Everything is a setting of the generation config: saved with it, and taken
by `generate()` as a keyword. A bare model has no `num_beams` and so searches greedily, as all of transformers' do; the
paper's 4 beams are a recipe's. Three settings are this model's own:

- `length_penalty_type` (`str`, defaults to `"gnmt"`): what the log-probability of a hypothesis is divided by, see
  [`length_penalty`]; `"power"` is transformers' own. L counts the tokens that `generate()` adds, `</s>` among them,
  and not the decoder's prompt. The quotient is what `sequences_scores` returns.
- `max_length_offset` (`int`, *optional*, defaults to 50): **each sentence** gets at most this number of tokens more
  than its source has; everything but padding (the attention mask) counts there, so `</s>` as well. A sentence that
  reaches its limit is cut, as in tensor2tensor: no `</s>` is forced on it. A `max_length` or `max_new_tokens`, of the
  call or of the generation config, replaces this limit; `None` switches it off.
- `finish_candidates` (`str`, defaults to `"all"`): which of the 2 x `num_beams` best candidates of a step may finish.
  `"all"`, as in tensor2tensor, where a hypothesis that is cut has not finished: it is returned only where fewer than
  `num_return_sequences` have, behind these. Or `"top"`, the first `num_beams`, as in transformers, where a cut
  hypothesis has finished and competes. (With n tokens that end a sentence, candidates are (1 + n) x `num_beams`.)

Two settings of transformers have the paper's values as long as nobody sets them and there is more than one beam. (They
are not written into the generation config: beside a single beam transformers takes them for mistakes.)

- `length_penalty` (`float`): alpha; 0.6 for `"gnmt"`, and for `"power"` 1.0 as in transformers.
- `early_stopping` (`bool` or `str`): for `"gnmt"` `"never"`, which is tensor2tensor's rule: a sentence is done when
  none of its alive hypotheses could still be among the `num_return_sequences` best, not even one that kept its
  probability up to the longest length. For `"power"` `False` as in transformers, which asks that of the `num_beams`
  best and the present length, so it may stop too soon; under this penalty `"never"` takes several times as long.
  `True` stops at `num_beams` finished hypotheses.

`generate(..., ensemble=[other, ...])` translates by the mean of the probabilities of this model and others with the
same vocabulary, on the same device; the settings are this one's.

Greedy and beam search run in `search_vaswani.py`, which finds what transformers' searches find and also returns
`sequences_scores` without `output_scores`, but no `past_key_values`. Whatever it does not cover goes to transformers'
own searches: sampling, outputs of every step, other caches, criteria of the caller's, hooks, autocast, training mode.
"""

import inspect
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from huggingface_hub import hf_hub_download, is_offline_mode
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import EosTokenCriteria, GenerationMixin
from transformers.utils import logging

from .search_vaswani import beam_search, greedy_search

logger = logging.get_logger(__name__)

# The releases of transformers whose private methods this file was written for, and what it has in the place of theirs.
WRITTEN_FOR = "5.20 to 5.23"
HOOKS = (
    "_prepare_generation_config",
    "_validate_generation_mode",
    "_prepare_generated_length",
    "_get_stopping_criteria",
    "_beam_search",
    "_sample",
    "_update_finished_beams",
    "_check_early_stop_heuristic",
)
DEFAULTS = {"length_penalty_type": "gnmt", "max_length_offset": 50, "finish_candidates": "all"}
ALPHAS = {"gnmt": 0.6, "power": 1.0}
EARLY_STOPPING: dict[str, bool | str] = {"gnmt": "never", "power": False}
CHOICES = {"length_penalty_type": tuple(ALPHAS), "finish_candidates": ("all", "top")}
# Settings that are whole numbers from 1 on, and the largest exponent of a length for which float32 has a number.
COUNTS = ("num_beams", "num_return_sequences", "max_new_tokens", "max_length")
LARGEST_ALPHA = 10
# transformers marks what is no hypothesis by log-probabilities of about -1e9; no real one is that unlikely.
NO_HYPOTHESIS = -1e8
NOT_FOR_AN_ENSEMBLE = (
    "An ensemble translates by greedy or beam search, in evaluation mode, from sentences that are not empty: it does "
    "not sample, and has no other caches, criteria, hooks or outputs of every step."
)


def length_penalty(length: Any, alpha: float, length_penalty_type: str = "gnmt") -> Any:
    """
    What the log-probability of a hypothesis is divided by.

    Args:
        length (`int` or `torch.Tensor`): L, the tokens of the hypothesis.
        alpha (`float`): strength; 0 compares plain probabilities.
        length_penalty_type (`str`): `"gnmt"`: ((5 + L) / 6)^alpha (Wu et al. 2016, equation 14; Section 6.1);
            `"power"`: L^alpha.

    Returns:
        `float` or `torch.Tensor` of the shape of `length`.
    """
    return ((5 + length) / 6) ** alpha if length_penalty_type == "gnmt" else length**alpha


class SourceLengthCriteria(StoppingCriteria):
    """
    Ends each sentence at a length of its own.

    Args:
        max_lengths (`torch.LongTensor` of shape `(batch,)`): longest targets, the decoder's prompt included. The rows
            of a sentence, one for each beam or sample, follow each other.
    """

    # Without a criterion that has this attribute, transformers' loop would not pad the rows that have ended.
    eos_token_id = None

    def __init__(self, max_lengths: torch.Tensor) -> None:
        self.max_lengths = max_lengths

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Which rows of `input_ids`, of shape `(rows, length)`, are done: `torch.BoolTensor` of shape `(rows,)`."""
        rows_of_a_sentence = input_ids.shape[0] // self.max_lengths.shape[0]
        return self.max_lengths.to(input_ids.device).repeat_interleave(rows_of_a_sentence) <= input_ids.shape[1]


@dataclass(frozen=True)
class BeamSearchRules:
    """
    The settings of one call. All that transformers' beam search does with `length_penalty` is to hand it on to the two
    methods that use it, so they travel in its place, and calls in several threads do not meet.
    """

    alpha: float
    length_penalty_type: str
    finish_candidates: str
    num_return_sequences: int
    longest: torch.Tensor  # tokens that a sentence may get at most, [batch, 1]
    shortest_limit: int  # the least of these
    eos_token_ids: torch.Tensor  # [ids]

    def penalty(self, length: Any) -> Any:
        """[`length_penalty`] with these settings."""
        return length_penalty(length, self.alpha, self.length_penalty_type)

    def finish(
        self,
        is_open: torch.Tensor,
        scores: torch.Tensor,
        is_finished: torch.Tensor,
        log_probs: torch.Tensor,
        tokens: torch.Tensor,
        ends: torch.Tensor,
        length: int,
        early_stopping: bool | str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Scores the candidates of a step and keeps the best finished hypotheses (tensor2tensor's `grow_finished`).

        Args:
            is_open (`torch.BoolTensor` of shape `(sentences, 1)`): whether the sentence may still get better.
            scores (`torch.Tensor` of shape `(sentences, beams)`): of the hypotheses that finished before.
            is_finished (`torch.BoolTensor` of shape `(sentences, beams)`): whether there is such a one.
            log_probs (`torch.Tensor` of shape `(sentences, candidates)`): of the candidates, the best first.
            tokens (`torch.LongTensor` of shape `(sentences, candidates)`): their last tokens.
            ends (`torch.BoolTensor` of shape `(sentences, candidates)`): whether they end.
            length (`int`): tokens that they have.
            early_stopping (`bool` or `str`): as in the generation config.

        Returns:
            `scores` and `is_finished` anew, and which these are: places in what had finished and, behind it, the
            candidates, of shape `(sentences, beams)`.
        """
        beams, candidates = scores.shape[1], log_probs.shape[1]
        ends = ends & is_open & (log_probs > NO_HYPOTHESIS)
        if early_stopping is True:
            ends &= ~is_finished.all(dim=1, keepdim=True)
        if self.finish_candidates == "top":
            ends[:, beams:] = False
        penalized = log_probs / self.penalty(length)

        def merge(kept: torch.Tensor, is_kept: torch.Tensor, hits: torch.Tensor) -> tuple[torch.Tensor, ...]:
            best, chosen = torch.cat((kept, penalized.where(hits, 10 * NO_HYPOTHESIS)), dim=1).topk(beams)
            return best, torch.cat((is_kept, hits), dim=1).gather(1, chosen), chosen

        if self.finish_candidates == "top" or length < self.shortest_limit:
            best, has_finished, chosen = merge(scores, is_finished, ends)
            return best, has_finished, chosen
        is_cut = ends & ~torch.isin(tokens, self.eos_token_ids) & (length >= self.longest)
        best, has_finished, chosen = merge(scores, is_finished, ends & ~is_cut)
        # Behind what has finished, which keeps its place by a score that no other has: float32 tells these apart.
        places = torch.where(has_finished, -NO_HYPOTHESIS - 64.0 * torch.arange(beams, device=best.device), best)
        behind, has_ended, second = merge(places, has_finished, is_cut)
        every = torch.arange(beams + candidates, device=chosen.device).expand(len(chosen), -1)
        chosen = torch.cat((chosen, every[:, beams:]), dim=1).gather(1, second)
        # A sentence that is done stays as it is: the next step would sort it by score again.
        return (
            torch.where(is_open, torch.where(has_finished, best, behind), scores),
            torch.where(is_open, has_ended, is_finished),
            torch.where(is_open, chosen, every[:, :beams]),
        )


class VaswaniGenerationMixin(GenerationMixin):
    """`generate()` as this module describes it. It stands before [`PreTrainedModel`] among the bases of a model."""

    # One sentence, if weights were missing in the file that the model was loaded from; a pipeline refuses the model.
    loading_error: str | None = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        _fill_in(self.generation_config)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """
        As in [`PreTrainedModel`]. Notes in `loading_error` if weights are missing in the file, or do not belong there.

        Raises:
            RuntimeError: a weight has another shape in the file than in the model, and `ignore_mismatched_sizes` was
                not given.
        """
        ours = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, report = super().from_pretrained(*args, **kwargs | ours)
        if report["mismatched_keys"] and not kwargs.get("ignore_mismatched_sizes"):
            name, there, here = min(report["mismatched_keys"])
            raise RuntimeError(
                f"The weights of {model.name_or_path} do not fit its config.json: {len(report['mismatched_keys'])} "
                f"of another shape (the first is {name}, {tuple(there)} in the file and {tuple(here)} in the model)."
            )
        model.loading_error = find_loading_error(model, report)
        return (model, report) if kwargs.get("output_loading_info") else model

    def train(self, mode: bool = True) -> Any:
        """As in [`nn.Module`]. Whoever trains a model with other weights than its file's wants it so."""
        if mode:
            self.loading_error = None
        return super().train(mode)

    def adjust_generation_fn(
        self, generation_config: Any, from_auto_class: Any, from_pipeline: Any, name: Any, *args: Any, **kwargs: Any
    ) -> None:
        """
        Called by `from_pretrained`: loads the generation config, which may be older than these settings.

        Raises:
            ValueError: generation_config.json is damaged, or has a number that no search can use.
        """
        try:
            super().adjust_generation_fn(generation_config, from_auto_class, from_pipeline, name, *args, **kwargs)
            if generation_config is None and name is not None and self.generation_config._from_model_config:
                check_settings_file(name, **kwargs)
            check_settings(self.generation_config)
        # transformers uses values before it checks them.
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"generation_config.json of {name} cannot be used: {error}") from error
        _fill_in(self.generation_config)

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Settles every setting of the call, and refuses those that mean nothing."""
        ensemble = kwargs.pop("ensemble", None) or ()
        check_ensemble(self, ensemble, **kwargs)
        prepared, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        prepared._ensemble = tuple(ensemble)
        given = {} if generation_config is None else vars(generation_config)
        layers = (kwargs, given, vars(self.generation_config))
        for name, default in DEFAULTS.items():
            # transformers takes None for unset, and here it is a value.
            setattr(prepared, name, next((layer[name] for layer in layers if name in layer), default))
            model_kwargs.pop(name, None)
        for name, choices in CHOICES.items():
            if getattr(prepared, name) not in choices:
                expected = " or ".join(f'"{choice}"' for choice in choices)
                raise ValueError(f"{name} must be {expected}, but it is {getattr(prepared, name)!r}.")
        check_settings(prepared)
        offset = prepared.max_length_offset
        if offset is not None and (not isinstance(offset, int) or isinstance(offset, bool) or offset < 0):
            raise ValueError(f"max_length_offset must be None or a whole number of at least 0, but it is {offset!r}.")
        for name, defaults in (("length_penalty", ALPHAS), ("early_stopping", EARLY_STOPPING)):
            # In assisted decoding this config is checked once more, and beside one beam they would be reported.
            if prepared.num_beams != 1 and all(layer.get(name) is None for layer in layers):
                setattr(prepared, name, defaults[prepared.length_penalty_type])
        # For _prepare_generated_length, which does not get the mask.
        mask = model_kwargs.get("attention_mask")
        prepared._source_lengths = (mask != 0).sum(dim=1) if mask is not None and mask.dim() == 2 else None
        return prepared, model_kwargs

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: GenerationConfig, generation_mode_kwargs: dict[str, Any]
    ) -> None:
        """Refuses an ensemble where nobody would ask it."""
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
        if generation_config._ensemble and generation_mode not in ("greedy_search", "beam_search"):
            raise ValueError(NOT_FOR_AN_ENSEMBLE)

    def _prepare_generated_length(
        self,
        generation_config: GenerationConfig,
        has_default_max_length: bool,
        input_ids_length: int,
        inputs_tensor: torch.Tensor,
        **kwargs: Any,
    ) -> GenerationConfig:
        """Settles each sentence's limit, in `_max_lengths`, and the longest of them as the limit of the batch."""
        offset, max_lengths = generation_config.max_length_offset, None
        if has_default_max_length and generation_config.max_new_tokens is None and offset is not None:
            lengths = generation_config._source_lengths
            if lengths is None:
                # Ids, embeddings, or transformers' stand-in for ids where the encoder's output is given.
                lengths = torch.full(inputs_tensor.shape[:1], inputs_tensor.shape[1], device=inputs_tensor.device)
            max_lengths = input_ids_length + lengths + offset
            for config in (model.config for model in (self, *generation_config._ensemble)):
                if config.position_encoding == "learned":
                    max_lengths = max_lengths.clamp(max=config.max_position_embeddings)
            generation_config.max_new_tokens = int(max_lengths.max()) - input_ids_length
        generation_config = super()._prepare_generated_length(
            generation_config=generation_config,
            has_default_max_length=has_default_max_length,
            input_ids_length=input_ids_length,
            inputs_tensor=inputs_tensor,
            **kwargs,
        )
        same = torch.full(inputs_tensor.shape[:1], generation_config.max_length, device=inputs_tensor.device)
        # For the other models of an ensemble.
        generation_config._inputs = inputs_tensor
        generation_config._max_lengths = (same if max_lengths is None else max_lengths).to(inputs_tensor.device)
        return generation_config

    def _get_stopping_criteria(self, generation_config: GenerationConfig, **kwargs: Any) -> Any:
        """transformers' criteria, and one for the sentences whose limit is below the batch's."""
        criteria = super()._get_stopping_criteria(generation_config=generation_config, **kwargs)
        if self.config.position_encoding == "sinusoidal":
            for criterion in criteria:
                if isinstance(criterion, MaxLengthCriteria):
                    # It would warn of positions past a table that is not there.
                    criterion.max_position_embeddings = None
        if generation_config._max_lengths.min() < generation_config.max_length:
            criteria.append(SourceLengthCriteria(generation_config._max_lengths))
        return criteria

    def _beam_search(self, input_ids: torch.Tensor, generation_config: GenerationConfig, **kwargs: Any) -> Any:
        """transformers' beam search, with [`BeamSearchRules`]."""
        longest = generation_config._max_lengths[:, None].to(input_ids.device) - input_ids.shape[1]
        eos_token_ids = generation_config._eos_token_tensor
        # transformers made this generation config for this call.
        generation_config.length_penalty = BeamSearchRules(
            alpha=generation_config.length_penalty,
            length_penalty_type=generation_config.length_penalty_type,
            finish_candidates=generation_config.finish_candidates,
            num_return_sequences=generation_config.num_return_sequences,
            longest=longest,
            shortest_limit=int(longest.min()),
            eos_token_ids=input_ids.new_empty(0) if eos_token_ids is None else eos_token_ids.to(input_ids.device),
        )
        fast = for_fast_search(self, generation_config, **kwargs)
        if fast is not None:
            return beam_search(input_ids=input_ids, generation_config=generation_config, **fast)
        # It tells the scores of the hypotheses only beside those of every token at every step.
        only_scores = generation_config.return_dict_in_generate and not generation_config.output_scores
        generation_config.output_scores |= only_scores
        # It makes tensors without saying where.
        with input_ids.device:
            found = super()._beam_search(input_ids, generation_config=generation_config, **kwargs)
        if only_scores:
            found.scores = None
        return found

    def _sample(self, input_ids: torch.Tensor, generation_config: GenerationConfig, **kwargs: Any) -> Any:
        """transformers' sampling and greedy search; the latter on the incremental decoder where that can be."""
        streamer = kwargs.pop("streamer", None)
        fast = for_fast_search(self, generation_config, **kwargs)
        if fast is not None:
            return greedy_search(input_ids=input_ids, generation_config=generation_config, streamer=streamer, **fast)
        return super()._sample(input_ids, generation_config=generation_config, streamer=streamer, **kwargs)

    def _update_finished_beams(
        self,
        sequences: torch.Tensor,
        topk_running_sequences: torch.Tensor,
        beam_scores: torch.Tensor,
        topk_log_probs: torch.Tensor,
        beam_indices: torch.Tensor,
        topk_running_beam_indices: torch.Tensor,
        is_early_stop_heuristic_unsatisfied: torch.Tensor,
        is_sent_finished: torch.Tensor,
        next_token_hits_stopping_criteria: torch.Tensor,
        cur_len: int,
        decoder_prompt_len: int,
        length_penalty: BeamSearchRules,
        early_stopping: bool | str,
        **kwargs: Any,
    ) -> Any:
        """Keeps the best of what had finished before and of the candidates that end."""
        scores, is_finished, chosen = length_penalty.finish(
            is_early_stop_heuristic_unsatisfied,
            beam_scores,
            is_sent_finished,
            topk_log_probs,
            topk_running_sequences[:, :, cur_len],
            next_token_hits_stopping_criteria,
            cur_len + 1 - decoder_prompt_len,
            early_stopping,
        )
        sequences = self._gather_beams(torch.cat((sequences, topk_running_sequences), dim=1), chosen)
        indices = self._gather_beams(torch.cat((beam_indices, topk_running_beam_indices), dim=1), chosen)
        return sequences, scores, indices, is_finished

    @staticmethod
    def _check_early_stop_heuristic(
        running_beam_scores: torch.Tensor,
        beam_scores: torch.Tensor,
        is_sent_finished: torch.Tensor,
        cur_len: int,
        decoder_prompt_len: int,
        early_stopping: bool | str,
        length_penalty: BeamSearchRules,
        **kwargs: Any,
    ) -> Any:
        """Which sentences may still improve, of shape `(batch, 1)` (tensor2tensor's `_is_not_finished`)."""
        rules, length = length_penalty, cur_len - decoder_prompt_len
        # A negative alpha is for short ones.
        look_ahead = early_stopping == "never" and rules.alpha > 0
        returned = slice(rules.num_return_sequences if early_stopping == "never" else None)
        may_improve = GenerationMixin._check_early_stop_heuristic(
            running_beam_scores=running_beam_scores / rules.penalty(rules.longest if look_ahead else length),
            beam_scores=beam_scores[:, returned],
            is_sent_finished=is_sent_finished[:, returned],
            cur_len=cur_len,
            decoder_prompt_len=decoder_prompt_len,
            early_stopping=early_stopping,
            length_penalty=0.0,
            **kwargs,
        )
        return may_improve & (length < rules.longest)


def for_fast_search(
    model: Any,
    generation_config: GenerationConfig,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> dict[str, Any] | None:
    """
    The arguments of [`beam_search`] and [`greedy_search`] for a call of `generate()`; or `None` where they cannot do
    all that is asked for, and transformers' own searches can.

    Raises:
        ValueError: an ensemble, of which transformers' searches know nothing.
    """
    models = (model, *generation_config._ensemble)
    wanted = ("do_sample", "output_attentions", "output_hidden_states", "output_scores", "output_logits")
    cache = model_kwargs.pop("past_key_values", None)
    encoder_outputs, mask = model_kwargs.pop("encoder_outputs", None), model_kwargs.pop("attention_mask", None)
    # For criteria, which speak for themselves. Every pipeline gives one.
    model_kwargs.pop("tokenizer", None)
    if (
        synced_gpus
        or not model_kwargs.pop("use_cache", False)
        or any(getattr(generation_config, name) for name in wanted)
        or generation_config.cache_implementation is not None
        # A cache of the caller's own may have something in it, and is to have more in it afterwards.
        or getattr(cache, "_is_user_defined", False)
        # What else a model takes, it may look at.
        or any(value is not None for value in model_kwargs.values())
        or not all(_is_known(criterion, generation_config) for criterion in stopping_criteria)
        or not all(each.as_written.matches(each) for each in models)
        or torch.is_autocast_enabled(encoder_outputs[0].device.type)
        # A sentence without a token: what attention makes of it is a matter of the implementation.
        or (mask is not None and not (mask.dim() == 2 and mask.any(dim=1).all()))
    ):
        if len(models) > 1:
            raise ValueError(NOT_FOR_AN_ENSEMBLE)
        return None
    # transformers has repeated each sentence for each beam.
    of_each = slice(None, None, generation_config.num_beams)
    encoder_states, mask = [encoder_outputs[0][of_each]], None if mask is None else mask[of_each]
    for other in models[1:]:
        encoder_states.append(other.get_encoder()(input_ids=generation_config._inputs, attention_mask=mask)[0])
    return {
        "models": models,
        "logits_processor": logits_processor,
        "encoder_states": encoder_states,
        "source_mask": mask,
    }


def check_ensemble(model: Any, others: Sequence[Any], **generate_kwargs: Any) -> None:
    """Raises a ValueError unless models can translate together."""
    if not isinstance(others, (list, tuple)):
        raise ValueError(f"ensemble must be a list of models, but it is a {type(others).__name__}.")
    if others and any(generate_kwargs.get(name) is not None for name in ("encoder_outputs", "inputs_embeds")):
        raise ValueError("An ensemble needs input_ids: each of its models reads them by itself.")
    for other in others:
        if not isinstance(other, VaswaniGenerationMixin):
            raise ValueError(f"An ensemble is of Vaswani models, but {type(other).__name__} is none.")
        sizes = other.config.vocab_size, model.config.vocab_size
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"The models of an ensemble must have one vocabulary, but one has {sizes[0]:,} entries and this one "
                f"has {sizes[1]:,}."
            )


def _is_known(criterion: StoppingCriteria, generation_config: GenerationConfig) -> bool:
    """Whether a stopping criterion says no more than the generation config of the call does."""
    if isinstance(criterion, MaxLengthCriteria):
        return type(criterion) is MaxLengthCriteria and criterion.max_length == generation_config.max_length
    if isinstance(criterion, EosTokenCriteria):
        eos = generation_config._eos_token_tensor
        return type(criterion) is EosTokenCriteria and eos is not None and torch.equal(criterion.eos_token_id, eos)
    return type(criterion) is SourceLengthCriteria


def _fill_in(generation_config: GenerationConfig) -> None:
    """Gives a generation config the settings that it lacks; transformers changes only those that are there."""
    # transformers marks what it makes of a model's config, and loads from a file with that mark only its own settings.
    generation_config._from_model_config = None
    for name, default in DEFAULTS.items():
        if not hasattr(generation_config, name):
            setattr(generation_config, name, default)


def check_settings(generation_config: GenerationConfig) -> None:
    """
    Refuses numbers that no search can work with.

    Args:
        generation_config ([`GenerationConfig`]): the settings.

    Raises:
        ValueError: a setting is not a finite number in its range; the message has its name and value.
    """
    for name, value in vars(generation_config).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, but it is {value}.")
    for name in COUNTS:
        value = getattr(generation_config, name, None)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, but it is {value!r}.")
    alpha = getattr(generation_config, "length_penalty", None)
    if alpha is not None and (not isinstance(alpha, (int, float)) or abs(alpha) > LARGEST_ALPHA):
        expected = f"a number from -{LARGEST_ALPHA} to {LARGEST_ALPHA}"
        raise ValueError(f"length_penalty must be {expected}, but it is {alpha!r}.")


def check_settings_file(name: str, **kwargs: Any) -> None:
    """
    Refuses a generation_config.json that is there although transformers has not read it: it passes over one that is
    damaged, or could not be fetched, as if there were none.

    Args:
        name (`str`): the model's folder, or its id on the Hub.
        kwargs: What `from_pretrained` was told about the place.

    Raises:
        ValueError: the file is not JSON.
        OSError: the Hub does not say whether there is one.
    """
    place: dict[str, Any] = {key: kwargs.get(key) for key in ("cache_dir", "revision", "subfolder", "token")}
    offline = bool(kwargs.get("local_files_only")) or is_offline_mode()
    path = os.path.join(name, place["subfolder"] or "", "generation_config.json")
    if not os.path.isdir(name):
        try:
            path = hf_hub_download(name, "generation_config.json", local_files_only=offline, **place)
        except LocalEntryNotFoundError:
            if not offline:
                raise
            return
        except EntryNotFoundError:
            return
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            json.load(file)


def find_loading_error(model: Any, report: dict[str, Any]) -> str | None:
    """
    One sentence about weights that a model should have been given, and was not.

    Args:
        model ([`PreTrainedModel`]): as it was loaded.
        report (`dict[str, Any]`): what `from_pretrained` returned with `output_loading_info=True`.

    Returns:
        `str`, or `None` if every weight came from the file, is finite, and belongs to the model.
    """
    kinds = {"missing_keys": "missing", "unexpected_keys": "unexpected"}
    found = [
        f"{len(names)} {what} (the first is {min(names)})" for key, what in kinds.items() if (names := report[key])
    ]
    if not found:
        weights = ((name, weight) for name, weight in model.named_parameters() if weight.device.type != "meta")
        found = [f"{name} has values that are not finite" for name, each in weights if not each.isfinite().all()][:1]
    if not found:
        return None
    return f"The weights of {model.name_or_path} are not those of its config.json: {', '.join(found)}."


# ---- Another transformers ----------------------------------------------------------------------------------------


def changed_hooks(theirs: type) -> list[str]:
    """
    The methods of transformers that are missing, or lack a parameter that this module's own ones were written for.

    Args:
        theirs (`type`): [`GenerationMixin`].

    Returns:
        `list[str]`: their names.
    """
    changed = []
    for name in HOOKS:
        ours = getattr(vars(VaswaniGenerationMixin)[name], "__func__", vars(VaswaniGenerationMixin)[name])
        wanted = {p.name for p in inspect.signature(ours).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD}
        if not hasattr(theirs, name) or wanted - set(inspect.signature(getattr(theirs, name)).parameters):
            changed.append(name)
    return changed


def generate_as_transformers(self: Any, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
    """
    `generate()` where the methods that this module builds on are not what they were: transformers' own search, with
    the longest source and `max_length_offset` as the limit of the batch.

    Raises:
        ValueError: an ensemble, of which transformers' search knows nothing.
    """
    names = ", ".join(CHANGED_HOOKS)
    advice = f"Upgrade hf_vaswani, or install transformers {WRITTEN_FOR}."
    if kwargs.pop("ensemble", None):
        raise ValueError(f"An ensemble cannot translate with transformers {transformers.__version__}. {advice}")
    logger.warning_once(
        f"transformers {transformers.__version__} has changed {names}, on which the search of this model builds: "
        f"transformers' own search translates instead, by its own length penalty and rules. {advice}"
    )
    layers = [kwargs, vars(generation_config or self.generation_config)]
    offset = next((layer[name] for layer in layers if (name := "max_length_offset") in layer), None)
    for name in DEFAULTS:
        kwargs.pop(name, None)
    limits = (layer.get(name) for layer in layers for name in ("max_length", "max_new_tokens"))
    sources = (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    source = next((each for each in sources if each is not None), None)
    if offset is not None and source is not None and all(limit is None for limit in limits):
        kwargs["max_new_tokens"] = source.shape[1] + offset
    return GenerationMixin.generate(self, inputs, generation_config, **kwargs)


# Importing never fails over this, because the file lies in every saved model: a model must load, and be trained, with
# a transformers that nobody knew when it was saved.
CHANGED_HOOKS = changed_hooks(GenerationMixin)
if CHANGED_HOOKS:
    for name in HOOKS:
        delattr(VaswaniGenerationMixin, name)
    VaswaniGenerationMixin.generate = generate_as_transformers
