"""Inputs that several verbs share: models, target languages, lines of text."""

import argparse
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..files import read_lines

# Bytes; what has no end of a line for so long is no text.
LONGEST_LINE = 2**28
# Beyond this a beam search fills the memory and finds nothing more.
MOST = {"num_beams": 1000, "n_best": 1000}

logger = logging.getLogger("hf_vaswani")


def add_model(parser: argparse.ArgumentParser) -> None:
    """The options that say by which models, and how, a text is translated."""
    parser.add_argument(
        "--model",
        required=True,
        action="append",
        help="model folder, or id on the Hub; given several times, their probabilities are averaged",
    )
    parser.add_argument("--target-language", metavar="CODE", help="of a model for several: which, as de")
    parser.add_argument("--num-beams", type=int, metavar="N", help="beam size; default: the model's own")
    parser.add_argument("--int8", action="store_true", help="weights of 8 bits: faster on a CPU, nearly the same")


def check_counts(options: argparse.Namespace, *names: str) -> None:
    """Raises a `ValueError` for the first of these options that is given and below 1, or above what is of use."""
    for name in names:
        value, most = getattr(options, name), MOST.get(name, math.inf)
        if value is not None and not 1 <= value <= most:
            expected = "at least 1" if most == math.inf else f"from 1 to {most}"
            raise ValueError(f"--{name.replace('_', '-')} must be {expected}, but it is {value}.")


def tell_cut(were_cut: int, longest: int) -> None:
    """The one message about lines that were translated in pieces."""
    if were_cut:
        logger.warning(
            f"Cut: {were_cut} {'line is' if were_cut == 1 else 'lines are'} longer than the {longest:,} "
            "tokens that the model takes, and translated in pieces, at the ends of sentences where there are any."
        )


def require_file(path: Path) -> None:
    """Raises a `ValueError` where there is no such file."""
    if not path.exists():
        raise ValueError(f"There is no file {str(path)!r}.")
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder, and not a text.")


def load_translators(options: argparse.Namespace) -> tuple[list[Any], Any, str, tuple[str, ...]]:
    """As [`load`], with the beam and the kind of weights that were asked for."""
    models, tokenizer, front, tags = load(options.model, options.target_language)
    settings = models[0].generation_config
    if options.num_beams is not None:
        settings.num_beams = options.num_beams
    if (settings.num_beams or 1) == 1:
        # Without a beam they mean nothing, and transformers would warn of each.
        settings.length_penalty = settings.early_stopping = None
    if options.int8:
        from ..translation.quantization import to_int8

        models = [to_int8(model) for model in models]
    return models, tokenizer, front, tags


def load(names: Sequence[str], target_language: str | None) -> tuple[list[Any], Any, str, tuple[str, ...]]:
    """Models, their tokenizer, the tag to put in front of each source, those of which one must be there already."""
    import torch

    from ..data.tokenizer import language_tags
    from ..files import check_weights
    from ..translation.loading import load_translator

    for name in names:
        folder = Path(name)
        if (folder / "model" / "config.json").is_file():
            raise ValueError(f"{folder} is the folder of a run; its model is {folder / 'model'}.")
        if not name or (not folder.is_dir() and (folder.is_absolute() or len(folder.parts) != 2)):
            raise ValueError(
                f"There is no model folder {name!r}, and an id on the Hub would be of the form user/name."
            )
        check_weights(folder)
    loaded = [load_translator(name) for name in names]
    models, tokenizer = [model for model, _ in loaded], loaded[0][1]
    for name, (_, other) in zip(names, loaded, strict=True):
        if other.get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"The models {names[0]} and {name} have different vocabularies: they cannot be mixed.")
    front = _front(models[0], tokenizer, target_language)
    if torch.accelerator.is_available():
        models = [model.to(torch.accelerator.current_accelerator()) for model in models]
    # A model for several directions would take any, without one.
    return models, tokenizer, front, () if front else tuple(language_tags(tokenizer).values())


def _front(model: Any, tokenizer: Any, target_language: str | None) -> str:
    """
    The tag of the target language and a space, or nothing where a model needs none.

    Raises:
        ValueError: the model does not translate into this language.
    """
    from ..data.tokenizer import find_language_tag, language_tags

    if target_language is None:
        return ""
    targets = dict.fromkeys(pair[1] for pair in getattr(model.config, "language_pairs", None) or ())
    if targets and target_language not in targets:
        raise ValueError(f"The model translates into {', '.join(targets)}, and not into {target_language!r}.")
    if targets and not language_tags(tokenizer):
        return ""
    return f"{find_language_tag(tokenizer, target_language)} "


def addressed(lines: Iterable[str], name: str, front: str, tags: tuple[str, ...]) -> Iterator[str]:
    """Lines with the tag in front that they need; raises a `ValueError` for one that has none of `tags`."""
    for number, line in enumerate(lines, start=1):
        if tags and line.strip() and not line.startswith(tags):
            raise ValueError(
                f"Line {number} of {name} does not say into which language: give --target-language, or put one of "
                f"{', '.join(tags)} in front."
            )
        yield front + line if line.strip() and not (front and line.startswith(front.strip())) else line


def text_of(path: Path) -> Iterator[str]:
    """The lines of a file, which may be compressed, without their ends."""
    return (line.rstrip("\r\n") for line in read_lines(path, LONGEST_LINE))
