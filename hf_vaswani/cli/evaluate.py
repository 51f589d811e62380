"""The verbs that score translations beside references: evaluate, compare."""

import argparse
import csv
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .translate import add_model, addressed, check_counts, load_translators, require_file, tell_cut, text_of


def add_scoring_verbs(verbs: Any) -> None:
    """Adds the two to the verbs of a command line; each puts the function that does it under `run`."""
    evaluate = verbs.add_parser("evaluate", help="translate a text, and score it: BLEU, chrF, TER")
    add_model(evaluate)
    evaluate.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="TEXT",
        help="a source file and one or more files of references, line by line; or one .tsv .csv .jsonl .parquet file, "
        "a dataset folder, or a dataset's id on the Hub",
    )
    evaluate.add_argument(
        "--columns",
        nargs=2,
        metavar=("SOURCE", "REFERENCE"),
        help="of one file or a dataset: names, as en de; numbers count from 0, in a file without a header line",
    )
    evaluate.add_argument("--split", metavar="NAME", help="of a dataset; default: test")
    evaluate.add_argument("--config", metavar="NAME", help="of a dataset that has several configurations")
    evaluate.add_argument("--output", type=Path, metavar="FILE", help="where to write the translations, if anywhere")
    evaluate.add_argument("--sentences", action="store_true", help="also the scores of each sentence")
    _add_scoring(evaluate)
    evaluate.set_defaults(run=_evaluate)

    compare = verbs.add_parser(
        "compare", help="whether translations of one text differ by more than chance: paired bootstrap, randomization"
    )
    compare.add_argument(
        "systems", nargs="+", type=Path, metavar="FILE", help="translations; the first is the baseline"
    )
    compare.add_argument("--references", required=True, nargs="+", type=Path, metavar="FILE", help="one or more")
    compare.add_argument("--samples", type=int, default=1000, metavar="N", help="of paired bootstrap; default: 1000")
    compare.add_argument("--trials", type=int, default=10_000, metavar="N", help="of randomization; default: 10000")
    _add_scoring(compare)
    compare.set_defaults(run=_compare)


def _add_scoring(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenize", default="13a", metavar="NAME", help="sacreBLEU's tokenizer for BLEU; default: 13a"
    )
    parser.add_argument("--lowercase", action="store_true", help="BLEU and chrF ignore case; TER always does")
    parser.add_argument("--format", choices=("table", "json", "csv"), default="table", help="default: table")


def _evaluate(options: argparse.Namespace) -> None:
    from ..metrics import METRICS, score, sentence_scores

    check_counts(options, "num_beams")
    output = options.output
    if output is not None and (output.is_file() or output.is_dir()):
        raise ValueError(f"--output {output} exists already; name another file.")
    if output is not None and not output.parent.is_dir():
        raise ValueError(f"--output {output} is in a folder that does not exist.")
    sources, references = _evaluation_text(options)
    settings = {"tokenize": options.tokenize, "lowercase": options.lowercase}
    # What cannot be scored is to show before the text is translated.
    score([sentence[0] for sentence in references[:1]], references[:1], **settings)
    translations = _translated(sources, options)
    if output is not None:
        _write(output, "".join(f"{line}\n" for line in translations))
    scored = score(translations, references, **settings)
    rows = [
        {"metric": name, "score": scored[metric], "signature": scored["signatures"][metric]}
        for metric, name in METRICS.items()
    ]
    if options.sentences:
        each = sentence_scores(translations, references, **settings)
        scored["sentences"] = [scores | {"translation": text} for scores, text in zip(each, translations, strict=True)]
        lines = [{"line": number} | row for number, row in enumerate(scored["sentences"], start=1)]
        if options.format == "csv":
            rows = lines
        elif options.format == "table":
            _show("table", lines)
            sys.stdout.write("\n")
    _show(options.format, rows, {"lines": len(translations)} | scored)


def _write(output: Path, text: str) -> None:
    """Writes a new file whole, or to a device or a pipe."""
    from ..files import atomic_write_text
    from ..translation.lines import OutputFile

    if output.exists():
        with OutputFile(output) as file:
            file.write(text)
        return
    atomic_write_text(output, text)


def _evaluation_text(options: argparse.Namespace) -> tuple[list[str], list[tuple[str, ...]]]:
    """Source sentences, and of each its references."""
    from ..data.reading import load_pairs

    data = options.data
    # After the module that says which extra is needed.
    from datasets import disable_progress_bars

    disable_progress_bars()
    if len(data) > 1:
        if options.columns is not None:
            raise ValueError("--columns are those of one file or a dataset, but --data names several files.")
        pairs = [
            load_pairs("source", "reference", test_files={"source": data[0], "reference": reference})["test"]
            for reference in data[1:]
        ]
    else:
        if options.columns is None:
            raise ValueError(
                f"--data names one text, {data[0]}: say which of its columns are source and reference, for example by "
                "--columns en de, or name the files of the references as well."
            )
        source, reference = (int(name) if name.isdecimal() else name for name in options.columns)
        is_file = Path(data[0]).is_file()
        if is_file and (options.split or options.config):
            raise ValueError(f"--split and --config are of datasets, and {data[0]} is a file.")
        pairs = [
            load_pairs(
                options.columns[0],
                options.columns[1],
                dataset=None if is_file else data[0],
                dataset_config=options.config,
                train_split=None,
                validation_split=None,
                test_split=options.split or "test",
                test_files=data[0] if is_file else None,
                source_column=source,
                target_column=reference,
            )["test"]
        ]
    if not len(pairs[0]):
        raise ValueError(f"There is no text in {data[0]}.")
    return list(pairs[0]["source"]), list(zip(*(part["target"] for part in pairs), strict=True))


def _translated(sources: list[str], options: argparse.Namespace) -> list[str]:
    from tqdm.auto import tqdm

    from ..translation.lines import LINES_AT_A_TIME, LineTranslator

    models, tokenizer, front, tags = load_translators(options)
    lines = list(addressed(sources, options.data[0], front, tags))
    translator, translations = LineTranslator(models, tokenizer), []
    with tqdm(total=len(lines), unit=" lines", disable=None) as bar:
        for start in range(0, len(lines), LINES_AT_A_TIME):
            found = translator(lines[start : start + LINES_AT_A_TIME])
            translations += [" ".join(best[0][1].splitlines()) for best in found]
            bar.update(len(found))
    tell_cut(translator.were_cut, translator.longest)
    return translations


def _compare(options: argparse.Namespace) -> None:
    from ..metrics import compare

    check_counts(options, "samples", "trials")
    files = [*options.systems, *options.references]
    for path in files:
        require_file(path)
    names = [str(path) for path in options.systems]
    if len(set(names)) < len(names):
        raise ValueError("Each file of translations can be compared once, but one is there twice.")
    texts = [list(text_of(path)) for path in files]
    systems, references = dict(zip(names, texts, strict=False)), texts[len(names) :]
    for path, text in zip(options.references, references, strict=True):
        if len(text) != len(references[0]):
            raise ValueError(
                f"{path} has {len(text)} lines, but {options.references[0]} has {len(references[0])}: references of "
                "one text have as many lines."
            )
    found = compare(
        systems,
        list(zip(*references, strict=True)),
        options.tokenize,
        options.lowercase,
        options.samples,
        options.trials,
    )
    if options.format != "table":
        _show(options.format, [asdict(row) for row in found], [asdict(row) for row in found])
        return
    baseline = {row.metric: row.score for row in found if row.system == names[0]}
    _show(
        "table",
        [
            {
                "metric": row.metric,
                "system": row.system,
                "score": row.score,
                "95 % interval": f"{row.mean:.2f} ± {row.interval:.2f}",
                "difference": "" if row.system == names[0] else f"{row.score - baseline[row.metric]:+.2f}",
                "p, bootstrap": _probability(row.p_bootstrap),
                "p, randomization": _probability(row.p_randomization),
            }
            for row in found
        ],
    )
    sys.stdout.write("\nDifference and p: to the first system; * where p is below 0.05. TER: less is better.\n")
    for row in found:
        if row.system == names[0]:
            sys.stdout.write(f"{row.metric}: {row.signature}\n")


def _probability(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}{'*' if value < 0.05 else ''}"


def _show(form: str, rows: list[dict[str, Any]], whole: Any = None) -> None:
    """Rows as a table for a person or as CSV, or the whole as JSON."""
    if form == "json":
        sys.stdout.write(json.dumps(whole, indent=2, ensure_ascii=False) + "\n")
    elif form == "csv":
        writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        from tabulate import tabulate

        # By itself it would take "+1.20" for a number, and its sign away.
        sides = ["left" if isinstance(cell, str) else "right" for cell in rows[0].values()]
        cells = [[f"{cell:.2f}" if isinstance(cell, float) else cell for cell in row.values()] for row in rows]
        sys.stdout.write(tabulate(cells, headers=list(rows[0]), colalign=sides, disable_numparse=True) + "\n")
