"""Fields of labelled text as each format has them."""

import json

import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from hf_vaswani.data.tables import column_file

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
