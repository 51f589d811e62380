"""Every way to give text reads the same text; every mistake is reported with file and line."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from hf_vaswani.data.reading import Source, load_pairs, load_splits

# Hard for readers of tables: quotation marks, "null", a bare carriage return, U+2028, a leading comma.
PAIRS = [
    ('He said "yes".', 'Er sagte "ja".'),
    ('"Quoted', '"Zitiert'),
    ("null", "NA"),
    (", a, b", "ä, b"),
    ("line\u2028separator", "Zeilen\u2028trenner"),
    ("  spaces ", "Leerzeichen"),
]
KINDS = ["aligned", "aligned.gz", "tsv", "tsv.gz", "csv", "jsonl", "translation.jsonl", "lines.json", "list.json"]
KINDS += ["parquet", "saved", "translation.saved", "folder"]
STREAMING = pytest.mark.parametrize("streaming", [False, True])


def rows(dataset: Any) -> list[tuple[str, str]]:
    return [(row["source"], row["target"]) for row in dataset]


def aligned(folder: Path, pairs=PAIRS, ending: str = "\n", gz: str = "") -> dict[str, str]:
    files = {"en": folder / f"text.en{gz}", "de": folder / f"text.de{gz}"}
    for side, path in enumerate(files.values()):
        content = "".join(pair[side] + ending for pair in pairs).encode()
        path.write_bytes(gzip.compress(content) if gz else content)
    return {language: str(path) for language, path in files.items()}


def given(folder: Path, kind: str, pairs=PAIRS, mark: str = "") -> dict[str, Any]:
    """Writes pairs in a format, a file with a mark at its start; returns the arguments of [`load_pairs`]."""
    if kind.startswith("aligned"):
        return {"train_files": aligned(folder, pairs, gz=".gz" if kind.endswith("gz") else "")}
    path, table = folder / f"text.{kind}", [{"en": en, "de": de} for en, de in pairs]
    nested = [{"translation": row} for row in table]
    lines = "".join(json.dumps(row) + "\n" for row in (nested if "translation" in kind else table))
    if kind.endswith(("saved", "folder", "parquet")):
        features = datasets.Features({"translation": datasets.Translation(languages=["de", "en"])})
        dataset = datasets.Dataset.from_list(table)
        if kind == "translation.saved":
            dataset = datasets.Dataset.from_list(nested, features=features)
        if kind == "parquet":
            dataset.to_parquet(path)
            return {"train_files": str(path)}
        if kind == "folder":
            (path / "data").mkdir(parents=True)
            for split in ("train", "validation", "test"):
                (path / "data" / f"{split}.jsonl").write_text(lines)
            return {"dataset": str(path)}
        datasets.DatasetDict({"train": dataset, "val": dataset.select([0])}).save_to_disk(path)
        return {"dataset": str(path), "validation_split": "val", "test_split": None}
    quoted = [['"' + text.replace('"', '""') + '"' for text in pair] for pair in pairs]
    text = {
        "tsv": "en\tde\n" + "".join(f"{en}\t{de}\n" for en, de in pairs),
        "csv": "en,de\n" + "".join(f"{en},{de}\n" for en, de in (pairs if mark else quoted)),
        "list.json": json.dumps(table, indent=2),
    }.get(kind.removesuffix(".gz"), lines)
    content = (mark + text).encode()
    path.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    return {"train_files": str(path)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_has_the_same_pairs_cached_and_streamed(tmp_path, kind) -> None:
    arguments = given(tmp_path, kind)
    pairs, stream = load_pairs("en", "de", **arguments), load_pairs("en", "de", **arguments, streaming=True)
    assert isinstance(pairs["train"], datasets.Dataset) and isinstance(stream["train"], datasets.IterableDataset)
    assert rows(pairs["train"]) == rows(stream["train"]) == PAIRS
    names = {"folder": ["train", "validation", "test"]}.get(kind, ["train", "validation"] if "saved" in kind else None)
    assert list(pairs) == list(stream) == (names or ["train"])
    for split in names[1:] if names else ():
        assert isinstance(stream[split], datasets.Dataset)
        assert rows(pairs[split]) == rows(stream[split]) == (PAIRS[:1] if "saved" in kind else PAIRS)


@STREAMING
@pytest.mark.parametrize("kind", ["aligned", "tsv", "tsv.gz", "csv", "jsonl", "list.json", "parquet"])
def test_a_byte_order_mark_at_the_start_of_a_text_is_removed(tmp_path, kind, streaming) -> None:
    """At the start of a file, and of lines after concatenation; elsewhere U+FEFF is a character."""
    mark = "\ufeff"
    table = [(f"{mark}a", f"{mark}{mark}b"), ("c", f"{mark}d"), (f"{mark}e{mark}f", f"g{mark}")]
    found = load_pairs("en", "de", **given(tmp_path, kind, table, mark), streaming=streaming)["train"]
    assert rows(found) == [("a", "b"), ("c", "d"), (f"e{mark}f", f"g{mark}")]


def test_the_direction_is_the_recipes_and_line_ends_of_windows_are_removed(tmp_path) -> None:
    pairs = load_pairs("de", "en", train_files=aligned(tmp_path, ending="\r\n"))
    assert rows(pairs["train"]) == [(de, en) for en, de in PAIRS]


def test_a_changed_file_is_read_again(tmp_path) -> None:
    first = load_pairs("en", "de", train_files=aligned(tmp_path))
    second = load_pairs("en", "de", train_files=aligned(tmp_path, [("new", "neu")]))
    assert (len(first["train"]), rows(second["train"])) == (len(PAIRS), [("new", "neu")])


@STREAMING
@pytest.mark.parametrize(
    ("name", "content", "columns"),
    [
        ("named.tsv", "id\tGerman\tEnglish\n1\tHund\tdog\n2\tKatze\tcat\n", ("English", "German")),
        ("bare.tsv", "1\tHund\tdog\n2\tKatze\tcat\n\n\n", (2, 1)),
        (
            "named.jsonl",
            '{"text": "dog", "translation": "Hund"}\n{"text": "cat", "translation": "Katze"}\n',
            ("text", "translation"),
        ),
    ],
)
def test_columns_by_name_and_by_number(tmp_path, name, content, columns, streaming) -> None:
    """A table may end in empty lines."""
    (tmp_path / name).write_text(content)
    source, target = columns
    arguments = {"source_column": source, "target_column": target, "streaming": streaming}
    found = load_pairs("en", "de", train_files=str(tmp_path / name), **arguments)["train"]
    assert rows(found) == [("dog", "Hund"), ("cat", "Katze")]


@pytest.mark.parametrize("content", ["en\tde\n", "\n\n"])
def test_a_table_without_rows_is_an_empty_set(tmp_path, content) -> None:
    path = tmp_path / "text.tsv.gz"
    path.write_bytes(gzip.compress(content.encode()))
    assert rows(load_pairs("en", "de", train_files=str(path))["train"]) == []


def test_csv_fields_may_be_long_and_the_global_limit_is_restored(tmp_path) -> None:
    path, before = tmp_path / "text.csv", csv.field_size_limit()
    path.write_text("en,de\n" + "x" * 200_000 + ',"' + "y" * 200_000 + '"\n')
    assert rows(load_pairs("en", "de", train_files=str(path))["train"]) == [("x" * 200_000, "y" * 200_000)]
    path.write_text('en,de\na,"b\n' + "x" * 10_000_000)
    with pytest.raises(ValueError, match=r"text\.csv, line 3, cannot be read as a table: field larger than"):
        load_pairs("en", "de", train_files=str(path))
    assert csv.field_size_limit() == before


@pytest.mark.real_data
def test_multi30k_has_its_size(multi30k) -> None:
    files = {"en": str(multi30k / "val.en"), "fr": str(multi30k / "val.fr")}
    assert len(load_pairs("en", "fr", train_files=files)["train"]) == 1014


# ---- The built-in corpus -----------------------------------------------------------------------------------------


def test_the_built_in_corpus_reads_only_the_requested_splits_and_files_override_them(tmp_path) -> None:
    whole = load_pairs("en", "de", dataset="pocket", streaming=True)
    assert len(list(whole["train"])) == 20_000
    pairs = load_pairs("en", "de", dataset="pocket", validation_split=None, test_split="validation")
    assert list(pairs) == ["train", "test"]
    assert rows(pairs["test"]) == rows(whole["validation"])
    pairs = load_pairs("de", "en", dataset="pocket", train_files=aligned(tmp_path))
    assert len(pairs["train"]) == len(PAIRS)
    assert rows(pairs["test"]) == [(german, english) for english, german in rows(whole["test"])]
    assert all(english.isascii() for _, english in rows(pairs["test"]))


# ---- Mistakes ----------------------------------------------------------------------------------------------------


def garbled(content: bytes) -> bytes:
    """Compresses a text, and overwrites a part of it."""
    whole = gzip.compress(content, mtime=0)
    return whole[:11] + b"\xff" * 9 + whole[20:]


# Files with what an error says of them.
BROKEN: list[tuple[str, str | bytes, list[str]]] = [
    # Tables.
    ("few.tsv", "en\tde\na\tb\nc\nd\te\n", ["few.tsv, line 3", "(1)", "(2)"]),
    ("many.tsv", "en\tde\na\tb\nc\td\te\n", ["many.tsv, line 3", "(3)", "(2)"]),
    ("first.tsv", "en\tde\na\tb\tc\n", ["first.tsv, line 2", "(3)", "(2)"]),
    ("gap.tsv", "en\tde\na\tb\n\nc\td\n", ["gap.tsv, line 3", "empty"]),
    ("bytes.tsv", b"en\tde\na\tb\nc\t\xff\n", ["bytes.tsv, line 3, is not UTF-8"]),
    ("wide.tsv", "\t".join("column" for _ in range(2000)), ["wide.tsv", "no column 'en'", "'column', 'col ... "]),
    ("empty.tsv", "", ["empty.tsv is empty"]),
    ("few.csv", 'en,de\n"a\n1",b\nc\n', ["few.csv, line 4", "(1)", "(2)"]),
    ("many.csv", "en,de\na,b\nc,d,e\n", ["many.csv, line 3", "(3)", "(2)"]),
    ("open.csv", 'en,de\na,b\n"c,d\ne,f\n', ["open.csv, line 4", "unexpected end"]),
    ("bytes.csv", b"en,de\na,\xff\n", ["bytes.csv, line 2", "UTF-8"]),
    # JSON.
    ("none.jsonl", '{"en": "a", "de": "b"}\n{"en": "a"}\n', ["none.jsonl, line 2", "no target text"]),
    ("bytes.jsonl", b'{"en": "a", "de": "b"}\n{"en": "\xff", "de": "b"}\n', ["bytes.jsonl, line 2", "UTF-8"]),
    ("number.jsonl", '{"en": 1, "de": "b"}\n', ["number.jsonl, line 1", "1 for its source text"]),
    ("other.jsonl", '{"en": "a", "fr": "b"}\n', ["other.jsonl", "no column 'de'", "'en', 'fr'"]),
    ("cut.jsonl", '{"en": "a", "de": "b"}\n\n{"en": "a"', ["cut.jsonl, line 3, is not JSON"]),
    ("list.jsonl", '["a", "b"]\n', ["list.jsonl, line 1, is not a JSON object"]),
    ("flat.jsonl", '{"en": "a", "translation": "b"}\n', ["flat.jsonl, line 1 has no source text"]),
    ("half.jsonl", '{"en": "a", "de": "\\ud83d"}\n', ["half.jsonl, line 1, has an unpaired UTF-16 surrogate"]),
    ("deep.jsonl", '{"en": "a", "de": "b"}\n' + "[" * 20_000 + "]" * 20_000, ["deep.jsonl, line 2", "nested"]),
    ("deep.jsonl", '{"en": "a", "de": ' + '{"a":' * 20_000 + "1" + "}" * 20_000 + "}", ["line 1", "nested"]),
    ("digits.jsonl", '{"en": "a", "de": "b", "c": 1' + "0" * 5000 + "}", ["digits.jsonl, line 1", "4300 digits"]),
    ("long.jsonl", json.dumps({"en": "a", "de": ["x" * 5000]}), ["long.jsonl, line 1", "xx ... xx"]),
    ("empty.jsonl", "", ["empty.jsonl is empty"]),
    ("deep.json", "[" * 20_000 + "]" * 20_000, ["deep.json", "nested"]),
    ("cut.json", '[{"en": "a", "de": "b"}, {"en": "a', ["cut.json", "is not JSON", "character 33"]),
    ("none.json", '[{"en": "a", "de": "b"}, {"en": null, "de": "b"}]', ["none.json, row 2", "no source text"]),
    ("half.json", '[{"en": "\\ud83d", "de": "b"}]', ["half.json, row 1", "unpaired UTF-16 surrogate"]),
    # Compression, and other formats.
    ("cut.tsv.gz", gzip.compress(b"en\tde\n" + bytes(range(32, 127)) * 9)[:60], ["cut.tsv.gz", "as gz", "ended"]),
    ("garbled.jsonl.gz", garbled(b'{"en": "a", "de": "b"}\n' * 3000), ["garbled.jsonl.gz cannot be read as gz: "]),
    ("plain.jsonl.gz", '{"en": "a", "de": "b"}\n', ["plain.jsonl.gz", "as gz", "Not a gzipped file"]),
    ("packed.tsv", gzip.compress(b"en\tde\na\tb\n"), ["packed.tsv, line 1", "not UTF-8"]),
    ("text.parquet", "en\tde\na\tb\n", ["text.parquet", "parquet"]),
    ("text.parquet.gz", gzip.compress(b"PAR1"), ["text.parquet.gz", "unpack it"]),
    ("text.xml", "<a/>", ["text.xml has an unknown extension", ".tsv"]),
    # The source side of two files of 3000 lines; lines are counted to the end.
    ("text.en", "a\n" * 3001, ["text.en has 3001", "text.de has 3000"]),
    ("text.en", "a\n", ["text.en has 1", "text.de has 3000"]),
    ("text.en", b"a\nb\xff\n", ["text.en, line 2", "UTF-8"]),
    ("text.en.gz", gzip.compress(b"a\n" * 3000)[:-9], ["text.en.gz cannot be read as gz: "]),
]


@STREAMING
@pytest.mark.parametrize(("name", "content", "words"), BROKEN, ids=[f"{i}-{case[0]}" for i, case in enumerate(BROKEN)])
def test_a_broken_file_is_one_sentence(tmp_path, name, content, words, streaming) -> None:
    files = aligned(tmp_path, [("a", "b")] * 3000) | {"en": str(tmp_path / name)}
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError) as error:
        is_aligned = name.startswith("text.en")
        arguments = {"train_files": files if is_aligned else files["en"], "streaming": streaming}
        list(load_pairs("en", "de", **arguments)["train"])
    assert all(word in str(error.value) for word in words), str(error.value)
    assert len(str(error.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("languages", "arguments", "words"),
    [
        ("en de", {"train_files": {"en": "nowhere.en", "de": "nowhere.de"}}, r"no file 'nowhere\.en'"),
        ("en de", {"train_files": "nowhere.tsv"}, r"no file 'nowhere\.tsv'"),
        ("en de", {"train_files": {"en": ".", "de": "."}}, "'.' is a folder"),
        ("en fr", {"train_files": {"en": "a", "de": "b"}}, "for de and en, but the languages are en and fr"),
        ("en en", {"dataset": "pocket"}, "different languages"),
        ("en fr", {"dataset": "pocket"}, "languages en and de"),
        ("en de", {"dataset": "someone/nothing"}, "someone/nothing"),
    ],
)
def test_what_does_not_exist_is_named(languages, arguments, words) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        load_pairs(*languages.split(), **arguments)


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]", b'{"_data_files": 5}'])
@pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
def test_a_damaged_dataset_is_named(tmp_path, name, damage) -> None:
    """A dataset saved without splits is a training set and nothing else."""
    datasets.Dataset.from_list([{"en": en, "de": de} for en, de in PAIRS]).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="split 'validation'.*'train'"):
        load_pairs("en", "de", dataset=str(tmp_path / "saved"), test_split=None)
    (tmp_path / "saved" / name).write_bytes(damage)
    try:
        pairs = load_pairs("en", "de", dataset=str(tmp_path / "saved"), validation_split=None, test_split=None)
    except (ValueError, OSError) as error:
        assert str(tmp_path / "saved") in str(error)
    else:
        # `datasets` does not need this file.
        assert rows(pairs["train"]) == PAIRS


@STREAMING
def test_a_dataset_has_two_different_columns(tmp_path, streaming) -> None:
    arguments = given(tmp_path, "saved") | {"source_column": "de", "streaming": streaming}
    with pytest.raises(ValueError, match="different columns of .*saved, split train, but both are 'de'"):
        load_pairs("en", "de", **arguments)


# ---- Running text ------------------------------------------------------------------------------------------------


def lines_of(path: Path, column: str = "en", document: str | None = None, streaming: bool = False) -> list[tuple]:
    """Reads running text: its lines, each with its document."""
    columns = {"text": column} | ({} if document is None else {"document": document})
    rows = load_splits(Source("en", columns=columns, files={"train": str(path)}), streaming)["train"]
    return [(row["text"], row["document"]) for row in rows]


@pytest.mark.parametrize("streaming", [False, True])
def test_blank_lines_end_documents(tmp_path, streaming) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\ufeffone\ntwo \n\n \nthree\r\n\n", encoding="utf-8")
    assert lines_of(path, streaming=streaming) == [("one", "0"), ("two ", "0"), ("three", "1")]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_table_has_a_document_in_each_row_or_a_column_for_it(tmp_path, streaming) -> None:
    rows = [("a", "one\ntwo"), ("a", "three"), ("b", "four\n\n")]
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"name": name, "text": text}) + "\n" for name, text in rows), encoding="utf-8"
    )
    (tmp_path / "text.csv").write_text(
        "name,text\n" + "".join(f'{name},"{text}"\n' for name, text in rows), encoding="utf-8"
    )
    datasets.Dataset.from_list([{"name": name, "text": text} for name, text in rows]).to_parquet(
        tmp_path / "text.parquet"
    )
    for suffix in ("jsonl", "csv", "parquet"):
        path, lines = tmp_path / f"text.{suffix}", ("one", "two", "three", "four")
        assert lines_of(path, "text", None, streaming) == list(zip(lines, "0012", strict=True))
        assert lines_of(path, "text", "name", streaming) == list(zip(lines, "aaab", strict=True))


def test_a_missing_text_column_is_named(tmp_path) -> None:
    path = tmp_path / "text.tsv"
    path.write_text("en\tes\none\tuno\n", encoding="utf-8")
    assert lines_of(path, "es") == [("uno", "0")]
    with pytest.raises(ValueError, match=r"has no column 'fr'.*data\.source_column"):
        lines_of(path, "fr")
    with pytest.raises(ValueError, match=r"has no column 'chapter'.*data\.document_column"):
        lines_of(path, "en", "chapter")


def test_the_built_in_corpus_has_two_languages_to_read() -> None:
    english, german = (
        load_splits(Source(language, columns={"text": language}, dataset="pocket")) for language in ("en", "de")
    )
    pairs = load_pairs("en", "de", dataset="pocket")
    assert english["test"]["text"] == pairs["test"]["source"] and german["test"]["text"] == pairs["test"]["target"]


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize(
    "columns", [{"source": "en", "target": "de"}, {"text": "en"}, {"text": "en", "label": "label"}]
)
def test_a_split_that_does_not_exist_is_named(tmp_path, columns, split) -> None:
    table = datasets.Dataset.from_dict({"en": ["one"], "de": ["eins"], "label": ["a"]})
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text('{"en": "one", "de": "eins", "label": "a"}\n')
    datasets.DatasetDict({"train": table, "dev": table}).save_to_disk(tmp_path / "saved")
    table.save_to_disk(tmp_path / "whole")

    def load(dataset: str, streaming: bool = False) -> None:
        target = "de" if "target" in columns else None
        load_splits(Source("en", target, columns, dataset=dataset, dataset_splits={split: "foo"}), streaming)

    for folder, known in (("files", "train"), ("saved", "'train', 'dev'"), ("whole", "'train'")):
        with pytest.raises(ValueError, match=rf"{folder}', split 'foo', cannot be loaded: .*{known}"):
            load(str(tmp_path / folder))
    words = "'pocket' has no labels" if "label" in columns else r"no split 'foo'; it has train, validation, test\."
    for streaming in (False, True):
        with pytest.raises(ValueError, match=words):
            load("pocket", streaming)
