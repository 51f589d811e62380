"""
Text files that grow: one entry for each item of a long work, in blocks, so that it can be stopped anywhere and goes on
to the same bytes, in any number of processes.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..files import atomic_write_text, digest, find_damage, put_in_place, read_json, sync, temporary_name
from ..processes import Processes
from .lines import OutputFile, skip_lines, write_whole

# Items that are sorted by length and worked on together, and lost when the work is killed.
BLOCK = 1024
# Key of the record with the digest of the complete file.
COMPLETE = "sha256"

T = TypeVar("T")


class GrowingFile:
    """
    A file of lines that grows under a temporary name beside its own, which it gets when it is complete. A record of
    the settings, `NAME.json`, is written first; the digest of the complete file is added to it.

    Args:
        path (`Path`): the file: a `.tsv` of two or more columns, or a `.jsonl`.
        settings (`dict[str, Any]`): everything that the lines depend on; JSON-serializable.
        key (`str`): key of the recipe that names the place, for error messages.
        columns (`Sequence[str]`): names of the columns, for the header of a `.tsv`; none for a `.jsonl`.
    """

    def __init__(self, path: Path, settings: dict[str, Any], key: str, columns: Sequence[str] = ()) -> None:
        self.path, self.settings, self.columns = path, settings, tuple(columns)
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
        if not begun:
            self._write_record({})
        done, length = self._whole_blocks() if begun else (0, 0)
        with self.partial.open("rb+" if begun else "xb") as file:
            file.truncate(length)
            if not length:
                file.write(self.header.encode())
        return done

    def remove_if_other(self) -> None:
        """Removes the file if it is damaged or has other settings, for a work that is done again in no time."""
        if not self.record.is_file():
            return
        try:
            is_same = self._recorded()[0] == json.loads(json.dumps(self.settings)) and self._damage() is None
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
        return content, content.pop(COMPLETE, None)

    def _damage(self) -> str | None:
        """Returns how the complete file differs from what was written, as the beginning of a sentence."""
        _, sha256 = self._recorded()
        return find_damage(self.path.parent, {self.path.name: sha256}) if sha256 and self.path.exists() else None

    def _check_record(self, begun: Path) -> None:
        advice = f"Name another {self.key}, or delete {begun}."
        if not self.record.is_file():
            raise ValueError(f"{begun} exists already, without the record of its settings, {self.record}. {advice}")
        (recorded, _), settings = self._recorded(), json.loads(json.dumps(self.settings))
        different = [key for key in {**recorded, **settings} if recorded.get(key) != settings.get(key)]
        if different:
            then, now = ({key: of.get(key) for key in different} for of in (recorded, settings))
            changes = ", ".join(f"{key} was {then[key]!r} and is {now[key]!r}" for key in different)
            raise ValueError(f"{begun} was made with other settings: {changes}. {advice}")

    def _whole_blocks(self) -> tuple[int, int]:
        """Counts the lines of the whole blocks in the unfinished file, and the bytes up to their end."""
        lines = length = whole = 0
        first = bool(self.header)
        with self.partial.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                if not (line == self.header.encode() if first and not lines else self._is_entry(line)):
                    raise ValueError(f"{self.partial}, line {lines + 1}, is damaged: delete this file to start over.")
                lines, length = lines + 1, length + len(line)
                if (lines - first) % BLOCK == 0:
                    whole = length
        return max(lines - first, 0) // BLOCK * BLOCK, whole

    def _is_entry(self, line: bytes) -> bool:
        return line.count(b"\t") == len(self.columns) - 1 if self.columns else line.startswith(b"{")

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
        content = json.dumps(self.settings | more, indent=2, ensure_ascii=False)
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
        file ([`GrowingFile`]): where process 0 writes the entries.
        items (`Iterable`): all items; read in process 0 only.
        done (`int`): entries that are written already, in whole blocks.
        work (`Callable`): makes an entry of each item of a block, given the number of the block, too.

    Yields:
        `int`: the number of entries that were just written.
    """
    for chunk in processes.chunks(skip_lines(iter(items), done), BLOCK):
        i = processes.process_index
        part = work(done // BLOCK + i, chunk[i * BLOCK : (i + 1) * BLOCK])
        entries = [entry for part in processes.gather(part) for entry in part]
        if processes.is_main_process:
            file.write(entries)
        done += len(chunk)
        yield len(chunk)
