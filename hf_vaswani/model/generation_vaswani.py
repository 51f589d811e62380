"""The settings of Section 6.1 in transformers' `generate()`: length penalty, maximum lengths, rules of beam search.

"We used beam search with a beam size of 4 and length penalty alpha = 0.6. We set the maximum output length during
inference to input length + 50, but terminate early when possible." Where the paper is silent, the code of its authors
(tensor2tensor, `beam_search.py`) decides. Everything is a setting of the generation config: it is saved there, and
`generate()` takes it as a keyword. A model without `num_beams` searches greedily, like every model of transformers; a
recipe sets the paper's 4 beams. The settings and their defaults are `SEARCH_SETTINGS` in `rules_vaswani.py`; with one
beam, those that transformers has are not written into the generation config, where it would report them as mistakes.

`generate(..., ensemble=[other, ...])` translates by the mean of the probabilities of this model and others with the
same vocabulary on the same device, with the settings of this model. `generate(..., shortlist=Shortlist.load(folder,
tokenizer, vocab_size))` searches among the likely entries of the vocabulary alone, see `shortlist.py` of the package.

Sampling, and greedy and beam search, run in `search_vaswani.py`, with `sequences_scores` but no `cache`. All else
(beams with sampling, outputs of every step, custom caches or stopping criteria, modules that mix positions, autocast
to float16, training mode) falls back to transformers. A model of one stack searches so, too, by transformers' rules.

In every search, `pad_token_id` fills the rows behind `</s>` with one beam. With more beams it does so unless it is 0,
this model's default, or missing: then the first `eos_token_id` does.
"""

import inspect
import json
import os
from typing import Any

import torch
import transformers
from huggingface_hub import is_offline_mode, try_to_load_from_cache
from transformers import GenerationConfig, MaxLengthCriteria
from transformers.generation import GenerationMixin
from transformers.utils import logging

from .configuration_vaswani import CACHE, rename_cache
from .kernels_vaswani import fast_products
from .rules_vaswani import (
    DEFAULTS,
    SEARCH_SETTINGS,
    BeamSearchRules,
    SearchCall,
    SearchSetting,
    SourceLengthCriteria,
    search_call,
)

logger = logging.get_logger(__name__)

# ---- Hooks of generate() ------------------------------------------------------------------------------------------

# Releases of transformers that the tests pass with.
TESTED_RELEASES = "5.20 to 5.24"
# Private methods of transformers that these classes override, and the arguments that they read.
HOOKS: dict[str, tuple[str, ...]] = {
    "_prepare_generation_config": ("generation_config",),
    "_validate_generation_mode": ("generation_mode",),
    "_prepare_generated_length": ("generation_config", "has_default_max_length", "input_ids_length", "inputs_tensor"),
    "_get_stopping_criteria": ("generation_config",),
    "_beam_search": ("input_ids", "generation_config"),
    "_sample": ("input_ids", "generation_config"),
    "_update_finished_beams": (
        *("sequences", "beam_indices", "topk_running_sequences", "topk_running_beam_indices"),
        *("is_early_stop_heuristic_unsatisfied", "beam_scores", "is_sent_finished", "topk_log_probs"),
        *("next_token_hits_stopping_criteria", "cur_len", "decoder_prompt_len"),
    ),
    "_check_early_stop_heuristic": (
        *("is_early_stop_heuristic_unsatisfied", "running_beam_scores", "beam_scores", "is_sent_finished"),
        *("cur_len", "decoder_prompt_len"),
    ),
}


def changed_hooks(theirs: type) -> list[str]:
    """Returns the names of methods that [`GenerationMixin`] lacks, or that lack an argument that is read here."""
    # A method that is missing has no parameter.
    parameters = {name: inspect.signature(getattr(theirs, name, lambda: None)).parameters for name in HOOKS}
    return [name for name, read in HOOKS.items() if not {*read} <= parameters[name].keys()]


# Importing must not fail: a saved model has this file, and must load and train with any later transformers.
CHANGED_HOOKS = changed_hooks(GenerationMixin)


def without_changed_hooks(kind: Any) -> Any:
    """Returns a class without the methods that override those of transformers, if one of these has changed."""
    for name in HOOKS.keys() & vars(kind).keys() if CHANGED_HOOKS else ():
        delattr(kind, name)
    return kind


def fast_search(model: Any, input_ids: torch.Tensor, generation_config: GenerationConfig, **kwargs: Any) -> Any:
    """Runs a search of `search_vaswani.py`, or returns `None` if transformers' own is to run."""
    streamer = kwargs.pop("streamer", None)
    # Only here, so that a transformers without a name that the file needs still loads and trains the model.
    try:
        from .search_vaswani import beam_search, fast_search_inputs, single_search
    except (ImportError, AttributeError) as error:
        search_call().refuse(str(error))
        logger.warning_once(f"Falling back to transformers' own search, because {error}.")
        return None
    inputs = fast_search_inputs(model, input_ids, generation_config, **kwargs)
    if inputs is None:
        return None
    if streamer is None and (done := FastSearchMixin.at_home(model, input_ids, generation_config, inputs)) is not None:
        return done
    if generation_config.num_beams == 1:
        return single_search(input_ids, generation_config, inputs, streamer)
    return beam_search(input_ids, generation_config, inputs, BeamSearchRules.from_config(generation_config, input_ids))


@without_changed_hooks
class FastSearchMixin(GenerationMixin):
    """Runs the searches of `search_vaswani.py`; in front of [`PreTrainedModel`]."""

    # Searches by CUDA graphs, or returns `None`. The package sets it; a copy on the Hub is without.
    at_home = staticmethod(lambda *_: None)

    def generate(self, inputs: Any = None, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Generates as [`GenerationMixin.generate`] does, with the settings of this module."""
        prove_generate(type(self))
        # Trainers hand them to `generate()`, of which no step reads them.
        kwargs.pop("labels", None)
        with SearchCall(kwargs.get("attention_mask")):
            if CHANGED_HOOKS:
                prepare_fallback(self, inputs, generation_config, kwargs)
            return super().generate(inputs, generation_config, *args, **rename_cache(kwargs, CACHE))

    def _sample(self, input_ids: torch.Tensor, generation_config: GenerationConfig, **kwargs: Any) -> Any:
        """Runs [`single_search`], or transformers' own search if it cannot take the call."""
        found = fast_search(self, input_ids, generation_config, **kwargs)
        return super()._sample(input_ids, generation_config=generation_config, **kwargs) if found is None else found

    def _beam_search(self, input_ids: torch.Tensor, generation_config: GenerationConfig, **kwargs: Any) -> Any:
        """Runs [`beam_search`], or transformers' own if it cannot take the call, both by [`BeamSearchRules`]."""
        found = fast_search(self, input_ids, generation_config, **kwargs)
        if found is not None:
            return found
        # transformers returns scores of hypotheses only together with the scores of every step.
        only_scores = generation_config.return_dict_in_generate and not generation_config.output_scores
        generation_config.output_scores |= only_scores
        search_call().rules = BeamSearchRules.from_config(generation_config, input_ids)
        # transformers creates tensors without naming a device.
        with input_ids.device:
            found = super()._beam_search(input_ids, generation_config=generation_config, **kwargs)
        if only_scores:
            found.scores = None
        return found

    def _update_finished_beams(self, **state: Any) -> Any:
        """Keeps the best finished hypotheses, by [`BeamSearchRules.finish`]."""
        sequences, indices, candidates, candidate_indices, *compared, ends, last, prompt = (
            state[name] for name in HOOKS["_update_finished_beams"]
        )
        tokens, length = candidates[:, :, last], last + 1 - prompt
        scores, is_finished, chosen = search_call().rules.finish(*compared, tokens, ends, length)
        pairs = (sequences, candidates), (indices, candidate_indices)
        sequences, indices = (torch.cat(pair, dim=1).take_along_dim(chosen[:, :, None], dim=1) for pair in pairs)
        return sequences, scores, indices, is_finished

    @staticmethod
    def _check_early_stop_heuristic(**state: Any) -> torch.Tensor:
        """Returns which sentences can still improve, by [`BeamSearchRules.may_improve`]."""
        *compared, length, prompt = (state[name] for name in HOOKS["_check_early_stop_heuristic"])
        return search_call().rules.may_improve(*compared, length - prompt)


@without_changed_hooks
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
        """Loads the generation config for `from_pretrained`, and adds the settings that an older file lacks."""
        try:
            super().adjust_generation_fn(generation_config, from_auto_class, from_pipeline, name, *args, **kwargs)
            is_made_up = getattr(self.generation_config, "_from_model_config", True)
            # transformers treats a file that is damaged, or that the Hub did not send, like a missing one.
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
        call = search_call()
        call.ensemble, call.shortlist = kwargs.pop("ensemble", None) or (), kwargs.pop("shortlist", None)
        check_search_call(self, call, **kwargs)
        prepared, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        layers = (kwargs, vars(generation_config) if generation_config else {}, vars(self.generation_config))
        for name, default in DEFAULTS.items():
            # transformers treats None as unset, but for these settings it is a value.
            setattr(prepared, name, next((layer[name] for layer in layers if name in layer), default))
            model_kwargs.pop(name, None)
        for name, value in vars(prepared).items():
            if expected := SEARCH_SETTINGS.get(name, SearchSetting()).expected(value):
                raise ValueError(f"{name} must be {expected}, but it is {value!r}.")
        for name, setting in SEARCH_SETTINGS.items():
            # Assisted decoding validates this config again, which would report these settings beside one beam.
            if setting.by_type and prepared.num_beams != 1 and all(layer.get(name) is None for layer in layers):
                setattr(prepared, name, setting.by_type[prepared.length_penalty_type])
        return prepared, model_kwargs

    def _validate_generation_mode(self, generation_mode: Any, *args: Any, **kwargs: Any) -> None:
        """Rejects an ensemble and a shortlist with a generation mode that would ignore them."""
        super()._validate_generation_mode(generation_mode, *args, **kwargs)
        if generation_mode not in ("greedy_search", "beam_search"):
            search_call().refuse(f"the settings ask for {generation_mode.replace('_', ' ')}")

    def _prepare_generated_length(self, generation_config: GenerationConfig, **kwargs: Any) -> GenerationConfig:
        """Finds the maximum lengths of the sentences, and sets the longest of them for the batch."""
        call, source, prompt = search_call(), kwargs["inputs_tensor"], kwargs["input_ids_length"]
        offset, max_lengths = generation_config.max_length_offset, None
        configs = [model.config for model in (self, *call.ensemble)]
        tables = [each.max_position_embeddings for each in configs if each.position_encoding == "learned"]
        positions = min(tables, default=2**62)
        if kwargs["has_default_max_length"] and generation_config.max_new_tokens is None and offset is not None:
            if call.mask is not None and call.mask.dim() == 2:
                lengths = (call.mask != 0).sum(dim=1)
            else:
                # Ids, embeddings, or the placeholder for ids that transformers makes from `encoder_outputs`.
                lengths = torch.full(source.shape[:1], source.shape[1], device=source.device)
            max_lengths = (prompt + lengths + offset).clamp(max=positions)
            generation_config.max_new_tokens = int(max_lengths.max()) - prompt
        generation_config = super()._prepare_generated_length(generation_config=generation_config, **kwargs)
        limit_length(generation_config, positions + 1)
        if max_lengths is None:
            max_lengths = torch.full(source.shape[:1], generation_config.max_length, device=source.device)
        # The other models of an ensemble encode the source from the inputs.
        call.inputs, call.max_lengths = source, max_lengths.to(source.device)
        return generation_config

    def _maybe_prepare_encoder_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Calls the encoder, with fast products. A transformers without this method calls it by another one."""
        inputs = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
        with fast_products(self.get_encoder(), inputs):
            return super()._maybe_prepare_encoder_kwargs_for_generation(*args, **kwargs)

    def _get_stopping_criteria(self, generation_config: GenerationConfig, **kwargs: Any) -> Any:
        """Adds a criterion for sentences whose maximum length is below that of the batch."""
        criteria = super()._get_stopping_criteria(generation_config=generation_config, **kwargs)
        for criterion in criteria:
            if isinstance(criterion, MaxLengthCriteria) and self.config.position_encoding == "sinusoidal":
                # Sinusoids have no table that a long output could exceed; transformers would warn.
                criterion.max_position_embeddings = None
        max_lengths = search_call().max_lengths
        if max_lengths.min() < generation_config.max_length:
            criteria.append(SourceLengthCriteria(max_lengths))
        return criteria


# ---- Checks ------------------------------------------------------------------------------------------------------


def check_search_call(model: Any, call: SearchCall, **kwargs: Any) -> None:
    """Raises a `ValueError` if models cannot translate together, or with a shortlist, or a call has no ids."""
    ensemble, shortlist, vocab_size = call.ensemble, call.shortlist, model.config.vocab_size
    if not isinstance(ensemble, (list, tuple)):
        raise ValueError(f"ensemble must be a list of models, but it is a {type(ensemble).__name__}.")
    for number, other in enumerate(ensemble, start=1):
        if not isinstance(other, VaswaniGenerationMixin):
            raise ValueError(f"ensemble must contain Vaswani models, but item {number} is a {type(other).__name__}.")
        if other.config.vocab_size != vocab_size:
            raise ValueError(
                f"The models of an ensemble must share one vocabulary, but item {number} has "
                f"{other.config.vocab_size:,} entries and this model has {vocab_size:,}."
            )
    if shortlist is not None and not callable(getattr(shortlist, "entries", None)):
        raise ValueError(f"shortlist must be a Shortlist, but it is a {type(shortlist).__name__}.")
    if shortlist is not None and shortlist.vocab_size != vocab_size:
        raise ValueError(f"The shortlist is for {shortlist.vocab_size:,} entries, but the model has {vocab_size:,}.")
    for name in ("encoder_outputs", "inputs_embeds"):
        if kwargs.get(name) is not None:
            # Each model has its own encoder and embeddings, and a shortlist selects entries by the ids of the source.
            call.refuse(f"{name} was given")


def check_readable(name: str, **kwargs: Any) -> None:
    """Raises a `ValueError` if a generation_config.json is damaged or was not sent; `kwargs` of `from_pretrained`."""
    file = os.path.join(kwargs.get("subfolder") or "", "generation_config.json")
    path: Any = os.path.join(name, file)
    if not os.path.isdir(name):
        path = try_to_load_from_cache(name, file, kwargs.get("cache_dir"), kwargs.get("revision"))
        if path is None and not (kwargs.get("local_files_only") or is_offline_mode()):
            raise ValueError("the Hub did not send it.")
    if isinstance(path, str) and os.path.isfile(path):
        with open(path, encoding="utf-8") as opened:
            json.load(opened)


def limit_length(generation_config: GenerationConfig, most: int) -> None:
    """Ends texts where a table of learned positions ends: with `most` tokens, the last of which is not read."""
    if generation_config.max_length > most:
        logger.warning_once(
            f"The maximum length of {generation_config.max_length} tokens is above the model's {most - 1} positions "
            "(max_position_embeddings): texts end there."
        )
        generation_config.max_length = most


def _fill_in(generation_config: GenerationConfig) -> None:
    """Adds missing settings to a generation config; transformers overrides only those that exist."""
    vars(generation_config).update(DEFAULTS | vars(generation_config))
    # From a config with this mark transformers would load only its own settings.
    generation_config._from_model_config = None


# ---- Another transformers ----------------------------------------------------------------------------------------

# Classes whose `generate()` was proved in this process.
PROVED: set[type] = set()


def prove_generate(kind: type[Any]) -> None:
    """
    Checks once in a process, with a tiny model, that `generate()` of transformers works with a class of this package,
    or that of a subclass: its steps with a cache must have the logits of those without one. It takes a tenth of a
    second, on the CPU. Otherwise raises an `ImportError`: the class would say other words without an error.
    """
    package = __name__.rpartition(".")[0]
    kind = next(base for base in kind.__mro__ if base.__module__.rpartition(".")[0] == package)
    if kind in PROVED:
        return
    cause = None
    try:
        cached, uncached = (logits_of_a_tiny_model(kind, use_cache) for use_cache in (True, False))
        is_proved = torch.allclose(cached, uncached, rtol=1e-3, atol=1e-3)
        found = "with a cache differ from those without one"
    except Exception as error:
        is_proved, found, cause = False, f"end with {type(error).__name__}: {error}", error
    if not is_proved:
        raise ImportError(
            f"generate() of transformers {transformers.__version__} does not work with {kind.__name__}, which was "
            f"tested with {TESTED_RELEASES}: its decoding steps {found}. Install one of these releases, or a newer "
            "hf_vaswani; if the model's code came with its weights, renew it (hf-vaswani renew)."
        ) from cause
    PROVED.add(kind)


def logits_of_a_tiny_model(kind: type[Any], use_cache: bool) -> torch.Tensor:
    """Returns the logits of three steps of transformers' greedy search, of shape `(steps, batch, vocab_size)`."""
    sizes = {"d_model": 8, "d_ff": 8, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    settings = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "use_cache": use_cache}
    # The logits choose the search of transformers, which calls the modules.
    settings |= {"output_logits": True, "return_dict_in_generate": True, "synced_gpus": False}
    # Made without the random numbers of the caller, and computed without the settings of the caller.
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = kind(kind.config_class(vocab_size=16, **sizes)).eval()
    model = model.to_empty(device="cpu").float()
    with SearchCall(), torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        for weight in model.parameters():
            weight.normal_(generator=generator)
        ids, mask = torch.tensor([[0, 5, 6], [7, 8, 9]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
        found = GenerationMixin.generate(model, ids, attention_mask=mask, **settings)
    return torch.stack(found.logits)


def prepare_fallback(model: Any, inputs: Any, generation_config: Any, kwargs: dict[str, Any]) -> None:
    """
    Prepares the arguments of a call for transformers' own search, if a hook has changed: the longest source plus
    `max_length_offset` is the maximum length of the batch. Raises a `ValueError` with an ensemble or a shortlist.
    """
    change = f"transformers {transformers.__version__} has changed {', '.join(CHANGED_HOOKS)}"
    reason = f"{change}: upgrade hf_vaswani, or install transformers {TESTED_RELEASES}"
    call = search_call()
    call.ensemble, call.shortlist = kwargs.pop("ensemble", None), kwargs.pop("shortlist", None)
    call.refuse(reason)
    logger.warning_once(f"Falling back to transformers' own search, length penalty and stopping rules: {reason}.")
    config = vars(generation_config or model.generation_config)
    offset = {**config, **kwargs}.get("max_length_offset")
    for name in DEFAULTS:
        kwargs.pop(name, None)
    limits = (layer.get(name) for layer in (kwargs, config) for name in ("max_length", "max_new_tokens"))
    sources = (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    source = next((each for each in sources if each is not None), None)
    if offset is not None and source is not None and all(limit is None for limit in limits):
        kwargs["max_new_tokens"] = source.shape[1] + offset
