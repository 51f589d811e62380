"""The verbs that read text line by line: translate, score."""

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from ..files import decode_lines
from . import inputs
from .inputs import add_model, addressed, check_counts, load, load_translators, require_file, tell_cut, text_of

# Pairs of lines that are read and scored together.
PAIRS_AT_A_TIME = 1024
logger = logging.getLogger("hf_vaswani")


def add_verbs(verbs: Any) -> None:
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
    from ..translation.lines import LineTranslator, OutputFile, Processes, lines_done, rest_of, write_whole, written

    processes = Processes()
    is_main = processes.number == 0

    def check_files() -> int:
        for file in options.files:
            require_file(file)
            if options.output is not None and options.output.is_file() and options.output.samefile(file):
                raise ValueError(f"--output {options.output} is one of the files that are to be translated.")
        return lines_done(options.output, options.resume, options.n_best, options.format)

    number = processes.first(check_files)
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
        for chunk in processes.shared(rest_of(_all_lines(options.files, front, tags), number)):
            found = processes.each_some(translator, chunk)
            if is_main:
                texts = (written(i, each, options.n_best, options.format) for i, each in enumerate(found, number + 1))
                write_whole(output, "".join(texts))
            number += len(chunk)
            bar.update(len(chunk))
    were_cut = sum(processes.gathered(translator.were_cut))
    if is_main:
        tell_cut(were_cut, translator.longest)


def _all_lines(files: list[Path], front: str, tags: tuple[str, ...]) -> Iterator[str]:
    if not files:
        lines = decode_lines(sys.stdin.buffer, "the input", inputs.LONGEST_LINE)
        yield from addressed((line.rstrip("\r\n") for line in lines), "the input", front, tags)
    for path in files:
        yield from addressed(text_of(path), str(path), front, tags)


def _score(options: argparse.Namespace) -> None:
    from ..translation.batches import log_probabilities

    source, target = options.source, options.target
    require_file(source)
    require_file(target)
    (model,), tokenizer, front, tags = load([options.model], options.target_language)
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
