"""Strict loading of models and tokenizers: complete, or one error that names the damaged file."""

import json
import logging
import math
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from ..adapters import has_adapter, merged_weights, read_weights
from ..data.tokenizer import load_tokenizer
from ..files import MOVING_AVERAGE, check_weights, read_json
from ..model import heads_vaswani as heads
from ..model.modeling_vaswani import VaswaniEncoderModel, VaswaniForConditionalGeneration
from ..model.pipeline_vaswani import find_non_finite
from ..model.rules_vaswani import SEARCH_SETTINGS, SearchSetting
from ..model_names import resolve_model

logger = logging.getLogger(__name__)

SINGLE_STACKS = (
    VaswaniEncoderModel,
    heads.VaswaniForMaskedLM,
    heads.VaswaniForPreTraining,
    heads.VaswaniForCausalLM,
    heads.VaswaniForSequenceClassification,
    heads.VaswaniForTokenClassification,
)
SETTINGS = ("config.json", "generation_config.json")
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
# Token ids in the configs and generation configs of transformers.
IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
LIST = r"\[(\d+(, \d+)*)?\]"
FORMS_OF_IDS = {
    "|".join((*IDS, "forced_bos_token_id", "forced_eos_token_id")): (
        rf"\d+|{LIST}",
        "an id, a whole number of at least 0",
    ),
    "(begin_)?suppress_tokens": (LIST, "a list of ids"),
    "bad_words_ids": (rf"\[({LIST}(, {LIST})*)?\]", "a list of lists of ids"),
}
# Names of settings, the form of their values in JSON, and this form in words. Without the highest count, a search
# could be practically endless.
FORMS = FORMS_OF_IDS | {
    "|".join(name for name, each in SEARCH_SETTINGS.items() if each.at_least == 1): (
        r"[1-9]\d{0,6}",
        "a whole number from 1 to 9,999,999",
    ),
    "max_length_offset|min_length|min_new_tokens|(encoder_)?no_repeat_ngram_size": (
        r"\d{1,7}",
        "a whole number from 0 to 9,999,999",
    ),
    "repetition_penalty|temperature|top_p": (r"-?\d.*", "a number"),
    "do_sample|use_cache|output_(scores|logits|attentions|hidden_states)": ("true|false", "true or false"),
    "early_stopping": ('true|false|"never"', "true, false or 'never'"),
}
# Sizes in the config of any model of transformers: it has at least as many weights, or as many tensors as layers.
SIZES, LAYERS = r"d_\w+|num_heads|\w+_(size|dim|heads)", r"\w+_layers"
# Data types of weights, as safetensors names them.
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
# Maximum length in an error message of a value, and of the message of a library.
MAX_VALUE_CHARS, MAX_MESSAGE_CHARS = 80, 300


def load_translator(name: str | Path, dtype: Any = "auto") -> tuple[Any, PreTrainedTokenizerBase]:
    """
    Loads an encoder-decoder model and its tokenizer, and generates one token as a check.

    Args:
        name (`str` or `Path`): a model, see [`resolve_model`].
        dtype (`torch.dtype` or `str`): data type of the weights; by default the saved one.

    Returns:
        `tuple` of a [`PreTrainedModel`] in evaluation mode and its [`PreTrainedTokenizerBase`].

    Raises:
        ValueError: as in [`load_model`] and [`load_whole_tokenizer`], or model and tokenizer do not match, or the
            model cannot translate.
    """
    folder = resolve_model(name)
    model, tokenizer = load_model(folder, dtype), load_whole_tokenizer(folder)
    check_vocabulary(model, tokenizer, folder)
    # No list of settings is complete, neither of generation configs nor of tokenizers.
    with quiet(), _as_value_error(f"The model {str(name)!r} cannot translate", folder), torch.inference_mode():
        inputs = tokenizer([tokenizer.eos_token], return_tensors="pt")
        found = model.generate(**inputs, max_new_tokens=1, num_return_sequences=1, return_dict_in_generate=False)
        tokenizer.batch_decode(found, skip_special_tokens=True)
    return model, tokenizer


def load_single_stack(name: str | Path) -> tuple[Any, PreTrainedTokenizerBase]:
    """
    Loads an encoder or a decoder on its own, with the head that it was saved with, and its tokenizer.

    Args:
        name (`str` or `Path`): a model, see [`resolve_model`].

    Returns:
        `tuple` of a [`VaswaniPreTrainedModel`] in evaluation mode and its [`PreTrainedTokenizerBase`].

    Raises:
        ValueError: a file is missing or damaged, or the model is of another kind.
    """
    folder = resolve_model(name)
    config = _check_settings(folder)
    classes = {each.__name__: each for each in SINGLE_STACKS}
    (kind,) = config.get("architectures") or [None]
    if kind not in classes:
        raise ValueError(
            f"{folder / SETTINGS[0]} has the architecture {_shown(kind)}, but it must be one of {', '.join(classes)}."
        )
    model = _load(classes[kind], folder, config)
    tokenizer = load_whole_tokenizer(folder)
    check_vocabulary(model, tokenizer, folder)
    return model, tokenizer


def load_model(name: str | Path, dtype: Any = "auto") -> Any:
    """
    Loads an encoder-decoder model, and checks that its files have every weight.

    Args:
        name (`str` or `Path`): a model, see [`resolve_model`].
        dtype (`torch.dtype` or `str`): data type of the weights; by default the saved one.

    Returns:
        [`PreTrainedModel`] on the CPU, in evaluation mode.

    Raises:
        ValueError: a file is missing or damaged, a setting is invalid, or the weights are non-finite, do not match the
            config or are not those that the training wrote; the message names the file.
    """
    folder = resolve_model(name)
    config = _check_settings(folder)
    return _load(AutoModelForSeq2SeqLM, folder, config, dtype)


def _load(kind: Any, folder: Path, config: dict[str, Any], dtype: Any = "auto") -> Any:
    """Loads a model by a class of transformers, and checks its weights in one pass."""
    is_recorded = has_adapter(folder) or check_weights(folder)
    _check_headers(folder, config)
    what = f"The model {str(folder)!r} cannot be loaded"
    options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with quiet(), _as_value_error(what, folder):
        try:
            if (weights := _weights_beside(folder)) is not None:
                options |= {"config": AutoConfig.from_pretrained(folder), "state_dict": weights}
                dtype = torch.float32 if dtype == "auto" else dtype
                # Only runs of this package have such checkpoints, and an Auto class needs a folder.
                kind = VaswaniForConditionalGeneration if kind is AutoModelForSeq2SeqLM else kind
            # Code of the repository never runs, and there is no prompt about it.
            model, report = kind.from_pretrained(
                folder if weights is None else None, dtype=dtype, trust_remote_code=False, **options
            )
            if weights is not None and model.can_generate():
                model.generation_config = GenerationConfig.from_pretrained(folder)
        except UnpicklingError as error:
            raise ValueError(
                f"The weights in {folder} are a pickle that is damaged, or contains code: save them as "
                "model.safetensors."
            ) from error
        except Exception:
            _check_headers(folder, config)
            raise
    check_report(report, folder)
    if not is_recorded:
        check_finite(model, folder)
    return model.eval()


def _weights_beside(folder: Path) -> dict[str, torch.Tensor] | None:
    """Returns the weights of a checkpoint that are not in its `model.safetensors`: with adapters, or averaged."""
    if has_adapter(folder):
        return merged_weights(folder)
    return read_weights(folder / MOVING_AVERAGE) if (folder / MOVING_AVERAGE).is_file() else None


def load_whole_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """
    Loads a tokenizer for a translation model, and checks all its files.

    Args:
        name (`str` or `Path`): a model, see [`resolve_model`].

    Returns:
        [`PreTrainedTokenizerBase`].

    Raises:
        ValueError: the tokenizer is missing or lacks what translation needs, or one of its files is damaged.
    """
    folder = resolve_model(name)
    path = folder / "tokenizer.json"
    content, *_ = [
        _read(folder / each) if (folder / each).exists() else {} for each in (path.name, *TOKENIZER_SETTINGS)
    ]
    with quiet(), _as_value_error(f"The tokenizer in {folder} cannot be loaded", folder):
        try:
            tokenizer = load_tokenizer(str(folder))
        except Exception as error:
            if not (isinstance(error, ValueError) and str(folder) in str(error)):
                _check_tokenizer_file(path)
            raise
        _check_template(path, content.get("post_processor") or {})
        tokenizer("a")
    longest = tokenizer.model_max_length
    if type(longest) not in (int, float) or not longest >= 2:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'} has model_max_length {_shown(longest)}, but it must be at least 2."
        )
    return tokenizer


def _check_tokenizer_file(path: Path) -> None:
    """Raises a `ValueError` with the path of a damaged tokenizer.json, which the errors of the libraries lack."""
    if not path.exists():
        raise ValueError(f"{path} is missing, and so are the files that it could be converted from.")
    try:
        Tokenizer.from_file(str(path))
    # tokenizers raises plain exceptions.
    except Exception as error:
        raise ValueError(f"{path} is not a tokenizer: {str(error)[:MAX_MESSAGE_CHARS]}") from error


def _check_template(path: Path, processor: dict[str, Any]) -> None:
    """Raises a `ValueError` for a template with an undefined token, on which tokenizers would panic."""
    for each in processor.get("processors", [processor]):
        pieces = [*each.get("single", []), *each.get("pair", [])] if each.get("type") == "TemplateProcessing" else []
        for piece in pieces:
            token = piece.get("SpecialToken", {}).get("id")
            if token is not None and token not in each["special_tokens"]:
                raise ValueError(f"{path} has {_shown(token)} in a template, but not among its special_tokens.")


def check_vocabulary(model: Any, tokenizer: PreTrainedTokenizerBase, name: str | Path) -> None:
    """Raises a `ValueError` if a tokenizer has ids beyond the embedding of its model."""
    rows = model.get_input_embeddings().weight.shape[0]
    token, highest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if highest >= rows:
        raise ValueError(
            f"The tokenizer in {name} has the id {highest} ({_shown(token)}), but the embedding of the model has only "
            f"{rows} rows: they belong to different models."
        )


# How many threads are in [`quiet`], and what restores the settings.
QUIET_LOCK, QUIET_THREADS, RESTORE = threading.Lock(), 0, ExitStack()


@contextmanager
def quiet() -> Iterator[None]:
    """
    Silences progress bars and warnings of the libraries, where errors here say the same. These are settings of the
    process: the last of several threads to leave restores them.
    """
    global QUIET_THREADS
    with QUIET_LOCK:
        QUIET_THREADS += 1
        if QUIET_THREADS == 1:
            RESTORE.callback(transformers_logging.set_verbosity, transformers_logging.get_verbosity())
            if transformers_logging.is_progress_bar_enabled():
                RESTORE.callback(transformers_logging.enable_progress_bar)
            transformers_logging.set_verbosity_error()
            transformers_logging.disable_progress_bar()
            RESTORE.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
    try:
        yield
    finally:
        with QUIET_LOCK:
            QUIET_THREADS -= 1
            if not QUIET_THREADS:
                RESTORE.close()


# ---- Settings ----------------------------------------------------------------------------------------------------


def _check_settings(folder: Path) -> dict[str, Any]:
    """
    Checks the values in `config.json` and `generation_config.json`, many of which transformers accepts unchecked.
    Returns the content of `config.json`.
    """
    if folder.is_file():
        raise ValueError(f"{folder} is a file, not a model folder: hf-vaswani convert makes one of other formats.")
    paths = [folder / file for file in SETTINGS]
    config, generation = _read(paths[0]), _read(paths[1]) if paths[1].exists() else {}
    kind = config.get("model_type")
    if str(kind) not in CONFIG_MAPPING:
        raise ValueError(
            f"{paths[0]} has the model_type {_shown(kind)}, which the installed transformers does not have."
        )
    size = config.get("decoder_vocab_size") or config.get("vocab_size")
    for path, settings in zip(paths, (config, generation), strict=True):
        for key, value in settings.items():
            text = json.dumps(value)
            expected = None if value is None else _expected(key, value, text)
            if expected:
                raise ValueError(f"{path} has {key} {_shown(value)}, but it must be {expected}.")
            for id_ in re.findall(r"\d+", text) if any(re.fullmatch(keys, key) for keys in FORMS_OF_IDS) else ():
                if isinstance(size, int) and int(id_) >= size:
                    raise ValueError(f"{path} has the id {id_} as {key}, but the vocabulary has {size} entries.")
    with quiet(), _as_value_error(f"{paths[0]} cannot be used", folder):
        AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return config


def _expected(name: str, value: Any, text: str) -> str | None:
    """Returns what a setting must be, in words, or `None` if it is that; `text` is its value in JSON."""
    # Whole numbers that torch cannot represent are no better.
    if '"' not in text and re.search(r"NaN|Infinity|\d{19}", text):
        return "finite"
    forms = (form for names, form in FORMS.items() if re.fullmatch(names, name))
    found = next((words for form, words in forms if not re.fullmatch(form, text)), None)
    return found or SEARCH_SETTINGS.get(name, SearchSetting()).expected(value)


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."


# ---- Files and weights -------------------------------------------------------------------------------------------


@contextmanager
def _as_value_error(what: str, name: str | Path) -> Iterator[None]:
    """
    Turns any error into a `ValueError` that names the model: transformers, tokenizers and torch have no error class
    for damaged files, and an invalid value fails where it is first used.
    """
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        logger.debug("Original error:", exc_info=True)
        text = " ".join(str(error).split())
        if isinstance(error, ValueError) and str(name) in text:
            raise
        kind = "" if isinstance(error, (ValueError, OSError, RuntimeError)) else f"{type(error).__name__}: "
        raise ValueError(f"{what}: {kind}{text[:MAX_MESSAGE_CHARS] if text else type(error).__name__}") from error


def _check_headers(folder: Path, config: dict[str, Any]) -> None:
    """
    Checks the headers of the safetensors files in a folder, if it has any: files are whole, weights are floating-point
    numbers, and no size in the config exceeds them.
    """
    index = folder / "model.safetensors.index.json"
    is_sharded = index.exists() and not (folder / "model.safetensors").exists()
    if is_sharded and not isinstance(_read(index).get("weight_map"), dict):
        raise ValueError(f"{index} has no weight_map from tensor names to files.")
    shapes: dict[str, list[int]] = {}
    for path in folder.glob("model*.safetensors"):
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                shapes |= {name: tensor.get_shape() for name, tensor in tensors.items()}
                dtypes = {name: tensor.get_dtype() for name, tensor in tensors.items()}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        for name, dtype in dtypes.items():
            if dtype not in FLOATS and "quantization_config" not in config:
                raise ValueError(
                    f"The weights in {folder} have {name} as {dtype}, but weights must be floating-point numbers."
                )
    # Checked before a model of such a size is allocated.
    weights = sum(map(math.prod, shapes.values()))
    for pattern, most, what in ((SIZES, weights, "values"), (LAYERS, len(shapes), "tensors")):
        for name, value in config.items() if shapes else ():
            if type(value) is int and value > most and re.fullmatch(pattern, name):
                raise ValueError(
                    f"{folder / SETTINGS[0]} has {name} {_shown(value)}, but its weights have only {most} {what}."
                )


def check_report(report: Mapping[str, Any], name: str | Path) -> None:
    """
    Checks that a file has every weight of the model, in its shape, and no other.

    Args:
        report (`Mapping[str, Any]`): what `from_pretrained(..., output_loading_info=True)` returns beside the model.
        name (`str` or `Path`): a model, see [`resolve_model`].

    Raises:
        ValueError: naming the first weight of each kind.
    """
    shapes = [
        f"{name}, {(*there,)} in the file and {(*here,)} in the model"
        for name, there, here in report["mismatched_keys"]
    ]
    kinds = {"missing": report["missing_keys"], "unexpected": report["unexpected_keys"], "of another shape": shapes}
    found = ", ".join(f"{len(names)} {kind} (first: {min(names)})" for kind, names in kinds.items() if names)
    if found:
        raise ValueError(f"The weights of {name} do not match its config.json: {found}.")


def check_finite(model: Any, name: str | Path) -> None:
    """Raises a `ValueError` if a weight of a model is NaN or infinite."""
    if tensor := find_non_finite(model):
        raise ValueError(f"The weights of {name} have non-finite values in {tensor}.")
