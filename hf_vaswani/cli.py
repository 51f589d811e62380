"""The command line: hf-vaswani VERB. One sentence and exit code 2 for whatever a person can put right."""

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

# Pairs of lines that are read and scored together.
PAIRS_AT_A_TIME = 1024

logger = logging.getLogger("hf_vaswani")


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs one verb.

    Args:
        argv (`Sequence[str]`, *optional*): the command line without the program's name; by default the process's own.

    Returns:
        `int`: the exit code: 0, or 2 after bad input.
    """
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logger.setLevel(logging.INFO)
    # Accelerate warns at each checkpoint that a tied matrix is stored once, as it should be.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="hf-vaswani", description="The 2017 Transformer: train it, use it.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("train", help="train a recipe: train RECIPE.yaml [--section.key value ...]", add_help=False)
    translate = verbs.add_parser("translate", help="translate files, or standard input, line by line")
    translate.add_argument("files", nargs="*", type=Path, metavar="FILE", help="text; default: standard input")
    translate.add_argument(
        "--model",
        required=True,
        action="append",
        help="model folder, or id on the Hub; given several times, their probabilities are averaged",
    )
    translate.add_argument("--target-language", metavar="CODE", help="of a model for several: which, as de")
    translate.add_argument("--num-beams", type=int, metavar="N", help="beam size; default: the model's own")
    translate.add_argument("--int8", action="store_true", help="weights of 8 bits: faster on a CPU, nearly the same")
    translate.add_argument("--output", type=Path, metavar="FILE", help="where to write; default: standard output")
    translate.add_argument("--resume", action="store_true", help="go on with an output that is not complete")
    translate.add_argument(
        "--n-best", type=int, metavar="N", help="the N best translations of a line: its number, score, translation"
    )
    translate.add_argument(
        "--format", choices=("tsv", "jsonl"), help="of --n-best: N lines with tabs (default), or an object a line"
    )
    score = verbs.add_parser(
        "score", help="log-probability of given translations: a line each, of the whole, of a token, and the tokens"
    )
    score.add_argument("--model", required=True, help="model folder, or id on the Hub")
    score.add_argument("--target-language", metavar="CODE", help="of a model for several: which, as de")
    score.add_argument("source", type=Path, help="sentences, one a line")
    score.add_argument("target", type=Path, help="their translations, one a line")
    average = verbs.add_parser("average", help="write the mean of several checkpoints as a model")
    average.add_argument("folders", nargs="+", metavar="FOLDER", help="checkpoints or models, or one run")
    average.add_argument("--last", type=int, metavar="N", help="of a run: its last N checkpoints")
    average.add_argument("--best", type=int, metavar="N", help="of a run: the N checkpoints of its best validations")
    average.add_argument("--by", choices=("bleu", "loss"), help="what is best; default: what the run's recipe says")
    average.add_argument(
        "--output", required=True, metavar="FOLDER", help="the model's folder, which must not exist yet"
    )
    try:
        # A recipe has a command line of its own, in which every key is an option.
        if arguments[:1] == ["train"]:
            _train(arguments[1:])
        else:
            options = parser.parse_args(arguments)
            if options.verb == "average":
                _average([Path(name) for name in options.folders], options)
            elif options.verb == "score":
                _score(options.model, options.target_language, options.source, options.target)
            else:
                _translate(options)
        return 0
    except BrokenPipeError:
        # Whoever reads the output has enough, as `head` has.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError) as error:
        logger.debug("Where it happened:", exc_info=True)
        sys.stderr.write(f"hf-vaswani: {' '.join(str(error).split())}\n")
        return 2
    except RuntimeError as error:
        # torch has no class of its own for this on a CPU.
        if "memory" not in str(error):
            raise
        sys.stderr.write(f"hf-vaswani: There is not enough memory: {str(error).splitlines()[0]}\n")
        return 2
    except KeyboardInterrupt as error:
        sys.stderr.write(f"hf-vaswani: {str(error) or 'stopped.'}\n")
        return getattr(error, "exit_code", 130)


def _train(arguments: list[str]) -> None:
    from .recipe import load_recipe

    recipe = load_recipe(arguments)
    # Imported once the recipe is right: these take seconds.
    from accelerate import PartialState
    from tqdm.contrib.logging import logging_redirect_tqdm
    from transformers.utils.logging import disable_progress_bar

    from .training import train

    disable_progress_bar()
    with logging_redirect_tqdm():
        result = train(recipe)
    if PartialState().is_main_process:
        for sample in result.get("samples", []):
            sys.stdout.write("".join(f"{name:>11}  {text}\n" for name, text in sample.items()) + "\n")
        if "bleu" in result:
            sys.stdout.write(f"Test BLEU {result['bleu']:.2f}  ({result['signature']})\n")
        sys.stdout.write(f"Model     {result['model']}\n")


def _average(folders: list[Path], options: argparse.Namespace) -> None:
    from .checkpoints import RECIPE, checkpoints_to_average, save_average
    from .recipe import load_recipe

    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"There is no folder {str(folder)!r}.")
    counts = [count for count in (options.last, options.best) if count is not None]
    if counts:
        if len(counts) > 1 or counts[0] < 1 or len(folders) > 1:
            raise ValueError("Of one run, give --last N or --best N, N being 1 or more.")
        training = load_recipe([str(folders[0] / RECIPE)]).training
        best_by = options.by or training.best_by
        found = checkpoints_to_average(folders[0], training.save_every, options.last, options.best, best_by)
        if len(found) < counts[0]:
            raise ValueError(f"{folders[0]} has {len(found)} such checkpoints, and not {counts[0]}.")
        folders = found
    elif (folders[0] / RECIPE).is_file():
        raise ValueError(f"{folders[0]} is the folder of a run: say which of its checkpoints by --last N or --best N.")
    save_average(folders, Path(options.output))
    sys.stdout.write(f"The mean of {', '.join(map(str, folders))}\nModel     {options.output}\n")


def _translate(options: argparse.Namespace) -> None:
    from tqdm.auto import tqdm

    for name, value in (("--num-beams", options.num_beams), ("--n-best", options.n_best)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, but it is {value}.")
    if options.format and options.n_best is None:
        raise ValueError("--format is of --n-best, which is not there.")
    if options.resume and options.output is None:
        raise ValueError("--resume needs the --output that is to be completed.")
    from .translation import LineTranslator, Processes, lines_done, rest_of, write_whole, written

    processes = Processes()
    is_main = processes.number == 0

    def check_files() -> int:
        for file in options.files:
            _require_file(file)
            if options.output is not None and options.output.exists() and options.output.samefile(file):
                raise ValueError(f"--output {options.output} is one of the files that are to be translated.")
        return lines_done(options.output, options.resume, options.n_best, options.format)

    number = processes.first(check_files)
    models, tokenizer, front, tags = _load(options.model, options.target_language)
    if options.num_beams is not None:
        models[0].generation_config.num_beams = options.num_beams
    num_beams = models[0].generation_config.num_beams or 1
    if options.n_best is not None and options.n_best > num_beams:
        raise ValueError(f"--n-best {options.n_best} needs a beam of as many: --num-beams is {num_beams}.")
    if options.int8:
        from .quantization import to_int8

        models = [to_int8(model) for model in models]
    translator = LineTranslator(models, tokenizer, options.n_best)
    with contextlib.ExitStack() as stack:
        output = sys.stdout
        if options.output and is_main:
            output = stack.enter_context(options.output.open("a", encoding="utf-8"))
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
    if were_cut and is_main:
        logger.warning(
            f"Cut: {were_cut} {'line is' if were_cut == 1 else 'lines are'} longer than the {translator.longest:,} "
            "tokens that the model takes, and translated in pieces, at the ends of sentences where there are any."
        )


def _require_file(path: Path) -> None:
    if not path.exists():
        raise ValueError(f"There is no file {str(path)!r}.")
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder, and not a text.")


def _all_lines(files: list[Path], front: str, tags: tuple[str, ...]) -> Iterator[str]:
    if not files:
        yield from _addressed(_lines(sys.stdin.buffer, "the input"), "the input", front, tags)
    for path in files:
        with path.open("rb") as file:
            yield from _addressed(_lines(file, str(path)), str(path), front, tags)


def _score(model_name: str, target_language: str | None, source: Path, target: Path) -> None:
    from .evaluation import log_probabilities

    _require_file(source)
    _require_file(target)
    with source.open("rb") as sources, target.open("rb") as targets:
        (model,), tokenizer, front, tags = _load([model_name], target_language)
        source_lines = _addressed(_lines(sources, str(source)), str(source), front, tags)
        target_lines = _lines(targets, str(target))
        done = 0
        while chunk := list(islice(zip_longest(source_lines, target_lines), PAIRS_AT_A_TIME)):
            for number, pair in enumerate(chunk, start=done + 1):
                if None in pair:
                    shorter, longer = (source, target) if pair[0] is None else (target, source)
                    raise ValueError(f"{shorter} ends after line {number - 1}, but {longer} does not.")
            pairs = [list(side) for side in zip(*chunk, strict=True)]
            for log_probability, tokens in log_probabilities(model, tokenizer, pairs[0], pairs[1]):
                sys.stdout.write(f"{log_probability:.4f}\t{log_probability / tokens:.4f}\t{tokens}\n")
            sys.stdout.flush()
            done += len(chunk)


def _load(names: Sequence[str], target_language: str | None) -> tuple[list[Any], Any, str, tuple[str, ...]]:
    """Models, their tokenizer, the tag to put in front of each source, those of which one must be there already."""
    from .tokenizer import find_language_tag, language_tags, load_tokenizer

    for name in names:
        folder = Path(name)
        if (folder / "model" / "config.json").is_file():
            raise ValueError(f"{folder} is the folder of a run; its model is {folder / 'model'}.")
        if not folder.is_dir() and (folder.is_absolute() or len(folder.parts) != 2):
            raise ValueError(
                f"There is no model folder {name!r}, and an id on the Hub would be of the form user/name."
            )
    tokenizer = load_tokenizer(names[0])
    for name in names[1:]:
        if load_tokenizer(name).get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"The models {names[0]} and {name} have different vocabularies: they cannot be mixed.")
    front = "" if target_language is None else f"{find_language_tag(tokenizer, target_language)} "
    models = [_load_model(name) for name in names]
    # A model for several directions would take any, without one.
    return models, tokenizer, front, () if front else tuple(language_tags(tokenizer).values())


def _load_model(name: str) -> Any:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForSeq2SeqLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        model = AutoModelForSeq2SeqLM.from_pretrained(name)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"The model {name!r} cannot be loaded: {error}") from error
    if torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
    return model


def _addressed(lines: Iterable[str], name: str, front: str, tags: tuple[str, ...]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if tags and line.strip() and not line.startswith(tags):
            raise ValueError(
                f"Line {number} of {name} does not say into which language: give --target-language, or put one of "
                f"{', '.join(tags)} in front."
            )
        yield front + line if line.strip() else line


def _lines(file: Iterable[bytes], name: str) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"Line {number} of {name} is not UTF-8: {error.reason}.") from error


if __name__ == "__main__":
    sys.exit(main())
