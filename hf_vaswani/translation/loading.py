"""Loads models and tokenizers completely, or refuses them in one sentence that names the damaged file."""

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import hf_hub_download, is_offline_mode
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForSeq2SeqLM, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ..data.tokenizer import load_tokenizer
from ..files import read_json
from ..model.generation_vaswani import CHOICES, LARGEST_ALPHA

logger = logging.getLogger(__name__)

SETTINGS = ("config.json", "generation_config.json")
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
# The ids that transformers' configs and generation configs have.
IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
FORCED_IDS = ("forced_bos_token_id", "forced_eos_token_id")
# Counts, by the least that each may be.
COUNTS = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "max_length": 1,
    "max_new_tokens": 1,
    "max_length_offset": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
}
NUMBERS = ("length_penalty", "repetition_penalty", "temperature", "top_p")
FLAGS = ("do_sample", "use_cache", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
# Beyond this a search would not end.
HIGHEST_COUNT = 1_000_000
# How deep ids lie in lists.
DEPTHS = {"suppress_tokens": 1, "begin_suppress_tokens": 1, "bad_words_ids": 2}
# Sizes of which there are at least as many weights, and numbers of layers, each of which has a tensor.
SIZES = (
    *("vocab_size", "decoder_vocab_size", "d_model", "d_ff", "d_k", "d_v", "num_heads"),
    *("encoder_ffn_dim", "decoder_ffn_dim", "encoder_attention_heads", "decoder_attention_heads"),
)
LAYERS = ("encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers", "num_hidden_layers")
# The types that weights are stored in, by safetensors' names.
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
# Characters of a value, or of a library's message, that are shown.
SHOWN, SAID = 80, 300


def load_translator(name: str | Path, dtype: Any = "auto") -> tuple[Any, PreTrainedTokenizerBase]:
    """
    Loads an encoder-decoder model and its tokenizer, and tries them on one token.

    Args:
        name (`str` or `Path`): a model folder, or the id of a repository on the Hub.
        dtype (`torch.dtype` or `str`): type of the weights; by default the one they were saved in.

    Returns:
        `tuple` of a [`PreTrainedModel`] in evaluation mode and its [`PreTrainedTokenizerBase`].

    Raises:
        ValueError: as [`load_model`] and [`load_whole_tokenizer`], or the two do not fit each other, or no translation
            comes out of them.
    """
    _check_config(name)
    tokenizer = load_whole_tokenizer(name)
    model = load_model(name, dtype)
    check_vocabulary(model, tokenizer, name)
    # The generation config may have anything in it, and so may the tokenizer.
    with quiet(), _refused(f"The model {str(name)!r} cannot translate", name), torch.inference_mode():
        inputs = tokenizer([tokenizer.eos_token], return_tensors="pt")
        found = model.generate(**inputs, max_new_tokens=1, num_return_sequences=1, return_dict_in_generate=False)
        tokenizer.batch_decode(found, skip_special_tokens=True)
    return model, tokenizer


def load_model(name: str | Path, dtype: Any = "auto") -> Any:
    """
    Loads an encoder-decoder model, every weight of which was in its files.

    Args:
        name (`str` or `Path`): a model folder, or the id of a repository on the Hub.
        dtype (`torch.dtype` or `str`): type of the weights; by default the one they were saved in.

    Returns:
        [`PreTrainedModel`] on the CPU, in evaluation mode.

    Raises:
        ValueError: a file is missing or damaged, has values that cannot be used, or the weights are not finite or not
            those of the config. The message names the file.
    """
    folder = _check_config(name)
    _check_sizes(folder)
    with quiet(), _refused(f"The model {str(name)!r} cannot be loaded", folder):
        try:
            model, report = AutoModelForSeq2SeqLM.from_pretrained(
                name,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                # Code of the repository is not run, and nobody is asked about it.
                trust_remote_code=False,
            )
        except UnpicklingError as error:
            raise ValueError(
                f"The weights in {name} are a pickle that is not whole, or has more in it than weights, and cannot be "
                "read without running its code; model.safetensors is read."
            ) from error
        except Exception:
            _read_tensors(folder)
            raise
    _check_report(report, name)
    check_finite(model, name)
    return model.eval()


def load_whole_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """
    Loads a tokenizer that a translation model can use.

    Args:
        name (`str` or `Path`): a folder, or the id of a repository on the Hub.

    Returns:
        [`PreTrainedTokenizerBase`].

    Raises:
        ValueError: the tokenizer is missing, one of its files is damaged, or it lacks what translation needs.
    """
    folder = Path(name)
    if not folder.is_dir():
        folder = _folder(name, "tokenizer.json", *TOKENIZER_SETTINGS)
    for file in TOKENIZER_SETTINGS:
        if (folder / file).exists():
            _read(folder / file)
    with quiet(), _refused(f"The tokenizer in {name} cannot be loaded", folder):
        try:
            tokenizer = load_tokenizer(str(name))
        except Exception as error:
            if not (isinstance(error, ValueError) and str(name) in str(error)):
                _check_tokenizer_file(folder / "tokenizer.json")
            raise
        tokenizer("a")
    longest = tokenizer.model_max_length
    if type(longest) not in (int, float) or not longest >= 2:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'} has model_max_length {_shown(longest)}, but it must be at least 2."
        )
    return tokenizer


def _check_tokenizer_file(path: Path) -> None:
    """Refuses a damaged tokenizer.json by its name, which the libraries do not tell."""
    if not path.exists():
        raise ValueError(f"{path} is missing, or another file that a fast tokenizer could be made of.")
    _read(path)
    try:
        Tokenizer.from_file(str(path))
    # Its errors are of no narrower class.
    except Exception as error:
        raise ValueError(f"{path} is not a tokenizer: {str(error)[:SAID]}") from error


def check_finite(model: Any, name: str | Path) -> None:
    """Raises a `ValueError` for the first tensor of a model that has NaN or infinity."""
    for tensor, weight in (*model.named_parameters(), *model.named_buffers()):
        if weight.is_floating_point() and not weight.isfinite().all():
            raise ValueError(f"The weights in {name} have values in {tensor} that are not finite.")


def check_vocabulary(model: Any, tokenizer: PreTrainedTokenizerBase, name: str | Path) -> None:
    """Raises a `ValueError` where the tokenizer of a model has ids that its embedding has no row for."""
    rows = model.get_input_embeddings().weight.shape[0]
    token, highest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if highest >= rows:
        raise ValueError(
            f"The tokenizer in {name} has the id {highest} ({_shown(token)}), but the embedding of the model has only "
            f"{rows} rows: they are not of one model."
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the libraries' progress bars, and their warnings about what is refused here in one sentence."""
    verbosity, has_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_bars:
            transformers_logging.enable_progress_bar()


def _check_config(name: str | Path) -> Path:
    """Refuses the settings of a model that cannot be used; returns the folder that they are in."""
    folder = _folder(name)
    check_settings(folder)
    model_type = _read(folder / SETTINGS[0])["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"{folder / SETTINGS[0]} has the model_type {_shown(model_type)}, which this transformers does not know."
        )
    with quiet(), _refused(f"{folder / SETTINGS[0]} cannot be used", folder):
        AutoConfig.from_pretrained(name, trust_remote_code=False)
    return folder


# ---- Settings ----------------------------------------------------------------------------------------------------


def check_settings(folder: Path) -> None:
    """
    Refuses values in `config.json` and `generation_config.json` that transformers takes and cannot use.

    Args:
        folder (`Path`): has the first, and perhaps the second, without which transformers takes its own defaults.

    Raises:
        ValueError: with the file, the name and the value.
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
    """Returns the kind of value that a setting must have, or `None` if it has it."""
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
    """Tells whether a value is a number that torch cannot hold."""
    return (isinstance(value, float) and not math.isfinite(value)) or (type(value) is int and abs(value) >= 2**63)


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from error


def _flat(value: Any) -> list[Any]:
    """An id, or all ids of lists."""
    return [id_ for each in value for id_ in _flat(each)] if isinstance(value, list) else [value]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


# ---- Files and weights -------------------------------------------------------------------------------------------


def _folder(name: str | Path, *files: str) -> Path:
    """The folder of a model; for the id of a repository, the one in the Hub's cache that has these small files."""
    if Path(name).is_dir():
        return Path(name)
    with _refused(f"The model {str(name)!r} cannot be loaded", name):
        folder = Path(hf_hub_download(str(name), SETTINGS[0])).parent
        for file in files or SETTINGS[1:]:
            try:
                hf_hub_download(str(name), file)
            except LocalEntryNotFoundError:
                # Without a network only the cache is asked; with one, nobody knows what the Hub has.
                if not is_offline_mode():
                    raise
            except EntryNotFoundError:
                # Files that the repository does not have are not needed.
                continue
    return folder


@contextmanager
def _refused(what: str, name: str | Path) -> Iterator[None]:
    """
    Any error as a `ValueError`: transformers, tokenizers and torch have no class of their own for damaged files, and
    what is wrong with a value shows wherever it is used first. One that has the name of the model in it stays.
    """
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        logger.debug("Where it happened:", exc_info=True)
        text = " ".join(str(error).split())
        if isinstance(error, ValueError) and str(name) in text:
            raise
        kind = "" if isinstance(error, (ValueError, OSError, RuntimeError)) else f"{type(error).__name__}: "
        raise ValueError(f"{what}: {kind}{text[:SAID] if text else type(error).__name__}") from error


def _read_tensors(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """
    Types and shapes of the tensors in a folder, as the beginnings of its safetensors files say; empty without one.

    Raises:
        ValueError: a file is damaged; the message names it.
    """
    index = folder / "model.safetensors.index.json"
    paths = [folder / "model.safetensors"]
    if index.exists() and not paths[0].exists():
        files = _read(index).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise ValueError(f"{index} has no weight_map from names of tensors to files.")
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
    """Refuses weights that are no floating-point numbers, and sizes of a config that they do not have."""
    tensors, config = _read_tensors(folder), _read(folder / SETTINGS[0])
    for name, (dtype, _) in tensors.items():
        if dtype not in FLOATS and "quantization_config" not in config:
            raise ValueError(f"The weights in {folder} have {name} as {dtype}, which is no type of weights.")
    # Before a model of such a size is made.
    weights = sum(math.prod(shape) for _, shape in tensors.values())
    for names, most, what in ((SIZES, weights, "weights"), (LAYERS, len(tensors), "tensors")):
        for name, value in config.items() if tensors else ():
            if name in names and type(value) is int and value > most:
                raise ValueError(
                    f"{folder / SETTINGS[0]} has {name} {_shown(value)}, but beside it are only {most} {what}."
                )


def _check_report(report: dict[str, Any], name: str | Path) -> None:
    """Refuses what `from_pretrained` has filled up, left out or made anew."""
    misfits = sorted(report["mismatched_keys"])
    what = {
        f"of another shape ({tuple(misfits[0][1])} in place of {tuple(misfits[0][2])})" if misfits else "": [
            str(tensor) for tensor, *_ in misfits
        ],
        "missing": sorted(map(str, report["missing_keys"])),
        "too many": sorted(map(str, report["unexpected_keys"])),
    }
    for kind, tensors in what.items():
        if tensors:
            count = "1 tensor is" if len(tensors) == 1 else f"{len(tensors)} tensors are"
            first = "" if len(tensors) == 1 else "the first is "
            raise ValueError(
                f"The weights in {name} are not those of its config.json: {count} {kind}, {first}{tensors[0]}."
            )
    if report["error_msgs"]:
        raise ValueError(f"The weights in {name} cannot be loaded: {report['error_msgs'][0]}"[:SAID])
