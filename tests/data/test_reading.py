"""Every way to give sentence pairs reads the same pairs; every mistake is reported with file and line."""

import csv
import gzip
import json
from pathlib import Path

import datasets
import pytest

from hf_vaswani.data.reading import Source, load_pairs, load_splits

# Hard for readers of tables: quotation marks, "null", a bare carriage return, U+2028, a leading comma.
PAIRS = [
    ('He said "yes".', 'Er sagte "ja".'),
    ('"Quoted', '"Zitiert'),
    ("null", "NA"),
    ("a, b", "ä, b"),
    ("line\u2028separator", "Zeilen\u2028trenner"),
    ("  spaces ", "Leerzeichen"),
]


def rows(dataset: datasets.Dataset) -> list[tuple[str, str]]:
    return list(zip(dataset["source"], dataset["target"], strict=True))


def aligned(folder: Path, pairs=PAIRS, ending: str = "\n") -> dict[str, str]:
    files = {"en": folder / "text.en", "de": folder / "text.de"}
    for side, path in enumerate(files.values()):
        path.write_bytes("".join(pair[side] + ending for pair in pairs).encode())
    return {language: str(path) for language, path in files.items()}


def test_two_line_aligned_files(tmp_path) -> None:
    pairs = load_pairs("en", "de", train_files=aligned(tmp_path))
    assert rows(pairs["train"]) == PAIRS
    assert list(pairs) == ["train"]


def test_the_direction_is_the_recipes(tmp_path) -> None:
    pairs = load_pairs("de", "en", train_files=aligned(tmp_path))
    assert rows(pairs["train"]) == [(de, en) for en, de in PAIRS]


def test_windows_line_ends_and_a_byte_order_mark_are_removed(tmp_path) -> None:
    files = aligned(tmp_path, ending="\r\n")
    Path(files["en"]).write_bytes(b"\xef\xbb\xbf" + Path(files["en"]).read_bytes())
    assert rows(load_pairs("en", "de", train_files=files)["train"]) == PAIRS


def test_a_changed_file_is_read_again(tmp_path) -> None:
    first = load_pairs("en", "de", train_files=aligned(tmp_path))
    second = load_pairs("en", "de", train_files=aligned(tmp_path, [("new", "neu")]))
    assert (len(first["train"]), rows(second["train"])) == (len(PAIRS), [("new", "neu")])


@pytest.mark.parametrize(
    "kind", ["tsv", "tsv.gz", "csv", "jsonl", "translation.jsonl", "lines.json", "list.json", "parquet"]
)
def test_one_file_of_columns(tmp_path, kind) -> None:
    path = tmp_path / f"text.{kind}"
    if kind.startswith("tsv"):
        text = "en\tde\n" + "".join(f"{en}\t{de}\n" for en, de in PAIRS)
        path.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
    elif kind == "csv":
        quoted = ['"' + text.replace('"', '""') + '"' for pair in PAIRS for text in pair]
        path.write_text("en,de\n" + "".join(f"{a},{b}\n" for a, b in zip(quoted[::2], quoted[1::2], strict=True)))
    elif kind == "parquet":
        datasets.Dataset.from_dict({"en": [en for en, _ in PAIRS], "de": [de for _, de in PAIRS]}).to_parquet(path)
    else:
        lines = [{"en": en, "de": de} for en, de in PAIRS]
        lines = [{"translation": line} for line in lines] if kind.startswith("translation") else lines
        one_by_one = "".join(json.dumps(line) + "\n" for line in lines)
        path.write_text(json.dumps(lines, indent=2) if kind == "list.json" else one_by_one)
    assert rows(load_pairs("en", "de", train_files=str(path))["train"]) == PAIRS
    assert [tuple(row.values()) for row in load_pairs("en", "de", train_files=str(path), streaming=True)["train"]] == (
        PAIRS
    )


def test_columns_by_name_and_by_number(tmp_path) -> None:
    named = tmp_path / "named.tsv"
    named.write_text("id\tGerman\tEnglish\n1\tHund\tdog\n")
    columns = {"source_column": "English", "target_column": "German"}
    assert rows(load_pairs("en", "de", train_files=str(named), **columns)["train"]) == [("dog", "Hund")]
    lines = tmp_path / "named.jsonl"
    lines.write_text('{"text": "dog", "translation": "Hund"}\n')
    columns = {"source_column": "text", "target_column": "translation"}
    for streaming in (False, True):
        pairs = load_pairs("en", "de", train_files=str(lines), **columns, streaming=streaming)
        assert list(pairs["train"]) == [{"source": "dog", "target": "Hund"}]
    bare = tmp_path / "bare.tsv"
    bare.write_text("1\tHund\tdog\n2\tKatze\tcat\n")
    numbers = {"source_column": 2, "target_column": 1}
    assert rows(load_pairs("en", "de", train_files=str(bare), **numbers)["train"]) == [
        ("dog", "Hund"),
        ("cat", "Katze"),
    ]


@pytest.mark.parametrize("as_translation", [False, True])
def test_a_local_dataset_folder(tmp_path, as_translation) -> None:
    table = [{"en": en, "de": de} for en, de in PAIRS]
    if as_translation:
        features = datasets.Features({"translation": datasets.Translation(languages=["de", "en"])})
        dataset = datasets.Dataset.from_list([{"translation": row} for row in table], features=features)
    else:
        dataset = datasets.Dataset.from_list(table)
    datasets.DatasetDict({"train": dataset, "val": dataset.select([0])}).save_to_disk(tmp_path / "saved")
    pairs = load_pairs("en", "de", dataset=str(tmp_path / "saved"), validation_split="val", test_split=None)
    assert rows(pairs["train"]) == PAIRS
    assert rows(pairs["validation"]) == PAIRS[:1]
    assert "test" not in pairs


def test_a_dataset_saved_without_splits_is_a_training_set_and_nothing_else(tmp_path) -> None:
    datasets.Dataset.from_list([{"en": en, "de": de} for en, de in PAIRS]).save_to_disk(tmp_path / "saved")
    alone = {"dataset": str(tmp_path / "saved"), "test_split": None}
    assert rows(load_pairs("en", "de", **alone, validation_split=None)["train"]) == PAIRS
    with pytest.raises(ValueError, match="split 'validation'.*'train'"):
        load_pairs("en", "de", **alone)


def test_a_folder_in_the_hubs_layout(tmp_path) -> None:
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps({"en": e, "de": d}) + "\n" for e, d in PAIRS))
    pairs = load_pairs("en", "de", dataset=str(tmp_path))
    assert [rows(pairs[split]) for split in ("train", "validation", "test")] == [PAIRS] * 3


def test_files_override_the_split_of_the_dataset(tmp_path) -> None:
    pairs = load_pairs("de", "en", dataset="pocket", train_files=aligned(tmp_path))
    assert len(pairs["train"]) == len(PAIRS)
    assert len(pairs["test"]) == 500
    german, english = rows(pairs["test"])[0]
    assert english.isascii()
    assert german != english


@pytest.mark.parametrize(
    ("source_lines", "target_lines", "words"),
    [
        ("a\nb\nc\n", "x\ny\n", ["text.en has 3", "text.de has 2"]),
        ("a\n", "x\ny\nz\n", ["text.en has 1", "text.de has 3"]),
        (b"a\nb\xff\n", "x\ny\n", ["text.en, line 2", "UTF-8"]),
    ],
)
def test_bad_aligned_files(tmp_path, source_lines, target_lines, words) -> None:
    files = {"en": tmp_path / "text.en", "de": tmp_path / "text.de"}
    for path, lines in zip(files.values(), (source_lines, target_lines), strict=True):
        path.write_bytes(lines if isinstance(lines, bytes) else lines.encode())
    with pytest.raises(ValueError) as error:
        load_pairs("en", "de", train_files={language: str(path) for language, path in files.items()})
    assert all(word in str(error.value) for word in words), str(error.value)


def test_missing_files_languages_columns_and_values(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.en"):
        load_pairs("en", "de", train_files={"en": "nowhere.en", "de": "nowhere.de"})
    with pytest.raises(FileNotFoundError, match=r"nowhere\.tsv"):
        load_pairs("en", "de", train_files="nowhere.tsv")
    with pytest.raises(ValueError, match="for de and en, but the languages are en and fr"):
        load_pairs("en", "fr", train_files=aligned(tmp_path))
    (tmp_path / "text.xml").write_text("<a/>")
    with pytest.raises(ValueError, match=r"text\.xml.*\.tsv"):
        load_pairs("en", "de", train_files=str(tmp_path / "text.xml"))
    (tmp_path / "text.jsonl").write_text('{"en": "a", "de": "b"}\n{"en": "a"}\n')
    with pytest.raises(ValueError, match=r"text\.jsonl, line 2 has no target"):
        load_pairs("en", "de", train_files=str(tmp_path / "text.jsonl"))
    with pytest.raises(ValueError, match="no column 'fr'.*'en', 'de'"):
        load_pairs("en", "fr", train_files=str(tmp_path / "text.jsonl"))
    (tmp_path / "bad.tsv").write_bytes(b"en\tde\na\tb\nc\t\xff\n")
    with pytest.raises(ValueError, match=r"bad\.tsv, line 3, is not UTF-8"):
        load_pairs("en", "de", train_files=str(tmp_path / "bad.tsv"))
    for name, content in (("broken.jsonl", b'{"en": "a"\n'), ("bytes.jsonl", b'{"en": "\xff", "de": "b"}\n'),
                          ("empty.jsonl", b""), ("empty.tsv", b""),
                          ("number.jsonl", b'{"en": 1, "de": "b"}\n'), ("bad.parquet", b"PAR1")):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name + (", line 1, is not UTF-8" if name == "bytes.jsonl" else "")):
            load_pairs("en", "de", train_files=str(tmp_path / name))
    with pytest.raises(ValueError, match="different languages"):
        load_pairs("en", "en", train_files=aligned(tmp_path))
    with pytest.raises(FileNotFoundError, match="someone/nothing"):
        load_pairs("en", "de", dataset="someone/nothing")
    with pytest.raises(ValueError, match="languages en and de"):
        load_pairs("en", "fr", dataset="pocket")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("few.tsv", "en\tde\na\tb\nc\nd\te\n", ["few.tsv, line 3", "(1)", "(2)"]),
        ("many.tsv", "en\tde\na\tb\nc\td\te\n", ["many.tsv, line 3", "(3)", "(2)"]),
        ("first.tsv", "en\tde\na\tb\tc\n", ["first.tsv, line 2", "(3)", "(2)"]),
        ("few.csv", 'en,de\n"a\n1",b\nc\n', ["few.csv, line 4", "(1)", "(2)"]),
        ("many.csv", "en,de\na,b\nc,d,e\n", ["many.csv, line 3", "(3)", "(2)"]),
        ("open.csv", 'en,de\na,b\n"c,d\ne,f\n', ["open.csv, line 4", "unexpected end"]),
        ("gap.tsv", "en\tde\na\tb\n\nc\td\n", ["gap.tsv, line 3", "empty"]),
        ("bytes.csv", b"en,de\na,\xff\n", ["bytes.csv, line 2", "UTF-8"]),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_ragged_table_is_refused_with_its_line(tmp_path, name, content, words, streaming) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as error:
        list(load_pairs("en", "de", train_files=str(tmp_path / name), streaming=streaming)["train"])
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_table_without_header_has_its_width_from_the_first_row_and_may_end_in_empty_lines(tmp_path) -> None:
    path = tmp_path / "text.tsv"
    path.write_text("a\tb\nc\td\n\n\n")
    columns = {"source_column": 0, "target_column": 1}
    assert rows(load_pairs("en", "de", train_files=str(path), **columns)["train"]) == [("a", "b"), ("c", "d")]
    path.write_text("a\tb\nc\td\te\n")
    with pytest.raises(ValueError, match=r"text\.tsv, line 2, has another number of columns \(3\)"):
        load_pairs("en", "de", train_files=str(path), **columns)


@pytest.mark.parametrize("kind", ["aligned", "tsv", "csv", "jsonl", "translation.jsonl", "parquet", "saved", "pocket"])
def test_a_stream_has_the_same_pairs_as_the_cache(tmp_path, kind) -> None:
    path = tmp_path / f"text.{kind}"
    table = [{"en": en, "de": de} for en, de in PAIRS]
    data: dict[str, object] = {"train_files": str(path)}
    if kind == "aligned":
        data = {"train_files": aligned(tmp_path)}
    elif kind == "saved":
        datasets.Dataset.from_list(table).save_to_disk(path)
        data = {"dataset": str(path), "validation_split": None, "test_split": None}
    elif kind == "pocket":
        data = {"dataset": "pocket"}
    elif kind == "parquet":
        datasets.Dataset.from_list(table).to_parquet(path)
    elif kind == "tsv":
        path.write_text("en\tde\n" + "".join(f"{en}\t{de}\n" for en, de in PAIRS))
    elif kind == "csv":
        datasets.Dataset.from_list(table).to_csv(path)
    else:
        lines = [{"translation": row} for row in table] if kind.startswith("translation") else table
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    stream = load_pairs("en", "de", **data, streaming=True)
    assert isinstance(stream["train"], datasets.IterableDataset)
    assert all(isinstance(pairs, datasets.Dataset) for split, pairs in stream.items() if split != "train")
    found = [(row["source"], row["target"]) for row in stream["train"]]
    assert found == rows(load_pairs("en", "de", **data)["train"])
    assert len(found) == (20_000 if kind == "pocket" else len(PAIRS))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("text.jsonl", b'{"en": "a", "de": "b"}\n{"en": "a"}\n', ["text.jsonl, line 2", "no target text"]),
        ("bytes.jsonl", b'{"en": "a", "de": "b"}\n{"en": "\xff", "de": "b"}\n', ["bytes.jsonl, line 2", "UTF-8"]),
        ("number.jsonl", b'{"en": 1, "de": "b"}\n', ["number.jsonl, line 1", "1 for its source text"]),
        ("other.jsonl", b'{"en": "a", "fr": "b"}\n', ["other.jsonl", "no column 'de'", "'en', 'fr'"]),
        ("cut.jsonl", b'{"en": "a", "de": "b"}\n\n{"en": "a"', ["cut.jsonl, line 3, is not JSON"]),
        ("list.jsonl", b'["a", "b"]\n', ["list.jsonl, line 1, is not a JSON object"]),
        ("flat.jsonl", b'{"en": "a", "translation": "b"}\n', ["flat.jsonl, line 1 has no source text"]),
        ("half.jsonl", b'{"en": "a", "de": "\\ud83d"}\n', ["half.jsonl, line 1, has an unpaired UTF-16 surrogate"]),
    ],
)
def test_errors_in_a_stream_are_raised_on_reading(tmp_path, name, content, words) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        list(load_pairs("en", "de", train_files=str(tmp_path / name), streaming=True)["train"])
    assert all(word in str(error.value) for word in words), str(error.value)


def test_unequal_line_counts_of_a_stream_are_counted_to_the_end(tmp_path) -> None:
    files = aligned(tmp_path)
    with open(files["de"], "a", encoding="utf-8") as file:
        file.write("mehr\nund mehr\n")
    stream = load_pairs("en", "de", train_files=files, streaming=True)["train"]
    with pytest.raises(ValueError, match=rf"text.en has {len(PAIRS)} and \S+text.de has {len(PAIRS) + 2}"):
        list(stream)


BROKEN = [
    ("deep.jsonl", b'{"en": "a", "de": "b"}\n' + b"[" * 20_000 + b"]" * 20_000, ["deep.jsonl, line 2", "nested"]),
    ("deep.jsonl", b'{"en": "a", "de": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}", ["line 1", "nested"]),
    ("deep.json", b"[" * 20_000 + b"]" * 20_000, ["deep.json", "nested"]),
    ("number.jsonl", b'{"en": "a", "de": "b", "c": 1' + b"0" * 5000 + b"}", ["number.jsonl, line 1", "4300 digits"]),
    ("long.jsonl", json.dumps({"en": "a", "de": ["x" * 5000]}).encode(), ["long.jsonl, line 1", "xx ... xx"]),
    ("wide.tsv", b"\t".join(b"column" for _ in range(2000)), ["wide.tsv", "no column 'en'", "'column', 'col ... "]),
    ("cut.json", b'[{"en": "a", "de": "b"}, {"en": "a', ["cut.json", "is not JSON", "character 33"]),
    ("none.json", b'[{"en": "a", "de": "b"}, {"en": null, "de": "b"}]', ["none.json, row 2", "no source text"]),
    ("half.json", b'[{"en": "\\ud83d", "de": "b"}]', ["half.json, row 1", "unpaired UTF-16 surrogate"]),
    ("cut.tsv.gz", gzip.compress(b"en\tde\n" + bytes(range(32, 127)) * 9)[:60], ["cut.tsv.gz", "as gz", "ended"]),
    ("plain.jsonl.gz", b'{"en": "a", "de": "b"}\n', ["plain.jsonl.gz", "as gz", "Not a gzipped file"]),
    ("packed.tsv", gzip.compress(b"en\tde\na\tb\n"), ["packed.tsv, line 1", "not UTF-8"]),
    ("text.parquet", b"en\tde\na\tb\n", ["text.parquet", "parquet"]),
    ("text.parquet.gz", gzip.compress(b"PAR1"), ["text.parquet.gz", "unpack it"]),
]


@pytest.mark.parametrize(("name", "content", "words"), BROKEN, ids=[f"{i}-{case[0]}" for i, case in enumerate(BROKEN)])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_broken_file_is_one_sentence(tmp_path, name, content, words, streaming) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        list(load_pairs("en", "de", train_files=str(tmp_path / name), streaming=streaming)["train"])
    assert all(word in str(error.value) for word in words), str(error.value)
    assert len(str(error.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize("kind", ["aligned", "tsv", "tsv.gz", "csv", "jsonl", "json", "parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_byte_order_mark_at_the_start_of_a_text_is_removed(tmp_path, kind, streaming) -> None:
    """At the start of a file, and of lines after concatenation; elsewhere U+FEFF is a character."""
    mark, path = "\ufeff", tmp_path / f"text.{kind}"
    table = [(f"{mark}a", f"{mark}{mark}b"), ("c", f"{mark}d"), (f"{mark}e{mark}f", f"g{mark}")]
    if kind == "aligned":
        data: dict[str, object] = {"train_files": aligned(tmp_path, table)}
    else:
        data = {"train_files": str(path)}
        mapped = [{"en": en, "de": de} for en, de in table]
        text = {
            "csv": "en,de\n" + "".join(f"{en},{de}\n" for en, de in table),
            "jsonl": "".join(json.dumps(row) + "\n" for row in mapped),
            "json": json.dumps(mapped),
        }.get(kind, "en\tde\n" + "".join(f"{en}\t{de}\n" for en, de in table))
        content = (mark + text).encode()
        path.write_bytes(gzip.compress(content) if kind == "tsv.gz" else content)
        if kind == "parquet":
            datasets.Dataset.from_list(mapped).to_parquet(path)
    pairs = load_pairs("en", "de", **data, streaming=streaming)["train"]
    found = [(row["source"], row["target"]) for row in pairs]
    assert found == [("a", "b"), ("c", "d"), (f"e{mark}f", f"g{mark}")]


def test_csv_fields_may_be_long_and_the_global_limit_is_restored(tmp_path) -> None:
    path, before = tmp_path / "text.csv", csv.field_size_limit()
    path.write_text("en,de\n" + "x" * 200_000 + ',"' + "y" * 200_000 + '"\n')
    assert rows(load_pairs("en", "de", train_files=str(path))["train"]) == [("x" * 200_000, "y" * 200_000)]
    path.write_text('en,de\na,"b\n' + "x" * 10_000_000)
    with pytest.raises(ValueError, match=r"text\.csv, line 3, cannot be read as a table: field larger than"):
        load_pairs("en", "de", train_files=str(path))
    assert csv.field_size_limit() == before


def test_a_folder_is_refused_as_a_text_file(tmp_path) -> None:
    for files in ({"en": str(tmp_path), "de": str(tmp_path)}, str(tmp_path)):
        with pytest.raises(ValueError, match="is a folder|unknown extension"):
            load_pairs("en", "de", train_files=files)


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]", b'{"_data_files": 5}'])
@pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
def test_a_damaged_dataset_is_named(tmp_path, name, damage) -> None:
    datasets.Dataset.from_list([{"en": en, "de": de} for en, de in PAIRS]).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / name).write_bytes(damage)
    try:
        pairs = load_pairs("en", "de", dataset=str(tmp_path / "saved"), validation_split=None, test_split=None)
    except (ValueError, OSError) as error:
        assert str(tmp_path / "saved") in str(error)
    else:
        # `datasets` does not need this file.
        assert rows(pairs["train"]) == PAIRS


@pytest.mark.real_data
def test_multi30k_has_its_size(multi30k) -> None:
    files = {"en": str(multi30k / "val.en"), "fr": str(multi30k / "val.fr")}
    assert len(load_pairs("en", "fr", train_files=files)["train"]) == 1014


def test_a_dataset_has_two_different_columns(tmp_path) -> None:
    datasets.Dataset.from_dict({"en": ["a"], "de": ["b"]}).save_to_disk(tmp_path / "saved")
    data = {"dataset": str(tmp_path / "saved"), "validation_split": None, "test_split": None, "source_column": "de"}
    for streaming in (False, True):
        with pytest.raises(ValueError, match="different columns of .*saved, split train, but both are 'de'"):
            load_pairs("en", "de", **data, streaming=streaming)


def test_the_built_in_corpus_reads_only_the_requested_splits() -> None:
    pairs = load_pairs("en", "de", dataset="pocket", validation_split=None, test_split="validation")
    assert list(pairs) == ["train", "test"]
    assert rows(pairs["test"]) == rows(load_pairs("en", "de", dataset="pocket")["validation"])
    with pytest.raises(ValueError, match="no split 'dev'; it has train, validation, test"):
        load_pairs("en", "de", dataset="pocket", validation_split="dev")


@pytest.mark.parametrize("content", ["en\tde\n", "\n\n"])
def test_a_table_without_rows_is_an_empty_set(tmp_path, content) -> None:
    path = tmp_path / "text.tsv.gz"
    path.write_bytes(gzip.compress(content.encode()))
    assert rows(load_pairs("en", "de", train_files=str(path))["train"]) == []


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("damage", ["cut", "foreign", "garbled"])
@pytest.mark.parametrize("kind", ["aligned", "tsv", "jsonl"])
def test_a_damaged_gz_is_named(tmp_path, kind, damage, streaming) -> None:
    text = {"aligned": "a\n", "tsv": "en\tde\n" + "a\tb\n", "jsonl": '{"en": "a", "de": "b"}\n'}[kind]
    whole = gzip.compress((text * (1 if kind == "tsv" else 3000)).encode(), mtime=0)
    content = {"cut": whole[:-9], "foreign": b"text", "garbled": whole[:11] + b"\xff" * 9 + whole[20:]}[damage]
    path = tmp_path / f"text.{kind}.gz"
    path.write_bytes(content)
    (tmp_path / "text.de").write_text("b\n" * 3000)
    files = {"en": str(path), "de": str(tmp_path / "text.de")} if kind == "aligned" else str(path)
    with pytest.raises(ValueError, match=rf"text\.{kind}\.gz cannot be read as gz: ."):
        list(load_pairs("en", "de", train_files=files, streaming=streaming)["train"])


@pytest.mark.parametrize("streaming", [False, True])
def test_line_aligned_files_may_be_gzipped(tmp_path, streaming) -> None:
    for side, text in (("en", "a\nb\n"), ("de", "c\nd\n")):
        (tmp_path / f"t.{side}.gz").write_bytes(gzip.compress(text.encode()))
    files = {side: str(tmp_path / f"t.{side}.gz") for side in ("en", "de")}
    rows = load_pairs("en", "de", train_files=files, streaming=streaming)["train"]
    assert list(rows) == [{"source": "a", "target": "c"}, {"source": "b", "target": "d"}]


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
