"""One shard of a table: read, translated in blocks, written beside the rows that could not be translated."""

import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..records import public, to_json
from .manifest import Folder, Manifest, Settings, ShardRecord
from .shards import UNKNOWN_TO_PYTHON, Block, Source, blocks, schema_of

# Scores and translations of a text, best first.
NBestList = list[tuple[float, str]]
TranslateLines = Callable[[list[str]], list[NBestList]]
# Kind and sentence.
Problem = tuple[str, str]

LINE_BREAK = re.compile(r"\r\n|\r|\n")


class TextTranslator:
    """
    A model as tables use it.

    Args:
        translate (`Callable`): returns the n-best lists of lines of text.
        tagged (`Callable`): returns a line with the language tag that the model needs; raises `ValueError` if it is
            unknown.
        lines_split (`Callable`): returns how many lines so far were longer than the model accepts.
    """

    def __init__(
        self, translate: TranslateLines, tagged: Callable[[str], str] = str, lines_split: Callable[[], int] = lambda: 0
    ) -> None:
        self.translate, self.tagged, self.lines_split = translate, tagged, lines_split

    def __call__(self, texts: list[str]) -> list[NBestList | Exception]:
        """
        Translates texts line by line.

        Args:
            texts (`list[str]`): texts. A line break ends a sentence, and is kept.

        Returns:
            `list`: for each text its n-best list, or the error if it cannot be translated.
        """
        found: list[NBestList | Exception] = []
        lines_of: list[list[str] | Exception] = []
        for text in texts:
            try:
                lines_of.append([self.tagged(line) for line in LINE_BREAK.split(text)])
            except ValueError as error:
                lines_of.append(error)
        good = [lines for lines in lines_of if not isinstance(lines, Exception)]
        translated = iter(self._isolated(good))
        for lines in lines_of:
            found.append(lines if isinstance(lines, Exception) else next(translated))
        return found

    def _isolated(self, texts: list[list[str]]) -> list[NBestList | Exception]:
        """Translates texts together, and in halves if that fails, until those that make it fail are found."""
        try:
            lines = iter(self.translate([line for text in texts for line in text]))
            return [_joined([next(lines) for _ in text]) for text in texts]
        except Exception as error:
            if len(texts) > 1:
                middle = len(texts) // 2
                return self._isolated(texts[:middle]) + self._isolated(texts[middle:])
            # If any text fails, it is not the text's fault: a full memory, a GPU that is gone.
            self.translate(["."])
            return [error]


def _joined(lines: list[NBestList]) -> NBestList:
    """Joins the n-best lists of the lines of a text rank by rank."""
    # One line in is one line out, even if the model generates a line separator.
    return [
        (sum(score for score, _ in rank), "\n".join(" ".join(text.splitlines()) for _, text in rank))
        for rank in zip(*lines, strict=True)
    ]


# ---- Files -------------------------------------------------------------------------------------------------------


class JsonLines:
    """Writes rows as JSON lines."""

    def __init__(self, file: Path, settings: Settings) -> None:
        self.file: IO[str] = file.open("w", encoding="utf-8")
        self.settings = settings

    def problems(self, block: Block) -> dict[int, Problem]:
        """Returns the rows of Parquet that have values unknown to Python."""
        found = {}
        try:
            if isinstance(block.rows, pa.RecordBatch):
                block.rows.to_pylist()
        except UNKNOWN_TO_PYTHON:
            for place in range(len(block)):
                try:
                    block.row(place)
                except UNKNOWN_TO_PYTHON as error:
                    found[place] = ("no JSON", f"has a value that JSON cannot have: {error}")
        return found

    def write(self, block: Block, places: Sequence[int], added: Sequence[Sequence[Any]]) -> None:
        """Writes rows of a block, with the values of the added columns."""
        for place, values in zip(places, added, strict=True):
            row = block.row(place) | dict(zip(self.settings.added, values, strict=True))
            self.file.write(_json(row) + "\n")

    def close(self) -> None:
        """Completes the file."""
        self.file.close()


def _json(row: dict[str, Any]) -> str:
    """Returns a row as JSON, which has no NaN and no infinity: they become null."""
    try:
        return json.dumps(row, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(row), ensure_ascii=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Parquet:
    """Writes rows as Parquet, of the types that the table has or that its first rows of JSON have."""

    def __init__(self, file: Path, settings: Settings, schema: pa.Schema) -> None:
        scores = {f"{settings.to_column}_score": pa.float64(), f"{settings.to_column}_n_best": pa.list_(pa.string())}
        scores[f"{settings.to_column}_n_best_scores"] = pa.list_(pa.float64())
        self.schema = schema
        self.added = pa.schema([(name, scores.get(name, pa.string())) for name in settings.added])
        self.writer = pq.ParquetWriter(file, pa.schema([*schema, *self.added], metadata=_metadata(schema)))

    def problems(self, block: Block) -> dict[int, Problem]:
        """Returns the rows of JSON or CSV that do not fit in the types of the columns."""
        if isinstance(block.rows, pa.RecordBatch):
            return {}
        rows = {place: row for place, row in enumerate(block.rows) if isinstance(row, dict)}
        # One by one only if some row does not fit.
        if self._problem(list(rows.values())) is None:
            return {}
        return {place: problem for place, row in rows.items() if (problem := self._problem([row]))}

    def _problem(self, rows: list[dict[str, Any]]) -> Problem | None:
        known = set(self.schema.names)
        unknown = next((name for row in rows for name in row if name not in known), None)
        if unknown is not None:
            return "other columns", f"has {unknown!r}, which the first rows of the table lack"
        try:
            kept = all(map(_is_kept, rows, self._batch(rows).to_pylist()))
        except (pa.ArrowException, OverflowError, ValueError) as error:
            return "other types", f"does not fit in the types of the first rows: {error}"
        return None if kept else ("other types", "has values that the types of the first rows would lose")

    def _batch(self, rows: list[Any]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist(rows, schema=self.schema)

    def write(self, block: Block, places: Sequence[int], added: Sequence[Sequence[Any]]) -> None:
        """Writes rows of a block, with the values of the added columns."""
        if not places:
            return
        if isinstance(block.rows, pa.RecordBatch):
            # By slices, because Arrow cannot take single rows of each type.
            batches = [block.rows.slice(start, stop - start) for start, stop in _runs(places)]
        else:
            batches = [self._batch([block.rows[place] for place in places])]
        values = zip(*added, strict=True)
        columns = [pa.array(list(each), kind) for each, kind in zip(values, self.added.types, strict=True)]
        rows = pa.Table.from_batches(batches)
        self.writer.write_table(pa.Table.from_arrays([*rows.columns, *columns], schema=self.writer.schema))

    def close(self) -> None:
        """Completes the file."""
        self.writer.close()


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the first place of each run of neighbours among ascending places, and the place behind its last."""
    starts = [i for i in range(len(places)) if not i or places[i] != places[i - 1] + 1]
    return [(places[i], places[j - 1] + 1) for i, j in pairwise([*starts, len(places)])]


def _is_kept(before: Any, after: Any) -> bool:
    """Returns whether a value of JSON is still there after its conversion; keys without a value may be added."""
    if isinstance(before, dict) and isinstance(after, dict):
        return all(key in after and _is_kept(value, after[key]) for key, value in before.items())
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_is_kept, before, after))
    # NaN is not equal to itself.
    return bool(before == after or (before != before and after != after))


def _metadata(schema: pa.Schema) -> dict[bytes, bytes]:
    """Returns the metadata of a schema without what describes its columns to one library, which has one more now."""
    return {key: value for key, value in (schema.metadata or {}).items() if key not in (b"pandas", b"huggingface")}


class _Rejected:
    """The rows of a shard that could not be translated, in a file that is there if there are any."""

    def __init__(self, folder: Folder, name: str, url: str, stack: ExitStack) -> None:
        self.folder, self.name, self.url, self.stack = folder, name, url, stack
        self.file: IO[str] | None = None

    def write(self, block: Block, place: int, why: str) -> None:
        """Writes a row."""
        if self.file is None:
            path = self.stack.enter_context(self.folder.writing(self.name))
            self.file = self.stack.enter_context(path.open("w", encoding="utf-8", errors="backslashreplace"))
        row = {"file": public(self.url), "row": block.first + place, "reason": why, "content": block.shown(place)}
        self.file.write(_json(row) + "\n")


# ---- The shard ---------------------------------------------------------------------------------------------------


class ShardWorker:
    """
    Translates shards, one after the other.

    Args:
        manifest ([`Manifest`]): the table.
        output (`str`): path or URL of the folder of the results.
        load (`Callable`): loads the model.
    """

    def __init__(self, manifest: Manifest, output: str, load: Callable[[], TextTranslator]) -> None:
        self.manifest, self.folder = manifest, Folder(output)
        self.translator = load()

    def __call__(self, number: int, progress: Callable[[int], Any] = lambda rows: None) -> ShardRecord:
        """
        Translates a shard, and writes its rows, those that were rejected, and then its record, each file whole.

        Args:
            number (`int`): number of the shard.
            progress (`Callable[[int], Any]`): called with the number of rows of each block that is done.

        Raises:
            ValueError, OSError: the table cannot be read, or a result cannot be written.
        """
        begun, split = time.monotonic(), self.translator.lines_split()
        shard = self.manifest.shards[number]
        source, settings = self.manifest.sources[shard.source], self.manifest.settings
        data, rejects = self.manifest.data_file(number), self.manifest.rejected_file(number)
        rows, counts = 0, Counter[str]()
        # An attempt that was interrupted may have left it.
        self.folder.remove(rejects)
        with ExitStack() as stack:
            file = stack.enter_context(self.folder.writing(data))
            writer = stack.enter_context(closing(self._writer(file, source)))
            rejected = _Rejected(self.folder, rejects, source.url, stack)
            for block in blocks(source, shard):
                found, problems = self._translated(block, writer.problems(block))
                writer.write(block, list(found), [_values(settings, candidates) for candidates in found.values()])
                for place, (kind, why) in sorted(problems.items()):
                    rejected.write(block, place, why)
                    counts[kind] += 1
                rows += len(block)
                progress(len(block))
        record = ShardRecord(
            rows=rows,
            rejected=dict(sorted(counts.items())),
            split=self.translator.lines_split() - split,
            seconds=round(time.monotonic() - begun, 3),
            bytes=self.folder.size(data),
        )
        self.folder.write_json(self.manifest.record_file(number), to_json(record))
        return record

    def _writer(self, file: Path, source: Source) -> JsonLines | Parquet:
        if self.manifest.settings.format == "jsonl":
            return JsonLines(file, self.manifest.settings)
        # Files of JSON have no types: all get those of the first that has rows.
        typed = self.manifest.sources if source.kind == "jsonl" else [source]
        return Parquet(file, self.manifest.settings, schema_of(typed))

    def _translated(
        self, block: Block, problems: dict[int, Problem]
    ) -> tuple[dict[int, NBestList], dict[int, Problem]]:
        """Returns the n-best lists of the rows of a block, and the reasons of those that have none, by their place."""
        texts = block.column(self.manifest.settings.column)
        for place, text in enumerate(texts):
            reason = block.reason(place)
            problem = ("unreadable", reason) if reason else self._problem(text) or self._taken(block, place)
            if problem:
                problems[place] = problem
        places = [place for place in range(len(block)) if place not in problems]
        found = {}
        for place, candidates in zip(places, self.translator([texts[place] for place in places]), strict=True):
            if isinstance(candidates, Exception):
                problems[place] = ("failed", " ".join(f"{type(candidates).__name__}: {candidates}".split())[:1000])
            else:
                found[place] = candidates
        return found, problems

    def _taken(self, block: Block, place: int) -> Problem | None:
        """A row of JSON may have a column of the translations, though the first one has none."""
        row = None if isinstance(block.rows, pa.RecordBatch) else block.rows[place]
        names = [name for name in self.manifest.settings.added if isinstance(row, dict) and name in row]
        return ("column taken", f"has {names[0]!r} already") if names else None

    def _problem(self, text: Any) -> Problem | None:
        column, most = self.manifest.settings.column, self.manifest.settings.max_characters
        if text is None:
            return "no text", f"has no {column!r}"
        if not isinstance(text, str):
            return "no text", f"has {str(text)[:80]!r} for {column!r}, which must be text"
        if len(text) > most:
            return "too long", f"has {len(text):,} characters, above the limit of {most:,}"
        return None


def _values(settings: Settings, candidates: NBestList) -> list[Any]:
    """Returns the values of the added columns."""
    scores, texts = [round(score, 4) for score, _ in candidates], [text for _, text in candidates]
    return [texts[0], *([scores[0]] if settings.score else []), *([texts, scores] if settings.n_best else [])]
