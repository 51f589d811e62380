"""translate --table: the texts of a table, on this machine or on a Ray cluster."""

import argparse
import importlib.util
import logging
import os
import platform
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..extras import extra
from .inputs import check_beam, check_counts, load_translators

if TYPE_CHECKING:
    from ..processes import Processes
    from ..scale.manifest import Folder, Manifest
    from ..scale.worker import TextTranslator

logger = logging.getLogger("hf_vaswani")


def add_table(parser: argparse.ArgumentParser) -> None:
    """Adds the options of tables to the verb translate."""
    group = parser.add_argument_group("tables", "Translate a column of a table into a further one.")
    group.add_argument(
        "--table",
        metavar="TABLE",
        help="Parquet, JSONL, CSV or TSV: a file, a folder of files, a URL such as s3://bucket/folder/*.parquet, or a "
        "dataset on the Hub; --output is then a folder or the URL of one, and the same command completes it after a "
        "stop",
    )
    group.add_argument("--table-config", metavar="NAME", help="configuration of the dataset on the Hub")
    group.add_argument(
        "--table-split", metavar="NAME", default="train", help="split of the dataset on the Hub; default: train"
    )
    group.add_argument("--column", metavar="NAME", help="column to translate")
    group.add_argument(
        "--to-column", metavar="NAME", default="translation", help="column of the translations; default: translation"
    )
    group.add_argument("--score", action="store_true", help="add a column with the score of the search")
    group.add_argument(
        "--shard-rows", type=int, metavar="N", default=20_000, help="rows of an output file; default: 20000"
    )
    group.add_argument(
        "--max-characters",
        type=int,
        metavar="N",
        default=100_000,
        help="longest text that is translated; default: %(default)s",
    )
    group.add_argument(
        "--engine-cluster",
        choices=("local", "ray"),
        default="local",
        help="local (default): this process, or those of a launcher; ray: the Ray cluster that `ray start` or "
        "RAY_ADDRESS names, or one of this machine alone",
    )
    group.add_argument("--workers", type=int, metavar="N", help="processes on Ray; default: as many as have room")
    group.add_argument(
        "--worker-cpus", type=float, metavar="N", default=1.0, help="cores of a process on Ray; default: 1"
    )
    group.add_argument(
        "--worker-gpus",
        type=float,
        metavar="X",
        help="GPUs of a process on Ray, e.g. 0.5; default: 1 if there are any",
    )
    # All options but --table need it: an option that differs from its default was given.
    parser.set_defaults(table_defaults={action.dest: action.default for action in group._group_actions[1:]})


def check_options(options: argparse.Namespace) -> None:
    """Raises a `ValueError` for options of tables without --table, or of lines of text with it."""
    if options.table is None:
        for name, default in options.table_defaults.items():
            if getattr(options, name) != default:
                raise ValueError(f"--{name.replace('_', '-')} needs --table.")
        return
    for name, given in (("FILE", options.files), ("--resume", options.resume), ("--alignment", options.alignment)):
        if given:
            raise ValueError(f"{name} cannot be combined with --table.")
    if options.output is None:
        raise ValueError("--table needs --output, a folder for the translations.")
    if options.column is None:
        raise ValueError("--table needs --column, the column to translate.")
    check_counts(options, "num_beams", "n_best", "shard_rows", "max_characters", "workers")
    if options.format == "tsv":
        raise ValueError("--format must be parquet or jsonl with --table, but it is tsv.")
    if (options.score or options.n_best) and options.markup:
        raise ValueError(f"--markup cannot be combined with --{'score' if options.score else 'n-best'}.")
    if options.engine_cluster == "local":
        for name in ("workers", "worker_cpus", "worker_gpus"):
            if getattr(options, name) != options.table_defaults[name]:
                raise ValueError(f"--{name.replace('_', '-')} needs --engine-cluster ray.")
    for name in ("worker_cpus", "worker_gpus"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < 10_000:
            raise ValueError(f"--{name.replace('_', '-')} must be from 0 to 10000, but it is {value}.")


def translate_table(options: argparse.Namespace) -> None:
    """Translates the column of a table that the options of [`add_table`] give."""
    with extra("scale", "--table"):
        from ..scale.manifest import SUMMARY, Folder
    from ..interruption import exclusive, stopped_by_sigterm
    from ..processes import Processes

    if options.engine_cluster == "ray" and importlib.util.find_spec("ray") is None:
        raise ImportError("--engine-cluster ray needs ray: pip install 'hf_vaswani[scale]'")
    processes = Processes()
    if options.engine_cluster == "ray" and processes.num_processes > 1:
        raise ValueError("--engine-cluster ray starts its own processes: do not use a launcher.")
    if not options.output:
        raise ValueError("--output is empty: name a folder for the translations.")
    folder = Folder(options.output)
    if folder.local is not None:
        if folder.local.exists() and not folder.local.is_dir():
            raise ValueError(f"--output {options.output} is a file: name a folder.")
        # The processes of a cluster have working folders of their own.
        options.output = str(folder.local.absolute())
    options.model = [str(Path(name).absolute()) if os.path.isdir(name) else name for name in options.model]
    translator, translation = load_text_translator(options)
    with stopped_by_sigterm("stopped. The same command goes on."), ExitStack() as stack:
        if folder.local is not None:
            output = folder.local
            processes.on_main_process(lambda: stack.enter_context(exclusive(output)))
        manifest = processes.on_main_process(lambda: _begin(options, folder, translation))
        done = processes.on_main_process(lambda: manifest.records(folder))
        missing = [number for number in range(len(manifest.shards)) if number not in done]
        _translate_all(options, processes, manifest, missing, translator)
        processes.gather([None])
        if processes.is_main_process:
            records = manifest.records(folder)
            if len(records) < len(manifest.shards):
                raise OSError(
                    f"{len(manifest.shards) - len(records)} of {len(manifest.shards)} shards in {folder.url} are not "
                    "done: give the same command again."
                )
            summary = manifest.summary(records.values())
            folder.write_json(SUMMARY, summary)
            _report(summary, folder)


def load_text_translator(options: argparse.Namespace) -> tuple["TextTranslator", dict[str, Any]]:
    """
    Loads the models that the options give.

    Returns:
        `tuple` of a [`TextTranslator`] and of all that decides what it writes, for the manifest.
    """
    from ..scale.worker import TextTranslator
    from ..translation.backtranslation import model_digest, settings_of

    if options.score or options.n_best:
        # Scores come with n-best lists.
        options = argparse.Namespace(**vars(options) | {"n_best": options.n_best or 1})
    loaded = load_translators(options)
    check_beam(loaded.models[0], options.n_best, "--score" if options.n_best == 1 else f"--n-best {options.n_best}")
    lines = loaded.lines(options.n_best)
    translate: Any = partial(lines.with_markup, kind=options.markup) if options.markup else lines
    names = ("target_language", "engine", "compute_type", "approximate", "dtype", "int8", "shortlist", "markup")
    translation = {name: getattr(options, name) for name in names}
    digests = [f"SHA-256 {model_digest(model, loaded.tokenizer)}" for model in loaded.models]
    translation |= {"models": digests, "search": settings_of(loaded.models[0].generation_config)}
    return TextTranslator(
        translate, partial(loaded.tags.put, language=loaded.language), lambda: lines.lines_split
    ), translation


def load_same(options: argparse.Namespace, translation: dict[str, Any]) -> "TextTranslator":
    """Loads the models on a machine of a cluster, and checks that they are those of the machine that began."""
    from ..memory import limit_kernel_cache

    limit_kernel_cache()
    translator, here = load_text_translator(options)
    if here["models"] != translation["models"]:
        raise ValueError(
            f"{', '.join(options.model)} is another model on machine {platform.node()} than where the work was begun."
        )
    return translator


def _begin(options: argparse.Namespace, folder: "Folder", translation: dict[str, Any]) -> "Manifest":
    """Reads the manifest of the folder, or writes it; all machines then do what it says."""
    from ..scale.manifest import Manifest, Settings, check_same, read_manifest, write_manifest
    from ..scale.shards import cut, describe, find_files, schema_of

    table, output = Path(options.table), Path(options.output)
    if options.table and table.is_dir() and output.absolute().is_relative_to(table.absolute()):
        raise ValueError(f"--output {output} is in the folder of the table, {table}: name another folder.")
    sources = [describe(url) for url in find_files(options.table, options.table_config, options.table_split)]
    settings = Settings(
        column=options.column,
        to_column=options.to_column,
        format=options.format or ("jsonl" if sources[0].kind == "jsonl" else "parquet"),
        shard_rows=options.shard_rows,
        max_characters=options.max_characters,
        translation=translation,
        score=options.score,
        n_best=options.n_best,
    )
    before = read_manifest(folder)
    if before is not None:
        check_same(folder, before, sources, settings)
        return replace(before, sources=sources)
    if settings.format == "parquet":
        # A table that cannot be Parquet is refused before anything is written.
        schema_of(sources)
    manifest = Manifest(sources, settings, cut(sources, settings.shard_rows, settings.column, settings.added))
    write_manifest(folder, manifest)
    return manifest


def _translate_all(
    options: argparse.Namespace,
    processes: "Processes",
    manifest: "Manifest",
    missing: list[int],
    translator: "TextTranslator",
) -> None:
    """Translates the missing shards: each process its share, or all of them on Ray."""
    from tqdm.auto import tqdm

    rows = [manifest.shards[number].rows for number in missing]
    total = None if None in rows else sum(count or 0 for count in rows)
    bar = tqdm(total=total, unit=" rows", disable=None if processes.is_main_process else True)
    with bar:
        if options.engine_cluster == "ray":
            from ..scale.cluster import Workers, translate_on_ray
            from ..scale.manifest import RECORDS, Folder

            workers = Workers(options.workers, options.worker_cpus, options.worker_gpus)
            load = partial(load_same, options, manifest.settings.translation)
            for record in translate_on_ray(manifest, options.output, missing, load, workers):
                if not Folder(options.output).sizes(RECORDS):
                    raise OSError(
                        f"A shard is done, but is not in {options.output} on this machine: name a folder or a URL "
                        "that all machines share."
                    )
                bar.update(record.rows)
            return
        from ..scale.worker import ShardWorker

        translate = ShardWorker(manifest, options.output, lambda: translator)
        for number in missing[processes.process_index :: processes.num_processes]:
            translate(number, bar.update)


def _report(summary: dict[str, Any], folder: "Folder") -> None:
    """Says how many rows are translated, and where the others are."""
    from ..scale.manifest import DATA, REJECTED

    logger.info(f"{summary['translated']:,} of {summary['rows']:,} rows are translated, in {folder.at(DATA)}.")
    if summary["rejected"]:
        reasons = ", ".join(f"{why}: {count:,}" for why, count in summary["rejected"].items())
        logger.warning(
            f"{summary['rows'] - summary['translated']:,} rows are not ({reasons}); see {folder.at(REJECTED)}."
        )
    if summary["split"]:
        logger.warning(f"{summary['split']:,} lines were longer than the model's limit, and translated in pieces.")
