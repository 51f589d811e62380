"""The records of a run folder: to JSON and back, values of the wrong kind, keys of other versions, secrets in URLs."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from hf_vaswani.records import (
    Environment,
    Progress,
    Result,
    Text,
    Validation,
    from_json,
    public,
    public_text,
    to_json,
)

VALIDATION = Validation(
    4, {"loss": 1.5, "bleu": 20.0, "chrf": 40.0, "ter": 60.0, "exact_match": 0.5, "f1": None},
    signatures={"bleu": "tok:13a"}, sets={"en-de": {"bleu": 20.0}},
)  # fmt: skip
PROGRESS = Progress(
    step=4, position={"epoch": 1}, data={"pairs": 9}, launch={"processes": 1}, nonfinite=0, seconds=2.5,
    files={"config.json": "ab"}, state={"optimizer.bin": "cd"}, recipe={"seed": 1}, validations=[VALIDATION],
)  # fmt: skip
RESULT = Result(
    4, {"loss": 2.0, "accuracy": 0.5}, averaged=["checkpoint-4"], samples=[{"source": "one", "translation": "eins"}]
)
ENVIRONMENT = Environment(
    python="3.11", packages={"torch": "2.13"}, processes=1, cpu_threads=2, mixed_precision="no", seed=1,
    command=["train.py"], data=[Text(direction="en-de", pairs={"train": 9}, held_out={"test": 1}), Text(pairs={})],
)  # fmt: skip


@pytest.mark.parametrize(
    "record", [VALIDATION, PROGRESS, RESULT, ENVIRONMENT], ids=lambda record: type(record).__name__
)
def test_a_record_comes_back_from_json(record) -> None:
    assert from_json(type(record), json.loads(json.dumps(to_json(record)))) == record


def test_metrics_are_keys_of_a_record_and_other_measures_have_one_of_their_own() -> None:
    """As 0.1 wrote them; absent values are not written, but a loss that is not finite is."""
    line = to_json(VALIDATION)
    assert list(line) == ["step", "loss", "bleu", "chrf", "ter", "signatures", "sets", "best", "measures"]
    assert line["measures"] == {"exact_match": 0.5, "f1": None}
    assert to_json(RESULT)["measures"] == RESULT.scores
    unknown = Validation(1, {"loss": None, "bleu": 0.0})
    assert to_json(unknown) == {"step": 1, "loss": None, "bleu": 0.0, "best": False}
    assert to_json(Result(1, averaged=[])) == {"step": 1, "averaged": []}


def test_keys_of_later_versions_are_ignored_and_those_of_earlier_ones_suffice() -> None:
    content = {"step": 1, "averaged": ["checkpoint-1"]}
    assert from_json(Result, content | {"later": [1]}) == Result(1, averaged=["checkpoint-1"])


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        (Validation, "step", True),
        (Validation, "step", 1.0),
        (Validation, "step", "1"),
        (Validation, "bleu", None),
        (Validation, "bleu", "20"),
        (Validation, "loss", [1.0]),
        (Validation, "best", 1),
        (Validation, "signatures", {"bleu": 1}),
        (Validation, "sets", {"en-de": 20.0}),
        (Validation, "measures", [1.0]),
        (Progress, "position", []),
        (Progress, "files", {"config.json": None}),
        (Progress, "validations", VALIDATION.step),
        (Progress, "validations", [{"step": 1}]),
        (Progress, "validations", [{"step": 1, "loss": None, "bleu": "x"}]),
        (Result, "averaged", [1]),
        (Environment, "command", "train.py"),
        (Environment, "data", [{"direction": "en-de"}]),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(kind, key, value) -> None:
    whole: dict[type, Any] = {Validation: VALIDATION, Progress: PROGRESS, Result: RESULT, Environment: ENVIRONMENT}
    with pytest.raises(ValueError, match=r"^\w+ is (missing|.+)$") as error:
        from_json(kind, to_json(whole[kind]) | {key: value})
    if not isinstance(value, list):
        assert str(error.value).startswith(f"{key} is ")


@pytest.mark.parametrize("key", ["step", "loss", "bleu"])
def test_a_missing_key_is_named(key) -> None:
    content = {"step": 1, "loss": 2, "bleu": 0}
    assert from_json(Validation, content | {"loss": math.inf}).scores == {"loss": math.inf, "bleu": 0}
    del content[key]
    with pytest.raises(ValueError, match=f"^{key} is missing$"):
        from_json(Validation, content)


def test_the_digests_of_a_checkpoint_are_those_of_all_its_files() -> None:
    assert PROGRESS.digests == {"config.json": "ab", "optimizer.bin": "cd"}


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://host/t.tsv.gz?sv=2024&sig=SECRET%2F", "https://host/t.tsv.gz"),
        ("https://host/t.tsv?token=AB/SECRET#SECRET", "https://host/t.tsv"),
        ("https://host/my text.tsv?token=SECRET SECRET", "https://host/my text.tsv"),
        ("https://user:SECRET@host", "https://host"),
        ("s3://KEY:SEC/RET@bucket/t.tsv", "s3://bucket/t.tsv"),
        ("http://user:SECRET@[::1]:80/a?SECRET", "http://[::1]:80/a"),
        ("zip://t.tsv::simplecache::https://host/a.zip?a=b::SECRET", "zip://t.tsv::simplecache::https://host/a.zip"),
        # As a path has it.
        ("https:/host/t.tsv?sig=SECRET", "https:/host/t.tsv"),
        *((same, same) for same in ("https://host:8080/@me/t.tsv", "hf://datasets/me/data@main/t.tsv", "C:/a@b?c")),
        *((same, same) for same in ("runs/a?b", "file:///home/me@work/t.tsv", "pocket", "")),
    ],
)
def test_of_a_url_scheme_host_and_path_are_public(url, kept) -> None:
    assert public(url) == kept


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("There is no file 'https://host/a?sig=SECRET'.", "There is no file 'https://host/a'."),
        ("{en: https://host/a?SECRET, de: 's3://K:SECRET@b'}", "{en: https://host/a, de: 's3://b'}"),
        ('{"en":"https://host/a#SECRET","de":"b"}', '{"en":"https://host/a","de":"b"}'),
        ("Max retries exceeded with url: /a?sig=SECRET (Caused", "Max retries exceeded with url: /a (Caused"),
        ("see [it](https://host/a?b), and so on: why? a=b", "see [it](https://host/a), and so on: why? a=b"),
    ],
)
def test_a_text_keeps_what_is_around_its_urls(text, kept) -> None:
    assert public_text(text) == kept


def test_records_and_lists_are_public_as_a_whole() -> None:
    secret = replace(ENVIRONMENT, command=["train.py", "--data.train_files={en: https://host/a?SECRET, de: b}"])
    assert public([secret]) == [
        replace(secret, command=["train.py", "--data.train_files={en: https://host/a, de: b}"])
    ]
    assert "SECRET" in secret.command[1]
