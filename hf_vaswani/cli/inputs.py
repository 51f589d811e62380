"""Inputs that several verbs share: models, target languages and lines of text; and the tables they print."""

import argparse
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import read_lines

if TYPE_CHECKING:
    import torch

    from ..conversion.engines import EngineOptions
    from ..translation.lines import LineTranslator

# Pairs of lines that are read and computed together on a CPU.
PAIRS_AT_A_TIME = 1024
# In bytes: a file without a line end for so long is not text.
MAX_LINE = 2**28
# A wider beam fills the memory and finds nothing better.
MAX_COUNTS = {"num_beams": 1000, "n_best": 1000}

logger = logging.getLogger("hf_vaswani")


def add_models(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose the models, one or an ensemble, and the search."""
    parser.add_argument(
        "--model",
        required=True,
        action="append",
        help="folder of a run or a model, or Hub id, e.g. runs/my; repeat the option to translate with an ensemble",
    )
    add_place(parser)
    add_budget(parser)
    add_search(parser)
    parser.add_argument(
        "--int8", action="store_true", help="quantize weights to 8 bits: faster on a CPU, nearly the same translations"
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose a model, which [`load_one`] loads."""
    parser.add_argument("--model", required=True, help="folder of a run or a model, or Hub id, e.g. runs/my")
    add_place(parser)


def add_place(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose the revision, the target language and the device of models."""
    add_revision(parser)
    parser.add_argument("--target-language", metavar="CODE", help="target language of a multilingual model, e.g. de")
    add_device(parser)


def add_pairs(parser: argparse.ArgumentParser) -> None:
    """Adds two files whose lines belong together, see [`line_pairs`]."""
    parser.add_argument("source", type=Path, metavar="SOURCE", help="file of source sentences, one per line")
    parser.add_argument("target", type=Path, metavar="TARGET", help="file of their translations, one per line")


def add_search(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose the beam size, the engine and its arithmetic."""
    parser.add_argument("--num-beams", type=int, metavar="N", help="beam size, e.g. 4; default: the model's own")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="number format of the matrix products of torch; auto: bfloat16 where this machine is faster with it; "
        "default: that of the weights",
    )
    parser.add_argument(
        "--engine",
        # Checked with the other options of engines.
        metavar="{auto,torch,ctranslate2}",
        default="torch",
        help="what computes: torch (default), ctranslate2, or auto: ctranslate2 where it searches by exactly the "
        "model's settings",
    )
    parser.add_argument(
        "--compute-type",
        choices=("float32", "int8", "int8_float32", "bfloat16", "auto"),
        help="number format in which CTranslate2 computes; auto: the fastest of this processor; default: float32",
    )
    parser.add_argument(
        "--approximate",
        action="store_true",
        help="let CTranslate2 search by the settings that come closest to the model's",
    )
    parser.add_argument(
        "--shortlist",
        action="store_true",
        help="search among the likely entries of the vocabulary alone, by the model's shortlist, which hf-vaswani "
        "shortlist writes",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds the option that chooses the device; see [`choose_device`]."""
    parser.add_argument(
        "--device",
        default="auto",
        metavar="DEVICE",
        help="where to compute: cpu, or the accelerator of this machine, as cuda, cuda:1, mps, xpu or npu; default: "
        "auto, the accelerator if there is one, and the CPU for what computes there alone",
    )


def add_budget(parser: argparse.ArgumentParser) -> None:
    """Adds the option that chooses the size of batches."""
    parser.add_argument(
        "--tokens-per-batch",
        type=int,
        metavar="N",
        help="token budget of a batch, sentences times the longest, padding included; default: 4096 on a CPU and more "
        "on a GPU, which a smaller one would leave idle",
    )


def take_device(arguments: Sequence[str], program: str) -> tuple[argparse.Namespace, list[str]]:
    """Returns options of [`add_device`] and [`add_budget`] in a command line of recipe keys, and the rest of it."""
    parser = argparse.ArgumentParser(prog=program, usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    add_device(parser)
    add_budget(parser)
    options, others = parser.parse_known_args(arguments)
    check_counts(options, "tokens_per_batch")
    return options, others


def add_revision(parser: argparse.ArgumentParser) -> None:
    """Adds the option that chooses the revision of models on the Hub."""
    parser.add_argument(
        "--revision",
        metavar="REVISION",
        help="branch, tag or commit of a model on the Hub, for models that do not name theirs, as user/name@v2 does; "
        "default: its main branch",
    )


def add_recipe_verb(verbs: Any, name: str, purpose: str, run: Callable[[argparse.Namespace], None]) -> None:
    """
    Adds a verb whose arguments are a recipe and overrides of its keys.

    Args:
        verbs (`argparse._SubParsersAction`): the verbs of the command line.
        name (`str`), purpose (`str`): the verb, and what it does, for `hf-vaswani --help`.
        run (`Callable`): does it; gets the words behind the verb as `arguments`.
    """
    # Recipes have a parser of their own, --help included, with an option for each key: here none is an option.
    parser = verbs.add_parser(
        name, help=f"{purpose}: {name} RECIPE.yaml [--section.key value ...]", add_help=False, prefix_chars="\0"
    )
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(run=run)


def check_counts(options: argparse.Namespace, *names: str) -> None:
    """Raises a `ValueError` if one of these options is below 1 or above its limit in `MAX_COUNTS`."""
    for name in names:
        value, most = getattr(options, name), MAX_COUNTS.get(name, math.inf)
        if value is not None and not 1 <= value <= most:
            expected = "at least 1" if most == math.inf else f"from 1 to {most}"
            raise ValueError(f"--{name.replace('_', '-')} must be {expected}, but it is {value}.")


# ---- Lines of text -----------------------------------------------------------------------------------------------


def require_file(path: Path) -> None:
    """Raises a `ValueError` if the file does not exist or is a folder."""
    if not path.exists():
        raise ValueError(f"There is no file {str(path)!r}.")
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder, not a text file.")


def check_output(path: Path, option: str, is_new: bool = False) -> None:
    """Raises a `ValueError` if a file cannot be written, or `is_new` and it is there."""
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder: name a file.")
    if is_new and path.exists():
        raise ValueError(f"{option} {path} exists already: choose another file.")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path} is in a folder that does not exist.")
    # A device or a pipe may be in a folder of the system.
    if not path.exists() and not os.access(path.parent, os.W_OK):
        raise ValueError(f"{option} {path} is in a folder that cannot be written to.")


def text_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a text file, without line ends; a .gz file is decompressed."""
    return (line.rstrip("\r\n") for line in read_lines(path, MAX_LINE))


def warn_split(count: int, longest: int) -> None:
    """Warns once about lines that were too long for the model and translated in pieces."""
    if count:
        logger.warning(
            f"Split: {count} {'line is' if count == 1 else 'lines are'} longer than the model's limit of {longest:,} "
            "tokens, and translated in pieces, cut between sentences where possible."
        )


# ---- Models ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadedModels:
    """
    Models loaded for translation.

    Attributes:
        models (`list` of [`PreTrainedModel`]): one model, or an ensemble with one vocabulary.
        tokenizer ([`PreTrainedTokenizerBase`]): their tokenizer.
        tags ([`LanguageTags`]): those of the tokenizer.
        language (`str`, *optional*): target language of sources without a tag.
        engine (`Callable`, *optional*): translates in place of `generate()`, see [`choose_engine`].
        dtype (`torch.dtype`, *optional*): number format of matrix products; by default that of the weights.
        shortlist ([`Shortlist`], *optional*): the likely entries of translations, for `generate()`.
        folders (`Sequence[Path]`): folders of the models.
        device (`torch.device`, *optional*): what translates, also if it is an engine; by default the CPU.
        tokens_per_batch (`int`, *optional*): token budget of a batch; by default that of the device.
    """

    models: list[Any]
    tokenizer: Any
    tags: Any
    language: str | None = None
    engine: Any = None
    dtype: Any = None
    shortlist: Any = None
    folders: Sequence[Path] = ()
    device: Any = None
    tokens_per_batch: int | None = None

    @property
    def times(self) -> int:
        """Factor by which the device takes more lines at a time than a CPU."""
        from ..translation.budgets import times_on

        return 1 if self.device is None else times_on(self.device)

    def lines(self, n_best: int | None = None) -> "LineTranslator":
        """Returns what translates lines, with n-best lists of this size."""
        from ..translation.lines import LineTranslator

        how = self.engine, self.dtype, self.shortlist, self.tokens_per_batch
        return LineTranslator(self.models, self.tokenizer, n_best, *how)

    def tagged(self, lines: Iterable[str], name: str) -> Iterator[str]:
        """
        Puts the tag of the target language in front of lines, see [`LanguageTags.put`].

        Args:
            lines (`Iterable[str]`): source sentences.
            name (`str`): name of their file, for errors.

        Raises:
            ValueError: the model needs a tag, and a line has none, or a line has that of another language.
        """
        for number, line in enumerate(lines, start=1):
            try:
                yield self.tags.put(line, self.language)
            except ValueError as error:
                raise ValueError(f"{name}, line {number}: {error}") from error

    def target_of(self, lines: Iterable[str]) -> str | None:
        """Returns the language into which lines with their tags are translated, if it is known and the only one."""
        tags = {tag for line in lines if line.strip() and (tag := self.tags.split(line)[0].strip())}
        found = [self.language] if self.language else [tag[2:-1] for tag in tags] or self.tags.targets
        return found[0] if len(found) == 1 else None


def line_pairs(options: argparse.Namespace, translators: LoadedModels) -> Iterator[tuple[int, list[str], list[str]]]:
    """
    Reads the files of [`add_pairs`], the sources with their language tag.

    Yields:
        `tuple`: the number of pairs before these, counted from 0, and as many sources and targets as the device works
            on at a time.

    Raises:
        ValueError: a file has more lines than the other.
    """
    source, target = options.source, options.target
    lines = zip_longest(translators.tagged(text_lines(source), str(source)), text_lines(target))
    done = 0
    while chunk := list(islice(lines, translators.times * PAIRS_AT_A_TIME)):
        for number, (sentence, translation) in enumerate(chunk, start=done):
            if sentence is None or translation is None:
                shorter, longer = (source, target) if sentence is None else (target, source)
                raise ValueError(
                    f"{shorter} ends after line {number}, but {longer} continues: each line needs one of its own in "
                    "the other file."
                )
        yield done, [pair[0] for pair in chunk], [pair[1] for pair in chunk]
        done += len(chunk)


def engine_of(options: argparse.Namespace) -> "EngineOptions":
    """Returns the engine that the options of [`add_search`] choose, after checking them with each other."""
    from ..conversion.engines import EngineOptions

    n_best = getattr(options, "n_best", None)
    engine = EngineOptions(
        options.engine,
        options.compute_type,
        options.approximate,
        n_best,
        shortlist=options.shortlist,
        tokens_per_batch=options.tokens_per_batch,
    )
    engine.check()
    is_int8 = getattr(options, "int8", False)
    if is_int8 and options.engine != "torch":
        raise ValueError(
            f"--int8 is for torch, but --engine is {options.engine}: with ctranslate2, use --compute-type int8."
        )
    if options.dtype and is_int8:
        raise ValueError("--dtype is for torch with unquantized weights, but --int8 is given: leave one of them out.")
    if options.dtype and options.engine != "torch":
        raise ValueError(
            f"--dtype is for torch, but --engine is {options.engine}: with ctranslate2, use --compute-type."
        )
    return engine


def load_one(options: argparse.Namespace) -> LoadedModels:
    """Loads the model that the options of [`add_model`] give."""
    device = choose_device(options.device)
    translators = load_models([options.model], options.target_language, device, options.revision)
    return replace(translators, tokens_per_batch=getattr(options, "tokens_per_batch", None))


def load_translators(options: argparse.Namespace) -> LoadedModels:
    """Loads the models that the options of [`add_models`] give; applies beam size, number format and engine."""
    from ..conversion.engines import choose_engine

    check_counts(options, "tokens_per_batch")
    engine = engine_of(options)
    device = choose_device(options.device, options.engine, options.int8)
    # Where an engine translates, a copy of the model for torch would only take memory from it.
    first = "cpu" if options.engine != "torch" else device
    translators = load_models(options.model, options.target_language, first, options.revision)
    translators = replace(translators, device=device, tokens_per_batch=options.tokens_per_batch)
    if options.shortlist:
        translators = replace(translators, shortlist=_load_shortlist(translators))
    set_beams(translators.models[0], options.num_beams)
    if options.int8:
        from ..translation.quantization import to_int8

        return replace(translators, models=[to_int8(model) for model in translators.models])
    if options.engine == "torch":
        return _with_dtype(translators, options.dtype)
    engine = replace(engine, device=device)
    found = choose_engine(engine, translators.models, translators.tokenizer, translators.folders[0])
    if found is None or getattr(options, "alignment", False) or getattr(options, "markup", None):
        # Alignments are read from the attention, which no engine returns.
        translators = replace(translators, models=[model.to(device) for model in translators.models])
    return replace(translators, engine=found)


def set_beams(model: Any, num_beams: int | None) -> None:
    """Sets the beam size of a model, if one is given."""
    settings = model.generation_config
    if num_beams is not None:
        settings.num_beams = num_beams
    if (settings.num_beams or 1) == 1:
        # They have no effect on greedy search, and transformers would warn about each.
        settings.length_penalty = settings.early_stopping = None


def check_beam(model: Any, n_best: int | None, option: str) -> None:
    """Raises a `ValueError` if n-best lists or scores, which this option asks for, need a wider beam."""
    num_beams = model.generation_config.num_beams or 1
    if n_best is not None and max(n_best, 2) > num_beams:
        raise ValueError(f"{option} needs a beam size of at least {max(n_best, 2)}, but --num-beams is {num_beams}.")


def _load_shortlist(translators: LoadedModels) -> Any:
    """Returns the shortlist of the first model, whose vocabulary is that of all."""
    from ..model.modeling_vaswani import VaswaniForConditionalGeneration
    from ..translation.shortlist import Shortlist

    model, folder = translators.models[0], translators.folders[0]
    if not isinstance(model, VaswaniForConditionalGeneration):
        raise ValueError(
            f"--shortlist needs a Vaswani model, but {folder} is a {type(model).__name__}: hf-vaswani convert turns "
            "some into one."
        )
    return Shortlist.load(str(folder), translators.tokenizer, model.config.vocab_size)


def _with_dtype(translators: LoadedModels, choice: str | None) -> LoadedModels:
    """Applies --dtype: the weights in float32, and the number format of the products."""
    import torch

    from ..translation.quantization import fastest_translation

    if choice is None:
        return translators
    if choice == "auto":
        dtype, why = fastest_translation(translators.models[0])
        logger.info(f"Products in {str(dtype).removeprefix('torch.')}, because {why}")
        return replace(translators, dtype=dtype)
    return replace(translators, models=[model.float() for model in translators.models], dtype=getattr(torch, choice))


def choose_device(name: str, engine: str = "torch", int8: bool = False) -> "torch.device":
    """
    Returns the device that computes.

    Args:
        name (`str`): a device of torch; or `auto`, for the accelerator of this machine if there is one, and for the
            CPU where the engine or int8 computes there alone.
        engine (`str`): `torch`, `ctranslate2` or `auto`.
        int8 (`bool`): whether torch computes with 8-bit weights.

    Raises:
        ValueError: this machine has no such device, or the engine or int8 does not compute on it.
    """
    import torch

    from ..processes import launched_here, own_device

    own = device = own_device()
    if name != "auto":
        known = ["cpu"]
        if torch.accelerator.is_available():
            kind, count = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
            known += [str(kind), *(f"{kind}:{index}" for index in range(count))]
        if name not in known:
            raise ValueError(
                f"--device is {name!r}, but torch finds {', '.join(known)} on this machine: give one of these."
            )
        device = torch.device(name)
        if device.index is not None and (here := launched_here()) > 1:
            raise ValueError(
                f"--device is {name}, but {here} processes were launched, each of which has a device of its own: "
                f"give {device.type}."
            )
        if device.index is None and device.type == own.type:
            device = own
    from ..conversion.engines import is_on_cpu

    if device.type == "cpu" or not (int8 or (engine == "ctranslate2" and is_on_cpu(device))):
        return device
    what = "--int8" if int8 else f"--engine {engine}"
    if name != "auto":
        raise ValueError(f"--device is {name}, but {what} computes on the CPU alone here: leave out --device.")
    logger.info(f"{what} computes on the CPU alone here: the {device.type} of this machine is not used")
    return torch.device("cpu")


def load_models(
    names: Sequence[str],
    target_language: str | None,
    device: "torch.device | str | None" = None,
    revision: str | None = None,
    key: str = "--model",
) -> LoadedModels:
    """
    Loads models for translation.

    Args:
        names (`Sequence[str]`): models, see [`resolve_model`].
        target_language (`str`, *optional*): language code of the translations.
        device (`torch.device` or `str`, *optional*): where they compute; by default as [`choose_device`] chooses for
            `auto`.
        revision (`str`, *optional*): revision of those on the Hub that do not name theirs.
        key (`str`): option or key of the recipe that names them, for error messages.

    Raises:
        ValueError: a model does not exist or is damaged, the vocabularies differ, or the model does not translate into
            the target language.
    """
    import torch

    from ..model.sentences_vaswani import LanguageTags
    from ..model_names import resolve_model, with_revision
    from ..processes import limit_threads
    from ..translation.loading import load_translator

    limit_threads()
    folders = [resolve_model(name, key) for name in with_revision(names, revision)]
    loaded = [load_translator(folder) for folder in folders]
    models, tokenizer = [model for model, _ in loaded], loaded[0][1]
    for name, (_, other) in zip(names, loaded, strict=True):
        if other.get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"{names[0]} and {name} have different vocabularies and cannot form an ensemble.")
    # Without its tag, a multilingual model would translate into any of its languages.
    tags = LanguageTags(tokenizer, models[0].config, "--target-language", is_required=True)
    if target_language is not None:
        if tags.targets and target_language not in tags.targets:
            raise ValueError(
                f"The model translates into {', '.join(tags.targets)}, but --target-language is {target_language!r}."
            )
        if tags.by_language or not tags.targets:
            tags.find(target_language)
    device = choose_device("auto") if device is None else torch.device(device)
    models = [model.to(device) for model in models]
    return LoadedModels(models, tokenizer, tags, target_language, folders=folders, device=device)


def load_recorded(
    names: Sequence[str], key: str, device: "torch.device | None" = None
) -> tuple[LoadedModels, list[str]]:
    """
    Loads the models that a recipe names, for work that is recorded.

    Args:
        names (`Sequence[str]`): models, see [`resolve_model`].
        key (`str`): key of the recipe that names them, for error messages.
        device (`torch.device`, *optional*): as in [`load_models`].

    Returns:
        `tuple[LoadedModels, list[str]]`: the models, and the digest of each.

    Raises:
        ValueError: as in [`load_models`].
    """
    from ..model_names import resolve_model
    from ..translation.backtranslation import model_digest

    folders = [str(resolve_model(name, key)) for name in names]
    try:
        loaded = load_models(folders, None, device)
    except ValueError as error:
        raise ValueError(f"{key} {', '.join(names)}: {error}") from error
    return loaded, [f"SHA-256 {model_digest(model, loaded.tokenizer)}" for model in loaded.models]


# ---- Tables ------------------------------------------------------------------------------------------------------


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Prints rows with the same columns; numbers have two decimals and stand on the right."""
    from tabulate import tabulate

    # tabulate would parse "+1.20" as a number and drop its sign.
    sides = ["left" if isinstance(cell, str) else "right" for cell in rows[0].values()]
    cells = [[f"{cell:.2f}" if isinstance(cell, float) else cell for cell in row.values()] for row in rows]
    sys.stdout.write(tabulate(cells, headers=list(rows[0]), colalign=sides, disable_numparse=True) + "\n")
