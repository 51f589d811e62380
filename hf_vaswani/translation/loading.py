"""Strict loading of models and tokenizers: complete, or one error that names the damaged file."""

import logging
import math
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import constants, hf_hub_download, is_offline_mode, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name
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

from ..adapters import has_adapter, merged_weights
from ..data.tokenizer import load_tokenizer
from ..files import read_json, split_revision
from ..model.generation_vaswani import CHOICES, LARGEST_ALPHA
from ..model.generation_vaswani import COUNTS as SEARCH_COUNTS
from ..model.heads_vaswani import (
    VaswaniForCausalLM,
    VaswaniForMaskedLM,
    VaswaniForPreTraining,
    VaswaniForSequenceClassification,
    VaswaniForTokenClassification,
)
from ..model.loading_vaswani import check_shapes, find_loading_error, find_non_finite, load_stored
from ..model.modeling_vaswani import VaswaniEncoderModel

logger = logging.getLogger(__name__)

SINGLE_STACKS = (
    VaswaniEncoderModel,
    VaswaniForMaskedLM,
    VaswaniForPreTraining,
    VaswaniForCausalLM,
    VaswaniForSequenceClassification,
    VaswaniForTokenClassification,
)

SETTINGS = ("config.json", "generation_config.json")
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
# Token ids in the configs and generation configs of transformers.
IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
FORCED_IDS = ("forced_bos_token_id", "forced_eos_token_id")
# Counts, each with its minimum.
COUNTS = dict.fromkeys(SEARCH_COUNTS, 1) | {
    "max_length_offset": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
}
NUMBERS = ("length_penalty", "repetition_penalty", "temperature", "top_p")
FLAGS = ("do_sample", "use_cache", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
# A larger count would make a search practically endless.
HIGHEST_COUNT = 1_000_000
# Nesting of lists of ids.
DEPTHS = {"suppress_tokens": 1, "begin_suppress_tokens": 1, "bad_words_ids": 2}
# A model has at least as many weights as each of these sizes, and at least one tensor per layer.
SIZES = (
    *("vocab_size", "decoder_vocab_size", "d_model", "d_ff", "d_k", "d_v", "num_heads"),
    *("encoder_ffn_dim", "decoder_ffn_dim", "encoder_attention_heads", "decoder_attention_heads"),
)
LAYERS = ("encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers", "num_hidden_layers")
# Data types of weights, as safetensors names them.
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
# Weights of other libraries, and what lies in folders of a repository, such as an ONNX export.
IGNORED = ["*.h5", "*.msgpack", "*.ot", "*/*"]
# Maximum length in an error message of a value, and of the message of a library.
SHOWN, SAID = 80, 300


def load_translator(name: str | Path, dtype: Any = "auto") -> tuple[Any, PreTrainedTokenizerBase]:
    """
    Loads an encoder-decoder model and its tokenizer, and generates one token as a check.

    Args:
        name (`str` or `Path`): model folder, or id of a repository on the Hub.
        dtype (`torch.dtype` or `str`): data type of the weights; by default the saved one.

    Returns:
        `tuple` of a [`PreTrainedModel`] in evaluation mode and its [`PreTrainedTokenizerBase`].

    Raises:
        ValueError: as in [`load_model`] and [`load_whole_tokenizer`], or model and tokenizer do not match, or the
            model cannot translate.
    """
    name = pinned(name)
    _check_config(name)
    tokenizer = load_whole_tokenizer(name)
    model = load_model(name, dtype)
    check_vocabulary(model, tokenizer, name)
    # No list of settings is complete, neither of generation configs nor of tokenizers.
    with quiet(), _as_value_error(f"The model {str(name)!r} cannot translate", name), torch.inference_mode():
        inputs = tokenizer([tokenizer.eos_token], return_tensors="pt")
        found = model.generate(**inputs, max_new_tokens=1, num_return_sequences=1, return_dict_in_generate=False)
        tokenizer.batch_decode(found, skip_special_tokens=True)
    return model, tokenizer


def load_single_stack(name: str | Path) -> tuple[Any, PreTrainedTokenizerBase]:
    """
    Loads an encoder or a decoder on its own, with the head that it was saved with, and its tokenizer.

    Args:
        name (`str` or `Path`): model folder, or id of a repository on the Hub.

    Returns:
        `tuple` of a [`VaswaniPreTrainedModel`] in evaluation mode and its [`PreTrainedTokenizerBase`].

    Raises:
        ValueError: a file is missing or damaged, or the model is of another kind.
    """
    name = pinned(name)
    folder = _check_config(name)
    classes = {each.__name__: each for each in SINGLE_STACKS}
    (kind,) = _read(folder / SETTINGS[0]).get("architectures") or [None]
    if kind not in classes:
        raise ValueError(
            f"{folder / SETTINGS[0]} has the architecture {_shown(kind)}, but it must be one of {', '.join(classes)}."
        )
    tokenizer = load_whole_tokenizer(name)
    _check_sizes(folder)
    with quiet(), _as_value_error(f"The model {str(name)!r} cannot be loaded", folder):
        model, report = classes[kind].from_pretrained(name, output_loading_info=True, ignore_mismatched_sizes=True)
        check_shapes(model, report)
    problem = find_loading_error(model, report)
    if problem is not None:
        raise ValueError(problem)
    check_vocabulary(model, tokenizer, name)
    return model.eval(), tokenizer


def load_model(name: str | Path, dtype: Any = "auto") -> Any:
    """
    Loads an encoder-decoder model, and checks that its files have every weight.

    Args:
        name (`str` or `Path`): model folder, or id of a repository on the Hub.
        dtype (`torch.dtype` or `str`): data type of the weights; by default the saved one.

    Returns:
        [`PreTrainedModel`] on the CPU, in evaluation mode.

    Raises:
        ValueError: a file is missing or damaged, a setting is invalid, or the weights are non-finite or do not match
            the config; the message names the file.
    """
    name = pinned(name)
    folder = _check_config(name)
    if has_adapter(folder):
        return _load_merged(folder, dtype)
    _check_sizes(folder)
    with quiet(), _as_value_error(f"The model {str(name)!r} cannot be loaded", folder):
        try:
            model, report = AutoModelForSeq2SeqLM.from_pretrained(
                name,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                # Code of the repository never runs, and there is no prompt about it.
                trust_remote_code=False,
            )
        except UnpicklingError as error:
            raise ValueError(
                f"The weights in {name} are a pickle that is damaged, or contains code: save them as "
                "model.safetensors."
            ) from error
        except Exception:
            _read_tensors(folder)
            raise
        check_shapes(model, report)
    # A model of this package has looked at its weights itself.
    problem = model.loading_error if hasattr(model, "loading_error") else find_loading_error(model, report)
    if problem is None and report["error_msgs"]:
        problem = f"The weights of {name} cannot be loaded: {report['error_msgs'][0]}"[:SAID]
    if problem is not None:
        raise ValueError(problem)
    return model.eval()


def _load_merged(checkpoint: Path, dtype: Any) -> Any:
    """Loads the model of a checkpoint with adapters, as in [`load_model`], and merges them into its weights."""
    with quiet(), _as_value_error(f"The model {str(checkpoint)!r} cannot be loaded", checkpoint):
        weights = merged_weights(checkpoint)
        config = AutoConfig.from_pretrained(checkpoint)
        model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32 if dtype == "auto" else dtype)
        load_stored(model, weights)
        model.generation_config = GenerationConfig.from_pretrained(checkpoint)
    return model.eval()


def load_whole_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """
    Loads a tokenizer for a translation model, and checks all its files.

    Args:
        name (`str` or `Path`): folder, or id of a repository on the Hub.

    Returns:
        [`PreTrainedTokenizerBase`].

    Raises:
        ValueError: the tokenizer is missing or lacks what translation needs, or one of its files is damaged.
    """
    name = pinned(name)
    folder = Path(name)
    if not folder.is_dir():
        folder = model_folder(name, "tokenizer.json", *TOKENIZER_SETTINGS)
    for file in TOKENIZER_SETTINGS:
        if (folder / file).exists():
            _read(folder / file)
    with quiet(), _as_value_error(f"The tokenizer in {name} cannot be loaded", folder):
        try:
            tokenizer = load_tokenizer(str(name))
        except Exception as error:
            if not (isinstance(error, ValueError) and str(name) in str(error)):
                _check_tokenizer_file(folder / "tokenizer.json")
            raise
        _check_template(folder / "tokenizer.json")
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
    _read(path)
    try:
        Tokenizer.from_file(str(path))
    # tokenizers raises plain exceptions.
    except Exception as error:
        raise ValueError(f"{path} is not a tokenizer: {str(error)[:SAID]}") from error


def _check_template(path: Path) -> None:
    """Raises a `ValueError` for a template with an undefined token, on which tokenizers would panic."""
    processor = _read(path).get("post_processor") if path.exists() else None
    for each in (processor or {}).get("processors", [processor or {}]):
        pieces = [*each.get("single", []), *each.get("pair", [])] if each.get("type") == "TemplateProcessing" else []
        for piece in pieces:
            token = piece.get("SpecialToken", {}).get("id")
            if token is not None and token not in each["special_tokens"]:
                raise ValueError(f"{path} has {_shown(token)} in a template, but not among its special_tokens.")


def check_finite(model: Any, name: str | Path) -> None:
    """Raises a `ValueError` if a weight of a model is NaN or infinite."""
    if tensor := find_non_finite(model):
        raise ValueError(f"The weights in {name} have non-finite values in {tensor}.")


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


def _check_config(name: str | Path) -> Path:
    """Checks the config files of a model, and returns their folder."""
    folder = model_folder(name)
    check_settings(folder)
    model_type = _read(folder / SETTINGS[0])["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"{folder / SETTINGS[0]} has the model_type {_shown(model_type)}, which the installed version of "
            "transformers does not have."
        )
    with quiet(), _as_value_error(f"{folder / SETTINGS[0]} cannot be used", folder):
        AutoConfig.from_pretrained(name, trust_remote_code=False)
    return folder


# ---- Settings ----------------------------------------------------------------------------------------------------


def check_settings(folder: Path) -> None:
    """
    Checks the values in `config.json` and `generation_config.json`, many of which transformers accepts unchecked.

    Args:
        folder (`Path`): folder with `config.json` and, optionally, `generation_config.json`.

    Raises:
        ValueError: a setting is invalid; the message has file, name, value and expectation.
    """
    size: Any = None
    for path in (folder / file for file in SETTINGS):
        settings = _read(path) if path.name == SETTINGS[0] or path.exists() else {}
        if path.name == SETTINGS[0] and not isinstance(settings.get("model_type"), str):
            raise ValueError(f"{path} has no model_type, so it is not the config of a model.")
        size = size or settings.get("decoder_vocab_size") or settings.get("vocab_size")
        for name, value in settings.items():
            if value is None:
                continue
            expected = _expected(name, value)
            if expected:
                raise ValueError(f"{path} has {name} {_shown(value)}, but it must be {expected}.")
            for id_ in _flat(value) if name in (*IDS, *FORCED_IDS, *DEPTHS) else ():
                if isinstance(size, int) and id_ >= size:
                    raise ValueError(f"{path} has the id {id_} as {name}, but the vocabulary has {size} entries.")


def _expected(name: str, value: Any) -> str | None:
    """Returns the expected kind of value, for an error message, or `None` if the value is valid."""
    if any(_is_extreme(number) for number in _flat(value)):
        return "finite"
    if name in COUNTS and not (_is_count(value, COUNTS[name]) and value <= HIGHEST_COUNT):
        return f"a whole number from {COUNTS[name]} to {HIGHEST_COUNT}"
    if name in NUMBERS and type(value) not in (int, float):
        return "a number"
    if name == "length_penalty" and abs(value) > LARGEST_ALPHA:
        return f"from -{LARGEST_ALPHA} to {LARGEST_ALPHA}"
    if name in FLAGS and type(value) is not bool:
        return "true or false"
    if name == "early_stopping" and not (type(value) is bool or value == "never"):
        return "true, false or 'never'"
    if name in CHOICES and value not in CHOICES[name]:
        return " or ".join(map(repr, CHOICES[name]))
    if name in (*IDS, *FORCED_IDS) and not all(map(_is_count, value if isinstance(value, list) else [value])):
        return "an id, a whole number of at least 0"
    if name in DEPTHS:
        lists = value if DEPTHS[name] == 2 else [value]
        if not isinstance(lists, list) or not all(isinstance(ids, list) and all(map(_is_count, ids)) for ids in lists):
            return f"a list of {'lists of ' if DEPTHS[name] == 2 else ''}ids"
    return None


def _is_extreme(value: Any) -> bool:
    """Returns whether a value is a number outside the range of torch."""
    return (isinstance(value, float) and not math.isfinite(value)) or (type(value) is int and abs(value) >= 2**63)


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from error


def _flat(value: Any) -> list[Any]:
    """Flattens nested lists."""
    return [id_ for each in value for id_ in _flat(each)] if isinstance(value, list) else [value]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


# ---- Revisions ---------------------------------------------------------------------------------------------------


def pinned(name: str | Path) -> str | Path:
    """
    Returns the name of a model without a revision: for `user/name@revision`, the folder of that commit in the cache,
    after downloading it; any other name as it is.

    Raises:
        ValueError: there is no such revision, or the Hub cannot be reached.
    """
    model, revision = split_revision(str(name))
    if revision is None:
        return name
    with _as_value_error(f"The model {str(name)!r} cannot be loaded: loading it from the Hub failed", name):
        return snapshot_download(model, revision=revision, ignore_patterns=IGNORED)


def commit_of(name: str, repo_type: str = "model", revision: str | None = None) -> str | None:
    """
    Returns the commit of a repository that was downloaded last.

    Args:
        name (`str`): id on the Hub, with or without `@revision`.
        repo_type (`str`): `"model"`, or `"dataset"`.
        revision (`str`, *optional*): branch, tag or commit; by default that of the name, or the main branch.

    Returns:
        `str`: commit, or `None` for a local path, and for what the cache does not have.
    """
    if Path(name).exists():
        return None
    name, named = split_revision(name)
    revision = revision or named or constants.DEFAULT_REVISION
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=repo_type)
    if (folder / "snapshots" / revision).is_dir():
        return revision
    reference = folder / "refs" / revision
    return reference.read_text("utf-8").strip() if reference.is_file() else None


# ---- Files and weights -------------------------------------------------------------------------------------------


def model_folder(name: str | Path, *files: str) -> Path:
    """Returns the folder of a model; for an id on the Hub, the cache folder, after downloading some small files."""
    name = pinned(name)
    if Path(name).is_dir():
        return Path(name)
    what = f"The model {str(name)!r} cannot be loaded: it is not a local folder, and loading it from the Hub failed"
    with _as_value_error(what, name):
        folder = Path(hf_hub_download(str(name), SETTINGS[0])).parent
        for file in files or SETTINGS[1:]:
            try:
                hf_hub_download(str(name), file)
            except LocalEntryNotFoundError:
                # Offline, the cache decides. Online, the Hub has failed to answer.
                if not is_offline_mode():
                    raise
            except EntryNotFoundError:
                # These files are optional.
                continue
    return folder


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
        raise ValueError(f"{what}: {kind}{text[:SAID] if text else type(error).__name__}") from error


def _read_tensors(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """
    Reads data types and shapes of the tensors in a folder from the headers of its safetensors files, if it has any.

    Raises:
        ValueError: a file is damaged; the message names it.
    """
    index = folder / "model.safetensors.index.json"
    paths = [folder / "model.safetensors"]
    if index.exists() and not paths[0].exists():
        files = _read(index).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise ValueError(f"{index} has no weight_map from tensor names to files.")
        paths = [folder / file for file in sorted(set(files.values()))]
    found: dict[str, tuple[str, list[int]]] = {}
    for path in paths:
        if not path.exists():
            continue
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    tensor = file.get_slice(name)
                    found[name] = (tensor.get_dtype(), tensor.get_shape())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
    return found


def _check_sizes(folder: Path) -> None:
    """Checks that weights are floating-point numbers, and that no size in the config exceeds them."""
    tensors, config = _read_tensors(folder), _read(folder / SETTINGS[0])
    for name, (dtype, _) in tensors.items():
        if dtype not in FLOATS and "quantization_config" not in config:
            raise ValueError(
                f"The weights in {folder} have {name} as {dtype}, but weights must be floating-point numbers."
            )
    # Checked before a model of such a size is allocated.
    weights = sum(math.prod(shape) for _, shape in tensors.values())
    for names, most, what in ((SIZES, weights, "values"), (LAYERS, len(tensors), "tensors")):
        for name, value in config.items() if tensors else ():
            if name in names and type(value) is int and value > most:
                raise ValueError(
                    f"{folder / SETTINGS[0]} has {name} {_shown(value)}, but its weights have only {most} {what}."
                )
