"""Validation: the loss recomputed pair by pair, the search of each split, one line for each validation."""

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hf_vaswani.cli import main
from hf_vaswani.metrics import score
from hf_vaswani.model.cache_vaswani import find_change
from hf_vaswani.run_folder import read_result
from hf_vaswani.training.validation import _scores, finite
from hf_vaswani.translation.batches import translate_corpus

from ..conftest import tiny_recipe
from . import runs
from .runs import same_weights, validations, weights

train = partial(runs.train, scored=True)


def test_validation_loss_is_the_mean_over_the_targets_tokens(tiny_run) -> None:
    """Recomputed pair by pair, without batches and padding."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_run / "model")
    # The validation was made with the last checkpoint, not with the average.
    model.load_state_dict(weights(tiny_run / "checkpoint-12"), strict=False)
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_run / "tokenizer")
    recipe = (tiny_run / "recipe.yaml").read_text()
    folder = Path(recipe.split("en: ")[1].split("\n")[0]).parent
    lines = [(folder / f"text.{side}").read_text("utf-8").splitlines() for side in ("en", "de")]
    total, tokens = 0.0, 0
    for source, target in zip(*lines, strict=True):
        labels = tokenizer(target, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            total += model(**tokenizer(source, return_tensors="pt"), labels=labels).loss.item() * labels.numel()
        tokens += labels.numel()
    (validation,) = validations(tiny_run)
    assert validation["loss"] == pytest.approx(total / tokens, rel=1e-4)


def test_validating_does_not_change_the_training(tiny_run, tmp_path) -> None:
    run = tmp_path / "run"
    assert train(tiny_run.parent, run, validate_every=2) == 0
    assert same_weights(run / "checkpoint-12", tiny_run / "checkpoint-12")


@pytest.mark.slow
def test_mixed_precision_is_for_the_updates_alone(tmp_path, monkeypatch, new_state) -> None:
    """What is translated is the model that is saved, by the fast search; later updates are as if it had not been."""
    found = []

    def translate(model: Any, *arguments: Any, **settings: Any) -> list[str]:
        training = model.training
        found.append(find_change(model.eval()) is None)
        model.train(training)
        return translate_corpus(model, *arguments, **settings)

    monkeypatch.setattr("hf_vaswani.training.validation.translate_corpus", translate)
    often, once = tmp_path / "often", tmp_path / "once"
    for run, interval in ((often, 4), (once, 8)):
        assert train(tmp_path, run, mixed_precision="bf16", max_steps=8, validate_every=interval) == 0
    assert found == [True] * 5
    assert same_weights(often / "checkpoint-8", once / "checkpoint-8")


def test_validations_take_the_precision_of_the_training_if_asked_to(tmp_path, monkeypatch, new_state) -> None:
    """The test set is translated in float32 in any case, and the fast search finds nothing that it cannot do."""
    found: list[tuple[bool, bool]] = []

    def translate(model: Any, *arguments: Any, **settings: Any) -> list[str]:
        training = model.training
        is_fast = find_change(model.eval()) is None
        model.train(training)
        found.append((torch.is_autocast_enabled("cpu"), is_fast))
        return translate_corpus(model, *arguments, **settings)

    monkeypatch.setattr("hf_vaswani.training.validation.translate_corpus", translate)
    arguments = tiny_recipe(tmp_path, scored=True, mixed_precision="bf16", max_steps=1)
    for is_asked in (True, False):
        found.clear()
        switch = [f"--evaluation.validate_in_mixed_precision={str(is_asked).lower()}"]
        assert main(["train", *arguments, *switch, "--run_dir", str(tmp_path / str(is_asked))]) == 0
        assert found == [(is_asked, True), (False, True)]


def test_validations_are_one_line_each_also_after_a_stop(tmp_path) -> None:
    run = tmp_path / "run"
    assert train(tmp_path, run, max_steps=8, validate_every=4) == 0
    # As if it had been killed after it validated update 12, and before it saved it.
    with open(run / "validations.jsonl", "a") as file:
        file.write(json.dumps({"step": 12, "loss": 1.0, "bleu": 99.0, "best": True}) + "\n")
    assert train(tmp_path, run, max_steps=12, validate_every=4) == 0
    lines = validations(run)
    assert [line["step"] for line in lines] == [4, 8, 12]
    assert lines[-1]["bleu"] < 99


def test_validation_is_greedy_and_the_test_set_has_the_beam(tiny_run, tmp_path, monkeypatch) -> None:
    from hf_vaswani.training import validation

    seen, budgets, translate = [], [], validation.translate_corpus

    def spy(*args, **kwargs):
        seen.append({key: kwargs.get(key) for key in ("num_beams", "length_penalty", "early_stopping")})
        budgets.append(kwargs["tokens_per_batch"])
        return translate(*args, **kwargs)

    monkeypatch.setattr(validation, "translate_corpus", spy)
    assert train(tiny_run.parent, tmp_path / "run", max_steps=1) == 0
    beam = {"num_beams": 2, "length_penalty": 0.8, "early_stopping": True}
    greedy = {"num_beams": 1, "length_penalty": None, "early_stopping": None}
    assert seen == [greedy, beam]
    # A model whose own search is greedy keeps no penalty, but the validation has the recipe's.
    assert budgets == [None, None], "that of the device"
    search = ["--evaluation.num_beams=1", "--evaluation.validation_num_beams=2", "--evaluation.early_stopping=null"]
    search += ["--evaluation.tokens_per_batch=512"]
    arguments = [*tiny_recipe(tiny_run.parent, scored=True, max_steps=1), *search]
    assert main(["train", *arguments, "--run_dir", str(tmp_path / "greedy")]) == 0
    assert seen[2:] == [beam | {"early_stopping": None}, greedy] and budgets[2:] == [512, 512]


# ---- Several sets ------------------------------------------------------------------------------------------------


def with_another_set(folder: Path, run: Path, *options: str, **training: object) -> int:
    """Trains with a second validation set, the first 20 pairs of the other."""
    recipe = tiny_recipe(folder, scored=True, validate_every=2, save_every=2, **training)
    files = {}
    for side in ("en", "de"):
        files[side] = str(folder / f"short.{side}")
        text = (folder / f"text.{side}").read_text("utf-8").splitlines(keepends=True)
        Path(files[side]).write_text("".join(text[:20]), "utf-8")
    sets = f"--validation_sets={{short: {{validation_files: {json.dumps(files)}}}}}"
    return main(["train", *recipe, sets, "--run_dir", str(run), *options])


def test_each_set_has_its_own_loss_and_scores(tiny_run, tmp_path) -> None:
    run = tmp_path / "run"
    assert with_another_set(tmp_path, run, max_steps=4) == 0
    # Another set changes neither the training nor the scores of the first one.
    assert train(tiny_run.parent, tmp_path / "single", max_steps=4, validate_every=2, save_every=2) == 0
    for line, single in zip(validations(run), validations(tmp_path / "single"), strict=True):
        assert line["sets"].keys() == {"en-de", "short"}
        assert line["sets"]["en-de"] == {name: single[name] for name in ("bleu", "chrf", "loss")}
        assert line["sets"]["short"]["loss"] != single["loss"]
        assert min(part["loss"] for part in line["sets"].values()) < line["loss"]
        assert line["loss"] < max(part["loss"] for part in line["sets"].values())
        assert line["bleu"] == pytest.approx(sum(part["bleu"] for part in line["sets"].values()) / 2)


@pytest.mark.variants(2)
@pytest.mark.parametrize("best_set", ["short", "en-de"])
def test_the_best_checkpoint_is_that_of_the_set_that_counts(tmp_path, monkeypatch, best_set) -> None:
    from hf_vaswani.training import validation

    # The mean is best at update 6, and each set at another.
    bleu = {"en-de": iter([9.0, 1.0, 8.0]), "short": iter([1.0, 9.0, 8.0])}
    translate = validation.translate_and_score

    def scored(run, model, split, num_beams):
        translations, result = translate(run, model, split, num_beams)
        if split == "validation":
            for name, part in result["sets"].items():
                part["bleu"] = next(bleu[name])
        return translations, result

    monkeypatch.setattr(validation, "translate_and_score", scored)
    options = [f"--training.best_set={best_set}", "--training.average_best=1"]
    assert with_another_set(tmp_path, tmp_path / "run", *options, max_steps=6) == 0
    expected = {"short": 4, "en-de": 2}[best_set]
    assert [line["step"] for line in validations(tmp_path / "run") if line["best"]] == [expected]
    assert read_result(tmp_path / "run").averaged == [f"checkpoint-{expected}"]


def test_a_best_set_that_does_not_exist_is_refused_with_those_that_do(tmp_path, capsys) -> None:
    assert with_another_set(tmp_path, tmp_path / "run", "--training.best_set=law") == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "training.best_set is 'law', but the validation sets of the recipe are en-de, short." in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_from_a_model_is_validated_before_its_first_update_once(tiny_run, tmp_path) -> None:
    """Also if it is stopped and resumed, which changes nothing."""
    start = f"--initialize.from={tiny_run / 'model'}"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert with_another_set(tmp_path, whole, start, max_steps=4) == 0
    for steps in (2, 4):
        assert with_another_set(tmp_path, parts, start, max_steps=steps) == 0
    assert [line["step"] for line in validations(whole)] == [0, 2, 4]
    assert validations(parts) == validations(whole)
    assert same_weights(parts / "checkpoint-4", whole / "checkpoint-4")
    # The start has no checkpoint, so it is never averaged.
    assert with_another_set(tmp_path, parts, start, "--training.average_best=9", max_steps=4) == 0
    assert read_result(parts).averaged == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.slow
def test_trackers_get_the_scores_of_each_set(tmp_path, monkeypatch) -> None:
    from accelerate import Accelerator

    logged: dict[int, dict[str, float]] = {}
    monkeypatch.setattr(Accelerator, "log", lambda _, values, step: logged.setdefault(step, {}).update(values))
    assert with_another_set(tmp_path, tmp_path / "run", max_steps=2) == 0
    (line,) = validations(tmp_path / "run")
    for name, part in line["sets"].items():
        assert {metric: logged[2][f"validation_{metric}/{name}"] for metric in part} == part
    assert logged[2]["validation_bleu"] == line["bleu"]


# ---- Text made anew ----------------------------------------------------------------------------------------------

CHANCE = ["--data.augment={upper: 0.2, typos: 0.3}", "--tokenizer.bpe_dropout=0.1", "--data.stream_window=50"]


@pytest.mark.slow
def test_text_made_anew_resumes_bit_for_bit_and_with_no_other_chance(tmp_path, capsys) -> None:
    """From the middle of the second epoch, whose ids are not those of the first."""
    for name, stop in (("one", 12), ("two", 7), ("two", 12)):
        arguments = tiny_recipe(tmp_path, max_steps=stop, tokens_per_batch=400)
        assert main(["train", *arguments, *CHANCE, "--run_dir", str(tmp_path / name)]) == 0
        if stop == 7:
            progress = json.loads((tmp_path / "two" / "checkpoint-7" / "progress.json").read_text())
            assert progress["position"]["epoch"] > 0 and progress["position"]["update"] > 0
    assert same_weights(tmp_path / "one" / "checkpoint-12", tmp_path / "two" / "checkpoint-12")
    other = [*tiny_recipe(tmp_path, max_steps=14, tokens_per_batch=400), "--run_dir", str(tmp_path / "one")]
    for changed, key in (
        ([*CHANCE, "--tokenizer.bpe_dropout=0"], "tokenizer.bpe_dropout"),
        ([*CHANCE, "--data.augment.upper=0.3"], "data.augment"),
    ):
        capsys.readouterr()
        assert main(["train", *other, *changed]) == 2
        assert f"belongs to another recipe: {key} is" in capsys.readouterr().err


@pytest.mark.slow
def test_altered_test_sets_are_scored_at_the_end(tiny_run, tmp_path, monkeypatch, capsys) -> None:
    from hf_vaswani.training import validation

    altered, seen, translate = "--evaluation.altered=[upper,typos]", [], validation.translate_corpus

    def spy(model, tokenizer, sentences, **settings):
        seen.append(sentences)
        return translate(model, tokenizer, sentences, **settings)

    monkeypatch.setattr(validation, "translate_corpus", spy)
    arguments = [*tiny_recipe(tiny_run.parent, scored=True, max_steps=1), altered, "--run_dir", str(tmp_path / "run")]
    assert main(["train", *arguments]) == 0
    _, plain, upper, typos = seen
    assert upper == [text.upper() for text in plain] and typos != plain
    result = json.loads((tmp_path / "run" / "test.json").read_text())
    assert {name: set(scores) for name, scores in result["altered"]["en-de"].items()} == {
        name: {"bleu", "chrf", "ter"} for name in ("upper", "typos")
    }
    assert "(en-de, typos)" in capsys.readouterr().out
    assert "with typing errors in the source" in (tmp_path / "run" / "model" / "README.md").read_text()
    blind = ["--data.test_files=null", "--run_dir", str(tmp_path / "blind")]
    assert main(["train", *arguments, *blind]) == 2
    assert "evaluation.altered needs a test set" in capsys.readouterr().err


def test_measures_that_are_not_finite_are_written_as_null() -> None:
    measures = {"loss": math.nan, "perplexity": math.inf, "accuracy": 0.5}
    assert finite(measures) == {"loss": None, "perplexity": None, "accuracy": 0.5}


def test_validations_are_scored_once_and_without_ter(tiny_run, monkeypatch) -> None:
    """In the main process: the others wait for the scores, and no processor computes them twice."""
    from hf_vaswani.training import validation

    calls: list[int] = []

    def counted(*arguments: Any) -> dict[str, Any]:
        calls.append(1)
        return score(*arguments)

    monkeypatch.setattr(validation, "score", counted)
    monkeypatch.setattr(validation, "translate", lambda run, model, sources, num_beams: ["x"] * len(sources))
    monkeypatch.setattr("accelerate.utils.broadcast_object_list", lambda objects: [{"bleu": 7.0}, None])
    text = SimpleNamespace(name="en-de", source=["a"] * 3, plain=["a"] * 3, target=["x"] * 3, target_language="de")
    evaluation = SimpleNamespace(tokenize="13a", lowercase=False)
    for count, index, made in ((2, 1, 0), (1, 0, 1)):
        run: Any = SimpleNamespace(
            recipe=SimpleNamespace(task="translation", evaluation=evaluation),
            sets={"validation": [text], "test": [text]},
            accelerator=SimpleNamespace(process_index=index, num_processes=count),
        )
        _, scored = validation.translate_and_score(run, cast(Any, None), "validation", 1)
        assert len(calls) == made
    assert set(scored["signatures"]) == set(scored["scores"]) == {"bleu", "chrf"}
    assert "ter" in validation.translate_and_score(run, cast(Any, None), "test", 1)[1]["scores"]


def test_each_set_is_scored_by_the_tokenizer_of_its_language() -> None:
    """The mean is that of the sets, and its signature has those of all of them."""
    references = {"de": ["Die Katze schläft auf dem Bett."], "zh": ["猫在床上睡觉。"], "x": ["Die Katze schläft."]}
    lines = {"de": ["Die Katze schläft auf dem Tisch."], "zh": ["猫在桌上睡觉。"], "x": ["Die Katze schläft."]}
    sets = [
        SimpleNamespace(name=name, plain=["s"], target=target, target_language=name if name != "x" else "de")
        for name, target in references.items()
    ]
    evaluation = SimpleNamespace(tokenize="auto", lowercase=False)
    recipe = SimpleNamespace(task="translation", evaluation=evaluation)
    run: Any = SimpleNamespace(recipe=recipe, sets={"test": sets, "validation": sets[::2]})
    found = _scores(run, "test", lines)
    expected = {name: score(lines[name], references[name], "zh" if name == "zh" else "13a") for name in references}
    signatures = {name: scored.pop("signatures") for name, scored in expected.items()}
    assert found["sets"] == expected and found["set_signatures"] == signatures
    assert found["scores"]["bleu"] == sum(scored["bleu"] for scored in expected.values()) / 3
    assert found["signatures"]["bleu"] == f"{signatures['de']['bleu']} and {signatures['zh']['bleu']}"
    assert found["signatures"]["chrf"] == signatures["de"]["chrf"] == signatures["zh"]["chrf"]
    alike = _scores(run, "validation", lines)
    assert alike["set_signatures"] is None and alike["signatures"]["bleu"] == signatures["de"]["bleu"]


# ---- Text without spaces -----------------------------------------------------------------------------------------


def chinese(folder: Path, language: str = "zh", **training: object) -> list[str]:
    """Returns the arguments of a recipe whose targets are Chinese."""
    arguments = tiny_recipe(folder, scored=True, max_steps=2, save_every=2, validate_every=2, **training)
    words = dict(
        zip("eins zwei drei vier fünf sechs sieben acht neun zehn".split(), "一二三四五六七八九十", strict=True)
    )
    german = (folder / "text.de").read_text("utf-8")
    for word, sign in words.items():
        german = german.replace(word, sign)
    (folder / f"text.{language}").write_text(german.replace(" ", ""), encoding="utf-8")
    files = f"{{en: {folder / 'text.en'}, {language}: {folder / f'text.{language}'}}}"
    return [
        *(argument for argument in arguments if "_files=" not in argument),
        f"--data.target_language={language}",
        *(f"--data.{split}_files={files}" for split in ("train", "validation", "test")),
    ]


def test_validations_and_tests_of_chinese_are_signed_so_and_an_earlier_run_goes_on(tmp_path, capsys) -> None:
    arguments = chinese(tmp_path)
    assert main(["train", *arguments, "--run_dir", str(tmp_path / "run")]) == 0
    assert [line["signatures"]["bleu"].split("|")[3] for line in validations(tmp_path / "run")] == ["tok:zh"]
    assert "|tok:zh|" in read_result(tmp_path / "run").signatures["bleu"]
    assert "|tok:zh|" in capsys.readouterr().out
    # Runs of 0.1 have recorded 13a, which was its default.
    earlier = ["--run_dir", str(tmp_path / "earlier")]
    assert main(["train", *arguments, "--evaluation.tokenize=13a", *earlier]) == 0
    assert main(["train", *arguments, "--training.max_steps=4", *earlier]) == 0
    assert len(validations(tmp_path / "earlier")) == 2
    assert all("|tok:13a|" in line["signatures"]["bleu"] for line in validations(tmp_path / "earlier"))
    # A value that is given is another recipe.
    assert main(["train", *arguments, "--training.max_steps=4", "--evaluation.tokenize=zh", *earlier]) == 2
    assert "evaluation.tokenize is '13a' there and 'zh' here" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--data.target_language=de", "--validation_sets={far: {target_language: ja}}"]])
def test_a_missing_segmenter_ends_a_training_before_it_begins(tmp_path, capsys, without_mecab, more) -> None:
    arguments = [*chinese(tmp_path, "ja"), "--run_dir", str(tmp_path / "run")]
    assert main(["train", *arguments, *more]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "pip install 'sacrebleu[ja]'" in error and "--evaluation.tokenize char" in error
    assert not (tmp_path / "run").exists()
    assert main(["train", *arguments, "--evaluation.tokenize=char"]) == 0
    assert "|tok:char|" in read_result(tmp_path / "run").signatures["bleu"]
