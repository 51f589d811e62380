"""The records of a run folder: to JSON and back, values of the wrong kind, keys of other versions."""

import json
import math
from typing import Any

import pytest

from hf_vaswani.records import Environment, Progress, Result, Text, Validation, from_json, to_json

VALIDATION = Validation(
    step=4, loss=1.5, bleu=20.0, chrf=40.0, ter=60.0, signatures={"bleu": "tok:13a"}, sets={"en-de": {"bleu": 20.0}}
)
PROGRESS = Progress(
    step=4, position={"epoch": 1}, data={"pairs": 9}, launch={"processes": 1}, nonfinite=0, seconds=2.5,
    files={"config.json": "ab"}, state={"optimizer.bin": "cd"}, recipe={"seed": 1}, validations=[VALIDATION],
)  # fmt: skip
RESULT = Result(step=4, averaged=["checkpoint-4"], samples=[{"source": "one", "translation": "eins"}])
ENVIRONMENT = Environment(
    python="3.11", packages={"torch": "2.13"}, processes=1, cpu_threads=2, mixed_precision="no", seed=1,
    command=["train.py"], data=[Text(direction="en-de", pairs={"train": 9}, held_out={"test": 1}), Text(pairs={})],
)  # fmt: skip


@pytest.mark.parametrize(
    "record", [VALIDATION, PROGRESS, RESULT, ENVIRONMENT], ids=lambda record: type(record).__name__
)
def test_a_record_comes_back_from_json(record) -> None:
    assert from_json(type(record), json.loads(json.dumps(to_json(record)))) == record


def test_absent_values_are_not_written_but_a_loss_that_is_not_finite_is() -> None:
    assert to_json(Validation(step=1, loss=None, bleu=0.0)) == {"step": 1, "loss": None, "bleu": 0.0, "best": False}
    assert to_json(Result(step=1, averaged=[])) == {"step": 1, "averaged": []}


def test_keys_of_later_versions_are_ignored_and_those_of_earlier_ones_suffice() -> None:
    content = {"step": 1, "averaged": ["checkpoint-1"]}
    assert from_json(Result, content | {"later": [1]}) == Result(step=1, averaged=["checkpoint-1"])


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


@pytest.mark.parametrize("key", ["step", "bleu"])
def test_a_missing_key_is_named(key) -> None:
    content = to_json(VALIDATION)
    del content[key]
    with pytest.raises(ValueError, match=f"^{key} is missing$"):
        from_json(Validation, content)


def test_whole_numbers_are_numbers() -> None:
    assert from_json(Validation, {"step": 1, "loss": 2, "bleu": 0}).loss == 2
    assert math.isinf(from_json(Validation, {"step": 1, "loss": math.inf, "bleu": 0}).loss)


def test_the_digests_of_a_checkpoint_are_those_of_all_its_files() -> None:
    assert PROGRESS.digests == {"config.json": "ab", "optimizer.bin": "cd"}
