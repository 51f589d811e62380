"""The verb translate: text line by line, or a table."""

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..files import decode_lines
from . import inputs
from .inputs import (
    LoadedModels,
    add_models,
    check_beam,
    check_counts,
    check_output,
    load_translators,
    require_file,
    text_lines,
    warn_split,
)
from .pairs import pharaoh, rounded
from .table import add_table, check_options, translate_table

STANDARD_INPUT = "standard input"


def add_verbs(verbs: Any) -> None:
    """Adds the verb to the command line, with its function under `run`."""
    translate = verbs.add_parser(
        "translate",
        help="translate text line by line",
        description="Translate text line by line: one line in, one line out.",
        epilog="example: hf-vaswani translate --model runs/my/model in.txt > out.txt",
    )
    translate.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="text files, plain or .gz; default: standard input"
    )
    add_models(translate)
    translate.add_argument("--output", metavar="FILE", help="file to write; default: standard output")
    translate.add_argument("--resume", action="store_true", help="complete an --output that was interrupted")
    translate.add_argument(
        "--n-best",
        type=int,
        metavar="N",
        help="write the N best translations of each line, with line number and score, e.g. 4",
    )
    translate.add_argument(
        "--format",
        choices=("tsv", "jsonl", "parquet"),
        help="format of --n-best: tab-separated values (default) or JSON lines; of --table: parquet (default) or "
        "jsonl (default for JSONL)",
    )
    translate.add_argument(
        "--alignment",
        action="store_true",
        help="write after each translation which words of the line it was made from: Ein Hund rennt. ||| 0-0 1-1 2-2; "
        "with --format jsonl, also with which probabilities",
    )
    translate.add_argument(
        "--markup",
        choices=("html", "html+attributes", "placeholders"),
        help="html: keep tags, code, placeholders such as {name} and %%s, and URLs, each exactly once, and put them "
        "where the attention says; html+attributes: translate descriptions and titles in tags, too; placeholders: all "
        "but tags",
    )
    add_table(translate)
    translate.set_defaults(run=_translate)


@dataclass(frozen=True)
class Output:
    """
    File and format of the translations.

    Attributes:
        path (`Path`, *optional*): the file; by default standard output.
        n_best (`int`, *optional*): translations of each line, with scores; by default the best one, without.
        format (`str`, *optional*): format of n-best lists and of links: `"tsv"` (default) or `"jsonl"`.
        resume (`bool`): whether the file may hold translations already.
        alignment (`bool`): whether translations come with their links to the words of the line.
    """

    path: Path | None = None
    n_best: int | None = None
    format: str | None = None
    resume: bool = False
    alignment: bool = False

    def entry(self, number: int, candidates: Sequence[tuple[Any, ...]]) -> str:
        """
        Formats the translations of the `number`-th line, counted from 1, given as (score, translation) or as (score,
        translation, links).
        """
        if self.format == "jsonl":
            translations = [
                {"score": round(score, 4), "text": text} | ({"links": rounded(*links)} if links else {})
                for score, text, *links in candidates
            ]
            if self.n_best is None:
                del translations[0]["score"]
            content: dict[str, Any] = translations[0] if self.n_best is None else {"translations": translations}
            return json.dumps({"line": number} | content, ensure_ascii=False) + "\n"
        if self.n_best is None:
            # One line in is one line out, even if the model generates a line separator.
            return " ||| ".join([" ".join(candidates[0][1].splitlines()), *map(pharaoh, candidates[0][2:])]) + "\n"
        return "".join(
            "\t".join([str(number), f"{score:.4f}", " ".join(text.split()), *map(pharaoh, links)]) + "\n"
            for score, text, *links in candidates
        )

    def entries_done(self) -> int:
        """
        Counts the lines of text that the file has translations of, and cuts off an incomplete entry at its end.

        Raises:
            ValueError: the file cannot be written or resumed.
        """
        from ..translation.growing_file import keep_whole

        path = self.path
        if path is None:
            return 0
        check_output(path, "--output")
        if self.resume and path.exists() and not path.is_file():
            raise ValueError(f"--output {path} is not a regular file, and cannot be completed by --resume.")
        if not path.is_file():
            return 0
        if not self.resume and path.stat().st_size:
            raise ValueError(f"{path} exists already: complete it with --resume, or choose another --output.")
        return keep_whole(path, self._lines_per_entry, self._check_line)

    @property
    def _lines_per_entry(self) -> int:
        return self.n_best if self.n_best is not None and self.format != "jsonl" else 1

    def _check_line(self, number: int, line: bytes) -> None:
        prefix = self._prefix((number - 1) // self._lines_per_entry + 1)
        if not line.startswith(prefix):
            raise ValueError(
                f"{self.path}, line {number}, does not start with {prefix.decode()!r}: it was written with another "
                "--n-best or --format. Give the same options, or choose another --output."
            )
        if self.alignment != self._has_links(line):
            raise ValueError(
                f"{self.path}, line {number}, was written {'without' if self.alignment else 'with'} --alignment. Give "
                "the same options, or choose another --output."
            )

    def _prefix(self, number: int) -> bytes:
        """The start of each line in the `number`-th entry."""
        if self.n_best is None and self.format != "jsonl":
            return b""
        key = "text" if self.n_best is None else "translations"
        return f'{{"line": {number}, "{key}"'.encode() if self.format == "jsonl" else f"{number}\t".encode()

    def _has_links(self, line: bytes) -> bool:
        if self.format == "jsonl":
            return b', "links": [' in line
        if self.n_best is not None:
            return line.count(b"\t") == 3
        return re.search(rb" \|\|\| (?:\d+-\d+(?: \d+-\d+)*)?$", line.rstrip(b"\n")) is not None


def _translate(options: argparse.Namespace) -> None:
    from tqdm.auto import tqdm

    check_options(options)
    if options.table is not None:
        translate_table(options)
        return
    check_counts(options, "num_beams", "n_best")
    if options.format == "parquet":
        raise ValueError("--format parquet needs --table.")
    if options.n_best is None and (options.format == "tsv" or (options.format and not options.alignment)):
        needed = "--n-best" if options.format == "tsv" else "--n-best or --alignment"
        raise ValueError(f"--format {options.format} needs {needed}.")
    for name in ("n_best", "alignment"):
        if options.markup and getattr(options, name):
            raise ValueError(f"--markup cannot be combined with --{name.replace('_', '-')}.")
    if options.resume and options.output is None:
        raise ValueError("--resume needs --output, the file to complete.")
    if not options.files and sys.stdin is None:
        raise ValueError("Standard input is closed: name the files to translate.")
    from ..processes import Processes
    from ..translation.growing_file import OutputFile, skip_lines, write_whole
    from ..translation.lines import LINES_AT_A_TIME, translate_chunk

    processes = Processes()
    is_main = processes.is_main_process
    path = None if options.output is None else Path(options.output)
    output = Output(path, options.n_best, options.format, options.resume, options.alignment)

    def count_done() -> int:
        _check_files(options.files, path)
        return output.entries_done()

    done = processes.on_main_process(count_done)
    translators = load_translators(options)
    check_beam(translators.models[0], options.n_best, f"--n-best {options.n_best}")
    translator = translators.lines(options.n_best)
    translate: Callable[[list[str]], list[list[Any]]] = translator.aligned if options.alignment else translator
    if options.markup:
        translate = partial(translator.with_markup, kind=options.markup)
    # The bar is for people: not beside translations on a terminal, and not where nobody looks.
    in_view = path is None and sys.stdout.isatty()
    with contextlib.ExitStack() as stack:
        stream: Any = sys.stdout
        if path and is_main:
            stream = stack.enter_context(OutputFile(path))
        bar = stack.enter_context(tqdm(initial=done, unit=" lines", disable=True if in_view or not is_main else None))
        lines, size = _source_lines(options.files, translators), translators.times * LINES_AT_A_TIME
        for chunk in processes.chunks(skip_lines(lines, done), size):
            found = translate_chunk(processes, translate, chunk)
            if is_main:
                write_whole(stream, "".join(output.entry(i, each) for i, each in enumerate(found, done + 1)))
            done += len(chunk)
            bar.update(len(chunk))
    lines_split = sum(processes.gather(translator.lines_split))
    if is_main:
        warn_split(lines_split, translator.longest)


def _check_files(files: list[Path], output: Path | None) -> None:
    for file in files:
        require_file(file)
        if output is not None and output.is_file() and output.samefile(file):
            raise ValueError(f"--output {output} is one of the files to translate: choose another --output.")


def _source_lines(files: list[Path], translators: LoadedModels) -> Iterator[str]:
    if not files:
        lines = decode_lines(sys.stdin.buffer, STANDARD_INPUT, inputs.MAX_LINE)
        yield from translators.tagged((line.rstrip("\r\n") for line in lines), STANDARD_INPUT)
    for path in files:
        yield from translators.tagged(text_lines(path), str(path))
