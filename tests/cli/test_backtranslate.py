"""hf-vaswani backtranslate: pairs that a recipe reads, the same bytes after any interruption, and what is refused."""

import gzip
import time
from pathlib import Path

import pytest

from hf_vaswani.cli import main
from hf_vaswani.data.reading import load_pairs
from hf_vaswani.interruption import exclusive
from hf_vaswani.translation import growing_file, lines

from ..children import Child, run_python
from ..conftest import write_recipe
from .conftest import size_limit

# The model of the tests translates from English into German: text in English becomes pairs from German into English.
WORDS = ["one", "two three", "four five six", "nine", "seven eight"]


@pytest.fixture
def command(tiny_run, tmp_path: Path, monkeypatch) -> list[str]:
    """A command that translates 40 sentences in blocks of 8."""
    monkeypatch.setattr(growing_file, "BLOCK", 8)
    text = [f"{WORDS[i % 5]} {WORDS[i % 3]}" for i in range(40)]
    (tmp_path / "a.en").write_text("\n".join(text[:20]) + '\n\n  \n"ten"\ttwo\r\n', encoding="utf-8")
    (tmp_path / "b.en.gz").write_bytes(gzip.compress("\n".join(text[20:]).encode()))
    recipe = (
        "data: {source_language: de, target_language: en}\n"
        f"backtranslation: {{model: {tiny_run}, text: [{tmp_path / 'a.en'}, {tmp_path / 'b.en.gz'}],\n"
        f"                  output: {tmp_path / 'pairs.tsv'}}}\n"
    )
    return ["backtranslate", write_recipe(tmp_path, recipe)]


def test_the_pairs_are_read_by_more_data(command, tmp_path, capsys) -> None:
    assert main(command) == 0
    assert capsys.readouterr().out.startswith(f"Pairs  {tmp_path / 'pairs.tsv'} (41")
    pairs = load_pairs("de", "en", train_files=str(tmp_path / "pairs.tsv"))["train"]
    # Of 43 lines, two are blank.
    assert len(pairs) == 41 and pairs["target"][:2] == ["one one", "two three two three"]
    assert pairs["target"][20] == '"ten" two' and len(set(pairs["source"])) > 20
    assert main(command) == 0 and capsys.readouterr().out.startswith("Complete  ")


def test_beams_and_seeds_and_the_text_make_other_pairs_and_are_refused(command, tmp_path, capsys) -> None:
    assert main(command) == 0
    sampled = (tmp_path / "pairs.tsv").read_bytes()
    beam = ["--backtranslation.method", "beam", "--backtranslation.num_beams", "2"]
    for more, words in (
        (beam, "backtranslation.method was 'sampling' and is 'beam', backtranslation.num_beams was 4 and is 2"),
        (["--seed", "7"], "seed was 1 and is 7"),
        ([f"--backtranslation.text={tmp_path / 'a.en'}"], "backtranslation.text was ["),
    ):
        assert main([*command, *more]) == 2 and words in capsys.readouterr().err
        other = tmp_path / "other.tsv"
        assert main([*command, *more, "--backtranslation.output", str(other)]) == 0
        assert sampled != other.read_bytes() and other.with_name("other.tsv.json").is_file()
        other.unlink()
    assert (tmp_path / "pairs.tsv").read_bytes() == sampled


@pytest.mark.parametrize("after", [1, 3, 6])
def test_work_that_was_stopped_goes_on_to_the_same_bytes(command, tmp_path, monkeypatch, after) -> None:
    output, partial = tmp_path / "pairs.tsv", tmp_path / ".pairs.tsv.writing"
    assert main(command) == 0
    whole = output.read_bytes()
    output.unlink()
    translate, blocks = lines.LineTranslator.__call__, []

    def stopping(self, sentences):
        blocks.append(sentences)
        if len(blocks) == after:
            raise KeyboardInterrupt
        return translate(self, sentences)

    monkeypatch.setattr(lines.LineTranslator, "__call__", stopping)
    assert main(command) == 130 and not output.exists()
    assert partial.read_bytes().count(b"\n") == 1 + 8 * (after - 1)
    assert main(command) == 0 and output.read_bytes() == whole and not partial.exists()
    # Each block once, and the interrupted one again.
    assert len(blocks) == 7


@pytest.mark.process
def test_a_killed_process_goes_on_to_the_same_bytes(command, tmp_path) -> None:
    output, partial = tmp_path / "pairs.tsv", tmp_path / ".pairs.tsv.writing"
    assert main(command) == 0
    whole = output.read_bytes()
    output.unlink()
    program = (
        "import sys, time; from hf_vaswani.cli import main; from hf_vaswani.translation import growing_file\n"
        "growing_file.BLOCK, write = 8, growing_file.GrowingFile.write\n"
        "growing_file.GrowingFile.write = lambda self, pairs: (write(self, pairs), time.sleep(1))\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    child = Child(tmp_path / "outputs", run_python, ["-c", program, *command])
    end = time.monotonic() + 120
    while not (partial.is_file() and partial.read_bytes().count(b"\n") > 9) and time.monotonic() < end:
        time.sleep(0.02)
    child.end(0)
    # As if it had been killed while it wrote.
    partial.write_bytes(partial.read_bytes()[:-3])
    assert not output.exists() and main(command) == 0 and output.read_bytes() == whole


def test_a_full_disk_loses_nothing(command, tmp_path, capsys) -> None:
    output = tmp_path / "pairs.tsv"
    assert main(command) == 0
    whole = output.read_bytes()
    output.unlink()
    # The record fits.
    with size_limit(len(whole) - 20):
        assert main(command) == 2
    said = capsys.readouterr().err
    assert "cannot be written: File too large. Its lines are complete, and the same command continues" in said
    assert main(command) == 0 and output.read_bytes() == whole


def test_two_processes_do_not_write_one_file(command, tmp_path, capsys) -> None:
    with exclusive(tmp_path / "pairs.tsv"):
        assert main(command) == 2 and "pairs.tsv is being written by another process" in capsys.readouterr().err
    assert main(command) == 0 and not list(tmp_path.glob(".*.lock"))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--backtranslation.model=null"], "backtranslation.model must have a value, but it is None"),
        (["--backtranslation.text=null"], "backtranslation.text must have a value"),
        (["--backtranslation.text=nowhere.en"], "There is no file 'nowhere.en'"),
        (["--backtranslation.output=null"], "backtranslation.output must have a value"),
        (["--backtranslation.output=pairs.txt"], "backtranslation.output must end in .tsv"),
        (["--backtranslation.output=no/pairs.tsv"], "is in a folder that does not exist"),
        (["--backtranslation.model=nowhere"], "is 'nowhere', which does not exist"),
        (
            ["--data.source_language=fr"],
            "translates en-de, but for the data section of this recipe, it must translate en-fr",
        ),
        (["--backtranslation.top_k=5", "--backtranslation.method=beam"], "backtranslation.top_k (5) has no effect"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(command, tmp_path, capsys, more, words) -> None:
    before = sorted(tmp_path.iterdir())
    assert main([*command, *more]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_an_input_is_not_overwritten(command, tmp_path, capsys) -> None:
    (tmp_path / "text.tsv").write_text("one\n")
    same = [f"--backtranslation.{key}={tmp_path / 'text.tsv'}" for key in ("text", "output")]
    assert main([*command, *same]) == 2 and "is one of the files of backtranslation.text" in capsys.readouterr().err
    assert (tmp_path / "text.tsv").read_text() == "one\n"


def test_the_help_lists_the_keys(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["backtranslate", "--help"])
    said = capsys.readouterr().out
    assert stop.value.code == 0 and said.startswith("usage: hf-vaswani backtranslate RECIPE.yaml")
    assert "Translates text in the target language" in said and "--backtranslation.top_k" in said
