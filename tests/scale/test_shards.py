"""Tables: which files, which shards, which rows."""

import csv
import gzip
import json
import random

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hf_vaswani.scale import shards
from hf_vaswani.scale.shards import Shard, Source, blocks, cut, describe, find_files, schema_of

ROWS = [
    {"id": "0", "en": "one"},
    {"id": "1", "en": 'a, "quoted" cell\nof two lines'},
    {"id": "2", "en": ""},
    {"id": "3", "en": "ünï — 日本"},
    {"id": "4", "en": "five"},
    {"id": "5", "en": "six" * 1000},
    {"id": "6", "en": "seven"},
]


def write(path, rows=ROWS, group=3):
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
        return str(path)
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt", encoding="utf-8", newline="") as file:
        if name.endswith(".csv"):
            writer = csv.DictWriter(file, ["id", "en"])
            writer.writeheader()
            writer.writerows(rows)
        elif name.endswith(".tsv"):
            file.write("id\ten\n" + "".join(f"{row['id']}\t{row['en']}\n" for row in rows))
        else:
            # Blank lines are no rows.
            file.write("\n".join(json.dumps(row) + "\n" * (i % 3) for i, row in enumerate(rows)) + "\n\n")
    return str(path)


def read(source, shard):
    found = []
    for block in blocks(source, shard):
        found += [(block.first + place, block.row(place)) for place in range(len(block))]
        assert block.column("en") == [block.row(place)["en"] for place in range(len(block))]
    return found


NAMES = ["a.parquet", "a.jsonl", "a.ndjson", "a.json", "a.csv", "a.tsv", "a.jsonl.gz", "a.csv.gz", "a.tsv.gz"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("most", [1, 2, 3, 7, 100])
def test_shards_have_each_row_once_in_order(name, most, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shards, "BLOCK", 2)
    rows = [row | {"en": row["en"].replace("\n", " ")} for row in ROWS] if ".tsv" in name else ROWS
    source = describe(write(tmp_path / name, rows))
    found = cut([source], most, "en", ["de"])
    if name.endswith(".gz"):
        assert found == [Shard(0, 0, 1, None)]
    else:
        assert [shard.rows for shard in found] == [most] * (7 // most) + ([7 % most] if 7 % most else [])
        assert [shard.first for shard in found] == list(range(1, 8, most))
    assert [pair for shard in found for pair in read(source, shard)] == list(enumerate(rows, start=1))


def test_shards_of_random_tables_are_the_table(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shards, "BLOCK", 5)
    draw = random.Random(1)
    for number in range(30):
        count = draw.randrange(1, 40)
        rows = [{"id": str(i), "en": "".join(draw.choices('ab ,"\n\r\t\u2028é', k=9))} for i in range(count)]
        for suffix in ("parquet", "jsonl", "csv"):
            path = write(tmp_path / f"{number}.{suffix}", rows, group=draw.randrange(1, 10))
            source = describe(path)
            found = cut([source], draw.randrange(1, 12), "en", [])
            assert [row for shard in found for _, row in read(source, shard)] == rows


def test_a_byte_order_mark_is_no_text(tmp_path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfen\none\ntwo\n")
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"en": "one"}\n{"en": "two"}')
    for name in ("a.csv", "a.jsonl"):
        source = describe(str(tmp_path / name))
        found = cut([source], 1, "en", [])
        assert [row for shard in found for _, row in read(source, shard)] == [{"en": "one"}, {"en": "two"}]


def test_rows_that_cannot_be_read_are_kept_as_they_are_written(tmp_path) -> None:
    lines = [b'{"en": "one"}', b"{", b"[1]", b'{"en": "\xff"}', b'{"en": "\\ud800"}', b"[" * 100_000]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    source = describe(str(tmp_path / "a.jsonl"))
    (shard,) = cut([source], 10, "en", [])
    (block,) = blocks(source, shard)
    reasons = [block.reason(place) for place in range(6)]
    assert reasons[0] is None and reasons[2] == "is not a JSON object" and reasons[3] == "is not UTF-8"
    assert str(reasons[1]).startswith("is not JSON: Expecting property name")
    assert reasons[4] == "has an unpaired UTF-16 surrogate" and str(reasons[5]).startswith("is not JSON")
    assert block.column("en") == ["one", *[None] * 5]
    assert block.row(1) == "{" and "\\udcff" in block.row(3)

    (tmp_path / "a.csv").write_bytes(b"id,en\n1,one\n2\n3,\xff\n4,five,six\n")
    source = describe(str(tmp_path / "a.csv"))
    (block,) = blocks(source, cut([source], 10, "en", [])[0])
    assert [block.reason(place) for place in range(4)] == [
        None,
        "has 1 cells, but there are 2 columns",
        "is not UTF-8",
        "has 3 cells, but there are 2 columns",
    ]


# ---- Files -------------------------------------------------------------------------------------------------------


def test_a_folder_is_its_visible_files_sorted(tmp_path) -> None:
    for name in ("b.jsonl", "a/c.jsonl", ".hidden/a.jsonl", "_temporary/a.jsonl", "a/_SUCCESS", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"en": "one"}\n')
    expected = [str(tmp_path / "a" / "c.jsonl"), str(tmp_path / "b.jsonl")]
    assert find_files(str(tmp_path)) == expected
    assert find_files(str(tmp_path / "*.jsonl")) == expected[1:]
    assert find_files(expected[0]) == expected[:1]
    assert find_files(f"file://{tmp_path}") == [f"file://{name}" for name in expected]


def test_a_table_can_be_on_another_file_system(tmp_path) -> None:
    memory = fsspec.filesystem("memory")
    for name in ("a.parquet", "b.csv"):
        memory.put_file(write(tmp_path / name), f"/table/{name}")
    try:
        with pytest.raises(ValueError, match=r"--table memory://table has files of several formats \(csv, parquet\)"):
            find_files("memory://table")
        for name in ("a.parquet", "b.csv"):
            (url,) = find_files(f"memory://table/{name[0]}*")
            source = describe(url)
            found = cut([source], 2, "en", [])
            assert [row for shard in found for _, row in read(source, shard)] == ROWS
            assert source.size == (tmp_path / name).stat().st_size
    finally:
        memory.rm("/table", recursive=True)


@pytest.mark.parametrize(
    ("files", "table", "message"),
    [
        ({}, "missing.jsonl", "is neither a local path nor a dataset"),
        ({}, "a/b/c", "does not exist; a dataset on the Hub has an id such as user/name"),
        ({}, ".", "does not exist, or is empty"),
        ({"a.txt": "text"}, ".", "has no file with a known extension"),
        ({"a.jsonl": "{}", "b.csv": "en"}, ".", "has files of several formats"),
        ({"a.parquet.gz": ""}, ".", "is compressed twice"),
    ],
)
def test_a_table_that_cannot_be_found_is_one_sentence(files, table, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        find_files(table)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"PAR1 no", r"a\.parquet cannot be read as Parquet"),
        ("a.jsonl", b'{"de": "eins"}', r"a\.jsonl has no column 'en'; it has 'de'"),
        ("a.jsonl", b'["en"]', r"a\.jsonl, line 1, is not a JSON object: each line must be one JSON object"),
        ("a.csv", b"id,de\n", r"a\.csv has no column 'en'; it has 'id', 'de'"),
        ("a.csv", b'en\n"one\n', r"a\.csv, line 2, cannot be read as CSV: unexpected end of data"),
        ("a.jsonl", b'{"en": "one", "de": "eins"}', r"has a column 'de' already: choose another --to-column"),
    ],
)
def test_a_damaged_table_is_one_sentence_before_any_work(name, content, message, tmp_path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        cut([describe(str(tmp_path / name))], 10, "en", ["de"])


def test_a_damaged_compressed_file_is_named_when_it_is_read(tmp_path) -> None:
    path = tmp_path / "a.jsonl.gz"
    write(path, ROWS * 1000)
    path.write_bytes(path.read_bytes()[:-100])
    source = describe(str(path))
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz cannot be read: Compressed file ended"):
        list(blocks(source, cut([source], 10, "en", [])[0]))


def test_a_file_without_rows_has_no_shards(tmp_path) -> None:
    for name, text in (("a.jsonl", "\n"), ("a.csv", "en\n")):
        (tmp_path / name).write_text(text)
        assert cut([describe(str(tmp_path / name))], 10, "en", []) == []


# ---- Types -------------------------------------------------------------------------------------------------------


def test_the_types_of_json_are_those_of_its_first_rows(tmp_path) -> None:
    rows = [{"en": "one", "n": 1, "none": None}, {"en": "two", "n": 1.5, "list": [1]}]
    source = describe(write(tmp_path / "a.jsonl", rows))
    assert schema_of([source]) == pa.schema(
        [("en", pa.string()), ("n", pa.float64()), ("none", pa.string()), ("list", pa.list_(pa.int64()))]
    )
    source = describe(write(tmp_path / "b.jsonl", [{"en": "one"}, {"en": 2}]))
    with pytest.raises(ValueError, match=r"The values of 'en' in .* have no common type for Parquet .*: use --format"):
        schema_of([source])


def test_a_change_of_a_file_changes_its_digest(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    write(path)
    before = describe(str(path))
    path.write_text(path.read_text().replace("five", "nine"))
    assert before.size == describe(str(path)).size and before.digest != describe(str(path)).digest
    assert Source("x/a.jsonl.gz", 1, "").is_compressed and Source("x/A.CSV", 1, "").kind == "csv"


def test_what_would_be_lost_is_refused_or_kept(tmp_path) -> None:
    (tmp_path / "a.csv").write_text("id,x,x,en\n1,first,second,one\n")
    with pytest.raises(ValueError, match=r"a\.csv has the column 'x' twice: rename one"):
        cut([describe(str(tmp_path / "a.csv"))], 10, "en", [])
    pq.write_table(pa.table({"en": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="the column 'en' must be text, but it is int64"):
        cut([describe(str(tmp_path / "a.parquet"))], 10, "en", [])
    (tmp_path / "a.tsv").write_text("en\none\n \n\n\u00a0\ntwo\n")
    source = describe(str(tmp_path / "a.tsv"))
    assert [row["en"] for _, row in read(source, cut([source], 10, "en", [])[0])] == ["one", " ", "\u00a0", "two"]


@pytest.mark.parametrize("kind", ["string", "string_view"])
def test_a_text_of_parquet_that_is_not_utf_8_is_bytes(kind, tmp_path) -> None:
    values = pa.array([b"one", b"a \xff", None], pa.binary_view() if kind == "string_view" else pa.binary())
    text = pa.Array.from_buffers(pa.string_view() if kind == "string_view" else pa.string(), 3, values.buffers())
    pq.write_table(pa.table({"en": text}), tmp_path / "a.parquet")
    source = describe(str(tmp_path / "a.parquet"))
    (block,) = blocks(source, cut([source], 10, "en", [])[0])
    assert block.column("en") == ["one", b"a \xff", None]
    assert "cannot be shown" in block.shown(1)["en"]
