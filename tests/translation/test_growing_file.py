"""Growing files: they can be interrupted anywhere, other settings are refused, and what is damaged is named."""

import io
import json
import os
import signal
from pathlib import Path

import pytest

from hf_vaswani.processes import Processes
from hf_vaswani.translation import growing_file
from hf_vaswani.translation.growing_file import GrowingFile, OutputFile, grow, skip_lines, write_whole


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch) -> None:
    monkeypatch.setattr(growing_file, "BLOCK", 4)


def table(folder: Path, **settings: object) -> GrowingFile:
    return GrowingFile(folder / "pairs.tsv", {"seed": 1} | settings, "place", ("en", "de"))


def json_lines(folder: Path) -> GrowingFile:
    return GrowingFile(folder / "found.jsonl", {"seed": 1}, "place")


ROWS = [f"source {i}\ttarget {i}" if i % 3 else f"\ttarget {i}" for i in range(10)]
OBJECTS = [json.dumps({"text": f"\u2028 {i}"}, ensure_ascii=False) for i in range(10)]


@pytest.mark.parametrize(("make", "entries"), [(table, ROWS), (json_lines, OBJECTS)])
def test_a_file_that_was_cut_anywhere_goes_on_after_its_whole_blocks(tmp_path, make, entries) -> None:
    file = make(tmp_path)
    assert file.begin() == 0 and not file.path.exists()
    file.write(entries)
    content, header = file.partial.read_bytes(), len(file.header) > 0
    for length in range(len(content) + 1):
        file.partial.write_bytes(content[:length])
        again = make(tmp_path)
        done = again.begin()
        assert done == max(0, content[:length].count(b"\n") - header) // 4 * 4
        assert content.startswith(again.partial.read_bytes()), "nothing is lost but the end"
        again.write(entries[done:])
        assert again.partial.read_bytes() == content
    again.finish()
    assert again.path.read_bytes() == content and not again.partial.exists()
    assert list(again.lines()) == entries
    assert make(tmp_path).begin() is None, "it is complete"


def test_a_file_that_version_0_1_began_is_completed(tmp_path) -> None:
    (tmp_path / "pairs.tsv.json").write_text(json.dumps({"seed": 1, "search": {"num_beams": 4}, "digest": "abc"}))
    (tmp_path / ".pairs.tsv.writing").write_text("\n".join(["en\tde", *ROWS[:6]]) + "\nsource 6\tta")
    file = table(tmp_path, search={"num_beams": 4})
    assert file.begin() == 4
    file.write(ROWS[4:])
    file.finish()
    assert list(file.lines()) == ROWS


def test_lines_of_other_settings_are_refused_and_kept(tmp_path) -> None:
    pairs = table(tmp_path)
    pairs.begin()
    pairs.write(ROWS)
    content = pairs.partial.read_bytes()
    with pytest.raises(ValueError, match=r"\.pairs\.tsv\.writing was made with other settings: seed was 1 and is 2\."):
        table(tmp_path, seed=2).begin()
    assert pairs.partial.read_bytes() == content
    pairs.finish()
    with pytest.raises(ValueError, match=r"pairs\.tsv was made with other settings: top_k was None and is 5\. Name"):
        table(tmp_path, top_k=5).begin()
    pairs.record.unlink()
    with pytest.raises(ValueError, match=r"pairs\.tsv exists already, without the record of its settings"):
        table(tmp_path).begin()
    assert pairs.path.read_bytes() == content


def test_lines_of_other_settings_are_removed_only_if_asked_for(tmp_path) -> None:
    pairs = table(tmp_path, ids=(1, 2))
    pairs.begin()
    pairs.write(ROWS)
    pairs.finish()
    table(tmp_path, ids=[1, 2]).remove_if_other()
    assert pairs.path.is_file()
    table(tmp_path, ids=[1, 3]).remove_if_other()
    assert not any(tmp_path.iterdir())


def test_complete_files_that_were_changed_are_refused_or_made_again(tmp_path) -> None:
    pairs = table(tmp_path)
    pairs.begin()
    pairs.write(ROWS)
    pairs.finish()
    content = pairs.path.read_bytes()
    for damaged in (content.replace(b"target 3", b"target 4"), content[:-7], b""):
        pairs.path.write_bytes(damaged)
        with pytest.raises(
            ValueError, match=r"pairs\.tsv was changed or damaged .* Restore it, or delete it and .*json"
        ):
            table(tmp_path).begin()
        assert pairs.path.read_bytes() == damaged
    table(tmp_path).remove_if_other()
    assert not any(tmp_path.iterdir())


def test_a_damaged_file_is_named(tmp_path) -> None:
    pairs = table(tmp_path)
    pairs.begin()
    pairs.write(["one\teins", "two\tthree\tzwei"])
    with pytest.raises(ValueError, match=r"\.pairs\.tsv\.writing, line 3, is damaged: delete this file to start over"):
        table(tmp_path).begin()


def test_each_item_is_worked_on_once_in_numbered_blocks(tmp_path) -> None:
    file, blocks = table(tmp_path), []

    def work(block: int, items: list[int]) -> list[str]:
        blocks.append((block, items))
        return [f"{item}\t{block}" for item in items]

    file.begin()
    assert list(grow(Processes(), file, range(10), 0, work)) == [4, 4, 2]
    assert blocks == [(0, [0, 1, 2, 3]), (1, [4, 5, 6, 7]), (2, [8, 9])]
    blocks.clear()
    done = table(tmp_path).begin()
    assert done == 8 and list(grow(Processes(), file, range(10), done, work)) == [2] and blocks == [(2, [8, 9])]


@pytest.mark.parametrize(("begun", "now"), [(1, 3), (3, 1)])
def test_a_file_goes_on_in_the_blocks_that_it_was_begun_with(tmp_path, begun, now) -> None:
    """Also on a device that works on more or fewer items at a time: what is drawn in a block depends on its number."""

    def work(block: int, items: list[int]) -> list[str]:
        return [f"{item}\t{block}" for item in items]

    whole = GrowingFile(tmp_path / "a.tsv", {}, "place", "ab", begun)
    list(grow(Processes(), whole, range(40), whole.begin(), work))
    file = GrowingFile(tmp_path / "b.tsv", {}, "place", "ab", begun)
    assert next(grow(Processes(), file, range(40), file.begin(), work)) == 4 * begun
    assert json.loads(file.record.read_text()) == ({} if begun == 1 else {growing_file.ITEMS: 12})
    again = GrowingFile(tmp_path / "b.tsv", {}, "place", "ab", now)
    done = again.begin()
    assert done == 4 * begun
    list(grow(Processes(), again, range(40), done, work))
    assert again.partial.read_bytes() == whole.partial.read_bytes()
    again.finish()
    assert GrowingFile(tmp_path / "b.tsv", {}, "place", "ab", now).begin() is None
    again.partial.write_bytes(again.path.read_bytes())
    again.path.unlink()
    again.record.write_text(json.dumps({growing_file.ITEMS: "many"}))
    with pytest.raises(ValueError, match="b.tsv.json has items_of_a_block 'many', but it must be a whole number"):
        GrowingFile(tmp_path / "b.tsv", {}, "place", "ab", now).begin()


def test_skipping_lines_needs_as_many() -> None:
    assert list(skip_lines(iter(["a", "b", "c"]), 2)) == ["c"]
    assert list(skip_lines(iter(["a"]), 1)) == []
    with pytest.raises(ValueError, match="The output has 2 lines already, but the text has only 1"):
        list(skip_lines(iter(["a"]), 2))


def test_an_output_file_is_appended_to(tmp_path) -> None:
    for text in ("one\n", "zwei\nü\n"):
        with OutputFile(tmp_path / "out") as file:
            file.write(text)
    assert (tmp_path / "out").read_text("utf-8") == "one\nzwei\nü\n"


def test_ctrl_c_is_delayed_until_the_lines_are_written() -> None:
    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            for line in text.splitlines(keepends=True):
                super().write(line)
                os.kill(os.getpid(), signal.SIGINT)
            return len(text)

    output = Slow()
    with pytest.raises(KeyboardInterrupt):
        write_whole(output, "one\ntwo\n")
    assert output.getvalue() == "one\ntwo\n"
