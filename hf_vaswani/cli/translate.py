"""The verbs that read text line by line: translate, score; the models and lines that others need as well."""

import argparse
import contextlib
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from ..files import decode_lines, read_lines

# Pairs of lines that are read and scored together.
PAIRS_AT_A_TIME = 1024
# Bytes; what has no end of a line for so long is no text.
LONGEST_LINE = 2**28

# Beyond this a beam search fills the memory and finds nothing more.
MOST = {"num_beams": 1000, "n_best": 1000}

logger = logging.getLogger("hf_vaswani")


def add_text_verbs(verbs: Any) -> None:
    """Adds the two to the verbs of a command line; each puts the function that does it under `run`."""
    translate = verbs.add_parser("translate", help="translate files, or standard input, line by line")
    translate.add_argument("files", nargs="*", type=Path, metavar="FILE", help="text; default: standard input")
    add_model(translate)
    translate.add_argument("--output", type=Path, metavar="FILE", help="where to write; default: standard output")
    translate.add_argument("--resume", action="store_true", help="go on with an output that is not complete")
    translate.add_argument(
        "--n-best", type=int, metavar="N", help="the N best translations of a line: its number, score, translation"
    )
    translate.add_argument(
        "--format", choices=("tsv", "jsonl"), help="of --n-best: N lines with tabs (default), or an object a line"
    )
    translate.set_defaults(run=_translate)

    score = verbs.add_parser(
        "score", help="log-probability of given translations: a line each, of the whole, of a token, and the tokens"
    )
    score.add_argument("--model", required=True, help="model folder, or id on the Hub")
    score.add_argument("--target-language", metavar="CODE", help="of a model for several: which, as de")
    score.add_argument("source", type=Path, help="sentences, one a line")
    score.add_argument("target", type=Path, help="their translations, one a line")
    score.set_defaults(run=_score)


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


# ---- Translating and scoring line by line ------------------------------------------------------------------------


def _translate(options: argparse.Namespace) -> None:
    from tqdm.auto import tqdm

    check_counts(options, "num_beams", "n_best")
    if options.format and options.n_best is None:
        raise ValueError("--format is of --n-best, which is not there.")
    if options.resume and options.output is None:
        raise ValueError("--resume needs the --output that is to be completed.")
    if not options.files and sys.stdin is None:
        raise ValueError("Standard input is closed: name the files that are to be translated.")
    from ..processes import Processes
    from ..translation.lines import (
        LINES_AT_A_TIME,
        LineTranslator,
        OutputFile,
        each_some,
        lines_done,
        rest_of,
        write_whole,
        written,
    )

    processes = Processes()
    is_main = processes.is_main_process

    def check_files() -> int:
        for file in options.files:
            require_file(file)
            if options.output is not None and options.output.is_file() and options.output.samefile(file):
                raise ValueError(f"--output {options.output} is one of the files that are to be translated.")
        return lines_done(options.output, options.resume, options.n_best, options.format)

    number = processes.on_main_process(check_files)
    models, tokenizer, front, tags = load_translators(options)
    num_beams = models[0].generation_config.num_beams or 1
    if options.n_best is not None and max(options.n_best, 2) > num_beams:
        raise ValueError(
            f"--n-best {options.n_best} needs a beam of at least {max(options.n_best, 2)}, but --num-beams is "
            f"{num_beams}."
        )
    translator = LineTranslator(models, tokenizer, options.n_best)
    with contextlib.ExitStack() as stack:
        output: Any = sys.stdout
        if options.output and is_main:
            output = stack.enter_context(OutputFile(options.output))
        # The bar is for a person: not where the output is shown, and not where nobody looks.
        hidden = not is_main or (None if options.output is not None or not sys.stdout.isatty() else True)
        bar = stack.enter_context(tqdm(initial=number, unit=" lines", disable=hidden))
        for chunk in processes.chunks(rest_of(_all_lines(options.files, front, tags), number), LINES_AT_A_TIME):
            found = each_some(processes, translator, chunk)
            if is_main:
                texts = (written(i, each, options.n_best, options.format) for i, each in enumerate(found, number + 1))
                write_whole(output, "".join(texts))
            number += len(chunk)
            bar.update(len(chunk))
    were_cut = sum(processes.gather(translator.were_cut))
    if is_main:
        tell_cut(were_cut, translator.longest)


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


def _all_lines(files: list[Path], front: str, tags: tuple[str, ...]) -> Iterator[str]:
    if not files:
        lines = decode_lines(sys.stdin.buffer, "the input", LONGEST_LINE)
        yield from addressed((line.rstrip("\r\n") for line in lines), "the input", front, tags)
    for path in files:
        yield from addressed(text_of(path), str(path), front, tags)


def _score(options: argparse.Namespace) -> None:
    from ..translation.batches import log_probabilities

    source, target = options.source, options.target
    require_file(source)
    require_file(target)
    (model,), tokenizer, front, tags = _load([options.model], options.target_language)
    source_lines, target_lines = addressed(text_of(source), str(source), front, tags), text_of(target)
    done = 0
    while chunk := list(islice(zip_longest(source_lines, target_lines), PAIRS_AT_A_TIME)):
        for number, pair in enumerate(chunk, start=done + 1):
            if None in pair:
                shorter, longer = (source, target) if pair[0] is None else (target, source)
                raise ValueError(f"{shorter} ends after line {number - 1}, but {longer} does not.")
        pairs = [list(side) for side in zip(*chunk, strict=True)]
        try:
            found = log_probabilities(model, tokenizer, pairs[0], pairs[1])
        except ValueError as error:
            raise ValueError(f"In the lines from {done + 1} on: {error}") from error
        for log_probability, tokens in found:
            sys.stdout.write(f"{log_probability:.4f}\t{log_probability / tokens:.4f}\t{tokens}\n")
        sys.stdout.flush()
        done += len(chunk)


# ---- Models, and lines of text -----------------------------------------------------------------------------------


def load_translators(options: argparse.Namespace) -> tuple[list[Any], Any, str, tuple[str, ...]]:
    """As [`_load`], with the beam and the kind of weights that were asked for."""
    models, tokenizer, front, tags = _load(options.model, options.target_language)
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


def _load(names: Sequence[str], target_language: str | None) -> tuple[list[Any], Any, str, tuple[str, ...]]:
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
