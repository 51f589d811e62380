"""The verb that looks at the text before a training: check."""

import argparse
import contextlib
import io
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..extras import extra
from ..files import atomic_lines, atomic_write_bytes, atomic_write_text, tsv_cell
from .inputs import check_output

if TYPE_CHECKING:
    import numpy as np

    from ..corpus.checking import Checker
    from ..corpus.duplicates import Duplicates, HeldOut
    from ..corpus.report import Report
    from ..data.reading import Source
    from ..recipe import Recipe

logger = logging.getLogger("hf_vaswani")

# Pairs of the validation set, or of the training text without one, that say what is usual.
SAMPLE = 10_000
# A key of a recipe, as in --data.num_proc and --more_data+, is not among the options of the verb.
KEY = re.compile(r"--(seed\b|\w+[._+])")
DESCRIPTION = (
    "Look at the training text before a training: counts, lengths, languages, duplicates, text that is also in the "
    "validation and test sets, and pairs that are no translations of each other."
)
EPILOG = "example: hf-vaswani check configs/my.yaml --output clean.tsv --rejected rejected.tsv"


def add_verbs(verbs: Any) -> None:
    """Adds the verb to the command line, with its function under `run`."""
    # The keys of a recipe may follow, so that the options have a parser of their own.
    check = verbs.add_parser(
        "check", help="look at the text before a training, and clean it", add_help=False, prefix_chars="\0"
    )
    check.add_argument("arguments", nargs="*")
    check.set_defaults(run=_check)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-vaswani check",
        usage="%(prog)s TEXT [TEXT] [options] [--section.key value ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument(
        "text",
        nargs="*",
        metavar="TEXT",
        help="a recipe (.yaml); or two line-aligned files; or, with --columns, one .tsv, .csv, .jsonl or .parquet "
        "file, a dataset folder or a dataset id on the Hub. Keys of a recipe may follow",
    )
    parser.add_argument(
        "--columns",
        nargs=2,
        metavar=("SOURCE", "TARGET"),
        help="columns of one file or dataset: names, e.g. en de, or numbers from 0 for a file without a header",
    )
    parser.add_argument(
        "--languages",
        nargs=2,
        metavar=("SOURCE", "TARGET"),
        help="language codes; default: the names of the columns, or the extensions of the two files",
    )
    parser.add_argument(
        "--limits",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="limits in place of those that are proposed, e.g. max_ratio=4 max_length=100",
    )
    parser.add_argument("--no-language", action="store_true", help="do not identify languages, which takes most time")
    parser.add_argument("--output", type=Path, metavar="FILE", help="new .tsv file for the pairs with nothing wrong")
    parser.add_argument("--rejected", type=Path, metavar="FILE", help="new .tsv file for the others, with reasons")
    parser.add_argument("--json", type=Path, metavar="FILE", help="new file for the report as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="new .png file for the lengths")
    return parser


def _check(options: argparse.Namespace) -> None:
    arguments, keys = _split(options.arguments)
    options = _parser().parse_args(arguments)
    _check_outputs(options)
    draw = _plotter() if options.plot else None
    _hide_progress_of_datasets()
    recipe = _recipe(options, keys)
    if recipe.more_data and (options.output or options.rejected):
        raise ValueError(
            f"The recipe has {1 + len(recipe.more_data)} sources, but --output and --rejected take the pairs of one: "
            "to write them, check the files of each source by themselves."
        )
    from ..data.pairs import held_out_text
    from ..training.preparation import task_data

    data = task_data(recipe)
    sources, sets = data.read(), data.read_sets()
    held_out = held_out_text([*sources, *sets])
    reports = _reports(options, sources, held_out)
    for (i, split), (pairs, found) in held_out.counts().items():
        # A set without training text is reported with the last source.
        report, name = (
            (reports[i], split) if i < len(sources) else (reports[-1], f"{sets[i - len(sources)].name} {split}")
        )
        report.held_out[name] = {"pairs": pairs, "found": found}
    _write_reports(options, reports, draw)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Splits the command line into arguments of the verb and keys of a recipe with their values."""
    own: list[str] = []
    keys: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if KEY.match(argument):
            keys += [argument] if "=" in argument else [argument, *islice(rest, 1)]
        else:
            own.append(argument)
    return own, keys


def _hide_progress_of_datasets() -> None:
    # Imported before modules that name the extra of trainings, which is larger.
    with extra("clean"):
        from datasets import disable_progress_bars
    disable_progress_bars()


def _reports(
    options: argparse.Namespace, sources: "list[Source]", held_out: "HeldOut[tuple[int, str]]"
) -> "list[Report]":
    import numpy as np

    from ..corpus.checking import Checker
    from ..corpus.duplicates import Duplicates

    limits = _limits(options.limits)
    identifier = None if options.no_language else _identifier()
    duplicates, has_held_out = Duplicates(), bool(held_out.counts())
    reports = []
    for source in sources:
        checker = Checker((source.source_language, str(source.target_language)), identifier)
        for language in checker.unknown:
            logger.warning(
                f"py3langid does not know the language {language!r}, so it is not looked for: give its code of two "
                "letters, e.g. --languages en de"
            )
        report = _new_report(source, checker, limits)
        with _written(options, source) as write:
            for pairs in _parts(source):
                measures = checker.measure(*pairs)
                found = checker.judge(measures, report.limits, report.norm)
                found |= _repeated(source.name, pairs, ~found["empty"], report, duplicates)
                if has_held_out:
                    found["held_out"] = np.array(held_out.find(*pairs), dtype=bool) & ~found["empty"]
                write(pairs, found, report.pairs)
                report.add(measures, found)
        reports.append(report)
    return reports


def _parts(source: "Source") -> Iterator[tuple[list[str], list[str]]]:
    """Yields the training text in parts, the sources and the targets of each."""
    from tqdm.auto import tqdm

    pairs = source.splits["train"]
    length = len(pairs) if isinstance(pairs, Sized) else None
    with tqdm(desc=source.name, total=length, unit=" pairs", disable=None) as bar:
        for batch in source.batches("train"):
            yield batch["source"], batch["target"]
            bar.update(len(batch["source"]))


def _repeated(
    name: str, pairs: tuple[list[str], list[str]], full: "np.ndarray", report: "Report", duplicates: "Duplicates"
) -> "dict[str, np.ndarray]":
    """Finds the pairs that were there before, and counts those of which one side was."""
    import numpy as np

    sources, targets = ([side[i] for i in np.flatnonzero(full)] for side in pairs)
    repeated, same_source, same_target = duplicates.find(name, sources, targets)
    report.same_source += same_source
    report.same_target += same_target
    flags = np.zeros(len(full), dtype=bool)
    flags[full] = repeated
    return {"duplicate": flags}


# ---- The text ----------------------------------------------------------------------------------------------------


def _recipe(options: argparse.Namespace, keys: list[str]) -> "Recipe":
    """Reads the recipe that is given, or makes one of the text that is given."""
    from ..recipe import PAIR_TASKS
    from ..recipe_file import load_recipe

    text = options.text
    if not text and not keys:
        raise ValueError("There is no text to check: give a recipe (.yaml), two files, or one with --columns.")
    if text and Path(text[0]).suffix in (".yaml", ".yml"):
        if text[1:]:
            raise ValueError(f"A recipe is checked alone, but beside {text[0]} there is {text[1]!r}.")
        if options.columns or options.languages:
            raise ValueError("--columns and --languages do not apply to a recipe: set keys of its data section.")
        recipe = load_recipe([text[0], *keys], "hf-vaswani check")
        if recipe.task not in PAIR_TASKS:
            raise ValueError(f"{text[0]} has no sentence pairs (task: {recipe.task}), and only these are checked.")
    else:
        # No run is made: the name is never used.
        recipe = load_recipe(["--run_dir=check", *_as_keys(options), *keys], "hf-vaswani check")
    # Files are read as they are; a dataset is read as the training reads it, which may have it in its cache.
    if all(part.train_files is not None for part in (recipe.data, *recipe.more_data)):
        recipe.data.streaming = True
    return recipe


def _as_keys(options: argparse.Namespace) -> list[str]:
    """Returns the keys of a recipe for the text that is given."""
    from ..data.remote import file_name, is_url

    text, columns = options.text, options.columns
    if len(text) > 2:
        raise ValueError(f"A text is one file or two, but {len(text)} are given: {', '.join(text)}.")
    values: dict[str, Any] = {}
    if len(text) == 2:
        if columns:
            raise ValueError("--columns applies to one file or dataset, but two files are given.")
        found = [Path(file_name(name).removesuffix(".gz")).suffix[1:] for name in text]
        languages = options.languages or (found if all(found) and found[0] != found[1] else ["source", "target"])
        values["train_files"] = dict(zip(languages, text, strict=True))
    elif text:
        if columns is None:
            raise ValueError(
                f"One text is given, {text[0]}: name its columns, e.g. --columns en de, or both its files."
            )
        numbered = any(column.isdecimal() for column in columns)
        languages = options.languages or (["source", "target"] if numbered else columns)
        values["source_column"], values["target_column"] = columns
        if Path(text[0]).is_file() or is_url(text[0]):
            values["train_files"] = text[0]
        else:
            values |= {"dataset": text[0], "validation_split": None, "test_split": None}
    else:
        return []
    values["source_language"], values["target_language"] = languages
    return [f"--data.{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()]


def _new_report(source: "Source", checker: "Checker", set_limits: dict[str, Any]) -> "Report":
    """Proposes limits, and starts the report of a source with them."""
    from ..corpus.checking import Limits
    from ..corpus.report import Report

    split = "validation" if "validation" in source.splits else "train"
    rows = list(islice(source.splits[split], SAMPLE))
    measures = checker.measure([row["source"] for row in rows], [row["target"] for row in rows])
    limits, norm = checker.propose(measures)
    origin = f"from {len(rows):,} pairs of the validation set"
    if split == "train":
        limits, origin = Limits(), "defaults, because there is no validation set to propose them from"
    if set_limits:
        limits, origin = replace(limits, **set_limits), f"{origin}; {', '.join(set_limits)} by --limits"
    return Report(source.name, source.origin("train"), limits, norm, origin)


def _limits(words: list[str]) -> dict[str, Any]:
    """Reads the limits that are given as NAME=VALUE."""
    from ..corpus.checking import Limits

    kinds: dict[str, Any] = {each.name: each.type for each in fields(Limits)}
    found: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in kinds:
            raise ValueError(f"--limits has {word!r}, but the limits are {', '.join(kinds)}: give NAME=VALUE.")
        if name in found:
            raise ValueError(f"--limits has {name} twice: give it once.")
        try:
            found[name] = kinds[name](value)
        except ValueError as error:
            kind = "an integer" if kinds[name] is int else "a number"
            raise ValueError(f"--limits {name} must be {kind}, but it is {value!r}.") from error
        lowest, highest = int(name == "max_ratio"), 1 if name in ("min_letters", "max_foreign") else 10**9
        if not lowest <= found[name] <= highest:
            raise ValueError(f"--limits {name} must be from {lowest} to {highest:,}, but it is {value}.")
    return found


def _identifier() -> Any:
    """Loads the identifier of languages; `None` if it is not installed."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        logger.warning("Languages are not identified, which needs py3langid: pip install 'hf_vaswani[clean]'")
        return None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


# ---- Outputs -----------------------------------------------------------------------------------------------------


def _check_outputs(options: argparse.Namespace) -> None:
    outputs = {name: getattr(options, name) for name in ("output", "rejected", "json", "plot")}
    given = {name: path for name, path in outputs.items() if path is not None}
    for name, path in given.items():
        check_output(path, f"--{name}", is_new=True)
        if [other.resolve() for other in given.values()].count(path.resolve()) > 1:
            raise ValueError(f"--{name} {path} is given for two outputs: choose another file.")
        if name in ("output", "rejected") and path.suffix != ".tsv":
            raise ValueError(f"--{name} {path} must end in .tsv, by which a recipe recognizes its format.")
        if name == "plot" and path.suffix != ".png":
            raise ValueError(f"--plot {path} must end in .png.")


@contextlib.contextmanager
def _written(options: argparse.Namespace, source: "Source") -> Iterator[Callable[..., None]]:
    """Opens the two outputs, and yields the function that writes the pairs of a part to them."""
    import numpy as np

    names = (source.columns["source"], source.columns["target"])
    # Numbered columns mean that the first line is a pair, in the same columns.
    numbers = [name for name in names if isinstance(name, int)]
    header = len(numbers) < 2
    places = [0, 1] if header else numbers
    with contextlib.ExitStack() as stack:
        kept, rejected = (
            stack.enter_context(atomic_lines(path)) if path else None for path in (options.output, options.rejected)
        )
        if kept and header:
            kept.write("\t".join(map(str, names)) + "\n")
        if rejected:
            rejected.write("pair\treasons\t" + "\t".join(map(str, names)) + "\n")

        def write(pairs: tuple[list[str], list[str]], found: "dict[str, np.ndarray]", before: int) -> None:
            wrong = np.any(list(found.values()), axis=0).tolist()
            for i, (sides, is_wrong) in enumerate(zip(zip(*pairs, strict=True), wrong, strict=True)):
                if is_wrong and rejected:
                    reasons = ",".join(name for name, flags in found.items() if flags[i])
                    rejected.write("\t".join((f"{before + i + 1}", reasons, *map(tsv_cell, sides))) + "\n")
                elif kept and not is_wrong:
                    row = [""] * (1 + max(places))
                    row[places[0]], row[places[1]] = map(tsv_cell, sides)
                    kept.write("\t".join(row) + "\n")

        yield write


def _write_reports(
    options: argparse.Namespace, reports: "list[Report]", draw: "Callable[[Sequence[Report]], bytes] | None"
) -> None:
    from ..corpus.report import total

    for report in reports:
        sys.stdout.write(report.as_text() + "\n")
    if options.json:
        content = {"sources": [report.as_json() for report in reports], "total": total(reports)}
        atomic_write_text(options.json, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    if draw:
        atomic_write_bytes(options.plot, draw(reports))


def _plotter() -> "Callable[[Sequence[Report]], bytes]":
    """Returns the function that draws the lengths of each source as a PNG file."""
    with extra("viz", "--plot"):
        from matplotlib.figure import Figure

    def draw(reports: "Sequence[Report]") -> bytes:
        figure = Figure(figsize=(7, 3 * len(reports)), dpi=120, layout="constrained")
        for panel, report in zip(figure.subplots(len(reports), 1, squeeze=False)[:, 0], reports, strict=True):
            end = 2 + max(report.quantile(side, 0.999) for side in (0, 1))
            for side, label in enumerate(("source", "target")):
                panel.stairs(report.lengths[side, :end], label=label)
            panel.set(title=report.name, xlabel="words", ylabel="sentences")
            panel.legend(frameon=False)
        file = io.BytesIO()
        figure.savefig(file, format="png", metadata={"Software": None})
        return file.getvalue()

    return draw
