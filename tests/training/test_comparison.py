"""Before and after, and the gate: the kept start is translated, scored, shown and compared at every door."""

import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vaswani.cli import main
from hf_vaswani.data.task_data import EvaluationText
from hf_vaswani.data.tokenizer import add_tags
from hf_vaswani.hub.publishing import read_candidate
from hf_vaswani.metrics import score
from hf_vaswani.recipe import HubRecipe
from hf_vaswani.recipe_file import load_recipe
from hf_vaswani.run_folder import read_result
from hf_vaswani.training import comparison
from hf_vaswani.training.comparison import Baseline, judge
from hf_vaswani.translation.batches import translate_corpus

from ..conftest import tiny_recipe, write_pairs

SETS = "--validation_sets={short: {validation_files: FILES, test_files: FILES}}"


def arguments(folder: Path, *options: str, **training: object) -> list[str]:
    """Returns the arguments of a recipe that starts from a model, with a second set of other text."""
    recipe = tiny_recipe(folder, scored=True, **training)
    other = folder / "other"
    other.mkdir(exist_ok=True)
    source, target = write_pairs(other, 30)
    files = f"{{en: {source}, de: {target}}}"
    return [*recipe, SETS.replace("FILES", files), "--run_dir", str(folder / "run"), *options]


def train(folder: Path, *options: str, **training: object) -> int:
    return main(["train", *arguments(folder, *options, **training)])


@pytest.fixture(scope="session")
def compared_run(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with two test sets, which started from a model."""
    folder = tmp_path_factory.mktemp("compared")
    assert train(folder, f"--initialize.from={tiny_run / 'model'}", max_steps=8) == 0
    return folder / "run"


@pytest.fixture
def run(compared_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(compared_run, tmp_path / "run")
    return tmp_path / "run"


def lines(path: Path) -> list[str]:
    return path.read_text("utf-8").removesuffix("\n").split("\n")


def test_the_start_is_scored_as_it_translates_by_itself(compared_run) -> None:
    result = read_result(compared_run)
    model = AutoModelForSeq2SeqLM.from_pretrained(compared_run / "start")
    tokenizer = AutoTokenizer.from_pretrained(compared_run / "start")
    assert list(result.before) == list(result.sets) == ["en-de", "short"]
    for name, folder in (("en-de", compared_run.parent), ("short", compared_run.parent / "other")):
        expected = translate_corpus(model, tokenizer, lines(folder / "text.en"))
        assert lines(compared_run / f"start_translations.{name}.txt") == expected
        scored, compared = score(expected, lines(folder / "text.de")), result.before[name]
        assert compared.before == {metric: scored[metric] for metric in ("bleu", "chrf", "ter")}
        assert compared.after == result.sets[name]
        assert 0 < compared.p <= 1
    assert f"start_translations.{name}.txt" in result.translations


def test_before_and_after_are_printed_at_the_end(compared_run, tmp_path, capsys) -> None:
    # A finished run says its result again.
    assert main(["train", str(compared_run / "recipe.yaml")]) == 0
    said = capsys.readouterr().out
    for name, each in read_result(compared_run).before.items():
        before, after = each.before["bleu"], each.after["bleu"]
        assert f"     BLEU {before:.2f} before, {after:.2f} after  ({name}, p = {each.p:.3f})\n" in said


def test_a_run_from_scratch_has_neither(tiny_run) -> None:
    assert read_result(tiny_run).before is None and not list(tiny_run.glob("start*"))
    assert "Before and after" not in (tiny_run / "model" / "README.md").read_text("utf-8")


# ---- The gate ----------------------------------------------------------------------------------------------------


def hub(**settings: Any) -> HubRecipe:
    return HubRecipe(repo_id="alice/m", **settings)


def test_kept_translations_are_compared_again(run, monkeypatch) -> None:
    monkeypatch.setattr("hf_vaswani.training.comparison.Baseline", None)
    verdict = judge(read_candidate(run, run / "model", hub(not_worse_than="start")))
    assert verdict.than == "start" and verdict.sets == read_result(run).before
    assert judge(read_candidate(run, run / "model", hub())) is None


def test_lost_translations_are_made_again(run) -> None:
    before = judge(read_candidate(run, run / "model", hub(not_worse_than="start")))
    for path in (*run.glob("start_translations*"), *run.glob("test_translations*")):
        path.unlink()
    again = judge(read_candidate(run, run / "model", hub(not_worse_than="start")))
    assert again == before


def test_a_start_that_was_changed_is_not_compared_with(run) -> None:
    weights = run / "start" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + bytes(4))
    with pytest.raises(ValueError, match="start/model.safetensors was changed or damaged"):
        judge(read_candidate(run, run / "model", hub(not_worse_than="start")))


def test_another_model_is_compared_on_every_test_set(run, tiny_run) -> None:
    # The folder of a run stands for its model.
    for folder in (tiny_run / "model", tiny_run):
        verdict = judge(read_candidate(run, run / "model", hub(not_worse_than=str(folder))))
        assert verdict.than == str(folder) and verdict.sets == read_result(run).before


def test_a_run_without_a_test_set_has_nothing_to_compare(run, tiny_run) -> None:
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe["data"]["test_files"] = recipe["validation_sets"]["short"]["test_files"] = None
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for checkpoint in run.glob("checkpoint-4"):
        shutil.rmtree(checkpoint)
    progress = json.loads((run / "checkpoint-8" / "progress.json").read_text())
    del progress["recipe"]
    (run / "checkpoint-8" / "progress.json").write_text(json.dumps(progress))
    with pytest.raises(ValueError, match="models are compared on test sets, but its recipe has none"):
        judge(read_candidate(run, run / "checkpoint-8", hub(not_worse_than=str(tiny_run))))


def test_a_checkpoint_is_compared_by_its_own_translations(run) -> None:
    than = hub(not_worse_than="start")
    verdict = judge(read_candidate(run, run / "checkpoint-8", than))
    model = AutoModelForSeq2SeqLM.from_pretrained(run / "checkpoint-8")
    tokenizer = AutoTokenizer.from_pretrained(run / "checkpoint-8")
    recipe = load_recipe([str(run / "recipe.yaml")])
    files = recipe.validation_sets["short"].test_files
    translations = translate_corpus(model, tokenizer, lines(Path(files["en"])))
    assert verdict.sets["short"].after["bleu"] == score(translations, lines(Path(files["de"])))["bleu"]


def test_one_model_after_the_other_is_on_the_device_that_is_named(run, monkeypatch, accelerators, capsys) -> None:
    models: list[weakref.ref[Any]] = []
    alive, places = [], []
    load, make = comparison.load_translator, Baseline.__init__

    def watched(name):
        gc.collect()
        alive.append(sum(each() is not None for each in models))
        model, tokenizer = load(name)
        models.append(weakref.ref(model))
        return model, tokenizer

    def placed(self, name, device):
        places.append(device)
        make(self, name, "cpu")

    monkeypatch.setattr(comparison, "load_translator", watched)
    monkeypatch.setattr(Baseline, "__init__", placed)
    accelerators("cuda", 2)
    candidate = read_candidate(run, run / "checkpoint-8", hub(not_worse_than=str(run / "start")))
    for device in (None, torch.device("cuda:1")):
        judge(candidate, device)
    assert alive == [0] * 4 and places == [torch.device("cuda")] * 2 + [torch.device("cuda:1")] * 2
    assert main(["push", str(run), "--repo-id", "alice/m", "--device", "cuda:2"]) == 2
    assert "--device is 'cuda:2', but torch finds cpu, cuda, cuda:0, cuda:1" in capsys.readouterr().err


def test_changed_text_is_refused(run, compared_run) -> None:
    files = [compared_run.parent / "other" / name for name in ("text.en", "text.de")]
    before = [path.read_text("utf-8") for path in files]
    try:
        for path, text in zip(files, before, strict=True):
            path.write_text(text + "one more\n", encoding="utf-8")
        with pytest.raises(ValueError, match="test set short is no longer the one that the model was scored on"):
            judge(read_candidate(run, run / "model", hub(not_worse_than="start")))
    finally:
        for path, text in zip(files, before, strict=True):
            path.write_text(text, encoding="utf-8")


def test_a_start_that_was_not_kept_is_named(tiny_run) -> None:
    with pytest.raises(ValueError, match="has not kept the model that it started from"):
        judge(read_candidate(tiny_run, tiny_run / "model", hub(not_worse_than="start")))


def test_a_model_that_cannot_be_loaded_is_refused_before_the_training(tmp_path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    assert train(tmp_path, f"--hub.not_worse_than={tmp_path / 'empty'}") == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert str(tmp_path / "empty") in said and "config.json" in said
    assert not (tmp_path / "run").exists()


SENTENCES = ["one two", "", "three", "nine nine one two"]


def test_a_baseline_has_its_own_search_settings(tiny_run) -> None:
    folder = tiny_run / "model"
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.generation_config.num_beams == 2
    assert Baseline(folder, "cpu")(SENTENCES) == translate_corpus(model, tokenizer, SENTENCES)


def test_a_sentence_gets_the_baselines_own_tag(tiny_run, tmp_path) -> None:
    def text(*lines: str, to: str = "de", prefix: str | None = None) -> EvaluationText:
        return EvaluationText("set", list(lines), list(lines), None, prefix, to)

    plain = Baseline(tiny_run / "model", "cpu")
    assert plain.tagged(text(*SENTENCES)) == SENTENCES, "it has no tags"
    model, tokenizer = plain.translator.models[0], plain.translator.tokenizer
    add_tags(tokenizer, ["<2de>", "<2fr>"])
    for has_prefix in (False, True):
        if has_prefix:
            add_tags(tokenizer, ["<bt>"])
        model.resize_token_embeddings(len(tokenizer))
        for each in (model, tokenizer):
            each.save_pretrained(tmp_path)
        baseline = Baseline(tmp_path, "cpu")
        # A prefix that is a tag is only read by a vocabulary that has it.
        assert baseline.tagged(text("one", prefix="<bt>")) == ["<2de> <bt> one" if has_prefix else "<2de> one"]
    assert baseline.tagged(text("one", "", "<2fr> two")) == ["<2de> one", "", "<2fr> two"]
    assert baseline.tagged(text("one", to="es")) == ["one"]
    assert baseline.tagged(text("one", "", prefix="to German:")) == ["<2de> to German: one", ""]


def test_a_sentence_that_is_too_long_is_translated_in_pieces(tiny_run, monkeypatch) -> None:
    baseline = Baseline(tiny_run / "model", "cpu")
    baseline.translator.longest = 8
    (long,) = baseline(["one two three. Four five six. Seven eight nine."])
    assert isinstance(long, str) and baseline.translator.lines_split == 1
