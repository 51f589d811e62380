"""Distillation: what the teacher translates, what the student learns of it, and text of other settings."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vaswani.metrics import sentence_scores
from hf_vaswani.processes import Processes
from hf_vaswani.recipe import Recipe
from hf_vaswani.recipe_file import load_recipe
from hf_vaswani.training.distillation import (
    BackwardScore,
    Choice,
    Steps,
    Translation,
    digest_of,
    kept,
    named_parts,
    pairs_files,
    sentences_of,
    with_teacher_text,
    write_pairs,
)
from hf_vaswani.translation.backtranslation import set_search
from hf_vaswani.translation.batches import log_probabilities, translate_n_best
from hf_vaswani.translation.growing_file import grow

from ..conftest import write_recipe

SENTENCES = [("one two three", "eins zwei drei"), ("nine", "neun"), ("four five", None)]


@pytest.fixture
def loaded(tiny_run):
    folder = tiny_run / "model"
    return AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    (tmp_path / "a.tsv").write_text("en\tde\none\teins\n \tnichts\ntwo\u2028three\tzwei drei\nfour\t\n", "utf-8")
    (tmp_path / "b.fr").write_text("un\n", encoding="utf-8")
    (tmp_path / "b.de").write_text("eins\n", encoding="utf-8")
    (tmp_path / "more.en").write_text("nine\n\n  five\tsix \n", encoding="utf-8")
    text = (
        f"run_dir: {tmp_path / 'run'}\n"
        f"data: {{train_files: {tmp_path / 'a.tsv'}, test_files: {tmp_path / 'a.tsv'}}}\n"
        f"more_data: [{{source_language: fr, target_language: de,\n"
        f"             train_files: {{fr: {tmp_path / 'b.fr'}, de: {tmp_path / 'b.de'}}}}}]\n"
        f"teacher: {{model: somewhere, text: {tmp_path / 'more.en'}}}\n"
    )
    return load_recipe([write_recipe(tmp_path, text)])


def filled(file, lines: list[str]):
    """Completes a growing file with these lines."""
    assert file.begin() == 0
    list(grow(Processes(), file, lines, 0, lambda block, items: items))
    file.finish()
    return file


def test_the_teacher_translates_the_sources_of_the_training_text_and_more_text(recipe) -> None:
    more = [("nine", None), ("five six", None)]
    assert list(sentences_of(recipe, 0)) == [("one", "eins"), ("two three", "zwei drei"), ("four", ""), *more]
    assert list(sentences_of(recipe, 1)) == [("un", "eins")]
    # A stream has the same sentences.
    streamed = replace(recipe, data=replace(recipe.data, streaming=True))
    assert list(sentences_of(streamed, 0)) == list(sentences_of(recipe, 0))
    assert digest_of(sentences_of(recipe, 0)) == digest_of(sentences_of(streamed, 0))
    assert digest_of(sentences_of(recipe, 0))[1] == 5 and digest_of([]) != digest_of([("one", None)])
    assert digest_of([("one", "eins")])[0] != digest_of([("one", None)])[0]


def test_the_lists_are_those_of_beam_search(loaded) -> None:
    model, tokenizer = loaded
    set_search(model, "beam", num_beams=3)
    expected = translate_n_best(model, tokenizer, [source for source, _ in SENTENCES], 2)
    lines = [json.loads(line) for line in Translation([model], tokenizer, "", 2)(0, SENTENCES)]
    assert [(line["source"], line["target"]) for line in lines] == SENTENCES
    for line, candidates in zip(lines, expected, strict=True):
        assert [text for _, text in line["translations"]] == [text.strip() for _, text in candidates]
        found = [score for score, _ in line["translations"]]
        assert found == pytest.approx([score for score, _ in candidates], abs=1e-4)
    tagged = [json.loads(line) for line in Translation([model], tokenizer, "nine nine", 2)(0, SENTENCES)]
    assert tagged[0]["source"] == "one two three" and tagged != lines, "the tag is the teacher's alone"
    set_search(model, "beam", num_beams=1)
    (entry, *_) = Translation([model], tokenizer, "", 1)(0, SENTENCES)
    assert len(json.loads(entry)["translations"]) == 1


def test_several_teachers_are_an_ensemble(loaded, teacher) -> None:
    model, tokenizer = loaded
    other = AutoModelForSeq2SeqLM.from_pretrained(teacher)
    texts = [source for source, _ in SENTENCES]
    set_search(model, "beam", num_beams=3)
    expected = translate_n_best(model, tokenizer, texts, 2, ensemble=[other])
    lines = [json.loads(line) for line in Translation([model, other], tokenizer, "", 2)(0, SENTENCES)]
    found = [[score for score, _ in line["translations"]] for line in lines]
    assert found == [[pytest.approx(score, abs=1e-4) for score, _ in candidates] for candidates in expected]
    alone = translate_n_best(model, tokenizer, texts, 2)
    assert found != [[pytest.approx(score, abs=1e-4) for score, _ in candidates] for candidates in alone]


@pytest.mark.parametrize("choose", ["bleu", "chrf"])
def test_the_choice_is_the_nearest_to_the_target(choose) -> None:
    texts = ["neun acht", "eins zwei drei vier sechs", "eins zwei drei vier", "eins zwei drei vier"]
    translations = [[-1.0 - i, text] for i, text in enumerate(texts)]
    target = "eins zwei drei vier sechs sieben acht"
    lines = [
        json.dumps({"source": "s", "target": given, "translations": translations}) for given in (target, None, "")
    ]
    scores = [row[choose] for row in sentence_scores(texts, [target] * 4)]
    assert scores[1] > max(scores[0], scores[2]), "the test needs a nearest one"
    first, *others = Choice(choose, "13a", False)(0, lines)
    assert first == f"s\teins zwei drei vier sechs\t2\t{scores[1]:.4f}"
    # Without a target, the teacher decides, as it always does by default.
    assert others == ["s\tneun acht\t1\t-1.0000"] * 2 == Choice("model", "13a", False)(0, lines)[1:]
    same = json.dumps({"source": "s", "target": target, "translations": translations[2:]})
    assert Choice(choose, "13a", False)(0, [same])[0].split("\t")[2] == "1", "of equal ones, the teacher's best"


def test_the_choice_is_by_the_tokenizer_of_the_target_language(recipe) -> None:
    (name, part), *_ = named_parts(recipe)
    Path(f"{recipe.run_dir}.teacher").mkdir()
    filled(Steps(recipe, name, part).translations([], {}, "text"), ["{}"])

    def settings(tokenize: str, language: str) -> dict[str, Any]:
        other = replace(recipe, evaluation=replace(recipe.evaluation, tokenize=tokenize))
        return Steps(other, name, replace(part, target_language=language)).chosen().settings

    # What was chosen by an earlier version, whose default was 13a, is kept.
    assert settings("auto", "de") == settings("13a", "de") == settings("13a", "zh")
    assert settings("auto", "zh")["evaluation.tokenize"] == "zh"


def test_backward_scores_are_those_of_the_source_given_its_translation(loaded) -> None:
    model, tokenizer = loaded
    lines = ["eins zwei\tone two\t1\t0.5", "drei\t\t1\t0.5", "vier\tfour\t1\t0.5"]
    (first, tokens), (last, more) = log_probabilities(model, tokenizer, ["one two", "four"], ["eins zwei", "vier"])
    found = [line.split("\t") for line in BackwardScore(model, tokenizer, "")(0, lines)]
    assert [row[:2] for row in found] == [["eins zwei", "one two"], ["drei", ""], ["vier", "four"]]
    assert float(found[0][2]) == pytest.approx(first / tokens, abs=1e-3)
    assert found[1][2] == "-inf" and float(found[2][2]) == pytest.approx(last / more, abs=1e-3)
    model.config.position_encoding, model.config.max_position_embeddings = "learned", 4
    long = ["eins\tone two three four five six\t1\t0.5", "eins\tone\t1\t0.5"]
    scores = [float(line.split("\t")[2]) for line in BackwardScore(model, tokenizer, "")(0, long)]
    assert scores[0] == -math.inf < scores[1]


def test_the_worst_share_is_dropped_in_place(recipe) -> None:
    steps = Steps(recipe, *named_parts(recipe)[0])
    Path(f"{recipe.run_dir}.teacher").mkdir()
    filled(steps.translations(["m"], {}, "t"), ["{}"])
    filled(steps.chosen(), ["s\tt\t1\t0"])
    rows = [("a", -1.0), ("b", -9.0), ("c", -2.0), ("d", -math.inf), ("e", -9.0), ("f", -0.5), ("g", -3.0)]
    file = filled(steps.scored("back"), [f"{name}\t{'x' * (name != 'g')}\t{score}" for name, score in rows])
    for share, names in ((0.0, "abcdef"), (0.2, "abcef"), (0.3, "abcf"), (0.5, "acf"), (0.99, "f")):
        assert [source for source, _ in kept(file, share)] == list(names), share


def written(recipe: Recipe, rows: int = 4) -> list[int]:
    """Writes the pairs as after a translation."""
    Path(f"{recipe.run_dir}.teacher").mkdir(exist_ok=True)
    files = []
    for name, part in named_parts(recipe):
        steps = Steps(recipe, name, part)
        first = steps.translations(["m"], {}, "t")
        if first.begin() is not None:
            filled(first, ["{}"])
        second = steps.chosen()
        lines = [f"s {i}\tt {i}\t1\t0" for i in range(rows)]
        files.append(second if second.begin() is None else filled(second, lines))
    return write_pairs(recipe, files)


def test_training_reads_the_pairs_of_each_source(recipe, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"run\.teacher/pairs has no translations of the teacher yet\. Run hf-vasw"):
        with_teacher_text(recipe)
    assert written(recipe) == [4, 4]
    found = with_teacher_text(recipe)
    assert [part.train_files for part in (found.data, *found.more_data)] == pairs_files(recipe)
    assert found.data.test_files == recipe.data.test_files and found.given == recipe.given
    assert Path(pairs_files(recipe)[1]["fr"]).read_text() == "s 0\ns 1\ns 2\ns 3\n"
    # The record of the run, which has the new text already, is read in the same way.
    assert with_teacher_text(found) == found
    with pytest.raises(ValueError, match="is what the teacher wrote: give the recipe of the student"):
        list(sentences_of(found, 0))
    without = replace(recipe, teacher=replace(recipe.teacher, model=None))
    assert with_teacher_text(without) is without


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_beams": 4}, "teacher.num_beams was 8 and is 4"),
        ({"model": ["a", "b"]}, r"teacher.model was \['somewhere'\] and is \['a', 'b'\]"),
        ({"backward_model": "m"}, "teacher.backward_model was None and is 'm'"),
        ({}, "sources was"),
    ],
)
def test_pairs_of_other_settings_are_refused(recipe, change, words) -> None:
    written(recipe)
    other = replace(recipe, teacher=replace(recipe.teacher, **change))
    if not change:
        other = replace(recipe, data=replace(recipe.data, train_files="other.tsv", source_column=1))
    with pytest.raises(ValueError, match=f"has translations of other settings: {words}.* Run hf-vaswani distill"):
        with_teacher_text(other)


def test_pairs_are_written_again_if_something_changed(recipe) -> None:
    written(recipe)
    place = Path(pairs_files(recipe)[0]["en"])
    before = place.stat().st_mtime_ns
    assert written(recipe) == [4, 4] and place.stat().st_mtime_ns == before
    whole = place.read_text()
    for damage in (lambda: place.write_text("s 0\n"), place.unlink):
        damage()
        assert written(recipe) == [4, 4] and place.read_text() == whole
    other = replace(recipe, teacher=replace(recipe.teacher, choose="chrf"))
    with pytest.raises(ValueError, match="was made with other settings: teacher.choose was 'model' and is 'chrf'"):
        written(other)
    for name, part in named_parts(other):
        Steps(other, name, part).chosen().remove_if_other()
    assert written(other, rows=3) == [3, 3] and len(place.read_text().splitlines()) == 3
