"""The verb `evaluate`: translate a test set and score the translations."""

import argparse
import csv
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from .inputs import (
    add_models,
    check_counts,
    check_output,
    load_translators,
    print_table,
    warn_split,
)

if TYPE_CHECKING:
    from .inputs import LoadedModels


def add_verbs(verbs: Any) -> None:
    """Adds the verb to the command line, with its function under `run`."""
    evaluate = verbs.add_parser(
        "evaluate",
        help="translate a test set and score it with BLEU, chrF and TER",
        description="Translate a test set and score it with sacreBLEU: BLEU, chrF and TER, with their signatures.",
        epilog="example: hf-vaswani evaluate --model runs/my/model --data test.en test.de",
    )
    add_models(evaluate)
    evaluate.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="TEXT",
        help="source file and one or more reference files, line by line; or one .tsv, .csv, .jsonl or .parquet file, "
        "a dataset folder or a dataset id on the Hub, with --columns",
    )
    evaluate.add_argument(
        "--columns",
        nargs=2,
        metavar=("SOURCE", "REFERENCE"),
        help="columns of one file or dataset: names, e.g. en de, or numbers from 0 for a file without a header",
    )
    evaluate.add_argument("--split", metavar="NAME", help="split of a dataset; default: test")
    evaluate.add_argument("--config", metavar="NAME", help="configuration of a dataset, e.g. de-en")
    evaluate.add_argument("--output", type=Path, metavar="FILE", help="new file for the translations; default: none")
    evaluate.add_argument(
        "--altered",
        metavar="NAME,...",
        help="also score the test set with its sentences altered: upper (in capital letters), title (a capital letter "
        "at the beginning of each word), typos (typing errors), no_final_mark (without final marks)",
    )
    evaluate.add_argument("--sentences", action="store_true", help="also print the scores of each sentence")
    evaluate.add_argument(
        "--tokenize",
        default="auto",
        metavar="NAME",
        help="sacreBLEU tokenizer for BLEU, e.g. char; default: auto, which is zh, ja-mecab or ko-mecab if the model "
        "translates into Chinese, Japanese or Korean, and otherwise 13a",
    )
    evaluate.add_argument("--lowercase", action="store_true", help="ignore case in BLEU and chrF; TER always does")
    evaluate.add_argument(
        "--format", choices=("table", "json", "csv"), default="table", help="output format; default: table"
    )
    evaluate.set_defaults(run=_evaluate)


def _evaluate(options: argparse.Namespace) -> None:
    from ..data.augmentation import altered_set
    from ..metrics import METRICS, score, sentence_scores, tokenizer_of

    check_counts(options, "num_beams")
    alterations = _alterations(options)
    output = options.output
    if output is not None:
        check_output(output, "--output", is_new=output.is_file())
    sources, references = _read_test_set(options)
    translators = load_translators(options)
    lines = list(translators.tagged(sources, options.data[0]))
    tokenize = tokenizer_of(options.tokenize, translators.target_of(lines))
    settings = {"tokenize": tokenize, "lowercase": options.lowercase}
    # Settings that cannot be used fail here, before the text is translated.
    score([sentence[0] for sentence in references[:1]], references[:1], sources=sources[:1], **settings)
    translations = _translate(lines, translators)
    if output is not None:
        _write(output, "".join(f"{line}\n" for line in translations))
    scores = {"lines": len(translations)} | score(translations, references, sources=sources, **settings)
    if options.sentences:
        each = sentence_scores(translations, references, sources=sources, **settings)
        scores["sentences"] = [row | {"translation": text} for row, text in zip(each, translations, strict=True)]
    for name in alterations:
        altered, answers = altered_set(sources, references, name)
        lines = list(translators.tagged(altered, options.data[0]))
        scored = score(_translate(lines, translators), answers, sources=altered, **settings)
        scores.setdefault("altered", {})[name] = {metric: scored[metric] for metric in METRICS}
    _print_scores(options.format, scores)


def _alterations(options: argparse.Namespace) -> list[Any]:
    """Returns the alterations that --altered names, each once."""
    from ..recipe import Alteration

    known = get_args(Alteration)
    names = list(dict.fromkeys((options.altered or "").split(","))) if options.altered is not None else []
    for name in names:
        if name not in known:
            raise ValueError(f"--altered has {name!r}: choose from {','.join(known)}, separated by commas.")
    if names and options.sentences and options.format == "csv":
        raise ValueError("--altered and --sentences do not fit into one table of --format csv: give one of them.")
    return names


def _read_test_set(options: argparse.Namespace) -> tuple[list[str], list[tuple[str, ...]]]:
    """Reads the source sentences, and the references of each."""
    from ..data.reading import load_pairs

    source, *references = options.data
    # Imported after the module that names the missing extra.
    from datasets import disable_progress_bars

    disable_progress_bars()
    if references:
        if options.columns is not None:
            raise ValueError("--columns applies to one file or dataset, but --data names several files.")
        parts = [
            load_pairs("source", "reference", test_files={"source": source, "reference": reference})["test"]
            for reference in references
        ]
    else:
        parts = [_read_table(source, options)]
    if not len(parts[0]):
        raise ValueError(f"There is no text in {source}.")
    return list(parts[0]["source"]), list(zip(*(part["target"] for part in parts), strict=True))


def _read_table(name: str, options: argparse.Namespace) -> Any:
    """Reads two columns of a file or a dataset."""
    from ..data.reading import load_pairs
    from ..data.remote import is_url

    if options.columns is None:
        raise ValueError(
            f"--data names one text, {name}: name its columns, e.g. --columns en de, or add the reference files."
        )
    is_file = os.path.isfile(name) or is_url(name)
    if is_file and (options.split or options.config):
        raise ValueError(f"--split and --config apply only to datasets, but {name} is a file.")
    source, reference = (int(column) if column.isdecimal() else column for column in options.columns)
    return load_pairs(
        options.columns[0],
        options.columns[1],
        dataset=None if is_file else name,
        dataset_config=options.config,
        train_split=None,
        validation_split=None,
        test_split=options.split or "test",
        test_files=name if is_file else None,
        source_column=source,
        target_column=reference,
    )["test"]


def _translate(lines: list[str], translators: "LoadedModels") -> list[str]:
    """Translates lines, which have their language tags."""
    from tqdm.auto import tqdm

    from ..translation.lines import LINES_AT_A_TIME

    translator, size = translators.lines(), translators.times * LINES_AT_A_TIME
    translations = []
    with tqdm(total=len(lines), unit=" lines", disable=None) as bar:
        for start in range(0, len(lines), size):
            found = translator(lines[start : start + size])
            translations += [" ".join(best[0][1].splitlines()) for best in found]
            bar.update(len(found))
    warn_split(translator.lines_split, translator.longest)
    return translations


def _write(output: Path, text: str) -> None:
    """Writes a new file atomically, or to a device or a pipe."""
    from ..files import atomic_write_text
    from ..translation.growing_file import OutputFile

    if output.exists():
        with OutputFile(output) as file:
            file.write(text)
        return
    atomic_write_text(output, text)


def _print_scores(form: str, scores: dict[str, Any]) -> None:
    from ..metrics import METRICS

    if form == "json":
        _print_json(scores)
        return
    corpus = [
        {"metric": metric.title, "score": scores[name], "signature": scores["signatures"][name]}
        for name, metric in METRICS.items()
    ]
    altered = scores.get("altered", {})
    if form == "csv" and altered:
        corpus = [{"text": "unaltered"} | row for row in corpus]
        corpus += [
            {"text": text, "metric": metric.title, "score": row[name], "signature": scores["signatures"][name]}
            for text, row in altered.items()
            for name, metric in METRICS.items()
        ]
    sentences = [{"line": number} | row for number, row in enumerate(scores.get("sentences", []), start=1)]
    if form == "csv":
        _print_csv(sentences or corpus)
        return
    if sentences:
        print_table(sentences)
        sys.stdout.write("\n")
    print_table(corpus)
    if altered:
        sys.stdout.write("\n")
        texts = {"unaltered": scores} | altered
        print_table(
            [{"text": text} | {METRICS[name].title: row[name] for name in METRICS} for text, row in texts.items()]
        )


# ---- Output formats ----------------------------------------------------------------------------------------------


def _print_json(content: Any) -> None:
    sys.stdout.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _print_csv(rows: list[dict[str, Any]]) -> None:
    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
