"""One shard: its translations, its rejected rows, its record."""

import datetime
import decimal
import json
import math

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hf_vaswani.scale import shards
from hf_vaswani.scale.manifest import Folder, Manifest, read_manifest, write_manifest
from hf_vaswani.scale.shards import Source, cut, describe
from hf_vaswani.scale.worker import ShardWorker, TextTranslator

from .tables import load, manifest, read_output, read_rejected, settings, upper, write_rows


def run(work, folder, translator=load):
    translate = ShardWorker(work, str(folder), translator)
    return [translate(number) for number in range(len(work.shards))]


def run_rows(folder, rows, translator=load, **values):
    """Translates a table of JSON with these rows to the folder `out`."""
    return run(manifest(write_rows(folder / "table.jsonl", rows), **values), folder / "out", translator)


def german(folder):
    return [row["de"] for row in read_output(folder)]


def test_rows_keep_their_order_and_their_other_columns(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shards, "BLOCK", 3)
    rows = [{"id": i, "en": f"row {i}", "more": {"a": [i, None]}} for i in range(10)]
    for suffix in ("jsonl", "parquet"):
        path = write_rows(tmp_path / f"table.{suffix}", rows)
        for kind in ("jsonl", "parquet"):
            folder = tmp_path / f"{suffix}-{kind}"
            records = run(manifest(path, format=kind), folder)
            assert read_output(folder) == [row | {"de": row["en"].upper()} for row in rows]
            assert [record.rows for record in records] == [4, 4, 2]
            assert not (folder / "rejected").exists()


def test_columns_of_scores_and_n_best_lists(tmp_path) -> None:
    path = write_rows(tmp_path / "table.jsonl", [{"en": "One"}])
    expected = {"en": "One", "de": "ONE", "de_score": -0.1235, "de_n_best": ["ONE", "one"]}
    expected["de_n_best_scores"] = [-0.1235, -2.0]
    for kind in ("jsonl", "parquet"):
        run(manifest(path, format=kind, score=True, n_best=2), tmp_path / kind)
        assert read_output(tmp_path / kind) == [expected]


def test_types_of_parquet_are_kept(tmp_path) -> None:
    table = pa.table(
        {
            "en": pa.array(["one", None], pa.large_string()),
            "small": pa.array([1, 2], pa.int8()),
            "when": pa.array([datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)] * 2, pa.timestamp("ns", "UTC")),
            "price": pa.array([decimal.Decimal("1.50")] * 2, pa.decimal128(5, 2)),
            "word": pa.array(["a", "b"]).dictionary_encode(),
            "bytes": pa.array([b"\xff", None]),
        }
    )
    pq.write_table(table, tmp_path / "table.parquet")
    run(manifest(tmp_path / "table.parquet", format="parquet"), tmp_path / "out")
    found = pq.read_table(tmp_path / "out" / "data" / "part-00000.parquet")
    assert found.schema.remove(6) == pq.read_schema(tmp_path / "table.parquet").remove_metadata()
    assert found.drop_columns(["de"]).equals(table.cast(found.schema.remove(6)).slice(0, 1))
    # JSON has no bytes and no times.
    run(manifest(tmp_path / "table.parquet"), tmp_path / "json")
    assert read_output(tmp_path / "json")[0]["when"] == "2020-01-01 00:00:00+00:00"


VIEWS = {
    "en": pa.array(["one", None, "two"], pa.string_view()),
    "bytes": pa.array([b"\xff", None, b""], pa.binary_view()),
    "list": pa.array([["a"], [], None], pa.list_(pa.string_view())),
    "word": pa.array(["a", "b", "a"]).dictionary_encode(),
}


@pytest.mark.parametrize("column", ["en", "word"])
def test_text_of_each_type_of_arrow_is_translated(column, tmp_path) -> None:
    pq.write_table(pa.table(VIEWS), tmp_path / "table.parquet")
    for kind in ("parquet", "jsonl"):
        run(manifest(tmp_path / "table.parquet", format=kind, column=column), tmp_path / kind)
        assert german(tmp_path / kind) == [text.upper() for text in VIEWS[column].to_pylist() if text]
    found = pq.read_table(tmp_path / "parquet" / "data" / "part-00000.parquet").drop_columns(["de"])
    kept = [row for row in pa.table(VIEWS).to_pylist() if row[column]]
    assert found.to_pylist() == kept and found.schema == pq.read_schema(tmp_path / "table.parquet").remove_metadata()


def test_rows_without_a_translation_are_in_a_file_with_their_reasons(tmp_path) -> None:
    rows = [
        {"en": "one"},
        {"en": None},
        {"en": 5},
        {"en": "long " * 20},
        {"en": "a poison b"},
        {"de": "no source"},
        {"en": "two"},
        {"en": ""},
    ]
    path = write_rows(tmp_path / "table.jsonl", rows)
    path.write_text(path.read_text() + "{\n")
    (record,) = run(manifest(path, shard_rows=100), tmp_path / "out")
    assert german(tmp_path / "out") == ["ONE", "TWO", ""]
    rejected = read_rejected(tmp_path / "out")
    assert {row["row"]: row["reason"] for row in rejected} == {
        2: "has no 'en'",
        3: "has '5' for 'en', which must be text",
        4: "has 100 characters, above the limit of 50",
        5: "RuntimeError: no kernel for this",
        6: "has no 'en'",
        9: "is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    }
    assert rejected[0] == {"file": str(path), "row": 2, "reason": "has no 'en'", "content": {"en": None}}
    assert rejected[-1]["content"] == "{"
    assert record.rows == 9
    assert record.rejected == {"failed": 1, "no text": 3, "too long": 1, "unreadable": 1}


def test_rows_of_json_that_do_not_fit_in_parquet_are_rejected(tmp_path, monkeypatch) -> None:
    """None loses a value: neither a key that the first rows lack nor one within a value."""
    monkeypatch.setattr(shards, "ROWS_OF_SCHEMA", 2)
    rows = [{"id": 1, "en": "one", "m": {"a": 1}}, {"id": 2, "en": "two", "m": None}]
    rows += [{"id": "x", "en": "three"}, {"en": "four", "new": 1}, {"en": "five", "m": {"a": 2, "b": "more"}}]
    path = write_rows(tmp_path / "table.jsonl", [*rows, {"en": "six", "de": "mine"}, {"en": "seven"}])
    records = run(manifest(path, format="parquet"), tmp_path / "parquet")
    assert german(tmp_path / "parquet") == ["ONE", "TWO", "SEVEN"]
    rejected = [record.rejected for record in records]
    assert rejected == [{"other columns": 1, "other types": 1}, {"column taken": 1, "other types": 1}]
    assert "'new', which the first rows of the table lack" in read_rejected(tmp_path / "parquet")[1]["reason"]
    records = run(manifest(path), tmp_path / "jsonl")
    assert [record.rejected for record in records] == [{}, {"column taken": 1}]
    assert read_rejected(tmp_path / "jsonl")[0]["content"]["de"] == "mine"


def test_a_shard_of_nothing_but_rejected_rows_is_an_empty_file(tmp_path) -> None:
    path = write_rows(tmp_path / "table.jsonl", [{"en": "one"}] + [{"en": None}] * 7)
    for kind in ("jsonl", "parquet"):
        run(manifest(path, format=kind), tmp_path / kind)
        assert german(tmp_path / kind) == ["ONE"]
        assert (tmp_path / kind / "data" / f"part-00001.{kind}").exists()


def test_line_breaks_end_sentences_and_are_kept(tmp_path) -> None:
    seen = []

    def translate(lines):
        seen.extend(lines)
        return upper(lines)

    run_rows(tmp_path, [{"en": "one\ntwo\r\n\rthree\u2028four"}], lambda: TextTranslator(translate), score=True)
    assert seen == ["one", "two", "", "three\u2028four"]
    (row,) = read_output(tmp_path / "out")
    # A separator that the model generates does not end a line.
    assert (row["de"], row["de_score"]) == ("ONE\nTWO\n\nTHREE FOUR", round(4 * -0.123456, 4))


def test_a_few_rows_that_fail_do_not_cost_the_others(tmp_path) -> None:
    calls = []

    def translate(lines):
        calls.append(len(lines))
        return upper(lines)

    rows = [{"en": "poison" if i in (7, 8, 90) else f"row {i}"} for i in range(100)]
    run_rows(tmp_path, rows, lambda: TextTranslator(translate), shard_rows=100)
    assert len(read_output(tmp_path / "out")) == 97 and len(read_rejected(tmp_path / "out")) == 3
    assert len(calls) < 50


def test_what_fails_for_every_text_is_an_error(tmp_path) -> None:
    def broken(lines):
        raise RuntimeError("the GPU is gone")

    with pytest.raises(RuntimeError, match="the GPU is gone"):
        run_rows(tmp_path, [{"en": "one"}] * 10, lambda: TextTranslator(broken))
    assert Folder(str(tmp_path / "out")).sizes("data") == {} == Folder(str(tmp_path / "out")).sizes("shards")


def test_a_text_without_its_language_tag_is_rejected(tmp_path) -> None:
    def tagged(line):
        if line == "two":
            raise ValueError("has no target language tag")
        return f"<2de> {line}"

    run_rows(tmp_path, [{"en": "one"}, {"en": "two"}], lambda: TextTranslator(upper, tagged))
    assert german(tmp_path / "out") == ["<2DE> ONE"]
    assert read_rejected(tmp_path / "out")[0]["reason"] == "ValueError: has no target language tag"


def test_what_an_interrupted_attempt_left_is_replaced(tmp_path) -> None:
    for name in ("data/part-00000.jsonl", "data/.part-00000.jsonl.writing", "rejected/part-00000.jsonl"):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("old")
    run_rows(tmp_path, [{"en": "one"}])
    assert german(tmp_path / "out") == ["ONE"]
    assert read_rejected(tmp_path / "out") == []
    assert [each.name for each in (tmp_path / "out" / "data").iterdir()] == ["part-00000.jsonl"]


def test_texts_that_were_split_are_counted_by_shard(tmp_path) -> None:
    class Counting:
        split = 3

    def translate(lines):
        Counting.split += len(lines)
        return upper(lines)

    translator = TextTranslator(translate, lines_split=lambda: Counting.split)
    records = run_rows(tmp_path, [{"en": "one"}] * 6, lambda: translator)
    assert [record.split for record in records] == [4, 2]
    assert json.loads((tmp_path / "out" / "shards" / "00001.json").read_text())["split"] == 2


def test_a_first_file_without_rows_gives_no_types(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    sources = [
        describe(str(each)) for each in (tmp_path / "a.jsonl", write_rows(tmp_path / "b.jsonl", [{"en": "one"}]))
    ]
    work = Manifest(sources, settings(format="parquet"), cut(sources, 4, "en", ["de"]))
    run(work, tmp_path / "out")
    assert german(tmp_path / "out") == ["ONE"]


def test_a_date_that_python_lacks_is_no_json(tmp_path) -> None:
    times = pa.array([0, 10**18, 0], pa.timestamp("ms"))
    pq.write_table(pa.table({"en": ["one", "two", None], "when": times}), tmp_path / "table.parquet")
    (record,) = run(manifest(tmp_path / "table.parquet"), tmp_path / "jsonl")
    assert record.rejected == {"no JSON": 1, "no text": 1}
    assert german(tmp_path / "jsonl") == ["ONE"]
    assert "cannot be shown" in read_rejected(tmp_path / "jsonl")[0]["content"]["when"]
    # Parquet keeps what Python does not have.
    run(manifest(tmp_path / "table.parquet", format="parquet"), tmp_path / "parquet")
    found = pq.read_table(tmp_path / "parquet" / "data" / "part-00000.parquet")
    assert found.column("when").cast(pa.int64()).to_pylist() == [0, 10**18]


def test_json_has_null_for_numbers_that_are_not_finite(tmp_path) -> None:
    nan, infinity = float("nan"), float("inf")
    more = [{"a": nan, "b": 1.5}, {"a": -infinity, "b": infinity}]
    table = pa.table({"en": ["one", "two", None], "price": [nan, 2.0, infinity], "more": [[more[0]], more, None]})
    pairs = pa.array([[("x", nan)], [], None], pa.map_(pa.string(), pa.float64()))
    table = table.append_column("pairs", pairs)
    pq.write_table(table, tmp_path / "table.parquet")
    run(manifest(tmp_path / "table.parquet", format="jsonl"), tmp_path / "out")
    lines = (tmp_path / "out" / "data" / "part-00000.jsonl").read_text().splitlines()
    assert not any(word in line for line in lines for word in ("NaN", "Infinity"))
    first = {"a": None, "b": 1.5}
    assert [json.loads(line) for line in lines] == [
        {"en": "one", "price": None, "more": [first], "pairs": [["x", None]], "de": "ONE"},
        {"en": "two", "price": 2.0, "more": [first, {"a": None, "b": None}], "pairs": [], "de": "TWO"},
    ]
    (rejected,) = read_rejected(tmp_path / "out")
    assert rejected["content"] == {"en": None, "price": None, "more": None, "pairs": None}


def test_json_with_nan_fits_in_parquet(tmp_path) -> None:
    (tmp_path / "table.jsonl").write_text('{"en": "one", "price": 1.5}\n{"en": "two", "price": NaN}\n')
    run(manifest(tmp_path / "table.jsonl", format="parquet"), tmp_path / "out")
    first, second = read_output(tmp_path / "out")
    assert first == {"en": "one", "price": 1.5, "de": "ONE"} and second["de"] == "TWO" and math.isnan(second["price"])


@pytest.mark.parametrize("name", ["table.jsonl", "table.parquet"])
def test_what_is_written_has_no_secret_of_a_url(tmp_path, name) -> None:
    memory = fsspec.filesystem("memory")
    rows = write_rows(tmp_path / name, [{"en": "one"}, {"en": None}, {"en": "two"}])
    url = f"memory://me:SECRET@corpus/{name}?sig=SECRET"
    memory.pipe_file(url.removeprefix("memory:/"), rows.read_bytes())
    try:
        assert len(shards.find_files(url)) == 1
        work = manifest(url)
        write_manifest(Folder(str(tmp_path / "out")), work)
        run(work, tmp_path / "out")
    finally:
        memory.store.clear()
    assert german(tmp_path / "out") == ["ONE", "TWO"]
    (rejected,) = read_rejected(tmp_path / "out")
    assert rejected["file"] == f"memory://corpus/{name}" == read_manifest(Folder(str(tmp_path / "out"))).sources[0].url
    written = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(written) > 3 and not any(b"SECRET" in content for content in written)


def test_files_of_parquet_are_closed(tmp_path, monkeypatch) -> None:
    opened, made = [], Source.open
    monkeypatch.setattr(Source, "open", lambda self: opened.append(made(self)) or opened[-1])
    run(manifest(write_rows(tmp_path / "table.parquet", [{"en": "one"}] * 9)), tmp_path / "out")
    assert len(opened) > 3 and all(file.closed for file in opened)
