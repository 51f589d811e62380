"""
Outputs of a long work, which can be stopped anywhere and goes on to the same bytes: how far an unfinished output is,
whether it was begun with the same settings, and how its end is cut to whole entries.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TextIO, TypeVar

from ..files import atomic_write_text, digest, find_damage, put_in_place, read_json, sync, temporary_name
from ..interruption import delayed_signals
from ..processes import Processes

# Items that are sorted by length and worked on together, and lost when the work is killed: on a CPU.
BLOCK = 1024
# Keys of the record: the digest of the complete file, and the items of a block if it is not the usual one.
COMPLETE, ITEMS = "sha256", "items_of_a_block"

T = TypeVar("T")


# ---- The rule ----------------------------------------------------------------------------------------------------


def different_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """
    Compares the settings that an output was begun with and those of now, which must be the same.

    Args:
        before (`Mapping[str, Any]`), now (`Mapping[str, Any]`): settings, which may be nested; JSON-serializable.

    Returns:
        `str`: which settings were what and are what, for an error message; `None` if there is no difference.
    """
    then, here = (_flat(json.loads(json.dumps(settings))) for settings in (before, now))
    changes = [
        f"{key} was {then.get(key)!r} and is {here.get(key)!r}"
        for key in {**then, **here}
        if then.get(key) != here.get(key)
    ]
    return ", ".join(changes) or None


def _flat(content: Mapping[str, Any], front: str = "") -> dict[str, Any]:
    """Returns nested settings by names such as `search.num_beams`."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        found |= _flat(value, f"{key}.") if isinstance(value, dict) else {front + key: value}
    return found


def keep_whole(path: Path, lines_per_block: int, check: Callable[[int, bytes], None], header: int = 0) -> int:
    """
    Cuts off the end of an unfinished output that is not a whole block of lines.

    Args:
        path (`Path`): the file.
        lines_per_block (`int`): lines that are written together.
        check (`Callable[[int, bytes], None]`): raises an error for a line that cannot be one of the output; gets its
            number, counted from 1, and its bytes.
        header (`int`): lines in front of the first block.

    Returns:
        `int`: number of whole blocks that are left.
    """
    lines = length = whole = 0
    with path.open("rb+") as file:
        for line in file:
            # Only the last line can lack its end.
            if not line.endswith(b"\n"):
                break
            lines, length = lines + 1, length + len(line)
            check(lines, line)
            if (lines - header) % lines_per_block == 0:
                whole = length
        file.truncate(whole)
    return max(lines - header, 0) // lines_per_block


def skip_lines(lines: Iterator[T], done: int) -> Iterator[T]:
    """
    Skips the first `done` lines.

    Raises:
        ValueError: there are fewer lines.
    """
    there = sum(1 for _ in islice(lines, done))
    if there < done:
        raise ValueError(f"The output has {done} lines already, but the text has only {there}: give the same text.")
    yield from lines


class OutputFile:
    """
    Appends complete lines to a file, or writes them to a device or a pipe.

    Args:
        path (`Path`): the file.
        going_on (`str`): how the work goes on after a full disk, for the error message.

    Raises:
        OSError: the file cannot be written; the message names it.
    """

    def __init__(self, path: Path, going_on: str = "--resume continues after them") -> None:
        self.going_on = going_on
        self.path, self.is_regular = path, path.is_file() or not path.exists()
        # A pipe cannot be opened for appending. Unbuffered, so closing never has to write.
        self.file = path.open("ab" if self.is_regular else "wb", buffering=0)

    def __enter__(self) -> "OutputFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, text: str) -> None:
        """Writes lines. On a full disk, the file keeps the complete ones."""
        data, done = memoryview(text.encode()), 0
        try:
            while done < len(data):
                done += self.file.write(data[done:])
        except BrokenPipeError:
            raise
        except OSError as error:
            kept = ""
            if self.is_regular:
                whole = text.encode()[:done].rfind(b"\n") + 1
                self.file.truncate(self.file.seek(0, os.SEEK_END) - (done - whole))
                kept = f" Its lines are complete, and {self.going_on}."
            raise OSError(f"{self.path} cannot be written: {error.strerror or error}.{kept}") from error

    def flush(self) -> None:
        """Does nothing, because writes are not buffered."""


def write_whole(output: TextIO | OutputFile, text: str) -> None:
    """Writes complete lines: Ctrl-C and SIGTERM are delayed until they are written."""
    with delayed_signals():
        output.write(text)
        output.flush()


# ---- Files that appear when they are complete --------------------------------------------------------------------


class GrowingFile:
    """
    A file of lines that grows under a temporary name beside its own, which it gets when it is complete. A record of
    the settings, `NAME.json`, is written first; the digest of the complete file is added to it.

    Args:
        path (`Path`): the file: a `.tsv` of two or more columns, or a `.jsonl`.
        settings (`dict[str, Any]`): everything that the lines depend on; JSON-serializable.
        key (`str`): key of the recipe that names the place, for error messages.
        columns (`Sequence[str]`): names of the columns, for the header of a `.tsv`; none for a `.jsonl`.
        times (`int`): how many times as many items as on a CPU are worked on together.

    Attributes:
        block (`int`): items that are worked on together. A file that was begun keeps its own number.
    """

    def __init__(
        self, path: Path, settings: dict[str, Any], key: str, columns: Sequence[str] = (), times: int = 1
    ) -> None:
        self.path, self.settings, self.columns, self.block = path, settings, tuple(columns), times * BLOCK
        self.header = "\t".join(columns) + "\n" if columns else ""
        self.partial, self.record = temporary_name(path), path.with_name(f"{path.name}.json")
        self.key = key

    def begin(self) -> int | None:
        """
        Begins the file, or cuts off the end of an unfinished one that is not a whole block.

        Returns:
            `int`: lines that it has already, or `None` if it is complete.

        Raises:
            ValueError: it has lines of other settings, what is there cannot be judged, or the file is damaged.
            OSError: it cannot be written.
        """
        begun = [path for path in (self.path, self.partial) if path.exists()]
        if begun:
            self._check_record(begun[0])
        if self.path in begun:
            if damage := self._damage():
                raise ValueError(f"{damage}. Restore it, or delete it and {self.record} to make it again.")
            return None
        done = 0
        if begun:
            self.block = self._recorded_block()
            done = self.block * keep_whole(self.partial, self.block, self._check_line, header=int(bool(self.header)))
        else:
            self._write_record({})
        with self.partial.open("ab" if begun else "xb") as file:
            # The header belongs to the first block.
            if not file.tell():
                file.write(self.header.encode())
        return done

    def remove_if_other(self) -> None:
        """Removes the file if it is damaged or has other settings, for a work that is done again in no time."""
        if not self.record.is_file():
            return
        try:
            is_same = not different_settings(self._recorded()[0], self.settings) and self._damage() is None
        except ValueError:
            is_same = False
        if not is_same:
            for path in (self.path, self.partial, self.record):
                path.unlink(missing_ok=True)

    def _recorded(self) -> tuple[dict[str, Any], str | None]:
        """Returns the settings in the record, and the digest of the complete file, once it is there."""
        content = read_json(self.record)
        # Version 0.1 added a digest of the content.
        content.pop("digest", None)
        # The file goes on with its own.
        content.pop(ITEMS, None)
        return content, content.pop(COMPLETE, None)

    def _recorded_block(self) -> int:
        found = read_json(self.record).get(ITEMS, BLOCK)
        if type(found) is not int or found < 1:
            raise ValueError(f"{self.record} has {ITEMS} {found!r}, but it must be a whole number above 0.")
        return found

    def _damage(self) -> str | None:
        """Returns how the complete file differs from what was written, as the beginning of a sentence."""
        _, sha256 = self._recorded()
        return find_damage(self.path.parent, {self.path.name: sha256}) if sha256 and self.path.exists() else None

    def _check_record(self, begun: Path) -> None:
        advice = f"Name another {self.key}, or delete {begun}."
        if not self.record.is_file():
            raise ValueError(f"{begun} exists already, without the record of its settings, {self.record}. {advice}")
        if changes := different_settings(self._recorded()[0], self.settings):
            raise ValueError(f"{begun} was made with other settings: {changes}. {advice}")

    def _check_line(self, number: int, line: bytes) -> None:
        if self.header and number == 1:
            is_whole = line == self.header.encode()
        else:
            is_whole = line.count(b"\t") == len(self.columns) - 1 if self.columns else line.startswith(b"{")
        if not is_whole:
            raise ValueError(f"{self.partial}, line {number}, is damaged: delete this file to start over.")

    def write(self, entries: Iterable[str]) -> None:
        """Appends entries, which are lines without their ends, and leaves whole lines."""
        with OutputFile(self.partial, "the same command continues after them") as file:
            write_whole(file, "".join(f"{entry}\n" for entry in entries))

    def finish(self) -> None:
        """Gives the file its name, after recording its digest."""
        sync(self.partial)
        self._write_record({COMPLETE: digest(self.partial)})
        put_in_place(self.partial, self.path)

    def _write_record(self, more: dict[str, str]) -> None:
        block = {ITEMS: self.block} if self.block != BLOCK else {}
        content = json.dumps(self.settings | block | more, indent=2, ensure_ascii=False)
        atomic_write_text(self.record, content + "\n")

    def lines(self) -> Iterator[str]:
        """Yields the entries of the complete file, without line ends."""
        with self.path.open(encoding="utf-8", newline="\n") as file:
            if self.header:
                next(file)
            yield from (line.rstrip("\n") for line in file)


def grow(
    processes: Processes,
    file: GrowingFile,
    items: Iterable[T],
    done: int,
    work: Callable[[int, list[T]], Sequence[str]],
) -> Iterator[int]:
    """
    Works on items and writes their entries. All processes call this together, and each takes whole blocks.

    Args:
        processes ([`Processes`]): those of the launch.
        file ([`GrowingFile`]): where process 0 writes the entries, as its `begin` has left it there.
        items (`Iterable`): all items; read in process 0 only.
        done (`int`): entries that are written already, in whole blocks.
        work (`Callable`): makes an entry of each item of a block, given the number of the block, too.

    Yields:
        `int`: the number of entries that were just written.
    """
    size, i = file.block, processes.process_index
    for chunk in processes.chunks(skip_lines(iter(items), done), size):
        part = work(done // size + i, chunk[i * size : (i + 1) * size])
        entries = [entry for part in processes.gather(part) for entry in part]
        if processes.is_main_process:
            file.write(entries)
        done += len(chunk)
        yield len(chunk)
