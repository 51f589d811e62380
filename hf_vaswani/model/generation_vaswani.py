"""The settings of Section 6.1 in transformers' `generate()`: length penalty, maximum lengths, rules of beam search.

"We used beam search with a beam size of 4 and length penalty alpha = 0.6. We set the maximum output length during
inference to input length + 50, but terminate early when possible." Where the paper is silent, the code of its authors
(tensor2tensor, `beam_search.py`) decides. Everything is a setting of the generation config: it is saved there, and
`generate()` takes it as a keyword. A model without `num_beams` searches greedily, like every model of transformers; a
recipe sets the paper's 4 beams. Three settings are specific to this model:

- `length_penalty_type` (`str`, defaults to `"gnmt"`): divisor of the log-probability of a hypothesis, see
  [`length_penalty`]; `"power"` is transformers' own. L is the number of generated tokens, with `</s>` and without the
  decoder's prompt. The quotient is returned as `sequences_scores`.
- `max_length_offset` (`int`, *optional*, defaults to 50): maximum length of **each sentence**, relative to its source.
  All source tokens except padding count (by the attention mask), `</s>` included. A sentence that reaches the limit is
  cut, as in tensor2tensor: no `</s>` is appended. `max_length` or `max_new_tokens`, in the call or in the generation
  config, overrides this limit; `None` disables it.
- `finish_candidates` (`str`, defaults to `"all"`): which of the 2 x `num_beams` best candidates of a step may finish.
  `"all"` as in tensor2tensor, where a cut hypothesis is not finished: cut hypotheses are only returned, behind the
  finished ones, if fewer than `num_return_sequences` have finished. Or `"top"`, the first `num_beams`, as in
  transformers, where a cut hypothesis is finished and competes. (With n end-of-sentence tokens there are
  (1 + n) x `num_beams` candidates.)

Two settings of transformers default to the paper's values if there is more than one beam. (They are not written into
the generation config, because transformers reports them as mistakes when there is one beam.)

- `length_penalty` (`float`): alpha; 0.6 for `"gnmt"`, and 1.0 for `"power"` as in transformers.
- `early_stopping` (`bool` or `str`): `"never"` for `"gnmt"`, the rule of tensor2tensor: a sentence is done when no
  running hypothesis could still become one of the `num_return_sequences` best, even if it kept its probability up to
  the maximum length. `False` for `"power"` as in transformers, which compares with the `num_beams` best at the present
  length and may stop too soon; `"never"` takes several times as long with this penalty. `True` stops at `num_beams`
  finished hypotheses.

`generate(..., ensemble=[other, ...])` translates by the mean of the probabilities of this model and others with the
same vocabulary on the same device, with the settings of this model. `generate(..., shortlist=Shortlist.load(folder,
tokenizer, vocab_size))` searches among the likely entries of the vocabulary alone, see `shortlist.py` of the package.

Sampling, and greedy and beam search, run in `search_vaswani.py`, which returns the tokens of transformers' searches,
and `sequences_scores` without `output_scores`, but no `cache`. Everything else (beams with sampling, outputs
of every step, custom caches or stopping criteria, modules that mix positions, autocast to float16, training mode)
falls back to transformers' own searches. A decoder on its own has this search, too, with the settings and rules of
transformers.

In every search, transformers' and these, `pad_token_id` fills the rows behind `</s>` with one beam. With more beams it
does so unless it is 0, this model's default, or missing: then the first `eos_token_id` does.
"""

import inspect
import json
import math
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from huggingface_hub import is_offline_mode, try_to_load_from_cache
from transformers import GenerationConfig, MaxLengthCriteria
from transformers.generation import GenerationMixin
from transformers.utils import logging

from .configuration_vaswani import CACHE, rename_cache
from .kernels_vaswani import fast_products
from .rules_vaswani import BeamSearchRules, SourceLengthCriteria, new_search_call, search_call

logger = logging.get_logger(__name__)

# Releases of transformers that the tests pass with.
TESTED_RELEASES = "5.20 to 5.24"
# Private methods of transformers that this file overrides.
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
# Settings that are whole numbers of at least 1, and the largest exponent of a length that float32 can represent.
COUNTS = ("num_beams", "num_return_sequences", "max_new_tokens", "max_length")
LARGEST_ALPHA = 10


def fast_search(model: Any, input_ids: torch.Tensor, generation_config: GenerationConfig, **kwargs: Any) -> Any:
    """
    Returns the inputs of the searches of `search_vaswani.py`, or `None` if transformers' own search is to run. Only
    here is that file imported, so that a transformers without a name that it needs still loads and trains the model.

    Raises:
        ValueError: as [`fast_search_inputs`], or the file cannot be imported and the call has an ensemble or a
            shortlist.
    """
    try:
        from .search_vaswani import fast_search_inputs
    except (ImportError, AttributeError) as error:
        logger.warning_once(f"Falling back to transformers' own search, because {error}.")
        if search_call().ensemble or search_call().shortlist:
            raise ValueError(f"Ensembles and shortlists need the search of this model, but {error}.") from error
        return None
    return fast_search_inputs(model, input_ids, generation_config, **kwargs)


class FastSearchMixin(GenerationMixin):
    """Runs the searches of `search_vaswani.py`; in front of [`PreTrainedModel`]."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generates as [`GenerationMixin.generate`] does, with the settings of this module."""
        with new_search_call():
            return super().generate(*args, **kwargs)

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Proves at its first use that `generate()` works with the class, and gives the cache transformers' name."""
        prove_generate(type(self))
        # Trainers hand them to `generate()`, of which no step reads them.
        kwargs.pop("labels", None)
        return super()._prepare_generation_config(generation_config, **rename_cache(kwargs, CACHE))

    def _sample(self, input_ids: torch.Tensor, generation_config: GenerationConfig, **kwargs: Any) -> Any:
        """Runs [`single_search`], or transformers' own search if it cannot take the call."""
        streamer = kwargs.pop("streamer", None)
        inputs = fast_search(self, input_ids, generation_config, **kwargs)
        if inputs is not None:
            from .search_vaswani import single_search

            return single_search(input_ids, generation_config, inputs, streamer)
        return super()._sample(input_ids, generation_config=generation_config, streamer=streamer, **kwargs)


class VaswaniGenerationMixin(FastSearchMixin):
    """Overrides hooks of `generate()` with the rules of this module; a base class in front of [`PreTrainedModel`]."""

    # Weights that the files of the model lack, or have beyond it. A pipeline rejects a model that has one.
    loading_error: str | None = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        _fill_in(self.generation_config)

    def train(self, mode: bool = True) -> Any:
        """Sets the mode as [`nn.Module`] does. Training a model accepts the weights that it was loaded with."""
        if mode:
            self.loading_error = None
        return super().train(mode)

    def adjust_generation_fn(
        self, generation_config: Any, from_auto_class: Any, from_pipeline: Any, name: Any, *args: Any, **kwargs: Any
    ) -> None:
        """
        Loads the generation config for `from_pretrained`, and adds the settings that an older file lacks.

        Raises:
            ValueError: generation_config.json cannot be read.
        """
        try:
            super().adjust_generation_fn(generation_config, from_auto_class, from_pipeline, name, *args, **kwargs)
            is_made_up = getattr(self.generation_config, "_from_model_config", True)
            if generation_config is None and name is not None and is_made_up:
                check_readable(name, **kwargs)
        # transformers uses values of any type before it checks them.
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"generation_config.json of {name} cannot be used: {error}") from error
        _fill_in(self.generation_config)

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Resolves every setting of a call (keyword, config of the call, config of the model) and checks it."""
        ensemble = kwargs.pop("ensemble", None) or ()
        check_ensemble(self, ensemble, **kwargs)
        shortlist = kwargs.pop("shortlist", None)
        check_shortlist(self, shortlist, **kwargs)
        prepared, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        call = search_call()
        call.ensemble, call.shortlist = tuple(ensemble), shortlist
        given = {} if generation_config is None else vars(generation_config)
        layers = (kwargs, given, vars(self.generation_config))
        for name, default in DEFAULTS.items():
            # transformers treats None as unset, but for these settings it is a value.
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
            # Assisted decoding validates this config again, which would report these settings beside one beam.
            if prepared.num_beams != 1 and all(layer.get(name) is None for layer in layers):
                setattr(prepared, name, defaults[prepared.length_penalty_type])
        # _prepare_generated_length needs these and does not receive the mask.
        mask = model_kwargs.get("attention_mask")
        call.source_lengths = (mask != 0).sum(dim=1) if mask is not None and mask.dim() == 2 else None
        return prepared, model_kwargs

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: GenerationConfig, generation_mode_kwargs: dict[str, Any]
    ) -> None:
        """Rejects an ensemble and a shortlist with a generation mode that would ignore them."""
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
        if generation_mode in ("greedy_search", "beam_search"):
            return
        for name in ("ensemble", "shortlist"):
            if getattr(search_call(), name):
                raise ValueError(
                    f"{name} supports plain greedy and beam search only, but the settings ask for "
                    f"{generation_mode.replace('_', ' ')}."
                )

    def _prepare_generated_length(
        self,
        generation_config: GenerationConfig,
        has_default_max_length: bool,
        input_ids_length: int,
        inputs_tensor: torch.Tensor,
        **kwargs: Any,
    ) -> GenerationConfig:
        """Finds the maximum lengths of the sentences, and sets the longest of them for the batch."""
        offset, max_lengths = generation_config.max_length_offset, None
        call = search_call()
        configs = [model.config for model in (self, *call.ensemble)]
        tables = [each.max_position_embeddings for each in configs if each.position_encoding == "learned"]
        if has_default_max_length and generation_config.max_new_tokens is None and offset is not None:
            lengths = call.source_lengths
            if lengths is None:
                # Ids, embeddings, or the placeholder for ids that transformers makes from `encoder_outputs`.
                lengths = torch.full(inputs_tensor.shape[:1], inputs_tensor.shape[1], device=inputs_tensor.device)
            max_lengths = input_ids_length + lengths + offset
            for positions in tables:
                max_lengths = max_lengths.clamp(max=positions)
            generation_config.max_new_tokens = int(max_lengths.max()) - input_ids_length
        generation_config = super()._prepare_generated_length(
            generation_config=generation_config,
            has_default_max_length=has_default_max_length,
            input_ids_length=input_ids_length,
            inputs_tensor=inputs_tensor,
            **kwargs,
        )
        for positions in tables:
            limit_length(generation_config, positions + 1)
        same = torch.full(inputs_tensor.shape[:1], generation_config.max_length, device=inputs_tensor.device)
        # The other models of an ensemble encode the source from these.
        call.inputs = inputs_tensor
        call.max_lengths = (same if max_lengths is None else max_lengths).to(inputs_tensor.device)
        return generation_config

    def _maybe_prepare_encoder_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Calls the encoder, with fast products. A transformers without this method calls it by another one."""
        inputs = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
        with fast_products(self.get_encoder(), inputs):
            return super()._maybe_prepare_encoder_kwargs_for_generation(*args, **kwargs)

    def _get_stopping_criteria(self, generation_config: GenerationConfig, **kwargs: Any) -> Any:
        """Adds a criterion for sentences whose maximum length is below that of the batch."""
        criteria = super()._get_stopping_criteria(generation_config=generation_config, **kwargs)
        if self.config.position_encoding == "sinusoidal":
            for criterion in criteria:
                if isinstance(criterion, MaxLengthCriteria):
                    # Sinusoids have no table that a long output could exceed; transformers would warn.
                    criterion.max_position_embeddings = None
        max_lengths = search_call().max_lengths
        if max_lengths.min() < generation_config.max_length:
            criteria.append(SourceLengthCriteria(max_lengths))
        return criteria

    def _beam_search(self, input_ids: torch.Tensor, generation_config: GenerationConfig, **kwargs: Any) -> Any:
        """Runs [`beam_search`], or transformers' own if it cannot take the call, both by [`BeamSearchRules`]."""
        rules = BeamSearchRules.from_config(generation_config, input_ids)
        inputs = fast_search(self, input_ids, generation_config, **kwargs)
        if inputs is not None:
            from .search_vaswani import beam_search

            return beam_search(input_ids, generation_config, inputs, rules)
        # transformers returns scores of hypotheses only together with the scores of every step.
        only_scores = generation_config.return_dict_in_generate and not generation_config.output_scores
        generation_config.output_scores |= only_scores
        search_call().rules = rules
        # transformers creates tensors without naming a device.
        with input_ids.device:
            found = super()._beam_search(input_ids, generation_config=generation_config, **kwargs)
        if only_scores:
            found.scores = None
        return found

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
        **kwargs: Any,
    ) -> Any:
        """Keeps the best finished hypotheses, by [`BeamSearchRules.finish`]."""
        scores, is_finished, chosen = search_call().rules.finish(
            is_early_stop_heuristic_unsatisfied,
            beam_scores,
            is_sent_finished,
            topk_log_probs,
            topk_running_sequences[:, :, cur_len],
            next_token_hits_stopping_criteria,
            cur_len + 1 - decoder_prompt_len,
        )

        def gather(finished: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
            return torch.take_along_dim(torch.cat((finished, candidates), dim=1), chosen[:, :, None], dim=1)

        sequences = gather(sequences, topk_running_sequences)
        return sequences, scores, gather(beam_indices, topk_running_beam_indices), is_finished

    @staticmethod
    def _check_early_stop_heuristic(
        is_early_stop_heuristic_unsatisfied: torch.Tensor,
        running_beam_scores: torch.Tensor,
        beam_scores: torch.Tensor,
        is_sent_finished: torch.Tensor,
        cur_len: int,
        decoder_prompt_len: int,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Returns which sentences can still improve, by [`BeamSearchRules.may_improve`]."""
        return search_call().rules.may_improve(
            is_early_stop_heuristic_unsatisfied,
            running_beam_scores,
            beam_scores,
            is_sent_finished,
            cur_len - decoder_prompt_len,
        )


def check_ensemble(model: Any, others: Sequence[Any], **generate_kwargs: Any) -> None:
    """
    Checks that models can translate together.

    Raises:
        ValueError: `others` is not a list of Vaswani models with the vocabulary of `model`, or the call has no ids.
    """
    if not isinstance(others, (list, tuple)):
        raise ValueError(f"ensemble must be a list of models, but it is a {type(others).__name__}.")
    if others and any(generate_kwargs.get(name) is not None for name in ("encoder_outputs", "inputs_embeds")):
        raise ValueError("ensemble needs input_ids, because each model has its own encoder and embeddings.")
    for number, other in enumerate(others, start=1):
        if not isinstance(other, VaswaniGenerationMixin):
            raise ValueError(f"ensemble must contain Vaswani models, but item {number} is a {type(other).__name__}.")
        sizes = other.config.vocab_size, model.config.vocab_size
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"The models of an ensemble must share one vocabulary, but item {number} has {sizes[0]:,} entries and "
                f"this model has {sizes[1]:,}."
            )


def check_shortlist(model: Any, shortlist: Any, **generate_kwargs: Any) -> None:
    """
    Checks that a model can translate with a shortlist.

    Raises:
        ValueError: `shortlist` is no [`Shortlist`] or of another vocabulary, or the call has no ids.
    """
    if shortlist is None:
        return
    if not callable(getattr(shortlist, "entries", None)):
        raise ValueError(f"shortlist must be a Shortlist, but it is a {type(shortlist).__name__}.")
    if any(generate_kwargs.get(name) is not None for name in ("encoder_outputs", "inputs_embeds")):
        raise ValueError("shortlist needs input_ids, because it selects entries by those of the source.")
    if shortlist.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"The shortlist is for {shortlist.vocab_size:,} entries, but the model has {model.config.vocab_size:,}."
        )


def _fill_in(generation_config: GenerationConfig) -> None:
    """Adds missing settings to a generation config; transformers overrides only those that exist."""
    # From a config with this mark transformers would load only its own settings.
    generation_config._from_model_config = None
    for name, default in DEFAULTS.items():
        if not hasattr(generation_config, name):
            setattr(generation_config, name, default)


def check_readable(name: str, **kwargs: Any) -> None:
    """
    Checks a generation_config.json that transformers has not read: it treats a file that is damaged, or that the Hub
    did not send, like a missing one. Raises a `ValueError`; `kwargs` are those of `from_pretrained`.
    """
    file = os.path.join(kwargs.get("subfolder") or "", "generation_config.json")
    path: Any = os.path.join(name, file)
    if not os.path.isdir(name):
        path = try_to_load_from_cache(name, file, kwargs.get("cache_dir"), kwargs.get("revision"))
        if path is None and not (kwargs.get("local_files_only") or is_offline_mode()):
            raise ValueError("the Hub did not send it.")
    if isinstance(path, str) and os.path.isfile(path):
        with open(path, encoding="utf-8") as opened:
            json.load(opened)


def check_settings(generation_config: GenerationConfig) -> None:
    """
    Checks the numbers of a generation config.

    Args:
        generation_config ([`GenerationConfig`]): settings of a model or of a call.

    Raises:
        ValueError: a setting is not a finite number in its range.
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


def limit_length(generation_config: GenerationConfig, most: int) -> None:
    """Ends texts where a table of learned positions ends: with `most` tokens, the last of which is not read."""
    if generation_config.max_length > most:
        logger.warning_once(
            f"The maximum length of {generation_config.max_length} tokens is above the model's {most - 1} positions "
            "(max_position_embeddings): texts end there."
        )
        generation_config.max_length = most


# ---- The proof of generate() -------------------------------------------------------------------------------------

# Classes whose `generate()` was proved in this process, and whether this thread is about to prove one.
PROVED: set[type] = set()
PROVING = threading.local()


def prove_generate(kind: type[Any]) -> None:
    """
    Checks once in a process, with a tiny model, that `generate()` of transformers and a class work together: its steps
    with a cache must have the logits of those without one. It takes a tenth of a second, on the CPU.

    Args:
        kind (`type`): class of this package whose `generate()` is used, or a subclass, whose base is checked.

    Raises:
        ImportError: they do not, so that the class would say other words without an error.
    """
    package = __name__.rpartition(".")[0]
    kind = next(base for base in kind.__mro__ if base.__module__.rpartition(".")[0] == package)
    # The tiny model calls `generate()`, too.
    if kind in PROVED or getattr(PROVING, "now", False):
        return
    PROVING.now = True
    try:
        cached, uncached = (_logits_of_a_tiny_model(kind, use_cache) for use_cache in (True, False))
    except Exception as error:
        raise _contract_error(kind, f"its decoding steps end with {type(error).__name__}: {error}") from error
    finally:
        PROVING.now = False
    if not torch.allclose(cached, uncached, rtol=1e-3, atol=1e-3):
        raise _contract_error(kind, "its decoding steps with a cache differ from those without one")
    PROVED.add(kind)


def _logits_of_a_tiny_model(kind: type[Any], use_cache: bool) -> torch.Tensor:
    """Returns the logits of three steps of transformers' greedy search, of shape `(steps, batch, vocab_size)`."""
    sizes = {"d_model": 8, "d_ff": 8, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    # Made without the random numbers of the caller, and computed without the settings of the caller.
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = kind(kind.config_class(vocab_size=16, **sizes))
    model = model.to_empty(device="cpu").float().eval()
    with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float32))
        model.generation_config.eos_token_id = None
        found = model.generate(
            torch.tensor([[0, 5, 6], [7, 8, 9]]),
            attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]),
            max_new_tokens=3,
            do_sample=False,
            synced_gpus=False,
            use_cache=use_cache,
            # Chooses the search of transformers, which calls the modules.
            output_logits=True,
            return_dict_in_generate=True,
        )
    return torch.stack(found.logits)


def _contract_error(kind: type, reason: str) -> ImportError:
    return ImportError(
        f"generate() of transformers {transformers.__version__} does not work with {kind.__name__}, which was tested "
        f"with {TESTED_RELEASES}: {reason}. Install one of these releases, or a newer hf_vaswani; if the model's code "
        "came with its weights, renew it (hf-vaswani renew)."
    )


# ---- Another transformers ----------------------------------------------------------------------------------------


def changed_hooks(theirs: type) -> list[str]:
    """
    Finds methods of transformers that are missing, or lack a parameter that the overriding method relies on.

    Args:
        theirs (`type`): [`GenerationMixin`].

    Returns:
        `list[str]`: names of these methods.
    """
    changed = []
    for name in HOOKS:
        ours = getattr(VaswaniGenerationMixin, name)
        wanted = {p.name for p in inspect.signature(ours).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD}
        if not hasattr(theirs, name) or wanted - set(inspect.signature(getattr(theirs, name)).parameters):
            changed.append(name)
    return changed


def generate_as_transformers(self: Any, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
    """
    Replaces `generate()` if transformers has changed a method that this module overrides: runs transformers' own
    search, with the longest source plus `max_length_offset` as maximum length of the batch.

    Raises:
        ValueError: the call has an ensemble or a shortlist, which transformers' search does not support.
    """
    names = ", ".join(CHANGED_HOOKS)
    advice = f"Upgrade hf_vaswani, or install transformers {TESTED_RELEASES}."
    prove_generate(type(self))
    for name in ("ensemble", "shortlist"):
        if kwargs.pop(name, None):
            raise ValueError(f"{name} is not supported with transformers {transformers.__version__}. {advice}")
    logger.warning_once(
        f"transformers {transformers.__version__} has changed {names}, which the search of this model overrides: "
        f"falling back to transformers' own search, length penalty and stopping rules. {advice}"
    )
    layers = [kwargs, vars(generation_config or self.generation_config)]
    offset = next((layer[name] for layer in layers if (name := "max_length_offset") in layer), None)
    for name in ("labels", *DEFAULTS):
        kwargs.pop(name, None)
    limits = (layer.get(name) for layer in layers for name in ("max_length", "max_new_tokens"))
    sources = (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    source = next((each for each in sources if each is not None), None)
    if offset is not None and source is not None and all(limit is None for limit in limits):
        kwargs["max_new_tokens"] = source.shape[1] + offset
    return GenerationMixin.generate(self, inputs, generation_config, **kwargs)


# Importing must not fail: a saved model has this file, and must load and train with any later transformers.
CHANGED_HOOKS = changed_hooks(GenerationMixin)


def without_changed_hooks(kind: Any) -> Any:
    """Returns a class without the methods that override those of transformers, if one of these has changed."""
    for name in HOOKS if CHANGED_HOOKS else ():
        if name in vars(kind):
            delattr(kind, name)
    return kind


for kind in (VaswaniGenerationMixin, FastSearchMixin):
    without_changed_hooks(kind)
if CHANGED_HOOKS:
    FastSearchMixin.generate = generate_as_transformers  # type: ignore[method-assign]
