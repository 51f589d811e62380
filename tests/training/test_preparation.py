"""From a recipe to a run: two directions in one model, streams, and both again after a stop."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, pipeline

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.cli import main
from hf_vaswani.data.batching import EpochUpdates
from hf_vaswani.data.objectives import ObjectiveSettings
from hf_vaswani.data.task_data import VocabularySettings
from hf_vaswani.data.windows import WindowUpdates
from hf_vaswani.recipe_file import load_recipe
from hf_vaswani.run_folder import read_environment, read_recipe
from hf_vaswani.training import preparation
from hf_vaswani.training.update import Updater

from ..conftest import dear, tiny_recipe, write_pairs
from .runs import assert_close_weights, same_weights


def bilingual(folder: Path, *more: str, **training: object) -> list[str]:
    """Command line of a tiny recipe with two directions: numbers in English words to German, and to digits."""
    arguments = tiny_recipe(folder, scored=True, **training)
    source, _ = write_pairs(folder)
    words = "zero one two three four five six seven eight nine".split()
    digits = folder / "text.xx"
    lines = source.read_text("utf-8").splitlines()[:40]
    digits.write_text(
        "".join(" ".join(str(words.index(word)) for word in line.split()) + "\n" for line in lines), encoding="utf-8"
    )
    (folder / "short.en").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    files = {"en": str(folder / "short.en"), "xx": str(digits)}
    other = {"target_language": "xx", "weight": 2.0} | {
        f"{split}_files": files for split in ("train", "validation", "test")
    }
    return [*arguments, "--data.target_tag=true", f"--more_data=[{json.dumps(other)}]", *more]


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [dear(False), True])
def test_two_directions_in_one_model_stopped_and_resumed(tmp_path, streaming, capsys) -> None:
    more = ["--data.streaming=true", "--data.stream_window=50"] if streaming else []
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert main(["train", *bilingual(tmp_path, *more, max_steps=24), "--run_dir", str(whole)]) == 0, (
        capsys.readouterr()
    )
    for steps in (8, 24):
        arguments = bilingual(tmp_path, *more, max_steps=steps, data_workers=steps // 24)
        assert main(["train", *arguments, "--run_dir", str(parted)]) == 0, capsys.readouterr()
    assert same_weights(parted / "checkpoint-24", whole / "checkpoint-24")
    progress = json.loads((whole / "checkpoint-24" / "progress.json").read_text())
    assert progress["position"].keys() == ({"window", "update", "places"} if streaming else {"epoch", "update"})
    (validation, *_) = [json.loads(line) for line in (whole / "validations.jsonl").read_text().splitlines()]
    assert validation["sets"].keys() == {"en-de", "en-xx"}
    result = json.loads((whole / "test.json").read_text())
    assert result["sets"].keys() == {"en-de", "en-xx"}
    assert result["chrf"] == sum(scores["chrf"] for scores in result["sets"].values()) / 2
    added = json.loads((whole / "model" / "tokenizer.json").read_text())["added_tokens"]
    assert [token["content"] for token in added][-2:] == ["<2de>", "<2xx>"]


def test_a_run_goes_on_with_the_same_pairs_on_a_device_that_needs_few_shapes(tmp_path, monkeypatch, caplog) -> None:
    """It begins without them and goes on with them; the padding of a run that begins so is recorded."""
    build, few = preparation.batch_order, False
    monkeypatch.setattr(preparation, "batch_order", lambda *arguments: build(*arguments[:3], few))
    seen: list[list[int]] = []
    update = Updater.__call__

    def spy(self: Updater, batches: list[dict[str, torch.Tensor]], *more: Any, **keywords: Any) -> Any:
        seen.append([len(batch["labels"]) for batch in batches])
        return update(self, batches, *more, **keywords)

    monkeypatch.setattr(Updater, "__call__", spy)
    options = ["--model.dropout=0", "--training.simcut={p: 0.3}", "--training.log_every=1"]
    curves = []
    for name, parts in {"plain": [(False, 12)], "few": [(True, 12)], "both": [(False, 4), (True, 12)]}.items():
        for few, steps in parts:  # noqa: B007
            arguments = [*tiny_recipe(tmp_path, max_steps=steps), *options, "--run_dir", str(tmp_path / name)]
            assert main(["train", *arguments]) == 0
        assert_close_weights(tmp_path / "plain" / "checkpoint-12", tmp_path / name / "checkpoint-12", atol=1e-5)
        curves.append([json.loads(line) for line in (tmp_path / name / "training.jsonl").read_text().splitlines()])
    for curve in curves[1:]:
        assert [line["loss"] for line in curve] == pytest.approx([line["loss"] for line in curves[0]], rel=1e-4)
    assert seen[:12] != seen[12:24] and seen[24:] == [*seen[:4], *seen[16:24]]


def test_the_padding_of_few_shapes_is_recorded_where_the_device_needs_them(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(preparation, "is_accelerator", lambda device: True)
    assert main(["train", *tiny_recipe(tmp_path, max_steps=1), "--run_dir", str(tmp_path / "run")]) == 0
    environment = read_environment(tmp_path / "run")
    assert 0 < environment.padding < 0.9 and environment.shapes > 1
    said = f"Batches have {environment.shapes} shapes, and {environment.padding:.1%} of their positions are padding"
    assert caplog.text.count(said) == 1
    # Again with the same recipe: a resumed run has recorded it.
    assert main(["train", *tiny_recipe(tmp_path, max_steps=2), "--run_dir", str(tmp_path / "run")]) == 0
    assert caplog.text.count("of their positions are padding") == 1
    assert read_environment(tmp_path / "run") == environment


@pytest.mark.parametrize("options", [[], dear(["--data.streaming=true"])], ids=str)
def test_a_worker_encodes_what_is_made_anew_and_changes_nothing(tmp_path, monkeypatch, options) -> None:
    """By default, where an accelerator leaves the processor time for it; the run goes on without it."""
    counts, after = [], WindowUpdates.after

    def spy(self: WindowUpdates, position: dict[str, Any]) -> Any:
        counts.append(self.num_workers)
        return after(self, position)

    monkeypatch.setattr(WindowUpdates, "after", spy)
    arguments = [*tiny_recipe(tmp_path), "--tokenizer.bpe_dropout=0.2", "--data.stream_window=50", *options]
    assert main(["train", *arguments, "--run_dir", str(tmp_path / "without")]) == 0
    build = preparation.batch_order
    monkeypatch.setattr(preparation, "batch_order", lambda *arguments: build(*arguments[:3]))
    monkeypatch.setattr(preparation, "is_accelerator", lambda device: True)
    monkeypatch.setattr(preparation, "_record_batches", lambda *arguments: None)
    one = ["train", *arguments, "--run_dir", str(tmp_path / "one")]
    assert main([*one, "--training.max_steps=5"]) == 0
    assert main([*one, "--training.data_workers=0"]) == 0
    assert counts == [0, 1, 0]
    assert same_weights(tmp_path / "without" / "checkpoint-12", tmp_path / "one" / "checkpoint-12")
    # Text that is encoded once needs no other process.
    del counts[:]
    seen: list[int] = []
    monkeypatch.setattr(EpochUpdates, "after", lambda self, position: seen.append(self.loader.num_workers) or iter(()))
    with pytest.raises(StopIteration):
        main(["train", *tiny_recipe(tmp_path), "--run_dir", str(tmp_path / "cached")])
    assert seen == [0] and not counts


@pytest.mark.slow
@pytest.mark.portable
def test_one_model_learns_both_directions(tmp_path) -> None:
    """The same sentences to both: the tag alone says into which language."""
    run = tmp_path / "run"
    sizes = ["--model.d_model=64", "--model.d_ff=128", "--evaluation.max_length=40"]
    training = {"warmup_steps": 50, "tokens_per_batch": 512, "save_every": 50, "validate_every": 100}
    arguments = bilingual(tmp_path, *sizes, max_steps=100, **training)
    assert main(["train", *arguments, "--run_dir", str(run)]) == 0
    words = (tmp_path / "short.en").read_text("utf-8").splitlines()
    model = VaswaniForConditionalGeneration.from_pretrained(run / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    translator = pipeline("translation", model=model, tokenizer=tokenizer)

    def loss(tag: str, language: str) -> float:
        references = (tmp_path / f"text.{language}").read_text("utf-8").splitlines()[: len(words)]
        sources = tokenizer([f"<2{tag}> {line}" for line in words], return_tensors="pt", padding=True)
        labels = tokenizer(references, return_tensors="pt", padding=True)["input_ids"]
        with torch.no_grad():
            return model(**sources, labels=labels.masked_fill(labels == tokenizer.pad_token_id, -100)).loss.item()

    assert loss("de", "de") < loss("xx", "de")
    assert loss("xx", "xx") < loss("de", "xx")
    outputs = {
        language: [output["translation_text"] for output in translator(words, tgt_lang=language)]
        for language in ("de", "xx")
    }
    digits = {language: sum(any(map(str.isdigit, line)) for line in lines) for language, lines in outputs.items()}
    assert digits["xx"] > digits["de"], outputs


def test_an_interrupted_stream_of_other_text_is_refused(tmp_path, capsys) -> None:
    arguments = [*tiny_recipe(tmp_path, scored=True, max_steps=4), "--data.streaming=true", "--data.stream_window=50"]
    run = tmp_path / "run"
    assert main(["train", *arguments, "--run_dir", str(run)]) == 0
    write_pairs(tmp_path, count=60)
    longer = [argument.replace("max_steps=4", "max_steps=8") for argument in arguments]
    assert main(["train", *longer, "--run_dir", str(run)]) == 2
    assert "The training or validation text has changed since" in capsys.readouterr().err


@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_records_what_of_its_sets_is_in_the_training_text(tmp_path, streaming, capsys) -> None:
    test = tmp_path / "test.tsv"
    test.write_text("en\tde\nONE  seven\tanders\nanother one\tnoch eins\n", encoding="utf-8")
    arguments = [f"--data.test_files={test}", f"--data.streaming={streaming}", "--run_dir", str(tmp_path / "run")]
    recipe = tiny_recipe(tmp_path, scored=True, max_steps=4)
    source, target = tmp_path / "text.en", tmp_path / "text.de"
    with source.open("a", encoding="utf-8") as file, target.open("a", encoding="utf-8") as other:
        file.write("one seven\n")
        other.write("eins sieben\n")
    assert main(["train", *recipe, *arguments]) == 0, capsys.readouterr()
    (noted,) = json.loads((tmp_path / "run" / "environment.json").read_text())["data"]
    # The validation text of this recipe is its training text.
    assert noted.get("held_out") == (None if streaming else {"validation": 121, "test": 1})
    card = (tmp_path / "run" / "model" / "README.md").read_text("utf-8")
    assert ("(2 pairs, 1 of them with a sentence of the training text)" in card) is not streaming


# ---- Changed settings --------------------------------------------------------------------------------------------


def moved(folder: Path, arguments: list[str]) -> list[str]:
    """Moves the text of a command line of `tiny_recipe` into another folder."""
    folder.mkdir()
    for name in ("text.en", "text.de"):
        (folder.parent / name).rename(folder / name)
    return [word.replace(f"{folder.parent}/text.", f"{folder}/text.") for word in arguments]


def test_a_run_goes_on_with_its_text_in_another_place_only_if_it_is_the_same(tmp_path, capsys) -> None:
    arguments = [*tiny_recipe(tmp_path, scored=True, max_steps=4), "--run_dir", str(tmp_path / "run")]
    assert main(["train", *arguments, "--tokenizer.vocab_size=300"]) == 0
    arguments = moved(tmp_path / "elsewhere", arguments)
    # A finished run compares the text, too, and scores its model on it.
    assert main(["train", *arguments]) == 0
    files = read_recipe(tmp_path / "run").data.test_files
    assert files == {side: str(tmp_path / "elsewhere" / f"text.{side}") for side in ("en", "de")}
    free = ("evaluation.tokens_per_batch=512", "training.gradient_checkpointing=true", "training.log_every=3")
    assert main(["train", *arguments, *(f"--{key}" for key in free), "--training.max_steps=8"]) == 0
    capsys.readouterr()
    # Other text, with as many tokens.
    for split, what in (("train", "training or validation"), ("test", "test")):
        for side in ("en", "de"):
            lines = (tmp_path / "elsewhere" / f"text.{side}").read_text("utf-8").splitlines(keepends=True)
            (tmp_path / f"other.{side}").write_text("".join([lines[1], lines[0], *lines[2:]]), encoding="utf-8")
        other = f"--data.{split}_files={{en: {tmp_path / 'other.en'}, de: {tmp_path / 'other.de'}}}"
        for steps in (8, 12):
            assert main(["train", *arguments, other, f"--training.max_steps={steps}"]) == 2
            assert f"The {what} text has changed since" in capsys.readouterr().err
    assert (tmp_path / "run" / "checkpoint-8").is_dir()


def test_text_of_the_same_lengths_is_another_text(monkeypatch) -> None:
    monkeypatch.setattr(preparation, "SAMPLED", 4)

    def checksum(*texts: str, streaming: bool = False) -> int:
        rows = Dataset.from_dict({"source": list(texts), "target": ["x"] * len(texts)})
        source: Any = SimpleNamespace(splits={"train": rows.to_iterable_dataset() if streaming else rows})
        return preparation._checksum([source, source])

    assert checksum("one", "two") == checksum("one", "two") != checksum("one", "six")
    # A sample of a large text; of a stream, nothing.
    assert checksum(*"abcdefgh") == checksum(*"aBCdEFgH") != checksum(*"Abcdefgh")
    assert checksum("one", streaming=True) == checksum("two", streaming=True)


def test_a_run_without_checkpoints_has_its_text_where_it_had_it(tmp_path, capsys) -> None:
    """Nothing tells any more what the text was."""
    arguments = [*tiny_recipe(tmp_path, scored=True, max_steps=4), "--run_dir", str(tmp_path / "run")]
    assert main(["train", *arguments]) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    assert main(["train", *arguments]) == 0
    arguments = moved(tmp_path / "elsewhere", arguments)
    capsys.readouterr()
    assert main(["train", *arguments]) == 2
    assert "run belongs to another recipe: data.train_files is {" in capsys.readouterr().err


def test_a_vocabulary_may_move_but_not_change(tmp_path, capsys) -> None:
    arguments = [*tiny_recipe(tmp_path, max_steps=1), "--run_dir", str(tmp_path / "run")]
    assert main(["train", *arguments, "--run_dir", str(tmp_path / "first")]) == 0
    given = shutil.copytree(tmp_path / "first" / "tokenizer", tmp_path / "given")
    assert main(["train", *arguments, f"--tokenizer.path={given}"]) == 0
    moved = given.rename(tmp_path / "moved")
    assert main(["train", *arguments, f"--tokenizer.path={moved}", "--training.max_steps=2"]) == 0
    assert main(["train", *arguments, f"--tokenizer.path={given}", "--training.max_steps=3"]) == 0
    tokenizer = json.loads((moved / "tokenizer.json").read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (moved / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    capsys.readouterr()
    assert main(["train", *arguments, f"--tokenizer.path={moved}", "--training.max_steps=4"]) == 2
    assert f"tokenizer.path is {moved}, whose vocabulary is not that of" in capsys.readouterr().err


DATA = {
    "source_language": "en",
    "dataset": "me/text",
    "dataset_config": "small",
    "train_split": "a",
    "validation_split": "b",
    "test_split": "c",
    "test_files": "c.tsv",
    "weight": 2.0,
    "source_column": 1,
}
SOURCE = {
    "source_language": "en",
    "dataset": "me/text",
    "dataset_config": "small",
    "dataset_splits": {"train": "a", "validation": "b", "test": "c"},
    "files": {"train": None, "validation": None, "test": "c.tsv"},
    "weight": 2.0,
    "set_name": None,
}
TEXTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "translation": (
        {
            "data": {
                "target_language": "de",
                "target_tag": True,
                "prefix": "<x>",
                "augment": {"upper": 0.1},
                "target_column": 2,
            },
            "tokenizer": {"kind": "bpe", "split_digits": True, "bpe_dropout": 0.2},
            "evaluation": {"altered": ["typos"]},
        },
        {"columns": {"source": 1, "target": 2}, "target_language": "de", "tag": "<2de>", "prefix": "<x>"},
        {
            "alterations": {"upper": 0.1, "title": 0, "typos": 0, "no_final_mark": 0},
            "bpe_dropout": 0.2,
            "altered": ["typos"],
            "has_own_vocabulary": True,
            "vocabulary": VocabularySettings("bpe", 99, True, None, 777),
        },
    ),
    "span_corruption": (
        {"data": {"document_column": "id"}, "objective": {"block_length": 64, "noise_rate": 0.3, "span_length": 2.0}},
        {"columns": {"text": 1, "document": "id"}, "target_language": None, "tag": None},
        {"objective": ObjectiveSettings("span_corruption", 64, 0.3, 2.0, ["infilling"]), "by_line": False},
    ),
    "masked_lm": (
        {"data": {"source_column": None}, "objective": {"unit": "lines", "whole_words": True}},
        {"columns": {"text": "en"}},
        {"objective": ObjectiveSettings("masked_lm", 512, noise=["infilling"], whole_words=True), "by_line": True},
    ),
    "classification": (
        {"data": {"pair_column": "b", "label_column": "c"}, "objective": {"block_length": 64}},
        {"columns": {"text": 1, "pair": "b", "label": "c"}},
        {"task": "classification", "block_length": 64, "has_segments": True},
    ),
    "tagging": ({}, {"columns": {"words": 1, "tags": "label"}}, {"task": "tagging", "has_segments": False}),
}


@pytest.mark.parametrize("task", TEXTS)
def test_the_text_of_a_recipe_is_what_its_keys_say(tmp_path, task) -> None:
    keys, source, expected = TEXTS[task]
    own = keys.get("data", {})
    common = {"num_proc": 3} | (
        {} if task in ("classification", "tagging") else {"streaming": True, "stream_window": 9}
    )
    content = keys | {
        "task": task,
        "data": {**DATA, **common, **own},
        "validation_sets": {"web": {"test_files": "web.tsv"} | ({"pair_column": "b"} if "pair_column" in own else {})},
        "tokenizer": {"kind": "unigram", "vocab_size": 99} | keys.get("tokenizer", {}),
        "model": {"position_encoding": "learned", "max_position_embeddings": 777},
        "training": {"data_workers": 2},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(content), "utf-8")
    data = preparation.task_data(load_recipe([str(path)]))
    vocabulary = VocabularySettings("unigram", 99, False, None, 777)
    expected = {"vocabulary": vocabulary, "data_workers": 2, "max_length": 777} | common | expected
    assert {name: getattr(data, name) for name in expected} == expected
    (found,), (web,) = data.sources, data.sets
    assert {name: getattr(found, name) for name in SOURCE | source} == SOURCE | source
    assert (web.set_name, web.files["test"], web.files["train"]) == ("web", "web.tsv", None)
