"""hf-vaswani check: what it reads, what it writes, and that a recipe reads that again."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from hf_vaswani.cli import main
from hf_vaswani.data.reading import load_pairs

from ..conftest import tiny_recipe
from .conftest import size_limit

GOOD = [
    ("A dog runs through the snow.", "Ein Hund läuft durch den Schnee."),
    ("Two men are cooking dinner.", "Zwei Männer kochen das Abendessen."),
    ("The girl reads a red book.", "Das Mädchen liest ein rotes Buch."),
]
BAD = [
    ("A woman is singing on a stage.", ""),
    GOOD[0],
    ("A boy jumps into the lake.", " ".join(["Ein Junge springt in den See."] * 5)),
    ("The cat sleeps on the sofa.", "Die Katze schlÃ¤ft auf dem Sofa."),
    ("The test  is HERE.", "Der Test ist dort."),
]
REASONS = ["empty", "duplicate", "ratio", "encoding", "held_out"]
PAIRS = [*GOOD, *BAD]
TEST = [("the test is here.", "Hier ist der Test."), ("One more.", "Noch einer.")]


def write(folder: Path, name: str, pairs: list[tuple[str, str]]) -> list[str]:
    paths = [folder / f"{name}.en", folder / f"{name}.de"]
    for path, side in zip(paths, zip(*pairs, strict=True), strict=True):
        path.write_text("".join(f"{sentence}\n" for sentence in side), encoding="utf-8")
    return [str(path) for path in paths]


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    """Two files with good and bad pairs, and the key of a test set."""
    test = dict(zip(("en", "de"), write(tmp_path, "test", TEST), strict=True))
    return [*write(tmp_path, "train", PAIRS), "--data.test_files", json.dumps(test)]


def read(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text("utf-8").splitlines()]


def test_good_pairs_and_bad_ones_with_reasons(text, tmp_path, capsys) -> None:
    outputs = {name: tmp_path / name for name in ("clean.tsv", "rejected.tsv", "report.json")}
    options = [
        "--output",
        outputs["clean.tsv"],
        "--rejected",
        outputs["rejected.tsv"],
        "--json",
        outputs["report.json"],
    ]
    assert main(["check", *text, *map(str, options)]) == 0
    assert read(outputs["clean.tsv"]) == [["en", "de"], *map(list, GOOD)]
    rejected = read(outputs["rejected.tsv"])
    assert rejected[0] == ["pair", "reasons", "en", "de"]
    assert [row[:2] for row in rejected[1:]] == [[str(i), reason] for i, reason in enumerate(REASONS, start=4)]
    assert [tuple(row[2:]) for row in rejected[1:]] == BAD
    # A recipe reads what is left.
    pairs = load_pairs("en", "de", train_files=str(outputs["clean.tsv"]))["train"]
    assert list(zip(pairs["source"], pairs["target"], strict=True)) == GOOD
    said = capsys.readouterr().out
    (source,) = json.loads(outputs["report.json"].read_text("utf-8"))["sources"]
    assert (source["pairs"], source["kept"]) == (8, 3)
    assert {reason for reason, count in source["reasons"].items() if count} == set(REASONS)
    assert source["held_out"] == {"test": {"pairs": 2, "found": 1}}
    assert "1 of 2 test pairs have their source or target in the training text too." in said
    assert "defaults, because there is no validation set" in said


def test_a_set_without_training_text_is_compared_too(text, tmp_path, capsys) -> None:
    leaked = dict(zip(("en", "de"), write(tmp_path, "leaked", GOOD[:1]), strict=True))
    sets = f"--validation_sets={json.dumps({'leaked': {'test_files': leaked}})}"
    assert main(["check", *text, sets, "--no-language", "--json", str(tmp_path / "report.json")]) == 0
    (source,) = json.loads((tmp_path / "report.json").read_text("utf-8"))["sources"]
    assert source["held_out"] == {"test": {"pairs": 2, "found": 1}, "leaked test": {"pairs": 1, "found": 1}}
    # The pair is there twice.
    assert source["reasons"]["held_out"] == 3
    assert "1 of 1 leaked test pairs" in capsys.readouterr().out


def test_a_recipe_with_its_overrides_and_a_clean_text_for_it(tmp_path, capsys) -> None:
    recipe = tiny_recipe(tmp_path, scored=True)
    output = tmp_path / "clean.tsv"
    arguments = ["--no-language", "--output", str(output), "--limits", "max_ratio=5", "max_length=3"]
    assert main(["check", *recipe, *arguments, "--data.test_split=null"]) == 0
    said = capsys.readouterr().out
    assert (
        "from 120 pairs of the validation set; max_ratio, max_length by --limits" in said and "max_ratio=5.0" in said
    )
    assert "120 of 120 validation pairs" in said and "Nothing is wrong with 0 of 120 pairs" in said
    # Without the sets that are its own text, and longer numbers allowed.
    own = [word for word in recipe if "validation_files" not in word and "test_files" not in word]
    output.unlink()
    assert main(["check", *own, "--no-language", "--output", str(output)]) == 0
    cleaned = [*own, f"--data.train_files={output}", "--run_dir", str(tmp_path / "run")]
    assert main(["train", *cleaned]) == 0, capsys.readouterr()
    noted = json.loads((tmp_path / "run" / "environment.json").read_text())["data"]
    assert noted[0]["pairs"] == {"train": len(read(output)) - 1}


def test_a_table_with_named_columns(tmp_path, capsys) -> None:
    path = tmp_path / "text.tsv.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("id\ten\tde\n" + "".join(f"{i}\t{a}\t{b}\n" for i, (a, b) in enumerate(PAIRS)))
    assert main(["check", str(path), "--columns", "en", "de", "--output", str(tmp_path / "clean.tsv")]) == 0
    assert read(tmp_path / "clean.tsv")[:2] == [["en", "de"], list(GOOD[0])]


def test_numbered_columns_stay_the_same_numbers(tmp_path) -> None:
    path, output = tmp_path / "text.csv", tmp_path / "clean.tsv"
    # A cell of a CSV file may have what a cell of a TSV file cannot.
    rows = [*GOOD, ("A tab\there.", "Ein Tab\nhier.")]
    path.write_text("".join(f'{i},"{b}",x,"{a}"\n' for i, (a, b) in enumerate(rows)), encoding="utf-8")
    options = ["--columns", "3", "1", "--languages", "en", "de", "--output", str(output)]
    assert main(["check", str(path), *options]) == 0
    columns = {"source_column": 3, "target_column": 1}
    pairs = load_pairs("en", "de", train_files=str(output), **columns)["train"]
    assert list(zip(pairs["source"], pairs["target"], strict=True)) == [*GOOD, ("A tab here.", "Ein Tab hier.")]


def test_two_sources_are_reported_both(text, tmp_path, capsys) -> None:
    source, target, *test = text
    files = json.dumps({"en": source, "de": target})
    recipe = tmp_path / "two.yaml"
    recipe.write_text(f"data: {{train_files: {files}}}\nmore_data:\n- {{train_files: {files}}}\n", encoding="utf-8")
    report = tmp_path / "report.json"
    assert main(["check", str(recipe), "--json", str(report), *test]) == 0
    content = json.loads(report.read_text("utf-8"))
    assert content["total"]["pairs"] == 16
    # All pairs of the second source are there before; a recipe may have them twice on purpose, but should know.
    assert content["sources"][1]["reasons"]["duplicate"] == 7
    assert main(["check", str(recipe), "--output", str(tmp_path / "clean.tsv")]) == 2
    assert "2 sources, but --output" in capsys.readouterr().err


def test_a_picture(text, tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `viz` is not installed")
    assert main(["check", *text, "--plot", str(tmp_path / "lengths.png")]) == 0
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_languages(tmp_path, capsys, caplog) -> None:
    pytest.importorskip("py3langid", reason="the extra `clean` is not installed")
    english = "A very young woman is singing on a big stage."
    pairs = [*GOOD, (english, "Une très jeune femme chante sur une grande scène.")]
    paths = write(tmp_path, "train", pairs)
    assert main(["check", *paths, "--rejected", str(tmp_path / "rejected.tsv")]) == 0
    assert [row[:2] for row in read(tmp_path / "rejected.tsv")[1:]] == [["4", "language"]]
    assert "languages" in capsys.readouterr().out
    assert main(["check", *paths, "--languages", "english", "de"]) == 0
    assert "py3langid does not know the language 'english'" in caplog.text


def test_without_the_identifier_the_rest_is_checked(text, capsys, caplog, monkeypatch) -> None:
    for name in ("py3langid", "py3langid.langid"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["check", *text]) == 0
    assert "needs py3langid: pip install 'hf_vaswani[clean]'" in caplog.text
    said = capsys.readouterr().out
    assert "duplicate " in said and "languages " not in said and "language " not in said


@pytest.mark.parametrize(
    ("missing", "code", "words"),
    [
        (("accelerate", "evaluate", "peft", "matplotlib"), 0, "duplicate"),
        (("accelerate", "datasets"), 2, "needs datasets: pip install 'hf_vaswani[clean]'"),
    ],
)
def test_its_own_extra_is_enough_and_is_what_it_names(text, missing, code, words) -> None:
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({missing!r})); "
        "from hf_vaswani.cli import main; sys.exit(main(['check', *sys.argv[1:]]))"
    )
    done = subprocess.run([sys.executable, "-c", program, *text], capture_output=True, text=True, check=False)
    assert done.returncode == code and words in done.stdout + done.stderr, done.stderr[-2000:]


@pytest.mark.parametrize("damage", ["shorter", "latin-1"])
def test_a_broken_line_is_named_and_nothing_is_written(text, tmp_path, capsys, damage) -> None:
    target = Path(text[1])
    lines = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(
        b"".join(lines[:-1] if damage == "shorter" else [*lines[:5], "ä\n".encode("latin-1"), *lines[6:]])
    )
    outputs = ["--output", str(tmp_path / "clean.tsv"), "--rejected", str(tmp_path / "rejected.tsv")]
    assert main(["check", *text, *outputs]) == 2
    error = capsys.readouterr().err
    assert ("has 8 and" if damage == "shorter" else "train.de, line 6, is not UTF-8") in error or "has 7" in error
    assert not list(tmp_path.glob("*clean*")) + list(tmp_path.glob("*rejected*"))


def test_a_full_disk_leaves_nothing(tmp_path, capsys) -> None:
    paths = write(tmp_path, "train", [(f"Sentence {i} is here.", f"Satz {i} ist hier.") for i in range(3000)])
    with size_limit(8192):
        assert main(["check", *paths, "--no-language", "--output", str(tmp_path / "clean.tsv")]) == 2
    assert "clean.tsv could not be written" in capsys.readouterr().err
    assert not list(tmp_path.glob("*clean*"))


@pytest.mark.slow
@pytest.mark.real_data
def test_hardly_anything_is_wrong_with_multi30k(multi30k, tmp_path) -> None:
    files = {
        split: json.dumps({side: str(multi30k / f"{split}.{side}") for side in ("en", "de")}) for split in ("val",)
    }
    train = [str(multi30k / f"train.{side}") for side in ("en", "de")]
    options = ["--no-language", "--rejected", str(tmp_path / "rejected.tsv")]
    assert main(["check", *train, f"--data.validation_files={files['val']}", *options]) == 0
    rejected = read(tmp_path / "rejected.tsv")[1:]
    assert 0 < len(rejected) < 20
    # Its two sentences without a translation.
    assert [row[0] for row in rejected if row[3] == "@@"] == ["16510", "16664"]


def test_a_prefix_is_no_text(text, tmp_path, capsys) -> None:
    reports = []
    for more in ([], ["--data.prefix", "translate to German:"]):
        path = tmp_path / f"{len(more)}.json"
        assert main(["check", *text, *more, "--no-language", "--json", str(path)]) == 0
        reports.append(json.loads(path.read_text()))
    assert reports[0] == reports[1] and reports[0]["total"]
    capsys.readouterr()


def test_text_at_a_url_is_checked_where_it_is(tmp_path, capsys, monkeypatch) -> None:
    memory = fsspec.filesystem("memory")
    table = "".join(f"{source}\t{target}\n" for source, target in [("en", "de"), *PAIRS])
    memory.pipe_file("/corpus/a.tsv?sig=SECRET", table.encode())
    sides = dict(zip(("en", "de"), zip(*PAIRS, strict=True), strict=True))
    for side, text in sides.items():
        memory.pipe_file(f"/corpus/a.{side}?sig=SECRET", "".join(f"{line}\n" for line in text).encode())
    monkeypatch.setattr(type(memory), "get_file", lambda *_, **__: pytest.fail("It is copied."))
    one = ["memory://corpus/a.tsv?sig=SECRET", "--columns", "en", "de"]
    two = [f"memory://corpus/a.{side}?sig=SECRET" for side in sides]
    try:
        for name, text in (("one", one), ("two", two)):
            outputs = ["--output", str(tmp_path / f"{name}.tsv"), "--json", str(tmp_path / f"{name}.json")]
            assert main(["check", *text, "--no-language", *outputs]) == 0
            assert read(tmp_path / f"{name}.tsv")[:4] == [["en", "de"], *map(list, GOOD)]
    finally:
        memory.store.clear()
    said = capsys.readouterr()
    report = (tmp_path / "one.json").read_text()
    assert json.loads(report)["sources"][0]["text"] == ["memory://corpus/a.tsv"]
    assert "SECRET" not in said.out + said.err + report
