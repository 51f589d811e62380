"""Labelled text: read from every format, encoded, and refused where it is wrong."""

import json
from pathlib import Path

import datasets
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value

from hf_vaswani.data.labels import check_labels, encode_labelled, tag_places
from hf_vaswani.data.reading import Source
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.recipe import DataRecipe, EvaluationSetRecipe, ObjectiveRecipe, Recipe, TokenizerRecipe
from hf_vaswani.training.preparation import task_data

from .texts import build_updates, prepared

ROWS = [("good film", "pos"), ("bad film", "neg"), ("a very good book", "pos")]
TAGGED = [(["New", "York", "sleeps"], ["B-LOC", "I-LOC", "O"]), (["Ann", "reads"], ["B-PER", "O"])]


def recipe(path: Path | dict[str, str] | None, task: str = "classification", **data: object) -> Recipe:
    files = str(path) if isinstance(path, Path) else path
    settings = {"source_language": "en", "train_files": files, "test_files": files} | data
    return Recipe(task=task, data=DataRecipe(**settings), tokenizer=TokenizerRecipe(vocab_size=300))


def label_names(sources: list[Source]) -> list[str]:
    return task_data(Recipe(task="classification")).label_names(sources)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def as_tsv(folder: Path) -> Path:
    return write(folder / "a.tsv", "en\tlabel", *("\t".join(row) for row in ROWS))


def as_jsonl(folder: Path) -> Path:
    return write(folder / "a.jsonl", *(json.dumps({"en": text, "label": label}) for text, label in ROWS))


def as_parquet(folder: Path) -> Path:
    features = Features({"en": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
    columns = {"en": [text for text, _ in ROWS], "label": [int(label == "pos") for _, label in ROWS]}
    Dataset.from_dict(columns, features=features).to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def as_lines(folder: Path) -> dict[str, str]:
    texts, labels = (write(folder / name, *side) for name, side in zip("ab", zip(*ROWS, strict=True), strict=True))
    return {"en": str(texts), "label": str(labels)}


@pytest.mark.parametrize("make", [as_tsv, as_jsonl, as_parquet, as_lines])
def test_every_format_gives_the_same_rows(make, tmp_path) -> None:
    (source,) = task_data(recipe(make(tmp_path))).read()
    assert [tuple(row.values()) for row in source.splits["train"].to_list()] == ROWS
    assert source.name == "en" and label_names([source]) == ["neg", "pos"]


def test_a_dataset_has_names_for_its_classes(tmp_path) -> None:
    names = ClassLabel(names=["O", "B-LOC", "I-LOC", "B-PER"])
    features = Features({"tokens": List(Value("string")), "ner_tags": List(names)})
    columns = {
        "tokens": [words for words, _ in TAGGED],
        "ner_tags": [[names.str2int(tag) for tag in tags] for _, tags in TAGGED],
    }
    rows = Dataset.from_dict(columns, features=features)
    DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "data")
    columns = {"source_column": "tokens", "label_column": "ner_tags", "validation_split": None}
    (source,) = task_data(recipe(None, "tagging", dataset=str(tmp_path / "data"), test_files=None, **columns)).read()
    assert [tuple(row.values()) for row in source.splits["train"].to_list()] == TAGGED
    assert label_names([source]) == ["B-LOC", "B-PER", "I-LOC", "O"]


@pytest.mark.parametrize("as_lists", [True, False])
def test_words_are_lists_or_separated_by_spaces(as_lists, tmp_path) -> None:
    if as_lists:
        lines = [json.dumps({"en": words, "label": tags}) for words, tags in TAGGED]
        path = write(tmp_path / "a.jsonl", *lines)
    else:
        path = write(tmp_path / "a.tsv", "en\tlabel", *("\t".join(map(" ".join, row)) for row in TAGGED))
    (source,) = task_data(recipe(path, "tagging")).read()
    assert [tuple(row.values()) for row in source.splits["train"].to_list()] == TAGGED


def test_labels_that_are_numbers_are_in_their_order(tmp_path) -> None:
    lines = [json.dumps({"en": "a", "label": label}) for label in (10, 9, 2)]
    assert label_names(task_data(recipe(write(tmp_path / "a.jsonl", *lines))).read()) == ["2", "9", "10"]


def test_a_text_and_its_label_as_ids(tmp_path) -> None:
    settings = recipe(as_tsv(tmp_path))
    sources, tokenizer = prepared(settings)
    (test,) = task_data(settings).encode_sets(sources, tokenizer, label_names(sources))["test"]
    assert test.source == [text for text, _ in ROWS] and test.target == [label for _, label in ROWS]
    for row, (text, label) in zip(test.encoded, ROWS, strict=True):
        assert row["source_ids"] == tokenizer(text)["input_ids"]
        assert row["source_ids"][0] == tokenizer.bos_token_id and row["source_ids"][-1] == tokenizer.eos_token_id
        assert row["target_ids"] == [["neg", "pos"].index(label)]
    ((batch, *_), _) = next(
        build_updates(settings, sources, tokenizer, ["neg", "pos"]).after({"epoch": 0, "update": 0})
    )
    assert batch["labels"].shape == (3,) and batch["input_ids"].shape[0] == 3


def test_a_pair_of_texts_has_segments_and_is_cut_at_its_longer_side(tmp_path) -> None:
    path = write(tmp_path / "a.tsv", "en\tb\tlabel", "one\ttwo three\tx", "a " * 30 + "\tb b b\ty")
    settings = recipe(path, pair_column="b")
    settings.objective = ObjectiveRecipe(block_length=16)
    sources, tokenizer = prepared(settings)
    rows = encode_labelled(sources[0].splits["train"], tokenizer, ["x", "y"], 16, "a.tsv")
    whole = tokenizer("one", "two three")
    assert rows[0]["source_ids"] == whole["input_ids"] and rows[0]["segments"] == whole["token_type_ids"]
    assert len(rows[1]["source_ids"]) == 16
    assert rows[1]["source_ids"][-4:] == tokenizer("", "b b b")["input_ids"][-4:]


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "characters"])
def test_the_tag_of_a_word_is_at_its_first_token(kind) -> None:
    """Whatever the pieces are, and whether one begins with the space or not."""
    words = ["Unbelievable", "prices", ",", "e\u0301te\u0301", "sagt", "Ann"]
    tokenizer = train_tokenizer(["the price is the best", "Ann says été , no"] * 5, 290, kind)
    encoding = tokenizer.backend_tokenizer.encode(" ".join(words))
    tags = tag_places(encoding, words, range(6))
    assert [tag for tag in tags if tag != -100] == list(range(6))
    for word, place in zip(words, [tags.index(tag) for tag in range(6)], strict=True):
        start, end = encoding.offsets[place]
        assert " ".join(words)[start:].lstrip().startswith(word)
        assert " ".join(words)[start:end].strip()


def test_words_beyond_the_longest_text_have_no_tag() -> None:
    tokenizer = train_tokenizer(["a b c d"], 290, "bpe")
    words = ["a", "b", "c", "d"]
    rows = Dataset.from_dict({"words": [words], "tags": [["X", "O", "X", "O"]]})
    (row,) = encode_labelled(rows, tokenizer, ["O", "X"], 3, "a.tsv")
    assert row["target_ids"] == [1, 0, -100]


@pytest.mark.parametrize(
    ("lines", "task", "expected"),
    [
        (
            ["en\tlabel", "a\tx", "b\tx"],
            "classification",
            "needs two labels or more, but the training text has only 'x'",
        ),
        (["en\tlabel", "\t"], "tagging", "needs two labels or more, but the training text has none"),
        (["en\tlabel", "a\tx"], "classification", "must be different columns of"),
        (["en\tkind", "a\tx"], "classification", "has no column 'label'; it has ['en', 'kind']. Name the column"),
        (
            ["en\tlabel", "a\t"],
            "classification",
            "has '' for its label, which must be text or a whole number, and not empty",
        ),
        (["en\tlabel", "a b\tO"], "tagging", "row 1, has 2 words but 1 tags: each word needs one tag"),
        (["en\tlabel"], "classification", "The train set of en is empty"),
    ],
)
def test_bad_labels_are_refused(lines, task, expected, tmp_path) -> None:
    with pytest.raises(ValueError, match="a.tsv") as error:
        columns = {"label_column": "en"} if "different" in expected else {}
        sources = task_data(recipe(write(tmp_path / "a.tsv", *lines), task, **columns)).read()
        check_labels(label_names(sources), sources)
    assert expected in str(error.value)


def test_processes_encode_alike(tmp_path) -> None:
    """A special token in a text is text in every process."""
    lines = ["en\tlabel", *["the </s> cat <mask>\tx", "a dog\ty"] * 4]
    settings = recipe(write(tmp_path / "a.tsv", *lines))
    sources, tokenizer = prepared(settings)
    rows = sources[0].splits["train"]
    one, two = (encode_labelled(rows, tokenizer, ["x", "y"], 64, "a.tsv", n, n) for n in (1, 2))
    assert one["source_ids"] == two["source_ids"]
    assert one["source_ids"][0].count(tokenizer.eos_token_id) == 1


def test_words_of_held_out_sentences_are_not_cut(tmp_path, caplog) -> None:
    words = [f"w{i}" for i in range(30)]
    path = write(tmp_path / "a.tsv", "en\tlabel", f"{' '.join(words)}\t{' '.join(['O', 'X'] * 15)}")
    settings = recipe(path, "tagging")
    settings.objective = ObjectiveRecipe(block_length=16)
    sources, tokenizer = prepared(settings)
    (test,) = task_data(settings).encode_sets(sources, tokenizer, ["O", "X"])["test"]
    assert sum(tag != -100 for tag in test.encoded["target_ids"][0]) == 30
    build_updates(settings, sources, tokenizer, ["O", "X"])
    assert "words of the training text of en have no token in their text" in caplog.text


def test_a_label_that_the_training_text_does_not_have(tmp_path) -> None:
    settings = recipe(as_tsv(tmp_path))
    other = write(tmp_path / "b.tsv", "en\tlabel", "good\tpos", "meh\tmixed")
    settings.validation_sets = {"new": EvaluationSetRecipe(test_files=str(other), validation_split=None)}
    sources, tokenizer = prepared(settings)
    with pytest.raises(ValueError, match=r"b\.tsv, row 2, has the label 'mixed', but the model has only 'neg', 'pos'"):
        task_data(settings).encode_sets([*sources, *task_data(settings).read_sets()], tokenizer, label_names(sources))


def test_other_labels_are_another_text(tmp_path) -> None:
    """A run is not resumed with other labels, although all texts are the same."""
    settings = recipe(as_tsv(tmp_path))
    sources, tokenizer = prepared(settings)
    before = build_updates(settings, sources, tokenizer, ["neg", "pos"]).fingerprint
    rows = sources[0].splits["train"]
    sources[0].splits["train"] = datasets.Dataset.from_dict({"text": rows["text"], "label": ["neg", "pos", "neg"]})
    after = build_updates(settings, sources, tokenizer, ["neg", "pos"]).fingerprint
    assert before != after and before["crc32_of_lengths"] == after["crc32_of_lengths"]
