"""Fields of labelled text as each format has them."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from hf_vaswani.data.tables import column_file, dataset_split, text_columns

COLUMNS = {"text": "en", "label": "label"}


def test_tags_with_names_and_words_with_spaces_in_them(tmp_path) -> None:
    features = Features({"en": List(Value("string")), "label": List(ClassLabel(names=["O", "B-NUM"]))})
    words = ["about", "2\u00a0000"]
    Dataset.from_dict({"en": [words], "label": [[0, 1]]}, features=features).to_parquet(tmp_path / "a.parquet")
    rows = column_file(tmp_path / "a.parquet", None, {"words": "en", "tags": "label"}, False)
    assert rows.to_list() == [{"words": words, "tags": ["O", "B-NUM"]}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"en": "a"}, "has no column 'label'"),
        ({"en": "a", "label": None}, "has no label"),
        ({"en": "a", "label": 1.5}, "has 1.5 for its label"),
        ({"en": 3, "label": "x"}, "has 3 for its text"),
    ],
)
def test_bad_values_are_refused(row, expected, tmp_path) -> None:
    with pytest.raises(ValueError, match="a.jsonl") as error:
        (tmp_path / "a.jsonl").write_text(json.dumps(row), encoding="utf-8")
        column_file(tmp_path / "a.jsonl", None, COLUMNS, False)
    assert expected in str(error.value)


def test_a_label_that_is_kept_secret_is_refused(tmp_path) -> None:
    features = Features({"en": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
    Dataset.from_dict({"en": ["a", "b"], "label": [1, -1]}, features=features).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: row 2 has -1 for its label"):
        column_file(tmp_path / "a.parquet", None, COLUMNS, False)


KINDS_OF_TEXT = {
    "large": pa.large_string(),
    "view": pa.string_view(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
}


def text_of(kind: pa.DataType, texts: list[str | None]) -> pa.Array:
    return pa.array(texts).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(texts, kind)


@pytest.mark.parametrize("kind", KINDS_OF_TEXT.values(), ids=KINDS_OF_TEXT)
@pytest.mark.parametrize("streaming", [False, True])
def test_each_type_of_text_in_arrow_is_text(kind, streaming, tmp_path) -> None:
    expected = [{"source": "a", "target": "b"}, {"source": "c", "target": "d"}]
    sides = {"en": text_of(kind, ["\ufeffa", "c"]), "de": text_of(kind, ["b", "d"])}
    pq.write_table(pa.table(sides), tmp_path / "a.parquet")
    columns = {"source": "en", "target": "de"}
    assert list(column_file(tmp_path / "a.parquet", ("en", "de"), columns, streaming)) == expected
    nested = pa.StructArray.from_arrays(list(sides.values()), names=list(sides))
    pq.write_table(pa.table({"translation": nested}), tmp_path / "b.parquet")
    assert list(column_file(tmp_path / "b.parquet", ("en", "de"), columns, streaming)) == expected
    pq.write_table(pa.table(sides | {"en": text_of(kind, ["a", None])}), tmp_path / "c.parquet")
    with pytest.raises(ValueError, match=r"c\.parquet: row 2 has no source text"):
        list(column_file(tmp_path / "c.parquet", None, columns, streaming))


@pytest.mark.parametrize("kind", KINDS_OF_TEXT.values(), ids=KINDS_OF_TEXT)
def test_each_type_of_text_in_arrow_is_text_of_a_dataset_and_a_label(kind, tmp_path) -> None:
    rows = pa.table({"en": text_of(kind, ["a", "c"]), "label": text_of(kind, ["yes", "no"])})
    pq.write_table(rows, tmp_path / "a.parquet")
    Dataset.from_parquet(str(tmp_path / "a.parquet"), cache_dir=tmp_path / "cache").save_to_disk(tmp_path / "saved")
    saved = dataset_split(str(tmp_path / "saved"), None, "train", False)
    for found in (
        text_columns(saved, None, COLUMNS, "saved"),
        column_file(tmp_path / "a.parquet", None, COLUMNS, False),
    ):
        assert found.to_list() == [{"text": "a", "label": "yes"}, {"text": "c", "label": "no"}]
